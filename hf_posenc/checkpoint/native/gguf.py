"""GGUF files for what llama.cpp's graphs can compute.

llama       Llama, Mistral, SmolLM3 weights (and Qwen2, whose biases its graph takes): one table
            for all layers, spelled by a `rope_freqs` tensor (1e30 = not rotated)
smollm3     every 4th layer without rotation, plain frequencies elsewhere
granite_swa any layers without rotation (`attention.rope_pattern`), one table elsewhere; needs a
            llama.cpp of August 2026 or later
qwen3       plain frequencies in all layers; its graph reads nothing but the base
What they cannot compute is refused: llama.cpp would load it and run plain RoPE.
Source: llama.cpp's src/models (read) and runs of xllamacpp (see docs/engines.md).
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_posenc.checkpoint.native.case import Case, check_known, require, row_changes
from hf_posenc.checkpoint.native.gguf_vocab import GgufVocab, read_vocab
from hf_posenc.checkpoint.native.partial import interleave
from hf_posenc.checkpoint.native.report import ExportReport, Unexportable
from hf_posenc.checkpoint.native.rope_forms import DROPPED, spell
from hf_posenc.checkpoint.native.source import open_source
from hf_posenc.checkpoint.native.windows import WIDE_WINDOW
from hf_posenc.checkpoint.native.write import tokenizer_of
from hf_posenc.checkpoint.permute import permute_heads
from hf_posenc.errors import PosencError
from hf_posenc.plan import LayerPlan, float32

_LLAMA_LIKE = ("llama", "mistral", "qwen2", "smollm3")
_SINK = -1e30
_MODULES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


@dataclass(frozen=True)
class Graph:
    """A llama.cpp graph and what it is told.

    arch     `general.architecture`
    theta    `rope.freq_base`
    factors  F divisors of theta^(-i/F), or None for plain frequencies
    rotated  per layer, for graphs that can skip rotation, else None
    pairs    the graph pairs features (2i, 2i + 1), else (i, i + F)
    """

    arch: str
    theta: float
    factors: tuple[float, ...] | None
    rotated: tuple[bool, ...] | None
    pairs: bool = True


def export_gguf(
    model_or_path: Any, path: Path, *, merge: bool = True, tokenizer: Any = None
) -> ExportReport:
    """Write a GGUF file and read it back; see `export_native`.

    Errors: `Unexportable` when no graph computes the plan or the tokenizer cannot be written;
    `PosencError` when `path` exists or is no .gguf file.
    """
    if path.suffix != ".gguf":
        raise PosencError(f"{path}: the name of a GGUF file ends in .gguf")
    if path.exists():
        raise PosencError(f"{path}: exists; remove it or choose another output")
    if not merge:
        raise Unexportable("GGUF: an adapter cannot stay beside the file; merge it")
    source = open_source(model_or_path, merge=True)
    case = source.case
    check_known(case.plan)
    graph = choose_graph(case)
    tokenizer = tokenizer or tokenizer_of(source.folder)
    if tokenizer is None:
        raise Unexportable("GGUF: llama.cpp needs the tokenizer in the file, none was at hand")
    vocab = read_vocab(tokenizer, case.config.vocab_size)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as stage:
        written = Path(stage) / path.name
        write_gguf(case, graph, vocab, written)
        check_gguf(case, graph, written)
        written.replace(path)
    notes = ["read back from the file; llama.cpp itself was not run"]
    if graph.arch == "granite_swa":
        notes.append("needs a llama.cpp whose granite_swa graph reads attention.rope_pattern")
    return ExportReport(
        target="gguf",
        architecture=graph.arch,
        weight_changes=changes_of(case, graph),
        max_logit_difference=None,
        max_logit=None,
        notes=tuple(notes),
    )


def choose_graph(case: Case) -> Graph:
    """The graph that computes the plan.

    Errors: `Unexportable` with the reason when none does.
    """
    require(case.family in (*_LLAMA_LIKE, "qwen3"), f"GGUF: {case.family} models are not written")
    require(set(case.windows) == {None}, "GGUF: the llama graph has no sliding window")
    for kind in case.kinds:
        require(kind.stretch is None, "GGUF: frequencies that depend on the length of the row")
        require(kind.rope_scale == 1.0, "GGUF: attention factors (yarn, longrope) are not written")
    tables = [kind for kind in case.kinds if kind.rotated]
    require(
        len(tables) <= 1,
        f"GGUF: llama.cpp's graphs have one table for all layers, this plan has {len(tables)}",
    )
    require(
        case.spec.rotary_dim == case.spec.head_dim, "GGUF: the base rotates part of each head only"
    )
    still = LayerPlan((0.0,) * case.spec.num_frequencies)
    theta, factors = _spelled(tables[0] if tables else still, case)
    rotated = tuple(layer.rotated for layer in case.layers)
    if case.family == "qwen3":
        require(
            all(rotated) and factors is None,
            "GGUF: llama.cpp's qwen3 graph rotates all pairs of all layers at plain frequencies",
        )
        return Graph("qwen3", theta, None, None, pairs=False)
    if all(rotated) or not any(rotated):
        return Graph("llama", theta, factors, None)
    every_fourth = all(turns == ((i + 1) % 4 != 0) for i, turns in enumerate(rotated))
    extra = case.has("self_attn.o_proj.bias") or case.has("mlp.gate_proj.bias")
    if every_fourth and factors is None and not extra:
        return Graph("smollm3", theta, None, rotated)
    return Graph("granite_swa", theta, factors, rotated)


def changes_of(case: Case, graph: Graph) -> tuple[str, ...]:
    """In words, what differs from the base's own weights."""
    orders = interleave(case) if graph.pairs else (None,) * len(case.layers)
    sinks = ("attention sinks added, without effect",) if graph.arch == "granite_swa" else ()
    return (*row_changes(case, orders), *sinks)


