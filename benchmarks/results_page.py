"""Write docs/results.md from the committed result files; no number there is typed by hand.

python benchmarks/results_page.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from results_damage import damage_sections, provenance_text

from hf_posenc.files import read_json, write_text
from hf_posenc.plan import scheme_label

ROOT = Path(__file__).resolve().parents[1]
GRID = ROOT / "eval" / "results" / "smollm2_heal_grid.json"
BENCHMARKS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "results.md"


def main() -> int:
    """Write the page."""
    parts = [
        "# Results\n",
        "Made by `python benchmarks/results_page.py` from the JSON files in `eval/results/` and "
        "`benchmarks/results/`, which hold the full provenance.\n",
    ]
    if GRID.exists():
        parts += grid_section(read_json(GRID))
    parts += damage_sections(GRID.parent)
    parts += ["## Cost of the code\n"]
    for path in sorted(BENCHMARKS.glob("*.json")):
        result = read_json(path)
        parts += SECTIONS.get(path.stem, benchmark_section)(path.name, result)
    write_text(PAGE, "\n".join(parts))
    return 0


def grid_section(grid: dict[str, Any]) -> list[str]:
    """Zero-shot loss and both objectives, row by scheme, with the gap to the control."""
    rows: dict[tuple[str | None, str], dict[str, Any]] = {
        (row["scheme"], row["objective"]): row for row in grid["rows"]
    }
    control = rows[None, "ce"]
    stock, healed_stock = control["before"], control["after"]
    one = control["provenance"]
    lines = [
        "## SmolLM2-135M: what a conversion costs, before and after a short healing\n",
        f"Held-out loss in nats per token (lower is better), {control['dtype']}, six windows of "
        f"1024 tokens of each text. Healed on {control['heal']['tokens']:,} tokens "
        f"({control['heal']['steps']} steps of one row), seed {control['heal']['seed']}, with the "
        "quickstart's recipe: LoRA and norms. The controls: for ce the unconverted model healed "
        "on the same tokens; for kl the unconverted model itself. In brackets the gap to the "
        "control.\n",
        "| plan | essays before | reference before | essays, kl | reference, kl | essays, ce | "
        "reference, ce |",
        "|---|---|---|---|---|---|---|",
        f"| unconverted (control) | {stock['essays']:.3f} | {stock['reference']:.3f} | "
        f"{stock['essays']:.3f} | {stock['reference']:.3f} | {healed_stock['essays']:.3f} | "
        f"{healed_stock['reference']:.3f} |",
    ]
    for scheme in dict.fromkeys(name for name, _ in rows if name is not None):
        found = rows.get((scheme, "kl")) or rows[scheme, "ce"]
        cells = [scheme_label(found["options"])]
        cells += [_change(found["before"][text], stock[text]) for text in stock]
        for objective, goal in (("kl", stock), ("ce", healed_stock)):
            row = rows.get((scheme, objective))
            cells += [
                "not run" if row is None else _change(row["after"][text], goal[text])
                for text in stock
            ]
        lines.append("| " + " | ".join(cells) + " |")
    minutes = sum(row["heal"]["seconds"] for row in grid["rows"]) / 60
    lines += [
        "",
        f"Command: `python benchmarks/heal_grid.py`. {provenance_text(one)} "
        f"Healing took {minutes:.0f} minutes in all {len(grid['rows'])} runs.\n",
    ]
    return lines


def bias_section(name: str, result: dict[str, Any]) -> list[str]:
    """Time and memory of each bias by length, as ratios to the causal kernel."""
    lines = [f"### {name.removesuffix('.json')}\n", f"{result['what']}. Time as a ratio to causal "]
    lines[-1] += "sdpa at the same length, and peak memory in MiB. Goals: "
    lines[-1] += ", ".join(f"{key} {value}" for key, value in result["targets"].items()) + ".\n"
    for direction in dict.fromkeys(row["direction"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["direction"] == direction]
        lengths = sorted({row["length"] for row in rows})
        lines += [
            f"| {direction} | " + " | ".join(f"{n:,} tokens" for n in lengths) + " |",
            "|---" * (len(lengths) + 1) + "|",
        ]
        for bias in dict.fromkeys(row["bias"] for row in rows):
            found = {row["length"]: row for row in rows if row["bias"] == bias}
            cells = [
                f"{found[n]['ratio']:.2f}, {found[n]['peak_bytes'] / 2**20:.0f} MiB"
                if n in found
                else "not run"
                for n in lengths
            ]
            lines.append(f"| {bias} | " + " | ".join(cells) + " |")
        lines.append("")
    return [*lines, provenance_text(result["provenance"]) + "\n"]


def overhead_section(name: str, result: dict[str, Any]) -> list[str]:
    """Patched against stock by scheme and workload: median ratio, first and third quartile."""
    rows = result["rows"]
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    targets = ", ".join(f"{mode} {ratio}" for mode, ratio in result["targets"].items())
    lines = [
        f"### {name.removesuffix('.json')}\n",
        f"CPU seconds of a patched model as a ratio to the stock one ({result['model']}), median "
        f"and quartiles of {rows[0]['pairs']} pairs of calls; `stock` is a second stock model, the "
        f"noise. Targets: {targets} at most. A mode that is not named was not measured.\n",
        "| mode | scheme | " + " | ".join(workloads) + " |",
        "|---" * (len(workloads) + 2) + "|",
    ]
    for mode, scheme in dict.fromkeys((row["mode"], row["scheme"]) for row in rows):
        found = {r["workload"]: r for r in rows if (r["mode"], r["scheme"]) == (mode, scheme)}
        cells = [
            "{ratio:.3f} ({0:.3f} to {1:.3f})".format(*found[work]["quartiles"], **found[work])
            for work in workloads
        ]
        lines.append(f"| {mode} | {scheme} | " + " | ".join(cells) + " |")
    return [*lines, "", provenance_text(result["provenance"]) + "\n"]


def benchmark_section(name: str, result: dict[str, Any]) -> list[str]:
    """The headline numbers of one benchmark file."""
    lines = [f"### {name.removesuffix('.json')}\n", "| measured | value |", "|---|---|"]
    lines += [f"| {key} | {value} |" for key, value in _flat(result)]
    return [*lines, "", provenance_text(result["provenance"]) + "\n"]


def _flat(value: Any, path: str = "") -> list[tuple[str, str]]:
    if isinstance(value, dict):
        found = []
        for key, item in value.items():
            if key not in ("provenance", "schema", "kind", "name", "benchmark"):
                found += _flat(item, f"{path} {key}".strip())
        return found
    if isinstance(value, list):
        return []
    return [(path, f"{value:.4g}" if isinstance(value, float) else str(value))]


SECTIONS = {"bias_cost": bias_section, "patch_overhead": overhead_section}


def _change(loss: float, goal: float) -> str:
    return f"{loss:.3f} ({loss - goal:+.3f})"


if __name__ == "__main__":
    sys.exit(main())
