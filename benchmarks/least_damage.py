"""Zero-shot loss of SmolLM2-135M by how the dropped layers and pairs are chosen.

    python benchmarks/least_damage.py [--only "p_rope 0.5" ...]

No healing. Loss in nats per token over six windows of 1024 tokens of each held-out text (essays,
Python reference). Choices by calibration use eval/results/smollm2_calibration.json
(benchmarks/calibration.py). Finished rows are kept; results in
eval/results/smollm2_zero_shot.json.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from calibration import RESULTS, calibration, smollm2
from heal_grid import TEXTS, losses

from hf_posenc import get_plan, patch_model, unpatch_model
from hf_posenc.files import read_json, write_json
from hf_posenc.provenance import collect
from hf_posenc.sources import held_out_windows

RESULT = RESULTS / "smollm2_zero_shot.json"
SELECTIONS: tuple[Any, ...] = ("high", "low", "uniform", "norm", "score", "sensitivity")
FRACTIONS = (0.75, 0.5, 0.25, 0.125)


def choices() -> dict[str, dict[str, Any] | None]:
    """Row -> scheme; None is the unconverted model."""
    rows: dict[str, dict[str, Any] | None] = {"stock": None}
    rows["nope_interleaved every=4"] = {"name": "nope_interleaved", "every": 4}
    for statistic in ("ablation", "sensitivity", "score", "norm"):
        scheme = {"name": "nope_interleaved", "layers": f"auto:7:{statistic}"}
        rows[f"nope_interleaved auto:7:{statistic}"] = scheme
    for p in FRACTIONS:
        for select in SELECTIONS:
            rows[f"p_rope {p} {select}"] = {"name": "p_rope", "p": p, "select": select}
        for select in ("sensitivity", "score"):
            scheme = {"name": "p_rope", "p": p, "select": select, "per_layer": True}
            rows[f"p_rope {p} {select} per_layer"] = scheme
    rows["nope"] = {"name": "nope"}
    return rows


def main() -> int:
    """Measure the missing rows, writing the result after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", help="rows whose name begins so")
    arguments = parser.parse_args()
    made = calibration()
    model, tokenizer = smollm2()
    model.requires_grad_(False)
    windows = {name: held_out_windows(text, tokenizer) for name, text in TEXTS.items()}
    done = read_json(RESULT) if RESULT.exists() else {"schema": 1, "kind": "zero_shot", "rows": {}}
    for name, scheme in choices().items():
        if name in done["rows"] or not name.startswith(tuple(arguments.only or [""])):
            continue
        digest = None
        if scheme is not None:
            patch_model(model, scheme, calibration=made)
            plan = get_plan(model)
            digest = None if plan is None else plan.digest
        found = losses(model, windows)
        if scheme is not None:
            unpatch_model(model)
        done["rows"][name] = {"scheme": scheme, "plan_digest": digest, "loss": found}
        done["provenance"] = collect(tokens=sum(ids.numel() for ids in windows.values()))
        write_json(RESULT, done)
        print(f"{name}: {found}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
