"""The parts of a plan beyond frequencies: windows, logit scales, score biases, absolute vectors.

Each is a small frozen value; `part_to_json` and `part_from_json` carry it through JSON exactly.
What a part computes is written once, in `runtime/scores.py`, `runtime/bias.py` and
`runtime/embedding.py`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hf_posenc.errors import PosencError, did_you_mean

ScaleForm = Literal["llama4", "log", "inkling", "drope"]
SCALE_FORMS: tuple[ScaleForm, ...] = ("llama4", "log", "inkling", "drope")


@dataclass(frozen=True, slots=True)
class Window:
    """Which earlier tokens a layer sees.

    size      tokens, the query itself included: sliding sees the query and the size - 1 before it
    chunked   the row is cut into chunks of `size` instead, and a query sees its own chunk (Llama 4)
    """

    size: int
    chunked: bool = False

    def __post_init__(self) -> None:
        _whole(self.size, "window size", at_least=1)


@dataclass(frozen=True, slots=True)
class ConstantScale:
    """Scores times `value`, everywhere."""

    value: float

    def __post_init__(self) -> None:
        _number(self.value, "logit scale", above=0.0)
        object.__setattr__(self, "value", float(self.value))


@dataclass(frozen=True, slots=True)
class PositionScale:
    """Scores of the query at 0-based position n times a factor that grows with n.

    form       factor(n)
    "llama4"   alpha * ln(1 + floor((n + 1) / floor)) + 1            (Llama 4, transformers)
    "log"      max(1, log_a(a + n)) with a = floor                   (SWAN-GPT, arXiv 2504.08719)
    "inkling"  1 + alpha * ln(max(1, (n + 1) / floor)), biases too   (Inkling, transformers)
    "drope"    1 + alpha * ln(max(1, (n + 1) / floor)), with floor the trained length: DroPE's
               1 + c ln(C_test / C_train) at the query's own context length (arXiv 2512.12167)
    All but "log" are exactly 1 for the first `floor` positions (llama4: floor - 1).
    """

    form: ScaleForm
    floor: float
    alpha: float = 0.1

    def __post_init__(self) -> None:
        if self.form not in SCALE_FORMS:
            raise PosencError(
                f"logit scale {self.form!r} is unknown; {did_you_mean(str(self.form), SCALE_FORMS)}"
            )
        _number(self.floor, f"{self.form} scale: floor", above=1.0 if self.form == "log" else 0.0)
        _number(self.alpha, f"{self.form} scale: alpha", above=None)
        object.__setattr__(self, "floor", float(self.floor))
        object.__setattr__(self, "alpha", float(self.alpha))


@dataclass(frozen=True, slots=True)
class HeadScale:
    """Scores times a learned factor per query head, 1 at first (arXiv 2404.12224)."""


@dataclass(frozen=True, slots=True)
class ALiBi:
    """-slope_h * distance added to the scores; one slope per query head (arXiv 2108.12409)."""

    slopes: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "slopes", tuple(float(slope) for slope in self.slopes))
        if not self.slopes:
            raise PosencError("alibi needs at least one slope; give one per query head")
        for slope in self.slopes:
            _number(slope, "alibi slope", above=None)


@dataclass(frozen=True, slots=True)
class T5Bias:
    """A learned bias per query head and one-sided distance bucket (T5, arXiv 1910.10683).

    buckets        half of them exact distances, half log-spaced up to max_distance
    shared         one table for all layers, else one per layer
    """

    buckets: int = 32
    max_distance: int = 128
    shared: bool = True

    def __post_init__(self) -> None:
        _whole(self.buckets, "t5_bias buckets", at_least=2)
        if self.buckets % 2:
            raise PosencError(f"t5_bias buckets={self.buckets} must be even: half are exact")
        _whole(self.max_distance, "t5_bias max_distance", at_least=self.buckets // 2 + 1)


@dataclass(frozen=True, slots=True)
class QueryBias:
    """A learned bias from the query token's hidden state and the distance (Inkling).

    b_h(i, j) = (W_r x_i)_h . P[:, i - j], `rank` numbers per head, zero from `extent` on.
    """

    rank: int = 16
    extent: int = 1024

    def __post_init__(self) -> None:
        _whole(self.rank, "query_bias rank", at_least=1)
        _whole(self.extent, "query_bias extent", at_least=1)


@dataclass(frozen=True, slots=True)
class Sinusoidal:
    """Fixed sines and cosines added to the token embeddings (arXiv 1706.03762).

    scale_embeddings   multiply the token embeddings by sqrt(d_model) first, as the paper does
    """

    scale_embeddings: bool = False


@dataclass(frozen=True, slots=True)
class LearnedAbsolute:
    """A trained vector per position added to the token embeddings (GPT-2)."""

    max_positions: int
    init: Literal["zero", "sinusoidal"] = "zero"

    def __post_init__(self) -> None:
        _whole(self.max_positions, "learned_absolute max_positions", at_least=1)
        if self.init not in ("zero", "sinusoidal"):
            raise PosencError(f"init {self.init!r} is unknown; use 'zero' or 'sinusoidal'")


LogitScale = ConstantScale | PositionScale | HeadScale
Bias = ALiBi | T5Bias | QueryBias
Embedding = Sinusoidal | LearnedAbsolute
Part = Window | LogitScale | Bias | Embedding

LEARNED = (HeadScale, T5Bias, QueryBias, LearnedAbsolute)  # parts with parameters of their own

_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        Window,
        ConstantScale,
        PositionScale,
        HeadScale,
        ALiBi,
        T5Bias,
        QueryBias,
        Sinusoidal,
        LearnedAbsolute,
    )
}


def part_to_json(part: Part) -> dict[str, Any]:
    """`{"kind": class name, **fields}` in plain JSON values."""
    fields = dataclasses.asdict(part)
    return {"kind": type(part).__name__} | {
        key: list(value) if isinstance(value, tuple) else value for key, value in fields.items()
    }


def part_from_json(value: Mapping[str, Any]) -> Any:
    """The part `part_to_json` wrote."""
    fields = dict(value)
    kind = fields.pop("kind")
    if kind not in _KINDS:
        raise PosencError(
            f"plan carries a part {kind!r} that this version of hf_posenc does not know; upgrade it"
        )
    return _KINDS[kind](
        **{key: tuple(item) if isinstance(item, list) else item for key, item in fields.items()}
    )


def part_text(part: Part) -> str:
    """A part in a few words, for tables."""
    match part:
        case Window(size, chunked):
            return f"{'chunks' if chunked else 'window'} of {size}"
        case ConstantScale(value):
            return f"x {value:g}"
        case PositionScale(form, floor, alpha):
            return f"{form} from {floor:g}" + ("" if form == "log" else f", alpha {alpha:g}")
        case HeadScale():
            return "learned per head"
        case ALiBi():
            return "ALiBi"
        case T5Bias(buckets, max_distance, shared):
            return f"T5, {buckets} to {max_distance}" + (", shared" if shared else "")
        case QueryBias(rank, extent):
            return f"query, rank {rank} to {extent}"
        case Sinusoidal(scale_embeddings):
            return "sinusoidal" + (", embeddings x sqrt(d)" if scale_embeddings else "")
        case LearnedAbsolute(max_positions, init):
            return f"learned, {max_positions} positions, {init} at first"


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """ALiBi's slope per query head, steepest first for a power of two (Press et al., their code).

    2^(-8h/H) for H a power of two; otherwise those of the next lower power of two, then every
    second one of twice that number.
    """
    _whole(num_heads, "alibi: number of heads", at_least=1)
    lower = 2 ** int(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (h + 1) / lower) for h in range(lower)]
    between = [2.0 ** (-8.0 * (h + 1) / (2 * lower)) for h in range(0, 2 * lower, 2)]
    return tuple(slopes + between[: num_heads - lower])


def _number(value: Any, what: str, *, above: float | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise PosencError(f"{what} {value!r} must be a finite number")
    if above is not None and value <= above:
        raise PosencError(f"{what} {value!r} must be above {above:g}")


def _whole(value: Any, what: str, *, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise PosencError(f"{what} {value!r} must be a whole number of at least {at_least}")