def write_gguf(case: Case, graph: Graph, vocab: GgufVocab, path: Path) -> None:
    """Write the model; the file is complete when this returns."""
    from gguf import GGUFWriter

    writer = GGUFWriter(path, graph.arch)
    _write_facts(writer, case, graph)
    _write_vocab(writer, vocab)
    for name, value in tensors(case, graph).items():
        data, kind = _encoded(value)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors(case: Case, graph: Graph) -> dict[str, torch.Tensor]:
    """Every tensor of the file by its GGUF name, as [rows, columns]."""
    order = interleave(case)[0] if graph.pairs else None
    result: dict[str, torch.Tensor] = {}
    for name, value in case.weights.items():
        if name == "lm_head.weight" and case.config.tie_word_embeddings:
            continue
        moves = order is not None and ("self_attn.q_proj." in name or "self_attn.k_proj." in name)
        result[_gguf_name(name)] = permute_heads(value, order) if moves and order else value
    if graph.factors is not None:
        result["rope_freqs.weight"] = torch.tensor(graph.factors, dtype=torch.float32)
    if graph.arch == "granite_swa":
        for index in range(case.spec.num_layers):
            result[f"blk.{index}.attn_sinks.weight"] = torch.full((case.spec.num_heads,), _SINK)
    return result


def check_gguf(case: Case, graph: Graph, path: Path) -> None:
    """Read the file back: frequencies and layers as the plan has them, every tensor as meant.

    Errors: `Unexportable` naming what differs.
    """
    from gguf import GGUFReader

    reader = GGUFReader(path)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    wanted = tensors(case, graph)
    if stored.keys() != wanted.keys():
        raise Unexportable(f"GGUF: tensors {sorted(stored.keys() ^ wanted.keys())[:3]} are amiss")
    for name, value in wanted.items():
        data, _ = _encoded(value)
        if not np.array_equal(stored[name].data.view(np.uint8), data.view(np.uint8)):
            raise Unexportable(f"GGUF: {name} was not written as it is in the model")

    def key(name: str) -> Any:
        field = reader.fields.get(f"{graph.arch}.{name}")
        return None if field is None else field.contents()

    width = case.spec.num_frequencies
    factors = stored["rope_freqs.weight"].data if "rope_freqs.weight" in stored else [1.0] * width
    theta = key("rope.freq_base")
    plain = [theta ** (-index / width) for index in range(width)]
    for index, layer in enumerate(case.layers):
        turns = True
        if graph.arch == "smollm3":
            turns = (index + 1) % 4 != 0
        elif graph.arch == "granite_swa":
            turns = bool(key("attention.rope_pattern")[index])
        for frequency, base, factor in zip(layer.inv_freq, plain, factors, strict=True):
            found = base / float(factor) if turns else 0.0
            if abs(found - frequency) > 1e-6 * frequency + 1e-20:
                raise Unexportable(f"GGUF: layer {index} would rotate at {found}, not {frequency}")


