"""Commands that look and write no model: schemes, show."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from hf_posenc.cli.group import app, say, screen
from hf_posenc.cli.options import (
    CalibrationOption,
    ModelArgument,
    SchemeFileOption,
    SchemeOption,
    SetOption,
    checked_calibration,
    chosen_scheme,
)
from hf_posenc.errors import PosencError
from hf_posenc.schemes import Scheme, list_schemes


@app.command(epilog="Example: hf-posenc schemes")
def schemes(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the schemes with their options, defaults and sources."""
    found = list_schemes()
    if as_json:
        print(json.dumps({name: _describe(kind) for name, kind in found.items()}, indent=2))
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_lines=False)
    table.add_column("scheme", no_wrap=True)
    table.add_column("what it does", ratio=3)
    table.add_column("options (defaults)", ratio=2)
    table.add_column("source", ratio=2)
    for name, kind in found.items():
        about = _describe(kind)
        options = "\n".join(f"{key}={value}" for key, value in about["options"].items())
        table.add_row(
            Text(name, style="bold"), Text(about["summary"]), Text(options), Text(about["source"])
        )
        table.add_row()
    screen().print(table)


@app.command(
    epilog="Example: hf-posenc show Qwen/Qwen3-0.6B --scheme nope_interleaved --set every=4 "
    "--png plan.png"
)
def show(
    model: ModelArgument,
    scheme: SchemeOption = None,
    settings: SetOption = None,
    scheme_file: SchemeFileOption = None,
    calibration: CalibrationOption = None,
    png: Annotated[
        Path | None, typer.Option("--png", metavar="FILE", help="Also draw the heat map as PNG.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Show the plan of a checkpoint, or what a scheme would make of it; reads the config alone."""
    from hf_posenc.evaluation.figures import plan_map
    from hf_posenc.evaluation.style import save_png
    from hf_posenc.parts import part_text
    from hf_posenc.show import choice_text, plan_heat, plan_summary, plan_table, read_plan

    chosen = chosen_scheme(scheme, settings, scheme_file)
    if png is not None and png.suffix.lower() != ".png":
        raise PosencError(f"--png {png}: give a name that ends in .png")
    spec, plan = read_plan(model, chosen, checked_calibration(calibration, chosen))
    if as_json:
        facts = {"model": model, "family": spec.family, "max_positions": spec.max_positions}
        print(json.dumps({**facts, **plan_summary(plan), "plan": plan.to_json()}, indent=2))
    else:
        console = screen()
        console.print(f"{model}: {plan.label}", markup=False, soft_wrap=True)
        if (choice := choice_text(plan)) is not None:
            console.print(choice, markup=False, soft_wrap=True)
        if plan.embedding is not None:
            console.print(f"added to the token embeddings: {part_text(plan.embedding)}")
        console.print(plan_table(plan))
        console.print(plan_heat(plan))
    if png is not None:
        figure = plan_map(plan, trained_length=spec.max_positions, title=f"{model}: {plan.label}")
        say(f"heat map written to {save_png(figure, png)}")


def _describe(kind: type[Scheme]) -> dict[str, Any]:
    """Summary, options with their defaults as text, and source of a scheme."""
    options = {}
    for field in dataclasses.fields(kind):
        options[field.name] = (
            "(required)" if field.default is dataclasses.MISSING else str(field.default)
        )
    summary = (kind.__doc__ or "").strip().partition("\n")[0]
    return {"summary": summary, "options": options, "source": kind.source}
