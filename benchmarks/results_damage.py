"""Sections of docs/results.md about choosing, dropping and healing; see results_page.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_posenc.files import read_json
from hf_posenc.plan import scheme_label

Lines = list[str]

READING = """## What helped, and what did not

Read off the tables above: one model, few tokens, and one seed unless the row is among those with
several. Those say what a difference must exceed: the seven layers moved by a hundredth of a nat
either way with the seed.

What to drop:

- Choosing layers by measured ablation cost less than a third of what every fourth layer cost
  zero-shot, and about a third on the essays after healing: fifteen chosen layers cost what seven at
  every fourth do. The same number of layers by `norm` was hardly better than every fourth. Dropping
  one after another and measuring again each time (`plan_search`) found other layers that cost no
  less.
- `score` per layer is the best choice of pairs by far at .5 and .25, zero-shot and healed. Spread
  evenly over the layers it beats the fastest pairs at .5 and loses to them below: it is a
  second-order estimate, and dropping most pairs is no small change. With the most tokens a quarter
  of the pairs, chosen per layer, comes as close to the unconverted model as seven layers without
  rotation do.
- `sensitivity` ranks single pairs well; the sets it chooses for all layers alike are no better than
  the fastest pairs, and per layer it comes second to `score`.
- The 2-norm (`norm`) is the worst guide here: it ranks pairs the wrong way round. The pairs that
  weigh most are slow ones, whose rotation over a thousand tokens is small.

How to drop it:

- Compensation takes away part of the zero-shot damage of layers without rotation, hardly any where
  half of the pairs go; where three quarters go it takes away a tenth if they are chosen per layer
  and adds to it if they are the same everywhere. Where queries are normed (Gemma 3 270M,
  `normed_gains` below) it harms. Healing gains nothing from starting there: further behind for
  every fourth layer, within the seeds' range for the seven.
- No rotation anywhere, layer by layer over half of the steps, most harmless first: further behind
  than at once. There are fewer steps at the goal.
- No rotation anywhere with a learned scale per head on the scores: hardly different from without.
- No rotation anywhere stays far behind, with every way of healing that was tried here; the widest
  adapter is the best of them, and four times the tokens take away less than a tenth of what is
  left. The aim was one nat; a curve to a million tokens was not run.

How to heal, on every fourth layer where nothing else is said:

- Shorter rows, so more steps on the same tokens: 512 tokens are better than 1,024. Rows of 256 are
  better on one text and worse on the other.
- lr 1e-3 for LoRA of rank 16 is worse than 3e-3 in so few steps.
- Norms that train along are worth more than the rank: leaving them out costs as much as training
  q and k alone; ranks 8 to 64 and all linear layers lie close together.
- More parameters help where much is broken and harm where little is: rank 64 on all linear layers
  is the best healing without any rotation, and the worst of the seven layers.
- Whole q, k, v, o instead of LoRA of rank 16: at lr 3e-4 no better, at 1e-3 better on the essays
  and worse on the reference, with fourteen times the parameters and the same memory and time.
- Hidden states first, then kl: about the same as kl alone, worse than it where nothing rotates.
- The seven layers came to within a twentieth of a nat on the essays with the most tokens; the aim
  was .03, and no change above brought it nearer than another seed did.

Longer texts:

- RoPE under a window with global NoPE layers keeps its loss flat beyond the trained length, where
  the unconverted model falls apart; but trained this briefly it finds no needle, and YaRN, trained
  on the same tokens, is better at both.
