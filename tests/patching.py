"""Patching by matrix row, and what unpatching must give back."""

from __future__ import annotations

import copy
from typing import Any

import torch
from matrix import BY_ID, SchemeRow, atol, options_for
from tiny_models import MAX_POSITIONS, difference, logits, tokens
from torch import nn

import hf_posenc

FULL_ROW = tokens(1, MAX_POSITIONS + 44)  # beyond the trained length


def patch(model: Any, row: SchemeRow | str) -> Any:
    """Patch `model` with a row of the matrix (or its id)."""
    row = BY_ID[row] if isinstance(row, str) else row
    count = hf_posenc.ModelSpec.from_model(model).num_frequencies
    return hf_posenc.patch_model(model, row.scheme, **options_for(row, count))


def snapshot(model: Any) -> dict[str, Any]:
    """Everything about a model that unpatching must give back."""
    return {
        "class": type(model),
        "config class": {name: type(m.config) for name, m in _holders(model)},
        "config": {name: m.config.to_dict() for name, m in _holders(model)},
        "hooks": {name: len(m._forward_pre_hooks) for name, m in model.named_modules()},
        "modules": {name: (type(m), id(m)) for name, m in model.named_modules() if name},
        "gates": {n: m.use_rope for n, m in model.named_modules() if hasattr(m, "use_rope")},
        "attributes": {name: sorted(vars(m)) for name, m in model.named_modules()},
        "weights": {name: value.clone() for name, value in model.state_dict().items()},
        "parameters": {name: id(value) for name, value in model.named_parameters()},
        "buffers": {name: value.clone() for name, value in model.named_buffers()},
        "logits": logits(model),
    }


def _holders(model: nn.Module) -> list[tuple[str, Any]]:
    return [(name, m) for name, m in model.named_modules() if hasattr(m, "config")]


def assert_same(after: dict[str, Any], before: dict[str, Any]) -> None:
    """Equal in everything `snapshot` records, tensors bit for bit."""
    for key, value in before.items():
        if key in ("weights", "buffers"):
            assert after[key].keys() == value.keys()
            for name, tensor in value.items():
                assert torch.equal(after[key][name], tensor), name
        elif key == "logits":
            assert torch.equal(after[key], value)
        else:
            assert after[key] == value, key


def converted(base: Any, scheme: Any, **options: Any) -> Any:
    """A patched copy of a model."""
    return hf_posenc.patch_model(copy.deepcopy(base), scheme, **options)


def assert_equal(patched: Any, stock: Any) -> None:
    """Bitwise equal logits at hard positions and in a row beyond the trained length."""
    fresh = copy.deepcopy(stock)  # stock dynamic NTK remembers the longest row it has seen
    assert torch.equal(logits(patched), logits(stock))
    assert torch.equal(logits(patched, FULL_ROW, None), logits(fresh, FULL_ROW, None))


def assert_close(patched: Any, stock: Any) -> None:
    """Equal up to the order of a sum over the features of a head."""
    assert difference(logits(patched), logits(stock)) <= atol("reordered_sum")
    long = difference(logits(patched, FULL_ROW, None), logits(stock, FULL_ROW, None))
    assert long <= atol("reordered_long_sum")
