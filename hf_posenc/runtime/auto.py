"""The `posenc_<family>` model types that converted checkpoints are saved and loaded as.

Importing `hf_posenc` registers one config class and one causal-LM class per tested family with
transformers' Auto classes (others when they are first needed), the rope type "posenc", and the
conversion of stored q/k rows to the layout in memory. It changes no transformers class.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_posenc.checkpoint.permute import interleaved_order, inverse_order, permute_heads
from hf_posenc.errors import PosencError
from hf_posenc.files import write_text
from hf_posenc.model_spec import ModelSpec
from hf_posenc.plan import PositionPlan
from hf_posenc.runtime import families
from hf_posenc.runtime.install import check_switched_on, install, keep_scores
from hf_posenc.runtime.scores import register_attention

STUB = "posenc_stub.py"
_configs: dict[str, Any] = {}
_models: dict[str, Any] = {}


def config_class(family: str) -> Any:
    """`Posenc<Family>Config`, made and registered on first use."""
    if family not in _configs:
        stock: Any = CONFIG_MAPPING[family]
        name = f"Posenc{stock.__name__}"

        def from_dict(cls: Any, config_dict: dict[str, Any], **kwargs: Any) -> Any:
            if "posenc" not in config_dict and config_dict.get("model_type") == family:
                # PEFT asks the class of a live model's config to read the base it was loaded from.
                return stock.from_dict(config_dict, **kwargs)
            _read_plan(config_dict)  # before validators that would wrap what it says
            return super(made, cls).from_dict(config_dict, **kwargs)

        def to_dict(self: Any) -> dict[str, Any]:
            result: dict[str, Any] = stock.to_dict(self)
            if "rope_theta" in self.rope_parameters:  # where readers of older configs look
                result["rope_theta"] = self.rope_parameters["rope_theta"]
            return result

        attributes = {
            "model_type": families.PREFIX + family,
            "posenc": None,
            "validate_rope": _accept_rope,
            "from_dict": classmethod(from_dict),
            "to_dict": to_dict,
            "get_text_config": _text_config,
            "register_for_auto_class": classmethod(_keep_auto_map),
            "__annotations__": {"posenc": "dict | None"},
            "__module__": __name__,
            "__qualname__": name,
        }
        made: Any = strict(type(name, (stock,), attributes))
        _configs[family] = made
        globals()[name] = made
        AutoConfig.register(made.model_type, made, exist_ok=True)
    return _configs[family]


def model_class(family: str) -> Any:
    """`Posenc<Family>ForCausalLM`, made and registered on first use."""
    if family not in _models:
        stock: Any = families.causal_lm_class(family)
        config = config_class(family)
        name = f"Posenc{stock.__name__}"

        def build(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
            plan = plan_of_config(config)
            stock.__init__(self, config, *args, **kwargs)
            spec = ModelSpec.from_config(config)
            if plan.base != spec.fingerprint:
                raise PosencError(
                    f"config.json does not fit the plan it carries: {plan.label} was built for "
                    f"fingerprint {plan.base}, the config gives {spec.fingerprint}; it was edited "
                    "after the conversion"
                )
            install(self, plan, spec, loaded=True)

        def save(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
            check_switched_on(self, "save_pretrained")
            self.config.auto_map = auto_map(family)
            result = stock.save_pretrained(self, save_directory, *args, **kwargs)
            if kwargs.get("is_main_process", True):
                write_stub(save_directory, family)
            return result

        def set_attention(self: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
            stock.set_attn_implementation(self, attn_implementation, *args, **kwargs)
            keep_scores(self)

        attributes = {
            "__init__": build,
            "save_pretrained": save,
            "set_attn_implementation": set_attention,
            "config_class": config,
            "register_for_auto_class": classmethod(_keep_auto_map),
            "is_custom_code": classmethod(_is_not_custom),
            "__annotations__": {"config": config},
            "__module__": __name__,
            "__qualname__": name,
        }
        made: Any = type(name, (stock,), attributes)
        _models[family] = made
        globals()[name] = made
        AutoModelForCausalLM.register(config, made, exist_ok=True)
        _register_conversions(family)
    return _models[family]


def plan_of_config(config: PreTrainedConfig) -> PositionPlan:
    """The plan a `Posenc<Family>Config` carries."""
    names = ("model_type", "posenc", "rope_parameters")
    return _read_plan({name: getattr(config, name, None) for name in names})


def to_posenc_config(config: PreTrainedConfig, plan: PositionPlan) -> Any:
    """A copy of a stock config as its `Posenc<Family>Config`, carrying the plan."""
    made: Any = copy.deepcopy(config)
    made.__class__ = config_class(config.model_type)
    vars(made).pop("model_type", None)  # of a loaded config: it would hide the class's
    base = copy.deepcopy(config.rope_parameters)
    made.posenc = {"plan": plan.to_json(), "base_rope_parameters": base}
    made.rope_parameters = _marked(base)
    return made


def auto_map(family: str) -> dict[str, str]:
    """The `auto_map` of a converted checkpoint's config: its classes, named in the stub."""
    return {
        "AutoConfig": f"{Path(STUB).stem}.{config_class(family).__name__}",
        "AutoModelForCausalLM": f"{Path(STUB).stem}.{model_class(family).__name__}",
    }


