"""Gains on queries that make unrotated scores as like the rotated ones as they can be.

A pair of query head h that loses its rotation contributes Re(z) to a score where it contributed
Re(z e^{i w (m - n)}), z the product of query and conjugate key. A complex gain c per head and pair,
folded into q_proj at no cost, makes it Re(c z). Where a layer norms its queries only the norm's
weight is left: a real gain per feature, Re(z) = q1 k1 + q2 k2 becomes a q1 k1 + b q2 k2, shared by
all heads where they share the weight (Qwen3). All gains of a head, or of all heads that share them,
are found together, by least squares over the queries and keys of some text, up to a constant per
query, which softmax does not see.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_posenc.calibration.ablation import Damage
from hf_posenc.calibration.measure import at_rest, checked_rows
from hf_posenc.calibration.probe import PairFeatures, Seen, causal, probing
from hf_posenc.errors import PosencError
from hf_posenc.model_spec import ModelSpec
from hf_posenc.plan import LayerPlan, PositionPlan
from hf_posenc.runtime import families
from hf_posenc.runtime.gains import check_gains, norm_offset, norms_queries, query_carrier
from hf_posenc.runtime.patch import (
    apply_plan,
    base_of,
    get_plan,
    patch_model,
    unpatch_model,
)
from hf_posenc.schemes.pairs import drop_rotation, keep_pairs

QUERIES = 64  # per row
RIDGE = 1e-2  # pull towards 1, as a share of the mean of the normal matrix's diagonal
# Half of the weight follows attention, half is even over the keys a query sees: attention alone
# says nothing about keys that it ignores now and that unrotated scores might raise.
EVEN = 0.5

# Complex [H, F] for q_proj; real [H, D] or [1, D] for q_norm. 1 where nothing is gained.
Gain = Tensor


def compensate(
    model: Any, rows: Tensor, *, seed: int = 0, say: Callable[[str], None] | None = None
) -> Any:
    """Fold gains into the queries of a patched model, in place, for the pairs its plan dropped.

    rows  token ids [N, T], a few thousand tokens in all, held at once (`calibration_rows`); the
          fourth, eighth, ... row judges what is fitted to the others
    say   takes one line with the KL to the base on those rows, without gains and with them
    The model runs no slower. It keeps the base's own q_proj (or q_norm) of the layers that change,
    also in its checkpoint: `unpatch_model` and `unpatched` give back the bitwise original.
    Errors: `PosencError`, the model as it was before: one that is not patched, whose plan does more
    than drop pairs, that is compensated already, carries an adapter, or has queries that cannot
    carry gains; and where the gains do not bring its output closer to the base's.
    """
    plan = get_plan(model)
    if plan is None:
        raise PosencError(f"{type(model).__name__} is not patched; call patch_model first")
    if base_of(model) is not model:
        raise PosencError("the model carries an adapter; compensate first, attach it afterwards")
    marked, batch = compensable(model, plan), checked_rows(rows, model)
    unpatch_model(model)
    helped = False
    try:
        with at_rest(model):
            # Fitted on some rows, judged on others.
            judges = torch.arange(len(batch)) % 4 == 3
            damage = Damage(model, batch[judges] if judges.any() else batch)
            before = damage.of(plan.layers)
            gains = query_gains(model, batch[~judges], plan, seed=seed)
            apply_plan(model, marked, damage.spec)
            fold_gains(model, gains)
            after = damage.now()
        helped = after < before
    finally:
        if not helped:
            if get_plan(model) is not None:
                unpatch_model(model)
            patch_model(model, plan)
    if not helped:
        raise PosencError(
            f"{plan.label}: gains do not help this model (KL {before:.4g} without, {after:.4g} "
            "with, nats per token on these rows); it was left without"
        )
    if say is not None:
        say(f"gains: KL to the base {before:.4g} without, {after:.4g} with, nats per token")
    return model


def compensable(model: Any, plan: PositionPlan) -> PositionPlan:
    """`plan` as it will be once compensated on the model, patched or not; see `compensate`.

    Errors: `PosencError` where that cannot be done.
    """
    spec = ModelSpec.from_model(model)
    losing = [i for i, mask in enumerate(_lost(spec, plan)) if any(mask)]
    if plan.gained:
        raise PosencError(f"{plan.label} is compensated already")
    if plan.permuted:
        raise PosencError(
            f"{plan.label} re-orders features in memory; compensation is for plans that do not"
        )
    if not losing:
        raise PosencError(f"{plan.label} drops no pair, so there is nothing to compensate")
    if plan.embedding is not None or any(
        not _same(_without(own, gone), new)
        for own, new, gone in zip(spec.layers, plan.layers, _lost(spec, plan), strict=True)
    ):
        raise PosencError(
            f"{plan.label} changes more than which pairs turn (windows, scales, biases, bases); "
            "gains are fitted to the base's own attention"
        )
    layers = tuple(replace(k, gained=i in losing) for i, k in enumerate(plan.layers))
    marked = replace(plan, layers=layers)
    check_gains(families.attentions_of(families.decoder_of(model)), marked)
    return marked


def _without(own: LayerPlan, gone: list[bool]) -> LayerPlan:
    """The base's layer with some pairs dropped and nothing else changed."""
    if all(gone):
        return drop_rotation(own)
    return keep_pairs(own, {pair for pair, lost in enumerate(gone) if not lost})


