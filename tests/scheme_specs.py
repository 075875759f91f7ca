"""Model specs that scheme tests run over: one per kind of positional encoding a checkpoint has."""

from __future__ import annotations

from functools import cache

import transformers

from hf_posenc.model_spec import ModelSpec

_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 8,
    "max_position_embeddings": 4096,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.5 * i for i in range(8)],
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
}

CONFIGS = {
    "llama": ("LlamaConfig", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "llama_wide": (
        "LlamaConfig",
        {"head_dim": 24, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    ),
    "llama3": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "linear": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "proportional": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "proportional",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.75,
            }
        },
    ),
    "yarn": ("Qwen3Config", {"head_dim": 16, "rope_parameters": YARN}),
    "longrope": ("LlamaConfig", {"rope_parameters": LONGROPE}),
    "dynamic": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "stablelm": (
        "StableLmConfig",
        {
            "hidden_size": 128,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "smollm3": (
        "SmolLM3Config",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 2e6}},
    ),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 16}),
}


@cache
def spec(name: str) -> ModelSpec:
    """The spec of one of `CONFIGS`."""
    class_name, values = CONFIGS[name]
    return ModelSpec.from_config(getattr(transformers, class_name)(**{**_SHAPE, **values}))