def write_stub(folder: Path | str, family: str) -> None:
    """Write the two lines of code that `trust_remote_code=True` loads beside the weights."""
    config, model = config_class(family).__name__, model_class(family).__name__
    text = (
        "from hf_posenc.runtime.auto import config_class, model_class\n\n"
        f'{config}, {model} = config_class("{family}"), model_class("{family}")\n'
    )
    write_text(Path(folder) / STUB, text)


def register_families() -> None:
    """Register the tested families; called when `hf_posenc` is imported."""
    ROPE_INIT_FUNCTIONS[families.POSENC_ROPE] = _posenc_rope
    register_attention()
    for family in families.TESTED_FAMILIES:
        model_class(family)


def family_of_type(model_type: str) -> str | None:
    """`llama` for `posenc_llama`, None for a stock model type."""
    return (
        model_type.removeprefix(families.PREFIX) if model_type.startswith(families.PREFIX) else None
    )


class ReorderStoredHeads(ConversionOps):
    """Stored q/k rows -> memory (half-split), as `plan.pairing` says; the reverse on saving."""

    def __init__(self, *, saving: bool = False) -> None:
        self.saving = saving

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        config: Any = None,
        **_: Any,
    ) -> dict[str, Any]:
        result = {}
        for key, value in input_dict.items():
            tensor = value[0] if isinstance(value, list) else value
            target = target_patterns[0] if len(target_patterns) == 1 else key
            result[target] = self._reorder(tensor, config)
        return result

    @property
    def reverse_op(self) -> ConversionOps:
        return ReorderStoredHeads(saving=not self.saving)

    def _reorder(self, tensor: torch.Tensor, config: Any) -> torch.Tensor:
        if plan_of_config(config).pairing == "half_split":
            return tensor
        spec = ModelSpec.from_config(config)
        order = interleaved_order(spec.rotary_dim, spec.head_dim)
        return permute_heads(tensor, order if self.saving else inverse_order(order))


def reorder_on_save(model: Any, wanted: bool) -> None:
    """Let saving a patched model re-order q/k rows, or saving an unpatched one leave them.

    A model from `from_pretrained` saves with the conversions it was loaded with, whatever its
    class has become since; one built from a config asks by model type and needs nothing.
    """
    loaded_with = getattr(model, "_weight_conversions", None)
    if loaded_with is not None:
        kept = [conversion for conversion in loaded_with if not _reorders(conversion)]
        family = families.stock_config(model.config).model_type
        model._weight_conversions = [*kept, *_reorderings(family)] if wanted else kept


def _register_conversions(family: str) -> None:
    conversions = [*families.stock_conversions(family), *_reorderings(family)]
    register_checkpoint_conversion_mapping(families.PREFIX + family, conversions, overwrite=True)