def _same(wanted: LayerPlan, found: LayerPlan) -> bool:
    """Equal but for the last bits of frequencies: a narrower table may be rounded another way."""
    close = [
        math.isclose(a, b, rel_tol=1e-6)
        for a, b in zip(wanted.inv_freq, found.inv_freq, strict=True)
    ]
    return all(close) and replace(found, inv_freq=wanted.inv_freq) == wanted


def _lost(spec: ModelSpec, plan: PositionPlan) -> list[list[bool]]:
    """Per layer, which pairs turn in the checkpoint and not under the plan."""
    return [
        [a != 0 and b == 0 for a, b in zip(own.inv_freq, new.inv_freq, strict=True)]
        for own, new in zip(spec.layers, plan.layers, strict=True)
    ]


@torch.no_grad()
def query_gains(
    model: Any,
    rows: Tensor,
    plan: PositionPlan,
    *,
    seed: int = 0,
) -> dict[int, Gain]:
    """The gain of every layer that loses pairs under `plan`, a `Gain` each.

    model  unconverted; rows [N, T] token ids, all held at once
    Each layer is fitted on inputs that come from the converted and compensated layers before it.
    """
    spec = ModelSpec.from_model(model)
    chosen = torch.randperm(rows.shape[1], generator=torch.Generator().manual_seed(seed))
    queries = chosen[:QUERIES].sort().values
    losing = [torch.tensor(mask) for mask in _lost(spec, plan)]
    shares = [_sharing(a, spec) for a in families.attentions_of(families.decoder_of(model))]
    gains: dict[int, Gain] = {}

    def attend(seen: Seen) -> Tensor:
        lost = losing[seen.layer].to(seen.query.device)
        query, key = seen.query, seen.key
        if lost.any():
            gain = gains[seen.layer] = _fitted(
                seen, lost, queries.to(lost.device), shares[seen.layer]
            )
            mask = seen.features.spread(lost.float(), query, 0.0).bool()
            query = torch.where(mask, turned(seen.still_query, gain, seen), query)
            key = torch.where(mask, seen.still_key, key)
        return seen.attended(query, key)

    with probing(model, attend):
        device = model.get_input_embeddings().weight.device
        model.get_decoder()(input_ids=rows.to(device), use_cache=False)
    return gains


def turned(query: Tensor, gain: Gain, seen: Seen) -> Tensor:
    """Queries [B, H, T, D] times their gain."""
    if not gain.is_complex():
        return query * gain[:, None].to(query.dtype)
    one, two = seen.features.split(query)
    real, imag = gain.real[:, None], gain.imag[:, None]
    result = query.clone()
    result[..., seen.features.first] = one * real - two * imag
    result[..., seen.features.second] = one * imag + two * real
    return result


def _sharing(attention: Any, spec: ModelSpec) -> int | None:
    """How many heads share a real gain per feature; None: each has a complex one per pair."""
    if not norms_queries(attention):
        return None
    return spec.num_heads * spec.head_dim // query_carrier(attention).weight.numel()


def _fitted(seen: Seen, lost: Tensor, queries: Tensor, sharing: int | None) -> Gain:
    columns = _turns if sharing is None else _stretches
    equations = [
        _normal_equations(seen, lost, queries, head, columns) for head in range(seen.query.shape[1])
    ]
    normal, right = (torch.stack(side) for side in zip(*equations, strict=True))
    if sharing is not None:
        normal, right = (side.unflatten(0, (-1, sharing)).sum(1) for side in (normal, right))
    diagonal = normal.diagonal(dim1=1, dim2=2)
    # The tiny constant is for heads whose queries or keys are all zero.
    diagonal.add_(RIDGE * diagonal.mean(-1, keepdim=True) + 1e-12)
    one, two = torch.linalg.solve(normal, right)[..., 0].float().chunk(2, dim=-1)
    if sharing is None:
        gain = torch.ones(len(one), seen.features.count, dtype=torch.complex64, device=one.device)
        gain[:, lost] = torch.complex(1 + one, two)
        return gain
    gain = torch.ones(len(one), seen.query.shape[-1], device=one.device)
    for half, change in zip(seen.features.split(gain), (one, two), strict=True):
        half[:, lost] = 1 + change
    return gain