"""


def damage_sections(results: Path) -> Lines:
    """Every section whose result files are there."""
    lines: Lines = []
    calibration = results / "smollm2_calibration.json"
    predicts = results / "smollm2_calibration_predicts.json"
    if calibration.exists() and predicts.exists():
        lines += _calibration(read_json(calibration), read_json(predicts))
    if (path := results / "smollm2_zero_shot.json").exists():
        lines += _zero_shot(read_json(path))
    rows = [read_json(p) for p in sorted((results / "smollm2_heal_choices").glob("*.json"))]
    if rows:
        grid = read_json(results / "smollm2_heal_grid.json")["rows"]
        # The same windows, dtype and model.
        lines += _healed(rows, next(row["before"] for row in grid if row["scheme"] is None))
    rows = [read_json(p) for p in sorted((results / "smollm2_long_context").glob("*.json"))]
    if rows:
        lines += _long_context({row["row"]: row for row in rows})
    lines.append(READING)
    return lines


def provenance_text(record: dict[str, Any]) -> str:
    """Machine, versions, commit and date in one line."""
    machine, versions, git = record["machine"], record["versions"], record["git"] or {}
    parts = [
        f"{machine.get('cores', '?')} cores of {machine.get('cpu', 'unknown CPU')}",
        f"{machine.get('torch_threads', '?')} thread(s)",
        f"torch {versions['torch']}, transformers {versions['transformers']}",
        f"commit {str(git.get('commit', 'unknown'))[:10]}",
        record["date"][:10],
    ]
    return "; ".join(parts) + "."


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Lines:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _calibration(made: dict[str, Any], found: dict[str, Any]) -> Lines:
    about, correlation = made["provenance"], found["rank_correlation"]
    names = sorted(set(correlation["layers"]) | set(correlation["pairs"]))
    rows = [
        [
            name,
            *(
                f"{correlation[what][name]:.2f}" if name in correlation[what] else "-"
                for what in ("layers", "pairs")
            ),
        ]
        for name in names
    ]
    worst = max(range(len(found["layers"])), key=lambda layer: found["layers"][layer])
    return [
        "## What a calibration predicts\n",
        f"SmolLM2-135M calibrated on {made['tokens']:,} tokens: "
        f"{about['cpu_seconds']:.0f} CPU-seconds, "
        f"{about['peak_memory_bytes'] / 2**30:.2f} GiB peak for the process. The measured damage "
        "is the loss that is added on held-out text when one layer loses its rotation, or one "
        "pair in all layers, the rest as it was "
        f"({found['provenance']['tokens']:,} tokens; layer {worst} costs most, "
        f"{found['layers'][worst]:.3f} nats). Spearman's rank correlation of each statistic "
        "with it (1 = the same order):\n",
        *_table(["statistic", "over layers", "over pairs"], rows),
        "",
        "`ablation` is measured on the calibration's own text, so it is not perfect; there is none "
        f"for pairs. Command: `python benchmarks/calibration.py`. {provenance_text(about)}\n",
    ]


def _zero_shot(result: dict[str, Any]) -> Lines:
    rows = result["rows"]
    stock = rows["stock"]["loss"]

    def cell(name: str) -> str:
        if name not in rows:
            return "not run"
        loss = rows[name]["loss"]
        return " / ".join(f"{loss[text] - stock[text]:+.3f}" for text in stock)

    names = [name for name in rows if name.startswith("p_rope")]
    fractions = sorted({name.split()[1] for name in names}, key=float, reverse=True)
    selections = list(dict.fromkeys(name.split(maxsplit=2)[2] for name in names))
    grid = [[s, *(cell(f"p_rope {p} {s}") for p in fractions)] for s in selections]
    by_damage = sorted(rows, key=lambda name: sum(rows[name]["loss"].values()))
    layers = [
        [_label(rows[name]), cell(name)]
        for name in by_damage
        if rows[name]["scheme"] is not None and not name.startswith("p_rope")
    ]
    texts = " / ".join(f"{loss:.3f} {name}" for name, loss in stock.items())
    return [
        "## Zero-shot: what the choice is worth\n",
        f"Loss added to the unconverted model's {texts} (nats per token, held-out essays / "
        "reference), no healing. `p_rope` keeps a fraction p of the 32 pairs; the choices by "
        "statistic come from the calibration above; per_layer spends the same number of pairs "
        "unevenly over the layers.\n",
        *_table(["kept pairs", *(f"p {p}" for p in fractions)], grid),
        "",
        *_table(["layers without rotation", "added"], layers),
        "",
        f"Command: `python benchmarks/least_damage.py`. {provenance_text(result['provenance'])}\n",
    ]


def _label(row: dict[str, Any]) -> str:
    label = scheme_label(row["scheme"])
    label += ", found by plan_search" if row.get("steps") else ""
    return label + (", compensated" if row.get("compensated") else "")


def _healed(rows: list[dict[str, Any]], stock: dict[str, float]) -> Lines:
    controls = {
        (row["heal"]["tokens"], tuple(row["changes"])): row["after"]
        for row in rows
        if row["scheme"] is None
    }
    for row in rows:
        key = row["heal"]["tokens"], tuple(row["changes"])
        goal = controls.get(key) if "ce" in row["objective"] else stock
        if row["scheme"] is None:
            goal = stock
        row["behind"] = goal and {text: row["after"][text] - goal[text] for text in goal}
    plans = {_plan_name(row): _label(row) for row in rows if row["scheme"] is not None}
    rows = sorted(rows, key=lambda row: (_plan_name(row), sum((row["behind"] or {}).values())))
    lines: Lines = []
    for tokens in sorted({row["heal"]["tokens"] for row in rows}, reverse=True):
        table = [_healed_row(row) for row in rows if row["heal"]["tokens"] == tokens]
        head = ["row", "differs from the recipe", "before", "after", "behind its control", "seed"]
        head += ["trained", "minutes", "peak GiB"]
        lines += [f"### {tokens:,} tokens\n", *_table(head, table), ""]
    return [
        "## Healed: what to drop, how, with what\n",
        "Held-out loss in nats per token, essays / reference. All rows of one size see the same "
        "tokens of the training parts. The control of ce is the unconverted model healed on the "
        "same tokens; that of kl and hidden the unconverted model itself.\n",
        "Plans: " + "; ".join(f"{name} = {text}" for name, text in plans.items()) + ".\n",
        *lines,
        *_seeds(rows),
        "Command: `python benchmarks/heal_choices.py`. Minutes are of one thread, with other "
        "work beside it, and without the teacher's pass where its states were kept from an "
        f"earlier row: compare them with care. {provenance_text(rows[0]['provenance'])}\n",
    ]


def _plan_name(row: dict[str, Any]) -> str:
    """A row is named plan, size, way of healing: "nope4 short/kl r8"."""
    plan = str(row["row"]).partition("/")[0]
    name, _, size = plan.rpartition(" ")
    return name if size in ("short", "longer", "longest", "million") else plan


def _healed_row(row: dict[str, Any]) -> list[str]:
    heal, behind = row["heal"], row["behind"]
    gap = [f"{value:+.3f}" for value in (behind or {}).values()]
    return [
        f"{row['row']}, unconverted" if row["scheme"] is None else row["row"],
        ", ".join(row["changes"]) or "as the recipe",
        " / ".join(f"{loss:.3f}" for loss in row["before"].values()),
        " / ".join(f"{loss:.3f}" for loss in row["after"].values()),
        " / ".join(gap) or "no control",
        str(heal["seed"]),
        f"{heal['trainable_parameters'] / 1e6:.2f} M",
        f"{heal['seconds'] / 60:.1f}",
        f"{heal['peak_memory_bytes'] / 2**30:.2f}",
    ]


def _seeds(rows: list[dict[str, Any]]) -> Lines:
    """The same healing with other seeds: mean, lowest and highest."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        if row["scheme"] is not None and row["behind"]:
            what = row["compensated"], row["heal"]["tokens"], tuple(row["changes"])
            groups.setdefault((_plan_name(row), *what), []).append(row)
    table = []
    for (name, _, tokens, changes), found in groups.items():
        if len(found) == 1:
            continue
        cells = []
        for text in found[0]["behind"]:
            gaps = [row["behind"][text] for row in found]
            cells.append(f"{sum(gaps) / len(gaps):+.3f} ({min(gaps):+.3f} to {max(gaps):+.3f})")
        seeds = ", ".join(str(seed) for seed in sorted(row["heal"]["seed"] for row in found))
        table.append([name, ", ".join(changes) or "as the recipe", f"{tokens:,}", seeds, *cells])
    if not table:
        return []
    head = ["plan", "differs from the recipe", "tokens", "seeds", "essays behind"]
    head.append("reference behind")
    return [
        "### Other seeds\n",
        "The seed decides the order of the text and the adapter's start. Mean behind the control, "
        "lowest and highest:\n",
        *_table(head, table),
        "",
    ]


