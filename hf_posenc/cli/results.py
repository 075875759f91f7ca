"""Scores as tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.table import Table
from rich.text import Text

from hf_posenc.evaluation.record import EvalRecord
from hf_posenc.evaluation.run_folder import RunFolder
from hf_posenc.evaluation.style import length_text
from hf_posenc.evaluation.tables import Cell, tables


def run_tables(run: RunFolder) -> Iterator[Table]:
    """One table per task of a run: variants by scores, below each its difference to the control."""
    for found in tables([run]):
        table = Table(
            title=Text(f"{found.task} ({', '.join(name for name, _ in found.groups)})"),
            title_justify="left",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
        )
        table.add_column("model", no_wrap=True)
        for column in found.columns:
            name = column.head if len(found.groups) == 1 else f"{column.metric}\n{column.head}"
            table.add_column(Text(name), justify="right")
        for _, rows in found.bodies:
            for row in rows:
                table.add_row(Text(row.label), *(Text(_cell_text(cell)) for cell in row.cells))
        yield table


def eval_table(record: EvalRecord) -> Table:
    """Every score of one evaluation with its error and n."""
    title = record.model if record.scheme is None else f"{record.model}, {record.scheme['name']}"
    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for head, side in (("task", "left"), ("metric", "left"), ("length", "right"),
                       ("positions", "right"), ("value", "right"), ("± s.e.", "right"),
                       ("n", "right"), ("unit", "left")):  # fmt: skip
        table.add_column(head, justify=side)  # type: ignore[arg-type]
    for score in record.scores:
        table.add_row(
            Text(score.task),
            Text(score.metric),
            "" if score.length is None else length_text(score.length),
            "" if score.bin is None else f"{score.bin[0]}–{score.bin[1]}",
            f"{score.value:.4f}",
            "–" if score.stderr is None else f"{score.stderr:.4f}",
            f"{score.n:,}",
            Text(score.unit),
        )
    return table


def _cell_text(cell: Cell) -> str:
    if cell.value is None:
        return "not run"
    return f"{cell.value:.3f}" + ("" if cell.difference is None else f"\n{cell.difference:+.3f}")