# What a change of the gain by 1 adds to the scores, for pairs with features q1, q2 and k1, k2.
def _turns(q1: Tensor, q2: Tensor, k1: Tensor, k2: Tensor) -> tuple[Tensor, Tensor]:
    return q1 * k1 + q2 * k2, q1 * k2 - q2 * k1


def _stretches(q1: Tensor, q2: Tensor, k1: Tensor, k2: Tensor) -> tuple[Tensor, Tensor]:
    return q1 * k1, q2 * k2


def _normal_equations(
    seen: Seen, lost: Tensor, queries: Tensor, head: int, columns: Callable[..., Any]
) -> tuple[Tensor, Tensor]:
    """Normal matrix [2P, 2P] and right side [2P, 1] of one query head, P pairs lost."""
    heads, groups = seen.query.shape[1], seen.key.shape[1]
    group = slice(head * groups // heads, head * groups // heads + 1)
    one = slice(head, head + 1)
    visible = causal(seen, queries)
    query, key = seen.query[:, one, queries].float(), seen.key[:, group].float()
    scores = query @ key.transpose(-1, -2) * seen.scaling
    weight = scores.masked_fill(~visible, -torch.inf).softmax(-1)[..., None]
    spread = (visible / visible.sum(-1, keepdim=True))[..., None]
    weight = (1 - EVEN) * weight + EVEN * spread
    still_query = seen.still_query[:, one, queries].float() * seen.scaling
    features = (
        *(x[..., lost][..., :, None, :] for x in seen.features.split(still_query)),
        *(
            x[..., lost][..., None, :, :]
            for x in seen.features.split(seen.still_key[:, group].float())
        ),
    )
    straight = _turns(*features)[0].sum(-1, keepdim=True)
    parts = torch.cat(columns(*features), dim=-1)
    missing = _rotated(seen, lost, one, group, queries) - straight
    parts = parts - (weight * parts).sum(-2, keepdim=True)
    missing = missing - (weight * missing).sum(-2, keepdim=True)
    root = weight.sqrt()
    left = (root * parts).flatten(0, -2).double()
    return left.T @ left, left.T @ (root * missing).flatten(0, -2).double()


def _rotated(seen: Seen, lost: Tensor, head: slice, group: slice, queries: Tensor) -> Tensor:
    """What the lost pairs contributed to the scores, [B, 1, n, T, 1]."""
    query = seen.query[:, head, queries].float() * seen.scaling
    q = torch.cat([x[..., lost] for x in seen.features.split(query)], -1)
    k = torch.cat([x[..., lost] for x in seen.features.split(seen.key[:, group].float())], -1)
    return (q @ k.transpose(-1, -2))[..., None]


@torch.no_grad()
def fold_gains(model: Any, gains: Mapping[int, Gain]) -> None:
    """Multiply q_proj (and its bias) or the weight of q_norm by the gains, in place.

    See `compensate` for where that may be done.
    """
    attentions = families.attentions_of(families.decoder_of(model))
    spec = ModelSpec.from_model(model)
    features = PairFeatures.of(model.config, spec)
    places = torch.arange(spec.head_dim)
    first, second = places[features.first], places[features.second]
    for layer, gain in gains.items():
        carrier = query_carrier(attentions[layer])
        if not gain.is_complex():
            offset = norm_offset(carrier)
            weight = (carrier.weight.float() + offset) * gain.view_as(carrier.weight) - offset
            carrier.weight.copy_(weight)
            continue
        for parameter in carrier.parameters():
            parameter.copy_(_folded(parameter, gain, first, second))


def _folded(weight: Tensor, gain: Gain, first: Tensor, second: Tensor) -> Tensor:
    """Rows [H * D, ...] multiplied by the gain; `first`, `second` [F] index the pairs in a head."""
    rows = weight.detach().clone().unflatten(0, (gain.shape[0], -1))
    gain = gain.to(weight.device)
    shape = (*gain.shape, *([1] * (rows.ndim - 2)))
    real, imag = gain.real.reshape(shape), gain.imag.reshape(shape)
    one, two = rows[:, first].float(), rows[:, second].float()
    rows[:, first] = (one * real - two * imag).to(rows.dtype)
    rows[:, second] = (one * imag + two * real).to(rows.dtype)
    return rows.flatten(0, 1)
