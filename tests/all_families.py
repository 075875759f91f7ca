"""A tiny model of every causal-LM type that transformers can build without files.

python tests/all_families.py            # rewrite docs/families.md
"""

from __future__ import annotations

import contextlib
import signal
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tiny_models import harden, tokens
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import hf_posenc
from hf_posenc import PosencError
from hf_posenc.checkpoint.io import load_model
from hf_posenc.runtime.families import PREFIX, TESTED_FAMILIES

ALL = tuple(
    sorted(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if not name.startswith(PREFIX))
)
PAGE = Path(__file__).parents[1] / "docs" / "families.md"
_SECONDS = 60

# Set where a config has the attribute.
_SHAPE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 32,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "sliding_window": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class CannotBuild(Exception):
    """This file has no tiny config for that model type."""


def tiny(model_type: str) -> Any:
    """A tiny stock model of a type, eager attention, float32, eval."""
    try:
        with warnings.catch_warnings(), _limit(), torch.random.fork_rng():
            warnings.simplefilter("ignore")
            stock = CONFIG_MAPPING[model_type]
            default = stock()
            latent = hasattr(default, "qk_rope_head_dim")  # these derive head_dim from it
            shape = {k: v for k, v in _SHAPE.items() if not (latent and k == "head_dim")}
            config = stock(**{k: v for k, v in shape.items() if hasattr(default, k)})
            if config.get_text_config() is not config:
                raise CannotBuild("multimodal: its text decoder has a type of its own")
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
            model = model.float().eval()
            harden(model, 4.0)
            outputs(model)
            return model
    except Exception as error:
        raise CannotBuild(f"{type(error).__name__}: {str(error).splitlines()[0][:120]}") from error


@torch.no_grad()
def outputs(model: Any) -> torch.Tensor:
    """Logits of a short row; the seed is set for families with randomness of their own."""
    torch.manual_seed(0)
    ids = tokens(1, 12) % 100
    result: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return result


def verdict(model_type: str) -> tuple[str, str]:
    """("runs" | "refused" | "not built", detail) for a family; a broken claim is an assertion."""
    try:
        model = tiny(model_type)
    except CannotBuild as error:
        return "not built", str(error)
    before = outputs(model)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    stock = type(model)
    try:
        hf_posenc.patch_model(model, "rope")
    except PosencError as error:
        assert torch.equal(outputs(model), before), "a refused model was changed"
        assert type(model) is stock
        return "refused", str(error)
    assert torch.equal(outputs(model), before), "the null scheme changes logits"
    hf_posenc.unpatch_model(model)
    try:
        hf_posenc.patch_model(model, "nope")
        detail = ""
    except PosencError as error:  # some layers do not rotate at all
        detail = str(error)
        if not _patch_what_rotates(model):
            return "refused", detail
    assert not torch.equal(outputs(model), before), "NoPE changes nothing"
    with hf_posenc.unpatched(model):
        assert torch.equal(outputs(model), before)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = load_model(folder, attn_implementation="eager").eval()
    assert torch.equal(outputs(loaded), outputs(model)), "another model comes back from disk"
    hf_posenc.unpatch_model(model)
    assert torch.equal(outputs(model), before)
    assert type(model) is stock
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    return "runs", detail


def _patch_what_rotates(model: Any) -> bool:
    for index in range(hf_posenc.ModelSpec.from_model(model).num_layers):
        with contextlib.suppress(PosencError):
            hf_posenc.patch_model(model, "nope", layers=[index])
            return True
    return False


@contextlib.contextmanager
def _limit() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError(f"not built within {_SECONDS} s")

    earlier = signal.signal(signal.SIGALRM, stop)
    signal.alarm(_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, earlier)


def page(verdicts: dict[str, tuple[str, str]]) -> str:
    """docs/families.md."""
    import transformers

    groups = {key: [n for n in verdicts if verdicts[n][0] == key] for key in ("runs", "refused")}
    lines = [
        "# Families",
        "",
        "What `patch_model` does with each causal-LM type of transformers "
        f"{transformers.__version__}, measured on tiny random models by "
        "`python tests/all_families.py`.",
        "",
        "Tested by name, for every scheme: "
        + ", ".join(f"`{name}`" for name in TESTED_FAMILIES)
        + ".",
        "",
        f"## Run exactly ({len(groups['runs'])})",
        "",
        "The null scheme leaves the logits bit for bit, NoPE changes them, a saved model loads",
        "equal, unpatching gives back the original. Families outside the list above prove the",
        "first two on each model before it is changed.",
        "",
        "| model type | limits |",
        "|---|---|",
        *(f"| `{name}` | {_cell(verdicts[name][1])} |" for name in groups["runs"]),
        "",
        f"## Refused ({len(groups['refused'])})",
        "",
        "| model type | reason |",
        "|---|---|",
        *(f"| `{name}` | {_cell(verdicts[name][1])} |" for name in groups["refused"]),
        "",
        "## Not tried",
        "",
        "No tiny model of these could be built: multimodal configs, or sizes the script does not",
        "know. `patch_model` decides on the real model.",
        "",
        ", ".join(f"`{name}`" for name, (kind, _) in verdicts.items() if kind == "not built") + ".",
    ]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = {}
    for model_type in ALL:
        found[model_type] = verdict(model_type)
        print(f"{model_type:28}{found[model_type][0]:12}{found[model_type][1][:150]}", flush=True)
    PAGE.write_text(page(found))
