"""Everything that depends on the transformers version or on a model family; nowhere else.

Checked against transformers 5.24. Other modules ask this one for the decoder of a model, the
frequencies a config stands for, and what a family needs before a plan can run on it.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import logging
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hf_posenc.errors import PosencError, did_you_mean
from hf_posenc.model_spec import ModelSpec
from hf_posenc.plan import DynamicNTK, LayerPlan, LongFactors, Stretch, canonical_json

logger = logging.getLogger(__name__)

# Run in the test suite for every scheme; other families must pass the identity self-check.
TESTED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "smollm3")
PREFIX = "posenc_"
POSENC_ROPE = "posenc"

# How a family lays the F angles out over the table: cat(f, f), f0 f0 f1 f1 ..., or f alone.
TableLayout = Literal["half_split", "interleaved", "half_width"]


def decoder_of(model: nn.Module) -> nn.Module:
    """The module that owns `rotary_emb` and `layers`.

    Errors: `PosencError` naming the model class when there is none or more than one.
    """
    found = [
        module
        for module in model.modules()
        if getattr(module, "rotary_emb", None) is not None
        and isinstance(getattr(module, "layers", None), nn.ModuleList)
    ]
    if len(found) != 1:
        what = "no decoder with a rotary embedding" if not found else "more than one decoder"
        raise PosencError(
            f"{type(model).__name__}: {what}; hf_posenc converts decoder-only models that rotate "
            "queries and keys (Llama, Qwen, Mistral, SmolLM3 and families of that shape)"
        )
    return found[0]


def attentions_of(decoder: nn.Module) -> list[nn.Module]:
    """The attention module of every layer, in order."""
    layers: Any = decoder.layers
    found = [getattr(layer, "self_attn", None) for layer in layers]
    missing = [index for index, attention in enumerate(found) if attention is None]
    if missing:
        raise PosencError(
            f"{type(decoder).__name__}: layer {missing[0]} has no self_attn; models with "
            "linear-attention or state-space layers are not supported"
        )
    return [attention for attention in found if attention is not None]


def stock_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of the base architecture: of a converted one a copy without its plan."""
    posenc = getattr(config, "posenc", None)
    if not config.model_type.startswith(PREFIX) or posenc is None:
        return config
    result: Any = copy.deepcopy(config)
    result.__class__ = type(config).__mro__[1]
    result.rope_parameters = copy.deepcopy(posenc["base_rope_parameters"])
    for name in ("posenc", "auto_map", "model_type"):
        vars(result).pop(name, None)
    if result.architectures:  # named after the converted class once a model has been saved
        result.architectures = [name.removeprefix("Posenc") for name in result.architectures]
    return result


def spec_from_config(config: PreTrainedConfig) -> ModelSpec:
    """See `ModelSpec.from_config`."""
    config = stock_config(config)
    return _spec(config, build_stock_rotary(config))


def spec_from_model(model: PreTrainedModel) -> ModelSpec:
    """See `ModelSpec.from_model`; a converted model answers with its base's spec."""
    config: PreTrainedConfig = model.config
    decoder = decoder_of(model)
    if config.model_type.startswith(PREFIX):
        return spec_from_config(config)
    rotary: Any = decoder.rotary_emb
    tables = list(rotary.buffers())
    offloaded = any(table.device.type == "meta" for table in tables)
    rounded = [table.dtype for table in tables if torch.finfo(table.dtype).bits < 32]
    if rounded and not offloaded:
        warnings.warn(
            f"{type(model).__name__}: its RoPE frequencies were rounded to {rounded[0]} by a cast "
            "of the whole model; hf_posenc computes them again in float32 (load with dtype=... "
            "instead of calling .to(dtype))",
            stacklevel=3,
        )
    if rounded or offloaded:
        rotary = build_stock_rotary(config)
    return _spec(config, rotary)


def rope_layer(
    rope_parameters: Mapping[str, Any], *, rotary_dim: int, max_positions: int
) -> LayerPlan:
    """The layer transformers computes for `rope_parameters`; see `ModelSpec.rope_layer`."""
    values = dict(rope_parameters)
    rope_type = values.setdefault("rope_type", "default")
    if rope_type != "proportional":
        values.pop("partial_rotary_factor", None)  # `rotary_dim` says it already
    known = ["default", *(name for name in ROPE_INIT_FUNCTIONS if name != POSENC_ROPE)]
    if rope_type not in known:
        raise PosencError(f"rope_type {rope_type!r} is unknown; {did_you_mean(rope_type, known)}")
    try:
        with _no_transformers_warnings():
            config = LlamaConfig(
                hidden_size=rotary_dim,
                num_attention_heads=1,
                num_key_value_heads=1,
                head_dim=rotary_dim,
                max_position_embeddings=max_positions,
                rope_parameters=values,
            )
            return _layer_plan(LlamaRotaryEmbedding(config), config, None)
    except PosencError:
        raise
    except KeyError as error:
        raise PosencError(f"rope_type {rope_type!r} needs the key {error}") from None
    except (TypeError, ValueError, RuntimeError, ZeroDivisionError) as error:
        raise PosencError(f"rope_parameters {dict(values)}: {error}") from None


