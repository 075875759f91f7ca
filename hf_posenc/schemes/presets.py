"""The hybrids of published long-context models, each a named plan built from the parts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from hf_posenc.model_spec import ModelSpec
from hf_posenc.parts import PositionScale, Window
from hf_posenc.plan import LayerPlan
from hf_posenc.schedule import check_offset, select_layers
from hf_posenc.schemes.base import Scheme
from hf_posenc.schemes.dual import Dual
from hf_posenc.schemes.nope import NopeInterleaved
from hf_posenc.schemes.options import check_integer, check_number
from hf_posenc.schemes.pairs import drop_rotation
from hf_posenc.schemes.rope import Rope


@dataclass(frozen=True, kw_only=True)
class SmolLM3(NopeInterleaved):
    """Every n-th layer has no rotation: `nope_interleaved` under the model's name.

    every   the unrotated layers are those with (i + 1) % every == 0
    offset  the unrotated layers are those with i % every == offset instead
    Source: SmolLM3 in transformers.
    """

    name: ClassVar[str] = "smollm3"
    source: ClassVar[str] = "SmolLM3 in transformers"


@dataclass(frozen=True, kw_only=True)
class Gemma4(Scheme):
    """Sliding layers with full RoPE at a low base; every n-th layer global, with p-RoPE.

    every         the global layers are those with (i + 1) % every == 0
    window        of the local layers, in tokens
    theta_local   base of the local layers
    theta_global  base of the global layers
    p             fraction of the global layers' frequencies that is kept, the fastest
    Source: Gemma 4 in transformers.
    """

    name: ClassVar[str] = "gemma4"
    source: ClassVar[str] = "Gemma 4 in transformers"

    every: int = 6
    window: int = 1024
    theta_local: float = 1e4
    theta_global: float = 1e6
    p: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("window", self.window, at_least=1)
        check_number("p", self.p, at_most=1.0)
        self._dual()

    def plan_layer(self, spec: ModelSpec, index: int) -> LayerPlan:
        return self._dual().plan_layer(spec, index)

    def _dual(self) -> Dual:
        return Dual(
            every=self.every,
            theta_local=self.theta_local,
            theta_global=self.theta_global,
            p_global=self.p,
            window=self.window,
        )


@dataclass(frozen=True, kw_only=True)
class IRope(Scheme):
    """Llama 4: chunked RoPE layers, every n-th layer global without rotation and with a scale.

    every        the global layers are those with (i + 1) % every == 0
    chunk        tokens of a chunk in the RoPE layers
    scale_floor  tokens; the scale of the global layers is 1 below it and grows with its multiples
    scale_alpha  how fast it grows
    Source: Llama 4 in transformers.
    """

    name: ClassVar[str] = "irope"
    source: ClassVar[str] = "Llama 4 in transformers"

    every: int = 4
    chunk: int = 8192
    scale_floor: int = 8192
    scale_alpha: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("every", self.every, at_least=1)
        check_integer("chunk", self.chunk, at_least=1)
        check_integer("scale_floor", self.scale_floor, at_least=1)
        PositionScale("llama4", self.scale_floor, self.scale_alpha)

    def plan_layer(self, spec: ModelSpec, index: int) -> LayerPlan:
        own = spec.layers[index]
        if not select_layers(f"every:{self.every}", spec.num_layers)[index]:
            return replace(own, window=Window(self.chunk, chunked=True))
        scale = PositionScale("llama4", float(self.scale_floor), self.scale_alpha)
        return replace(drop_rotation(own), logit_scale=scale)


@dataclass(frozen=True, kw_only=True)
class RNopeSwa(Scheme):
    """Sliding RoPE layers, every n-th layer global without rotation.

    every   the global layers are those with (i + 1) % every == 0
    window  of the RoPE layers, in tokens
    theta   base of the RoPE layers; None keeps the checkpoint's own
    Source: RNoPE-SWA, arXiv 2501.18795; Command A, Cohere2 in transformers.
    """

    name: ClassVar[str] = "rnope_swa"
    source: ClassVar[str] = "RNoPE-SWA, arXiv 2501.18795; Command A"

    every: int = 4
    window: int = 4096
    theta: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("every", self.every, at_least=1)
        check_integer("window", self.window, at_least=1)
        Rope(theta=self.theta)

    def plan_layer(self, spec: ModelSpec, index: int) -> LayerPlan:
        if select_layers(f"every:{self.every}", spec.num_layers)[index]:
            return drop_rotation(spec.layers[index])
        return Rope(theta=self.theta, window=self.window).plan_layer(spec, index)


@dataclass(frozen=True, kw_only=True)
class Swan(Scheme):
    """One global NoPE layer with a logarithmic scale, then local RoPE layers.

    every       one of so many layers is global
    offset      the global layers are those with i % every == offset
    window      of the local layers, in tokens
    scale_base  a of the factor max(1, log_a(a + n)); None takes the config's trained length
    Source: SWAN-GPT, arXiv 2504.08719.
    """

    name: ClassVar[str] = "swan"
    source: ClassVar[str] = "SWAN-GPT, arXiv 2504.08719"

    every: int = 4
    offset: int = 0
    window: int = 512
    scale_base: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("every", self.every, at_least=1)
        check_offset(self.every, self.offset)
        check_integer("window", self.window, at_least=1)
        if self.scale_base is not None:
            check_number("scale_base", self.scale_base, above=1.0)

    def plan_layer(self, spec: ModelSpec, index: int) -> LayerPlan:
        own = spec.layers[index]
        chosen = select_layers(f"every:{self.every}", spec.num_layers, offset=self.offset)
        if not chosen[index]:
            return replace(own, window=Window(self.window))
        base = float(spec.max_positions if self.scale_base is None else self.scale_base)
        return replace(drop_rotation(own), logit_scale=PositionScale("log", base))


@dataclass(frozen=True, kw_only=True)
class Drope(Scheme):
    """No rotation anywhere; scores grow with ln(context length / trained length).

    scale_c         c of 1 + c ln(C_test / C_train), .1 to .4 in the paper; C_test is taken at
                    every query as the number of tokens it can see, so that inputs up to the
                    trained length are not scaled at all
    trained_length  C_train in tokens; None takes the config's max_position_embeddings
    Source: DroPE, arXiv 2512.12167.
    """

    name: ClassVar[str] = "drope"
    source: ClassVar[str] = "DroPE, arXiv 2512.12167"

    scale_c: float = 0.2
    trained_length: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("scale_c", self.scale_c)
        if self.trained_length is not None:
            check_integer("trained_length", self.trained_length, at_least=1)

    def plan_layer(self, spec: ModelSpec, index: int) -> LayerPlan:
        length = spec.max_positions if self.trained_length is None else self.trained_length
        scale = PositionScale("drope", float(length), self.scale_c)
        return replace(drop_rotation(spec.layers[index]), logit_scale=scale)
