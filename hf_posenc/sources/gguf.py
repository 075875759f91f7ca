"""A GGUF file becomes an ordinary Hugging Face folder, once, in the cache.

transformers reads the weights and the vocabulary; what it would drop without a word (scaled
rotary frequencies, tensors it has no name for) is refused here, and what it gets wrong in the
tokenizer is repaired.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import torch

from hf_posenc.errors import PosencError
from hf_posenc.files import read_json, staged_directory, write_json, write_text
from hf_posenc.sources.progress import note
from hf_posenc.sources.wheels import Wheel, cache_root, checksum, locked

CONVERTER_VERSION = 1
SOURCE_FILE = "gguf_source.json"

# llama.cpp names under which every decimal digit is a token of its own before merging.
_SINGLE_DIGIT_PRE = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva"}


def convert_gguf(path: Path, *, wheel: Wheel | None = None) -> tuple[Path, str]:
    """The HF folder of a GGUF file and the file's SHA-256; converted on first use.

    The folder holds config, fp32 safetensors, tokenizer, generation config, a LICENCE note and
    `gguf_source.json` with the checksums. Errors: `PosencError` for a file that is not GGUF, an
    architecture transformers cannot read, and anything that would not survive the conversion.
    """
    digest = checksum(path)
    folder = cache_root() / "gguf" / f"{_slug(path.stem)}-{digest[:16]}-v{CONVERTER_VERSION}"
    with locked(folder.parent / f".{folder.name}"):
        if not _is_complete(folder, digest):
            note(f"converting {path.name} to a Hugging Face folder (once)")
            _convert(path, digest, folder, wheel)
    return folder, digest


def _convert(path: Path, digest: str, folder: Path, wheel: Wheel | None) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    header = _Header.read(path)
    header.refuse_scaled_rotary()
    location = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**location)
        model = AutoModelForCausalLM.from_pretrained(
            **location,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
        )
        header.refuse_lost_tensors(model)
        header.refuse_other_gemma3(model.config)
        repairs = repair_tokenizer(tokenizer, header.pre_tokenizer, model.config)
        with staged_directory(folder, overwrite=True) as stage:
            model.save_pretrained(stage)
            tokenizer.save_pretrained(stage)
            _write_origin(stage, path, digest, wheel, header, repairs)
    except PosencError:
        raise
    except (ValueError, KeyError, TypeError, OSError, RuntimeError, ImportError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise PosencError(
            f"{path}: transformers cannot read this GGUF file ({reason}); "
            "use the model's safetensors checkpoint instead"
        ) from error


def repair_tokenizer(tokenizer: Any, pre_tokenizer: str, config: Any) -> list[str]:
    """Mend in place what a GGUF load gets wrong; returns what was mended, for the record.

    Vocabularies whose digits stand alone get their `Digits` step back; `model_max_length` becomes
    the model's own `max_position_embeddings`.
    """
    from tokenizers import pre_tokenizers

    repairs = []
    if pre_tokenizer in _SINGLE_DIGIT_PRE:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        repairs.append(f"pre-tokenizer {pre_tokenizer!r}: single digits restored")
    tokenizer.model_max_length = config.max_position_embeddings
    repairs.append(f"model_max_length set to {config.max_position_embeddings}")
    return repairs


class _Header:
    """What the GGUF file says about itself: architecture, rotary keys, tensor sizes."""

    def __init__(self, path: Path, fields: dict[str, Any], elements: dict[str, int]) -> None:
        self.path = path
        self.fields = fields
        self.elements = elements
        self.architecture = str(fields.get("general.architecture", ""))
        self.pre_tokenizer = str(fields.get("tokenizer.ggml.pre", ""))
        self.licence = str(fields.get("general.license", "not stated"))

    @classmethod
    def read(cls, path: Path) -> _Header:
        from gguf import GGUFReader, GGUFValueType

        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise PosencError(f"{path}: not a GGUF file; give a .gguf model or a folder")
        try:
            reader = GGUFReader(path)
            fields = {
                key: field.contents()
                for key, field in reader.fields.items()
                if field.types
                and not (field.types[0] == GGUFValueType.ARRAY and key.startswith("tokenizer."))
            }
        except (ValueError, IndexError, KeyError, OverflowError) as error:
            raise PosencError(f"{path}: damaged GGUF file ({error}); fetch it again") from error
        return cls(path, fields, {t.name: int(t.n_elements) for t in reader.tensors})

    def refuse_scaled_rotary(self) -> None:
        """transformers drops rotary scaling of a GGUF file silently; refuse instead."""
        scaling = self.fields.get(f"{self.architecture}.rope.scaling.type", "none")
        tensors = [n for n in self.elements if re.match(r"rope_(freqs|factors)", n)]
        if scaling != "none" or tensors:
            found = tensors[0] if tensors else f"rope.scaling.type = {scaling}"
            raise PosencError(
                f"{self.path}: its rotary frequencies are scaled ({found}), which a GGUF load "
                "would drop; use the model's safetensors checkpoint"
            )

    def refuse_lost_tensors(self, model: Any) -> None:
        """Every weight of the file must be in the model and the other way round, and the
        rotated width must be the file's."""
        stored = sum(self.elements.values())
        held = sum(p.numel() for p in model.parameters())  # tied weights count once
        if stored != held:
            raise PosencError(
                f"{self.path}: holds {stored} weights but the {model.config.model_type} model "
                f"takes {held}; use the model's safetensors checkpoint"
            )
        width = self.fields.get(f"{self.architecture}.rope.dimension_count")
        inv_freq = getattr(getattr(model.base_model, "rotary_emb", None), "inv_freq", None)
        if width is not None and inv_freq is not None and 2 * inv_freq.numel() != int(width):
            raise PosencError(
                f"{self.path}: rotates {width} features per head but transformers would rotate "
                f"{2 * inv_freq.numel()}; use the model's safetensors checkpoint"
            )

    def refuse_other_gemma3(self, config: Any) -> None:
        """A GGUF load assumes what Gemma 3 files leave to the reader; refuse where they differ.

        The local layers' base, and which layers are local, stand in newer files only; the scale of
        the scores follows from the shape (llama.cpp's gemma3 graph; the 27B model has its own).
        """
        if self.architecture != "gemma3":
            return
        theta = config.rope_parameters["sliding_attention"]["rope_theta"]
        local = [kind == "sliding_attention" for kind in config.layer_types]
        is_27b = config.num_hidden_layers == 62
        scale = config.hidden_size // config.num_attention_heads if is_27b else config.head_dim
        checks = {
            "rope.freq_base_swa": (self.fields.get("gemma3.rope.freq_base_swa", theta), [theta]),
            "attention.sliding_window_pattern": (
                self.fields.get("gemma3.attention.sliding_window_pattern", local),
                [local, 6],
            ),
            "the square of what divides its scores": (scale, [config.query_pre_attn_scalar]),
        }
        for what, (stated, assumed) in checks.items():
            if stated not in assumed:
                raise PosencError(
                    f"{self.path}: {what} is {stated} but a GGUF load assumes {assumed[-1]}; "
                    "use the model's safetensors checkpoint"
                )