def table_layout(rotary: nn.Module, spec: ModelSpec) -> TableLayout:
    """How the family lays angles out over its cos table, read off one call of its own module."""
    position = torch.tensor([[5]], device="cpu")
    kwargs = {"layer_type": _layer_types(rotary)[0]} if _layer_types(rotary) else {}
    with torch.device("cpu"):
        cos = _tables(rotary(torch.zeros(1, 1, spec.head_dim), position, **kwargs))[0][0, 0]
    if cos.shape[-1] == spec.num_frequencies:
        return "half_width"
    half = cos.shape[-1] // 2
    if torch.equal(cos[:half], cos[half:]):
        return "half_split"
    if torch.equal(cos[0::2], cos[1::2]):
        return "interleaved"
    raise PosencError(f"{spec.family}: its rotary table has a layout hf_posenc does not know")


def pairs_half_split(config: PreTrainedConfig) -> bool:
    """Whether the family rotates features (i, i + F), read off its own `rotate_half`.

    The table alone does not tell: GLM, Ernie 4.5 and Helium lay theirs out half-split and rotate
    neighbours. A family without that function counts as one that does not.
    """
    module = importlib.import_module(_rotary_class(stock_config(config)).__module__)
    rotate_half = getattr(module, "rotate_half", None)
    if rotate_half is None:
        return False
    turned = rotate_half(torch.arange(8.0).view(1, 1, 1, 8)).flatten()
    return turned.tolist() == [-4.0, -5.0, -6.0, -7.0, 0.0, 1.0, 2.0, 3.0]


def stock_conversions(family: str) -> list[Any]:
    """How transformers turns a family's stored weights into those in memory."""
    name = causal_lm_class(family).__name__
    found = get_checkpoint_conversion_mapping(name) or get_checkpoint_conversion_mapping(family)
    return list(found or [])


def stores_heads_apart(family: str) -> bool:
    """Whether q and k rows are stored in matrices of their own, under the names in memory."""
    made = [name for step in stock_conversions(family) for name in step.target_patterns]
    return not any("q_proj" in name or "k_proj" in name for name in made)


def build_stock_rotary(config: PreTrainedConfig) -> nn.Module:
    """A new rotary module of the family on the CPU, as its own model class would build it."""
    config = copy.deepcopy(stock_config(config))
    with torch.device("cpu"):  # also while a model is being built on the meta device
        rotary: nn.Module = _rotary_class(config)(config)
    return rotary


def open_rotation_gates(attentions: list[nn.Module]) -> None:
    """Let every layer apply the table it is handed; a plan says what the table holds.

    SmolLM3 skips rotation in layers whose `use_rope` is 0. With the gate open, a table of
    cos 1, sin 0 computes exactly the same.
    """
    attention: Any
    for attention in attentions:
        if hasattr(attention, "use_rope"):
            attention.use_rope = 1


def restore_rotation_gates(attentions: list[nn.Module], config: PreTrainedConfig) -> None:
    """Undo `open_rotation_gates` from the config."""
    attention: Any
    for index, attention in enumerate(attentions):
        if hasattr(attention, "use_rope"):
            attention.use_rope = config.no_rope_layers[index]


def causal_lm_class(model_type: str) -> type[PreTrainedModel]:
    """The stock causal-LM class of a family."""
    from transformers import CONFIG_MAPPING

    mapping: Any = AutoModelForCausalLM._model_mapping
    try:
        config_class = CONFIG_MAPPING[model_type]
        found = mapping[config_class]
    except KeyError:
        raise PosencError(
            f"{model_type}: transformers has no causal language model of that type"
        ) from None
    result: type[PreTrainedModel] = found[0] if isinstance(found, tuple) else found
    return result


