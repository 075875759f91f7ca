"""What is tested on what: families, schemes with options, and every tolerance with its reason.

Data only. A claim that design.md calls exact is tested with `torch.equal` and has no row in
TOLERANCES. Adding a scheme means adding its rows to SCHEMES; every contract then runs on it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hf_posenc.runtime.families import TESTED_FAMILIES

FAMILIES: tuple[str, ...] = TESTED_FAMILIES


@dataclass(frozen=True)
class SchemeRow:
    """One scheme with options.

    null           it computes what the base computes (the control, or a change of storage only)
    repairs        it re-orders q/k features in memory
    interleaved    its stored q/k rows are interleaved
    by_length      its tables depend on the length of the row (what is cached was rotated at an
                   earlier length, as in transformers)
    """

    id: str
    scheme: str
    options: dict[str, Any] = field(default_factory=dict)
    null: bool = False
    repairs: bool = False
    interleaved: bool = False
    by_length: bool = False


_LONG = {"short_factor": "short", "long_factor": "long"}  # lists are filled in per model width

SCHEMES: tuple[SchemeRow, ...] = (
    SchemeRow("rope", "rope", null=True),
    SchemeRow("rope-theta", "rope", {"theta": 1e4}),
    SchemeRow("rope-pi", "rope", {"scaling": "pi:4"}),
    SchemeRow("rope-ntk", "rope", {"scaling": "ntk:4"}),
    SchemeRow("rope-dynamic", "rope", {"scaling": "dynamic:4"}, by_length=True),
    SchemeRow("rope-yarn", "rope", {"scaling": "yarn:4"}),
    SchemeRow("rope-llama3", "rope", {"scaling": "llama3:8"}),
    SchemeRow(
        "rope-longrope",
        "rope",
        {"scaling": {"type": "longrope", "factor": 4.0, **_LONG}},
        by_length=True,
    ),
    SchemeRow("interleaved", "interleaved", {"preserve": True}, null=True, interleaved=True),
    SchemeRow(
        "interleaved-repaired", "interleaved", {"preserve": False}, repairs=True, interleaved=True
    ),
    SchemeRow(
        "interleaved-some", "interleaved", {"preserve": False, "layers": [0, 2]}, repairs=True
    ),
    SchemeRow("partial", "partial", {"fraction": 0.5}),
    SchemeRow("partial-raw", "partial", {"fraction": 0.5, "pairs": "raw"}, repairs=True),
    SchemeRow("partial-75", "partial", {"fraction": 0.75}),
    SchemeRow("p_rope", "p_rope", {"p": 0.5}),
    SchemeRow("p_rope-low", "p_rope", {"p": 0.25, "select": "low"}),
    SchemeRow("p_rope-uniform", "p_rope", {"p": 0.5, "select": "uniform"}),
    SchemeRow("p_rope-pairs", "p_rope", {"select": [0, 2, 5]}),
    SchemeRow("p_rope-own", "p_rope", {"select": [[0, 1], [3, 5], [], [0, 1, 2, 3]]}),
    SchemeRow("nope", "nope"),
    SchemeRow("nope_interleaved", "nope_interleaved", {"every": 2}),
    SchemeRow("nope_interleaved-offset", "nope_interleaved", {"every": 4, "offset": 0}),
    SchemeRow("dual", "dual", {"every": 2, "theta_local": 1e4, "p_global": 0.5}),
    SchemeRow(
        "compose",
        "compose",
        {
            "groups": [
                {"layers": "0-1", "scheme": {"name": "p_rope", "p": 0.5}},
                {"layers": [2], "scheme": {"name": "partial", "fraction": 0.5, "pairs": "raw"}},
                {"layers": [3], "scheme": "nope"},
            ]
        },
        repairs=True,
    ),
)
BY_ID = {row.id: row for row in SCHEMES}
# One of each kind the runtime handles differently: tables per layer, moved rows, both, length.
REPRESENTATIVE = ("nope_interleaved", "partial-raw", "interleaved-repaired", "rope-longrope")


def options_for(row: SchemeRow, num_frequencies: int) -> dict[str, Any]:
    """The options of a row for a model with that many frequencies."""
    scaling = row.options.get("scaling")
    if not isinstance(scaling, dict) or scaling.get("type") != "longrope":
        return dict(row.options)
    short = [1.0 + 0.01 * i for i in range(num_frequencies)]
    long = [1.0 + 0.5 * i for i in range(num_frequencies)]
    return {"scaling": {**scaling, "short_factor": short, "long_factor": long}}


@dataclass(frozen=True)
class Tolerance:
    """The largest absolute difference of logits (or as the reason says), and why it is not 0."""

    atol: float
    reason: str


TOLERANCES: dict[str, Tolerance] = {
    "reordered_sum": Tolerance(
        1e-5,
        "q.k is summed over the features of a head in another order: one float32 rounding of a "
        "score of about 20 (1e-6), carried through four layers of sharp attention",
    ),
    "reordered_long_sum": Tolerance(3e-5, "the same over rows of 300 tokens"),
    "cached": Tolerance(
        3e-5,
        "matrix products of other shapes (3 rows or 1 instead of T) round differently (1e-6), "
        "carried through four layers of sharp attention",
    ),
    "batched": Tolerance(
        3e-5, "the same for other row counts, and masked slots that lengthen sums by exact zeros"
    ),
    "kernel": Tolerance(1e-5, "eager, sdpa and flex sum the same softmax in different orders"),
    "alibi_kernel": Tolerance(
        3e-5, "the same, and distances carried as features are rounded with the dot product"
    ),
    "reference": Tolerance(
        5e-4,
        "attention probabilities against float64: angles are float32, off by up to "
        "position * 6e-8 rad (2e-5 at position 300) times scores of about 20",
    ),
    "shift": Tolerance(
        5e-4, "scores at shifted positions: the same float32 angle error, positions up to 300"
    ),
    "gradients": Tolerance(1e-6, "recomputed activations are equal; sums may fuse differently"),
    "merge": Tolerance(
        5e-5, "W + BA is rounded once instead of adding B(Ax) to Wx; then four layers as above"
    ),
}


def atol(name: str) -> float:
    """The tolerance of a named row."""
    return TOLERANCES[name].atol