def _reorderings(family: str) -> list[WeightConverter]:
    if not families.stores_heads_apart(family):
        return []
    names = [
        f"self_attn.{name}.{kind}" for name in ("q_proj", "k_proj") for kind in ("weight", "bias")
    ] + ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
    return [WeightConverter(name, name, [ReorderStoredHeads()]) for name in names]


def _reorders(conversion: Any) -> bool:
    operations = getattr(conversion, "operations", None) or ()
    return any(isinstance(operation, ReorderStoredHeads) for operation in operations)


def _read_plan(config: dict[str, Any]) -> PositionPlan:
    posenc = config.get("posenc")
    if not isinstance(posenc, dict) or not {"plan", "base_rope_parameters"} <= posenc.keys():
        raise PosencError(
            f"a config of type {config.get('model_type')!r} without its plan (key 'posenc'); the "
            "checkpoint is damaged or was not written by hf_posenc"
        )
    # The plan decides: an edited base would be ignored in silence.
    base = posenc["base_rope_parameters"]
    wanted = {"rope_parameters": _marked(base), "rope_theta": base.get("rope_theta")}
    for key, value in wanted.items():
        if config.get(key, value) != value:
            raise PosencError(
                f"config.json says {key} = {config[key]}, its plan was made for {value}; it was "
                "edited after the conversion: convert the base checkpoint anew instead"
            )
    return PositionPlan.from_json(posenc["plan"])


def _marked(rope_parameters: dict[str, Any]) -> dict[str, Any]:
    # A rope type that stock code does not know: loading as plain RoPE cannot happen in silence.
    if nested := {k: v for k, v in rope_parameters.items() if isinstance(v, dict)}:
        return {key: _marked(value) for key, value in nested.items()}
    # The other keys stay: some families read them for their attention scale.
    return {**rope_parameters, "rope_type": families.POSENC_ROPE}


def _posenc_rope(
    config: Any,
    device: Any = None,
    seq_len: int | None = None,
    layer_type: str | None = None,
    **_: Any,
) -> tuple[torch.Tensor, float]:
    if type(config) not in _configs.values():
        raise PosencError(
            "this checkpoint was converted by hf_posenc; load it with "
            "AutoModelForCausalLM.from_pretrained after `import hf_posenc`, not with a stock class"
        )
    # A placeholder of the right width: the class of a converted model puts its own module there.
    rope = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
    return torch.zeros(width, dtype=torch.float32, device=device), 1.0


def _accept_rope(self: Any) -> None:
    """Do nothing: the rope parameters of a converted model are in its plan, which checks itself."""


def _text_config(self: Any, decoder: Any = None, encoder: Any = None) -> Any:
    """The config itself; for a cache, a copy that says which layers see only a window."""
    # Read without checking: transformers asks while it validates, a damaged plan is the model's to
    # report.
    if not decoder or '"window"' not in json.dumps(getattr(self, "posenc", None)):
        return self
    windows = [layer.window for layer in plan_of_config(self).layers]
    if not any(windows):
        return self
    # A cache layer holds one size: the widest window, which the masks cut down where needed.
    view = copy.copy(self)
    sliding = "sliding_attention"
    view.layer_types = ["full_attention" if window is None else sliding for window in windows]
    view.sliding_window = max(window.size for window in windows if window is not None)
    return view


def _keep_auto_map(cls: Any, auto_class: Any = None) -> None:
    """Do nothing: transformers would copy package files into checkpoints and rewrite auto_map."""


def _is_not_custom(cls: Any) -> bool:
    """Weights are initialised by the stock family's rules, which restore its own buffers too."""
    return False


def __getattr__(name: str) -> Any:
    # Unpickling names classes of families that this process has not needed yet.
    for family, stock_name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if name == f"Posenc{stock_name}":
            return model_class(family)
    if name.startswith("Posenc") and name.endswith("Config"):
        for family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            if name == f"Posenc{CONFIG_MAPPING[family].__name__}":
                return config_class(family)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