def cache_keyword(model: nn.Module) -> str:
    """Name of the argument that takes a key/value cache (renamed in transformers 5)."""
    parameters = inspect.signature(model.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def _rotary_class(config: PreTrainedConfig) -> Any:
    family = config.model_type
    model_class = causal_lm_class(family)
    if config.get_text_config() is not config:
        raise PosencError(
            f"{family}: a multimodal config; load its text decoder as a causal LM and convert that"
        )
    module = importlib.import_module(model_class.__module__)
    prefix = model_class.__name__.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    found = getattr(module, f"{prefix}RotaryEmbedding", None)
    if found is None:
        candidates = [
            value
            for name, value in vars(module).items()
            if name.endswith("RotaryEmbedding") and inspect.isclass(value)
        ]
        found = candidates[0] if len(candidates) == 1 else None
    if found is None:
        raise PosencError(
            f"{family}: has no rotary embedding to convert; hf_posenc converts decoders that "
            "rotate queries and keys (Llama, Qwen, Mistral, SmolLM3 and families of that shape)"
        )
    return found


def _spec(config: PreTrainedConfig, rotary: Any) -> ModelSpec:
    layer_types = _layer_types(rotary)
    by_layer: list[Any] = [None] * config.num_hidden_layers
    if layer_types:
        by_layer = list(config.layer_types)
    plans = {kind: _layer_plan(rotary, config, kind) for kind in dict.fromkeys(by_layer)}
    layers = [plans[kind] for kind in by_layer]
    for index, rotates in enumerate(getattr(config, "no_rope_layers", None) or ()):
        if not rotates:
            layers[index] = LayerPlan((0.0,) * len(layers[index].inv_freq))
    widths = {len(layer.inv_freq) for layer in layers}
    if len(widths) != 1:
        raise PosencError(
            f"{config.model_type}: its layers have rotary tables of different widths, which "
            "hf_posenc does not support"
        )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return ModelSpec(
        family=config.model_type,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=head_dim,
        rotary_dim=2 * widths.pop(),
        hidden_size=config.hidden_size,
        max_positions=config.max_position_embeddings,
        layers=tuple(layers),
        rope_parameters=canonical_json(config.rope_parameters),
    )


def _layer_types(rotary: Any) -> list[str]:
    """Layer types with a table of their own (Gemma 3 and relatives), else none."""
    return list(rotary.rope_type) if isinstance(getattr(rotary, "rope_type", None), dict) else []


def _layer_plan(rotary: Any, config: Any, layer_type: str | None) -> LayerPlan:
    prefix = "" if layer_type is None else f"{layer_type}_"
    table = getattr(rotary, f"{prefix}original_inv_freq", None)
    if table is None:
        raise PosencError(
            f"{config.model_type}: its rotary embedding has no inv_freq table; not supported"
        )
    rope_type = rotary.rope_type if layer_type is None else rotary.rope_type[layer_type]
    parameters = config.rope_parameters
    parameters = parameters if layer_type is None else parameters[layer_type]
    kwargs = {} if layer_type is None else {"layer_type": layer_type}
    stretch: Stretch | None = None
    if rope_type == "longrope":
        original = parameters["original_max_position_embeddings"]
        long_table, _ = ROPE_INIT_FUNCTIONS[rope_type](
            config, "cpu", seq_len=original + 1, **kwargs
        )
        stretch = LongFactors(int(original), tuple(long_table.tolist()))
    elif "dynamic" in rope_type:
        stretch = DynamicNTK(
            int(config.max_position_embeddings),
            float(parameters["rope_theta"]),
            float(parameters["factor"]),
        )
    return LayerPlan(
        inv_freq=tuple(table.tolist()),
        rope_scale=float(getattr(rotary, f"{prefix}attention_scaling")),
        stretch=stretch,
    )


def _tables(output: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if not (isinstance(output, tuple) and len(output) == 2):
        raise PosencError("the family's rotary embedding does not return (cos, sin)")
    return output


@contextmanager
def _no_transformers_warnings() -> Iterator[None]:
    # The shadow config of `rope_layer` is ours; its complaints would confuse the reader.
    noisy = logging.getLogger("transformers")
    level = noisy.level
    noisy.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        noisy.setLevel(level)


def token_places(
    hidden_states: torch.Tensor, cache: Any, layer: int
) -> tuple[torch.Tensor, torch.Tensor, bool, bool]:
    """Places in the row of a call's queries [T] and keys [S], and two facts about the keys.

    Whether early keys are gone; whether the last keys are those of the queries, which holds for
    caches that grow and not for a preallocated one. Asked before the layer writes to its cache;
    places count slots, padding included.
    """
    length, device = hidden_states.shape[1], hidden_states.device
    keys, kv_start = length, 0
    q_start: Any = 0
    if cache is not None:
        keys, kv_start = cache.get_mask_sizes(length, layer)
        q_start = cache.get_query_offset(layer)
    grows = isinstance(q_start, int) and q_start + length == kv_start + keys
    if isinstance(q_start, torch.Tensor):
        q_start = q_start.to(device)
    queries = torch.arange(length, device=device) + q_start
    places = torch.arange(keys, device=device) + kv_start
    return queries, places, not (isinstance(kv_start, int) and kv_start == 0), grows


def stock_attention(name: str, module: Any) -> Any:
    """The stock attention function of a name; "eager" is each modeling file's own."""
    if name == "eager":
        return vars(sys.modules[type(module).__module__])["eager_attention_forward"]
    return ALL_ATTENTION_FUNCTIONS[name]


def register_attention(name: str, function: Any, masks_of: str) -> None:
    """Add an attention implementation under a name of ours, with the masks of a stock one."""
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[masks_of])


def narrowed_block_mask(mask: Any, allowed: torch.Tensor, kv_index: torch.Tensor) -> Any:
    """A flex BlockMask that also asks `allowed` [B or 1, 1, T, S]; keys lie at `kv_index` [S]."""
    rows = allowed.shape[0]

    def narrowed(batch: Any, head: Any, query: Any, key: Any) -> Any:
        seen = allowed[batch if rows > 1 else 0, 0, query, key]
        return seen & mask.mask_mod(batch, head, query, kv_index[key])

    return create_block_mask(
        narrowed, mask.shape[0], None, allowed.shape[2], allowed.shape[3], device=allowed.device
    )
