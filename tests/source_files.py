"""Small wheels and GGUF files made on the spot, and a pip that hands them out."""

from __future__ import annotations

import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}{% endfor %}"


def byte_vocabulary() -> tuple[list[str], list[str]]:
    """Byte-level tokens and two merges; the one of two digits is wrong where digits are single."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return [*SPECIAL, *bytes_to_unicode().values(), "12", "th"], ["1 2", "t h"]


def tiny_llama(seed: int = 0) -> LlamaForCausalLM:
    """A random GQA Llama whose attention is far from uniform."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(byte_vocabulary()[0]),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=96,
        rope_parameters={"rope_type": "default", "rope_theta": 5e4},
        rms_norm_eps=2.0**-16,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(20)
            layer.self_attn.k_proj.weight.mul_(20)
    return model


def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    *,
    pre: str = "smollm",
    scaling: str | None = None,
    extra: dict[str, torch.Tensor] | None = None,
    rotary_width: int | None = None,
) -> Path:
    """Write `model` as llama.cpp stores it: fp32, q and k rows interleaved per head."""
    from gguf import GGUFWriter

    config = model.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    writer = GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_license("apache-2.0")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(rotary_width or config.hidden_size // heads)
    writer.add_vocab_size(config.vocab_size)
    if scaling:
        writer.add_string("llama.rope.scaling.type", scaling)
    tokens, merges = byte_vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)

    names = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    tensors = {
        "token_embd.weight": model.model.embed_tokens.weight,
        "output_norm.weight": model.model.norm.weight,
    }
    for index, layer in enumerate(model.model.layers):
        for theirs, ours in names.items():
            weight = layer.get_submodule(theirs).weight
            if ours in ("attn_q", "attn_k"):
                weight = _interleave(weight, heads if ours == "attn_q" else kv_heads)
            tensors[f"blk.{index}.{ours}.weight"] = weight
    for name, tensor in {**tensors, **(extra or {})}.items():
        writer.add_tensor(name, tensor.detach().numpy().copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _interleave(weight: torch.Tensor, heads: int) -> torch.Tensor:
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def write_wheel(folder: Path, name: str, version: str, files: dict[str, bytes]) -> Path:
    """A wheel holding `files`, plus the metadata every wheel has and a licence."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{name.replace('-', '_')}-{version}"
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in files.items():
            archive.writestr(member, data)
        archive.writestr(f"{stem}.dist-info/METADATA", f"Name: {name}\nVersion: {version}\n")
        archive.writestr(f"{stem}.dist-info/LICENSE.txt", "You may.\n")
        archive.writestr(f"{stem}.dist-info/top_level.txt", "x\n")
    return path


class FakePip:
    """Stands in for `python -m pip download`: copies a wheel, or fails as pip does.

    `others` are copied when they are asked for by their own NAME==VERSION.
    """

    def __init__(
        self,
        wheel: Path | None = None,
        *,
        others: dict[str, Path] | None = None,
        stderr: str = "",
        before: Callable[[], None] | None = None,
    ) -> None:
        self.wheel = wheel
        self.others = others or {}
        self.stderr = stderr
        self.before = before
        self.calls: list[list[str]] = []

    def __call__(
        self, arguments: list[str], *, env: dict[str, str]
    ) -> subprocess.CompletedProcess[str]:
        self.calls.append(arguments)
        if self.before:
            self.before()
        wheel = self.others.get(arguments[-1], self.wheel)
        if wheel is None:
            return subprocess.CompletedProcess(arguments, 1, "", self.stderr)
        destination = Path(arguments[arguments.index("--dest") + 1])
        destination.mkdir(parents=True)
        (destination / wheel.name).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(arguments, 0, "", "")
