"""What the partial-rotary targets share: rotated pairs first, and `rope_parameters` for them.

Keeping the fastest r/2 of d/2 frequencies of base b is rotating r features of d with base
b^(r/d); any other choice of pairs is spelled the same way, in the order of their frequencies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from hf_posenc.checkpoint.native.case import Case, Order, Weights, require, spell_kind
from hf_posenc.checkpoint.native.rope_forms import RopeForm


@dataclass(frozen=True)
class PartialParts:
    """Row orders that put rotated features first, and the table of that narrower head."""

    orders: tuple[Order, ...]
    form: RopeForm


def rotated_first(
    case: Case, architecture: str, *, interleaved: bool, allowed: tuple[str, ...] | None = None
) -> PartialParts:
    """Orders and `rope_parameters` (with partial_rotary_factor) for a partial-rotary family.

    interleaved  pairs are (2i, 2i + 1) in the target, else (i, i + r/2)
    """
    kept = [[i for i, value in enumerate(layer.inv_freq) if value] for layer in case.layers]
    tables = {
        replace(layer, inv_freq=tuple(layer.inv_freq[i] for i in pairs))
        for layer, pairs in zip(case.layers, kept, strict=True)
        if pairs
    }
    require(
        len(tables) == 1 and all(kept),
        f"{architecture} rotates the same frequencies in every layer, this plan does not",
    )
    table = tables.pop()
    require(table.stretch is None, f"{architecture}: tables that depend on length are not exported")
    width, head_dim = 2 * len(table.inv_freq), case.spec.head_dim
    require(
        table.rope_scale == 1.0,
        f"{architecture} applies an attention factor to rotated features only, the plan to all",
    )
    share = width / head_dim
    require(int(head_dim * share) == width, f"{width} of {head_dim} features is no exact fraction")
    theta = case.shape().theta ** (width / case.spec.rotary_dim)
    form = spell_kind(case, table, case.shape(width, theta, allowed))
    form.parameters["partial_rotary_factor"] = share
    half = case.spec.num_frequencies
    orders = tuple(_order(pairs, half, head_dim, interleaved) for pairs in kept)
    return PartialParts(orders, form)


def interleave(case: Case) -> tuple[Order, ...]:
    """Whole-width pairs (i, i + F) as (2i, 2i + 1), in every layer."""
    half, head_dim = case.spec.num_frequencies, case.spec.head_dim
    order = _order(list(range(half)), half, head_dim, interleaved=True)
    return (order,) * len(case.layers)


def fuse_gate_up(weights: Weights) -> Weights:
    """mlp.gate_proj and mlp.up_proj as one mlp.gate_up_proj."""
    return _fuse(weights, ("gate_proj", "up_proj"), "gate_up_proj")


def fuse_qkv(weights: Weights) -> Weights:
    """q_proj, k_proj and v_proj as one qkv_proj."""
    return _fuse(weights, ("q_proj", "k_proj", "v_proj"), "qkv_proj")


def _order(pairs: list[int], half: int, head_dim: int, interleaved: bool) -> Order:
    dropped = [i for i in range(half) if i not in set(pairs)]
    if interleaved:
        first = [feature for i in pairs for feature in (i, i + half)]
    else:
        first = [*pairs, *(i + half for i in pairs)]
    return (*first, *dropped, *(i + half for i in dropped), *range(2 * half, head_dim))


def _fuse(weights: Weights, parts: tuple[str, ...], fused: str) -> Weights:
    result: Weights = {}
    for name, value in weights.items():
        module = name.rpartition(".")[0].rpartition(".")[2]
        if module == parts[0]:
            pieces = [weights[name.replace(parts[0], part)] for part in parts]
            result[name.replace(parts[0], fused)] = torch.cat(pieces)
        elif module not in parts:
            result[name] = value
    return result