def _write_origin(
    stage: Path,
    path: Path,
    digest: str,
    wheel: Wheel | None,
    header: _Header,
    repairs: list[str],
) -> None:
    import transformers

    origin = {
        "file": path.name,
        "sha256": digest,
        "source": wheel.source if wheel else path.name,
        "wheel_sha256": wheel.sha256 if wheel else None,
        "wheel_sha256_pinned": wheel.pinned if wheel else None,
        "licence": header.licence,
        "model": header.fields.get("general.name"),
        "organisation": header.fields.get("general.organization"),
        "repairs": repairs,
        "converter": CONVERTER_VERSION,
        "transformers": transformers.__version__,
    }
    lines = [
        f"The weights in this folder were converted to fp32 from {path.name}.",
        "",
        *(f"{key}: {origin[key]}" for key in ("source", "sha256", "wheel_sha256", "licence")),
        f"model: {origin['model']} ({origin['organisation']})",
    ]
    for name, text in (wheel.licences() if wheel else {}).items():
        lines += ["", f"--- {name} of {wheel.source if wheel else ''} ---", "", text.rstrip()]
    write_text(stage / "LICENCE", "\n".join(lines) + "\n")
    write_json(stage / SOURCE_FILE, origin)


def _is_complete(folder: Path, digest: str) -> bool:
    with contextlib.suppress(PosencError):
        return bool(read_json(folder / SOURCE_FILE).get("sha256") == digest)
    return False


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)