def _spelled(layer: LayerPlan, case: Case) -> tuple[float, tuple[float, ...] | None]:
    plain_theta = _plain_theta(layer, case) if layer.rotated else None
    if plain_theta is not None:
        return plain_theta, None
    theta, width = case.shape().theta, case.spec.rotary_dim
    plain = [theta ** (-2 * index / width) for index in range(width // 2)]
    factors = tuple(
        float32(base / frequency) if frequency else DROPPED
        for base, frequency in zip(plain, layer.inv_freq, strict=True)
    )
    return theta, factors


def _plain_theta(layer: LayerPlan, case: Case) -> float | None:
    try:
        form = spell(layer, case.shape(allowed=("default",)))
    except PosencError:
        return None
    return float(form.parameters["rope_theta"])


def _gguf_name(name: str) -> str:
    if name in _OUTER:
        return _OUTER[name]
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    module, _, kind = rest.rpartition(".")
    if module not in _MODULES or not layer.isdigit():
        raise Unexportable(f"GGUF: {name} has no place in llama.cpp's graphs")
    return f"blk.{layer}.{_MODULES[module]}.{kind}"


def _encoded(value: torch.Tensor) -> tuple[np.ndarray, Any]:
    """Matrices in their own dtype, vectors in float32, as llama.cpp expects them."""
    from gguf import GGMLQuantizationType as Kind
    from gguf.quants import quantize

    value = value.detach().cpu()
    if value.ndim > 1 and value.dtype == torch.bfloat16:
        return quantize(value.float().numpy(), Kind.BF16), Kind.BF16
    if value.ndim > 1 and value.dtype == torch.float16:
        return np.ascontiguousarray(value.numpy()), Kind.F16
    return np.ascontiguousarray(value.float().numpy()), Kind.F32


def _write_facts(writer: Any, case: Case, graph: Graph) -> None:
    config, spec, arch = case.config, case.spec, graph.arch
    writer.add_string("general.name", f"{case.family}, {case.plan.label}")
    writer.add_string("posenc.plan_digest", case.plan.digest)
    counts = {
        "vocab_size": config.vocab_size,
        "context_length": spec.max_positions,
        "embedding_length": spec.hidden_size,
        "block_count": spec.num_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": spec.num_heads,
        "attention.head_count_kv": spec.num_kv_heads,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
        "rope.dimension_count": spec.rotary_dim,
    }
    for name, value in counts.items():
        writer.add_uint32(f"{arch}.{name}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    writer.add_float32(f"{arch}.rope.freq_base", graph.theta)
    if arch == "granite_swa":
        assert graph.rotated is not None
        writer.add_float32(f"{arch}.logit_scale", 1.0)
        writer.add_float32(f"{arch}.attention.scale", spec.head_dim**-0.5)
        # The graph insists on sliding-window layers: the unrotated ones, wider than any row.
        windowed = [not turns for turns in graph.rotated]
        writer.add_uint32(f"{arch}.attention.sliding_window", max(WIDE_WINDOW, spec.max_positions))
        writer.add_array(f"{arch}.attention.sliding_window_pattern", windowed)
        writer.add_array(f"{arch}.attention.rope_pattern", list(graph.rotated))


def _write_vocab(writer: Any, vocab: GgufVocab) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocab.pre)
    writer.add_token_list(vocab.tokens)
    writer.add_token_types(vocab.types)
    writer.add_token_merges(vocab.merges)
    for name, index in vocab.special.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", index)
    writer.add_bool("tokenizer.ggml.add_bos_token", vocab.add_bos)
    if vocab.chat_template is not None:
        writer.add_chat_template(vocab.chat_template)