def _long_context(rows: dict[str, dict[str, Any]]) -> Lines:
    order = [name for name in ("stock", "control", "ntk", "yarn", "rnope_swa") if name in rows]
    by_position, needles = [], []
    for name in order:
        scores = {
            (s["task"], s["metric"], s["length"], tuple(s["bin"] or ())): s["value"]
            for s in rows[name]["scores"]
        }
        longest = max(key[2] for key in scores)
        bins = sorted(key[3] for key in scores if key[0] == "ppl_bins" and key[3])
        by_position.append([name, *(f"{scores['ppl_bins', 'nll', longest, b]:.3f}" for b in bins)])
        lengths = sorted({key[2] for key in scores if key[0] == "niah_essay"})
        needles.append(
            [
                name,
                *(
                    f"{scores['niah_essay', 'em', n, ()]:.2f} / "
                    f"{scores['niah_essay', 'acc', n, ()]:.2f} / "
                    f"{scores['niah_essay', 'nll', n, ()]:.2f}"
                    for n in lengths
                ),
            ]
        )
    one = rows[order[-1]]
    healed = next(row["heal"] for row in rows.values() if row["heal"])
    label = scheme_label(one["scheme"]) if one["scheme"] else one["row"]
    return [
        "## Beyond the trained length\n",
        f"SmolLM2-135M (trained to 8,192 tokens), {label} trained under its window, against NTK "
        f"and YaRN (factor 2) and the unconverted model (control), each healed with cross entropy "
        f"on the same {healed['tokens']:,} tokens in rows of {healed['row_tokens']:,} "
        f"(lr {healed['lr']:g}, seed {healed['seed']}); stock is not healed.\n",
        "Loss in nats per token by position, one text of 16,384 held-out tokens:\n",
        *_table(["", *(f"{a}-{b}" for a, b in bins)], by_position),
        "",
        "Needles in essays, eight probes of one haystack: exact match / right among four / nats "
        "per answer token:\n",
        *_table(["", *(f"{n:,}" for n in lengths)], needles),
        "",
        "Eight probes in one haystack are one cluster: differences of a few tenths in exact match "
        "mean little. Command: `python benchmarks/long_context.py`. "
        f"{provenance_text(one['provenance'])}\n",
    ]
