"""Options that several commands share, and how their text is read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from hf_posenc.calibration.text import DEFAULT_SOURCES
from hf_posenc.errors import PosencError, did_you_mean
from hf_posenc.model_spec import ModelSpec
from hf_posenc.schemes import as_scheme, list_schemes
from hf_posenc.schemes.base import Scheme

if TYPE_CHECKING:
    from hf_posenc.calibration.record import Calibration

DTYPES = ("bfloat16", "float16", "float32")

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Hub id, folder, .gguf file, or pypi:NAME==VERSION.",
        show_default=False,
    ),
]
SchemeOption = Annotated[
    str | None,
    typer.Option("--scheme", metavar="NAME", help="Scheme to use; `hf-posenc schemes` lists them."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="OPTION=VALUE",
        help="Option of the scheme, e.g. every=4 or layers=0-3,8; may be repeated.",
    ),
]
SchemeFileOption = Annotated[
    Path | None,
    typer.Option(
        "--scheme-file",
        metavar="FILE",
        help="Scheme as JSON or YAML, e.g. a composition of several.",
    ),
]
CalibrationOption = Annotated[
    Path | None,
    typer.Option(
        "--calibration",
        metavar="FILE",
        help="What `hf-posenc calibrate` wrote, for a scheme with layers=auto:N and the like.",
    ),
]
DtypeOption = Annotated[
    str | None,
    typer.Option("--dtype", help="bfloat16, float16 or float32; default: the checkpoint's own."),
]
RecipeArgument = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE", help="Name of a shipped recipe, or a YAML file.", show_default=False
    ),
]
RecipeSetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a value of the recipe, e.g. heal.lr=1e-3; may be repeated.",
    ),
]


TokensOption = Annotated[int, typer.Option("--tokens", help="Tokens of text in all.")]
RowTokensOption = Annotated[int, typer.Option("--row-tokens", help="Tokens per row.")]
TextsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--texts",
        metavar="SOURCE",
        help=f"Text source; may be repeated. Default: {' and '.join(DEFAULT_SOURCES)}.",
    ),
]


def chosen_scheme(
    name: str | None, settings: Sequence[str] | None, file: Path | None
) -> Scheme | None:
    """The scheme of --scheme/--set or --scheme-file; None when neither was given."""
    if file is not None:
        if name is not None or settings:
            raise PosencError("--scheme-file holds the whole scheme; leave out --scheme and --set")
        return as_scheme(_read_mapping(file))
    if name is None:
        if settings:
            raise PosencError(f"--set {settings[0]} belongs to a scheme; name it with --scheme")
        return None
    return as_scheme(name, **parse_settings(settings or ()))


def required_scheme(name: str | None, settings: Sequence[str] | None, file: Path | None) -> Scheme:
    """As `chosen_scheme`, but there must be one."""
    scheme = chosen_scheme(name, settings, file)
    if scheme is None:
        raise PosencError(f"no scheme given; use --scheme with one of: {', '.join(list_schemes())}")
    return scheme


def checked_calibration(file: Path | None, scheme: Scheme | None) -> Calibration | None:
    """The calibration of --calibration, which must have a scheme to choose for."""
    if file is None:
        return None
    if scheme is None:
        raise PosencError(f"--calibration {file} chooses for a scheme; name it with --scheme")
    from hf_posenc.calibration.record import Calibration

    return Calibration.load(file)


def parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    """`OPTION=VALUE` texts as options; values are JSON, or else YAML, as in `p=.5`, `theta=1e6`."""
    result: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        name = name.strip()
        if not equals or not name:
            raise PosencError(f"--set {setting!r} must have the form option=value, e.g. every=4")
        if name in result:
            raise PosencError(f"--set {name} is given twice; keep one")
        result[name] = _value(setting, text.strip())
    return result


def checked_dtype(dtype: str | None) -> str | None:
    """`dtype` when it is one a model can be loaded in."""
    if dtype is not None and dtype not in DTYPES:
        raise PosencError(f"--dtype {dtype!r} is unknown; {did_you_mean(dtype, DTYPES)}")
    return dtype


def check_row_tokens(row_tokens: int, spec: ModelSpec) -> None:
    """Refuse rows that the model cannot read. Errors: `PosencError`."""
    if row_tokens > spec.max_positions:
        raise PosencError(
            f"--row-tokens {row_tokens} exceeds the model's {spec.max_positions} positions"
        )


def parse_lengths(text: str | None) -> list[int] | None:
    """`1024,2048` or `1k,2k` as numbers of tokens."""
    if text is None:
        return None
    lengths = []
    for part in filter(None, (part.strip().lower() for part in text.split(","))):
        digits, unit = (part[:-1], 1024) if part.endswith("k") else (part, 1)
        if not (digits.isascii() and digits.isdigit()):
            raise PosencError(f"--lengths {text!r}: {part!r} is no length; use e.g. 1k,2k")
        lengths.append(int(digits) * unit)
    if not lengths:
        raise PosencError("--lengths is empty; use e.g. 1024,2048")
    return lengths


def _value(setting: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        pass
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise PosencError(f"--set {setting!r}: the value is neither JSON nor YAML") from None


def _read_mapping(file: Path) -> dict[str, Any]:
    try:
        value = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise PosencError(f"{file}: {error.strerror or 'cannot be read'}") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise PosencError(
            f"{file}: neither JSON nor YAML; a scheme is a mapping with 'name'"
        ) from None
    if not isinstance(value, dict):
        raise PosencError(f"{file}: a scheme is a mapping, e.g. {{name: p_rope, p: 0.5}}")
    return value
