"""Zero-shot loss of SmolLM2-135M by how the dropped layers and pairs are chosen.

    python benchmarks/least_damage.py [--windows 3] [--only "p_rope 0.5" ...]

No healing. Loss in nats per token over three windows of 1024 tokens of each held-out text (essays,
Python reference). Choices by calibration use eval/results/smollm2_calibration.json
(benchmarks/calibration.py); "compensated" rows fold gains into the queries
(hf_posenc/calibration/compensation.py); "search" drops layers one by one and measures again after
each (hf_posenc/calibration/search.py, on 2,048 tokens of the calibration's text). Finished rows are
kept; results in eval/results/smollm2_zero_shot.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from calibration import RESULTS, calibration, smollm2
from heal_grid import TEXTS, losses
from torch import Tensor

from hf_posenc import ModelSpec, PositionPlan, make_scheme, patch_model, unpatch_model
from hf_posenc.calibration import calibration_rows
from hf_posenc.calibration.compensation import fold_gains, query_gains
from hf_posenc.calibration.search import SearchStep, plan_search
from hf_posenc.files import read_json, write_json
from hf_posenc.provenance import collect
from hf_posenc.sources import held_out_windows

RESULT = RESULTS / "smollm2_zero_shot.json"
SELECTIONS: tuple[Any, ...] = ("high", "low", "uniform", "norm", "score", "sensitivity")
FRACTIONS = (0.5, 0.25, 0.125, 0.75)


def choices() -> dict[str, dict[str, Any] | None]:
    """Row -> scheme; None is the unconverted model."""
    rows: dict[str, dict[str, Any] | None] = {"stock": None}
    rows["nope_interleaved every=4"] = {"name": "nope_interleaved", "every": 4}
    for statistic in ("ablation", "sensitivity", "score", "norm"):
        scheme = {"name": "nope_interleaved", "layers": f"auto:7:{statistic}"}
        rows[f"nope_interleaved auto:7:{statistic}"] = scheme
    for count in (1, 3, 5, 10, 15, 20, 25):
        scheme = {"name": "nope_interleaved", "layers": f"auto:{count}:ablation"}
        rows[f"nope_interleaved auto:{count}:ablation"] = scheme
    for p in FRACTIONS:
        for select in SELECTIONS:
            rows[f"p_rope {p} {select}"] = {"name": "p_rope", "p": p, "select": select}
        for select in ("sensitivity", "score"):
            scheme = {"name": "p_rope", "p": p, "select": select, "per_layer": True}
            rows[f"p_rope {p} {select} per_layer"] = scheme
    rows["nope"] = {"name": "nope"}
    return rows


COMPENSATED = (
    "nope_interleaved every=4",
    "nope_interleaved auto:7:ablation",
    *(
        f"p_rope {p} {select}"
        for p in FRACTIONS
        for select in ("high", "score", "score per_layer", "uniform")
    ),
    "nope",
)
SEARCH = "nope_interleaved search:7"
SEARCH_ROWS = 4  # of 512 tokens


@contextmanager
def compensated(model: Any, plan: PositionPlan, rows: Tensor) -> Iterator[None]:
    """Inside the block the queries carry the gains that fit `plan`; weights come back after it."""
    kept = {name: value.clone() for name, value in model.state_dict().items() if "q_proj" in name}
    fold_gains(model, query_gains(model, rows, plan))
    try:
        yield
    finally:
        model.load_state_dict(kept, strict=False)


def main() -> int:
    """Measure the missing rows, writing the result after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", help="rows whose name begins so")
    parser.add_argument("--windows", type=int, default=3, help="of 1024 tokens, of each text")
    arguments = parser.parse_args()
    made = calibration()
    model, tokenizer = smollm2()
    model.requires_grad_(False)
    windows = {
        name: held_out_windows(text, tokenizer)[: arguments.windows] for name, text in TEXTS.items()
    }
    done = read_json(RESULT) if RESULT.exists() else {"schema": 1, "kind": "zero_shot", "rows": {}}
    text = calibration_rows(tokenizer)
    spec = ModelSpec.from_model(model)
    wanted = [(name, name, False) for name in (*choices(), SEARCH)]
    wanted += [(f"{name} compensated", name, True) for name in COMPENSATED]
    for name, row, gained in wanted:
        if name in done["rows"] or not name.startswith(tuple(arguments.only or [""])):
            continue
        steps: tuple[SearchStep, ...] = ()
        if row == SEARCH:
            sought = plan_search(model, text[:SEARCH_ROWS], drop=7)
            scheme, steps = sought.scheme.describe(), sought.steps
        else:
            scheme = choices()[row]
        plan = None if scheme is None else make_scheme(**scheme).build(spec, made)
        if plan is None:
            found = losses(model, windows)
        else:
            with compensated(model, plan, text) if gained else nullcontext():
                patch_model(model, plan)
                found = losses(model, windows)
                unpatch_model(model)
        digest = None if plan is None else plan.digest
        done["rows"][name] = {
            "scheme": scheme,
            "compensated": gained,
            "plan_digest": digest,
            "loss": found,
            **({"steps": [[step.dropped, step.damage] for step in steps]} if steps else {}),
        }
        done["provenance"] = collect(tokens=sum(ids.numel() for ids in windows.values()))
        write_json(RESULT, done)
        print(f"{name}: {found}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
