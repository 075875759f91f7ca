"""SmolLM2-135M to twice its trained length: windows with NoPE against stock, NTK and YaRN.

    python benchmarks/long_context.py [--tokens 65536] [--rows rnope_swa ntk ...]

Every row is healed with cross entropy on the same tokens by the recipe `smollm2_rnope_swa`, under
its own encoding (rnope_swa under its window); only the encoding differs. `stock` is the unhealed
model, `control` the unconverted model healed on those tokens. Then each is scored by loss at
every range of positions and by eight needles in one haystack of essays, up to 16,384 tokens; the
model was trained to 8,192. Finished rows are kept when the command is run again; rows can be made
by several processes, one file each, in eval/results/smollm2_long_context/.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from pathlib import Path
from typing import Any

from hf_posenc import patch_model
from hf_posenc.evaluation import evaluate
from hf_posenc.files import write_json
from hf_posenc.heal import heal, load_recipe
from hf_posenc.sources import load_pretrained, load_tokenizer

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "eval" / "results" / "smollm2_long_context"
RECIPE = "smollm2_rnope_swa"
LONGEST = 16_384
NEEDLE_LENGTHS = (1024, 2048, 4096, 8192, LONGEST)
WINDOWS = 2  # texts of LONGEST tokens scored by position
PROBES = 8  # one haystack
# row -> (scheme or None for the checkpoint's own, healed or not)
ROWS: dict[str, tuple[dict[str, Any] | None, bool]] = {
    "rnope_swa": (load_recipe(RECIPE).scheme, True),
    "ntk": ({"name": "rope", "scaling": "ntk:2"}, True),
    "yarn": ({"name": "rope", "scaling": "yarn:2"}, True),
    "control": (None, True),
    "stock": (None, False),
}


def run_row(name: str, tokens: int) -> dict[str, Any]:
    """Convert, heal and score one row."""
    scheme, healed = ROWS[name]
    settings = ["heal.objective=ce", f"heal.tokens={tokens}", "heal.heldout_rows=0"]
    recipe = load_recipe(RECIPE, [*settings, "heal.save_steps=0"])
    model = load_pretrained(recipe.model, dtype=recipe.dtype)
    tokenizer = load_tokenizer(recipe.model)
    if scheme is not None:
        recipe = recipe.model_copy(update={"scheme": scheme})
        patch_model(model, scheme)
    summary = None
    if healed:
        with tempfile.TemporaryDirectory() as folder:
            variant = "control" if scheme is None else "healed"
            record = heal(
                recipe,
                out=Path(folder) / "run",
                model=model,
                tokenizer=tokenizer,
                variant=variant,  # type: ignore[arg-type]
            )
        summary = {
            "objective": record.objective,
            "tokens": record.tokens,
            "steps": record.steps,
            "row_tokens": recipe.data.row_tokens,
            "lr": recipe.heal.lr,
            "seed": record.seed,
            "seconds": record.seconds,
            "first_loss": record.log[0]["loss"],
            "last_loss": record.log[-1]["loss"],
        }
    options: dict[str, Any] = {"max_length": LONGEST, "model_name": recipe.model, "variant": name}
    by_position = evaluate(
        model, tokenizer, "ppl_bins", lengths=[LONGEST], limit=WINDOWS, **options
    )
    needles = evaluate(
        model, tokenizer, "niah_essay", lengths=NEEDLE_LENGTHS, limit=PROBES, **options
    )
    return {
        "schema": 1,
        "kind": "long_context",
        "row": name,
        "scheme": scheme,
        "heal": summary,
        "scores": [dataclasses.asdict(s) for s in (*by_position.scores, *needles.scores)],
        "needles": [dataclasses.asdict(needle) for needle in needles.needles],
        "cpu_seconds": by_position.cost["cpu_seconds"] + needles.cost["cpu_seconds"],
        "data": by_position.data | needles.data,
        "provenance": needles.provenance,
    }


def main() -> int:
    """Make the rows that are asked for and missing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=65_536, help="healing tokens per row")
    parser.add_argument("--rows", nargs="*", choices=ROWS, default=list(ROWS), metavar="ROW")
    arguments = parser.parse_args()
    for name in arguments.rows:
        path = RESULTS / f"{name}.json"
        if path.exists():
            print(f"{name}: kept {path}")
            continue
        write_json(path, run_row(name, arguments.tokens))
        print(f"{name}: written to {path}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
