"""`partial`: the table and the rotated vectors of stock partial families, bit for bit."""

from __future__ import annotations

import importlib

import pytest
import reference
import torch
import transformers
from plan_math import in_memory, llama_config, plan_scores, plan_table, spec_of
from scheme_specs import LLAMA3, spec
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from hf_posenc.errors import PosencError
from hf_posenc.plan import LayerPlan, LongFactors
from hf_posenc.schemes import make_scheme

POSITIONS = torch.tensor([[0, 1, 2, 37, 4095, 32_768, 99_999]])
STOCK = {"GPTNeoX": "gpt_neox", "StableLm": "stablelm", "Phi": "phi", "Glm4Moe": "glm4_moe"}


def partial_layer(base, **options) -> LayerPlan:
    return make_scheme("partial", **options).build(base).layers[0]


def stock(family: str, head_dim: int, fraction: float, theta: float):
    """(rotary module, apply function) of a stock partial family."""
    config = getattr(transformers, f"{family}Config")(
        hidden_size=head_dim,
        num_attention_heads=1,
        num_key_value_heads=1,
        num_hidden_layers=1,
        head_dim=head_dim,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": theta,
            "partial_rotary_factor": fraction,
        },
    )
    name = STOCK[family]
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    return getattr(module, f"{family}RotaryEmbedding")(config), module.apply_rotary_pos_emb


def rotate_as_planned(layer: LayerPlan, x: torch.Tensor) -> torch.Tensor:
    """[T, D] float32 through the runtime's table and stock Llama's rotation, in memory order."""
    cos, sin = plan_table(layer, POSITIONS)
    memory = in_memory(layer, x)[None, None]
    return apply_rotary_pos_emb(memory, memory, cos, sin)[0][0, 0]


def rotate_stock(rotary, apply, x: torch.Tensor) -> torch.Tensor:
    cos, sin = rotary(x, POSITIONS)
    width, x = cos.shape[-1], x[None, None]
    turned = apply(x[..., :width], x[..., :width], cos, sin)[0]
    return torch.cat((turned, x[..., width:]), dim=-1)[0, 0]


def matched_order(head_dim: int, width: int) -> list[int]:
    """Base features in the order a stock partial head wants them, for the matched layout."""
    pairs, slots = head_dim // 2, width // 2
    taken = [int(j * head_dim / width + 0.5) for j in range(slots)]
    used = taken + [pairs + pair for pair in taken]
    return used + [feature for feature in range(head_dim) if feature not in used]


@pytest.mark.parametrize("family", STOCK)
@pytest.mark.parametrize(
    ("head_dim", "width"), [(16, 8), (16, 4), (16, 12), (16, 2), (64, 16), (96, 48), (128, 64)]
)
def test_is_a_stock_partial_head_bit_for_bit(family, head_dim, width):
    theta = 1e4
    rotary, apply = stock(family, head_dim, width / head_dim, theta)
    x = torch.randn(POSITIONS.shape[-1], head_dim, generator=torch.manual_seed(0))
    base = spec_of(head_dim, theta=theta)

    raw = partial_layer(base, fraction=width / head_dim, pairs="raw")
    assert raw.inv_freq[: width // 2] == tuple(rotary.inv_freq.tolist())
    assert raw.num_rotated == width // 2
    expected = rotate_stock(rotary, apply, x)
    assert not torch.equal(expected, x)
    assert torch.equal(rotate_as_planned(raw, x), in_memory(raw, expected))

    matched = partial_layer(base, fraction=width / head_dim)
    assert matched.permutation is None
    order = matched_order(head_dim, width)
    assert torch.equal(
        rotate_as_planned(matched, x)[:, order], rotate_stock(rotary, apply, x[:, order])
    )


def test_raw_half_of_a_16_wide_head():
    layer = partial_layer(spec_of(16), fraction=0.5, pairs="raw")
    assert layer.inv_freq == pytest.approx([1, 0.1, 0.01, 0.001, 0, 0, 0, 0])
    assert layer.inv_freq[4:] == (0.0,) * 4
    # memory pairs (i, i + 8) hold the base's features (i, i + 4) for i < 4
    assert layer.permutation == (0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15)
    x = torch.randn(POSITIONS.shape[-1], 16, generator=torch.manual_seed(0))
    turned = rotate_as_planned(layer, x)
    base_order = torch.empty_like(turned)
    base_order[:, list(layer.permutation)] = turned
    assert torch.equal(base_order[:, 8:], x[:, 8:])
    assert bool((base_order[1:, :8] != x[1:, :8]).all())


def test_matched_takes_the_checkpoints_own_pairs():
    own = spec("llama").layers[0].inv_freq
    half = partial_layer(spec("llama"), fraction=0.5).inv_freq
    assert half == (own[0], 0, own[2], 0, own[4], 0, own[6], 0)
    # 6 slots over 8 pairs: 0, 1.33, 2.67, 4, 5.33, 6.67
    layer = partial_layer(spec("llama"), fraction=0.75)
    assert [i for i, f in enumerate(layer.inv_freq) if f] == [0, 1, 3, 4, 5, 7]
    assert layer.inv_freq[1] == pytest.approx(1e4 ** (-2 / 12))


@pytest.mark.parametrize("width", range(2, 97, 2))
def test_matched_uses_each_pair_once_and_the_nearest(width):
    base = spec_of(96, theta=5e5)
    own, total = base.layers[0].inv_freq, 48
    layer = partial_layer(base, fraction=width / 96)
    places = [index for index, f in enumerate(layer.inv_freq) if f]
    assert len(places) == width // 2
    for slot, place in enumerate(places):
        exact = slot * 96 / width
        assert abs(place - exact) <= 0.5
        if total % (width // 2) == 0:
            assert place == exact
            assert layer.inv_freq[place] == pytest.approx(own[place], rel=2e-7)


@pytest.mark.parametrize("fraction", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("pairs", ["raw", "matched"])
def test_llama3_scaling_is_transformers_at_the_new_width(fraction, pairs):
    config = llama_config(64, **{**LLAMA3, "partial_rotary_factor": fraction})
    table, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    layer = partial_layer(spec_of(64, **LLAMA3), fraction=fraction, pairs=pairs)
    assert tuple(f for f in layer.inv_freq if f) == tuple(table.tolist())


@pytest.mark.parametrize("name", ["yarn", "longrope", "dynamic", "gemma3"])
def test_full_table_scalings_stay_as_they_are_on_the_pairs_kept(name):
    for layer, own in zip(
        make_scheme("partial").build(spec(name)).layers, spec(name).layers, strict=True
    ):
        assert layer.inv_freq == tuple(f if i % 2 == 0 else 0.0 for i, f in enumerate(own.inv_freq))
        assert layer.rope_scale == own.rope_scale
        if isinstance(own.stretch, LongFactors):
            long = own.stretch.inv_freq
            assert layer.stretch.inv_freq == (long[0], 0, long[2], 0, long[4], 0, long[6], 0)
        else:
            assert layer.stretch == own.stretch


def test_raw_moves_the_long_factors_with_the_frequencies():
    own = spec("longrope").layers[0]
    layer = partial_layer(spec("longrope"), pairs="raw")
    assert layer.inv_freq == (*own.inv_freq[::2], 0, 0, 0, 0)
    assert layer.stretch.inv_freq == (*own.stretch.inv_freq[::2], 0, 0, 0, 0)


@pytest.mark.parametrize("name", ["yarn", "longrope", "dynamic", "proportional", "gemma3"])
def test_full_table_scalings_refuse_to_be_respaced(name):
    with pytest.raises(PosencError, match="use 2, 4, 8 of 16 features"):
        make_scheme("partial", fraction=0.75).build(spec(name))


def test_raw_on_dynamic_ntk_is_refused():
    with pytest.raises(PosencError, match="pairs='matched'"):
        make_scheme("partial", pairs="raw").build(spec("dynamic"))


def test_counts_features_of_the_whole_head_on_a_partial_checkpoint():
    base = spec("stablelm")  # 16 of 32 features turn
    layer = partial_layer(base, fraction=0.25)
    assert [i for i, f in enumerate(layer.inv_freq) if f] == [0, 2, 4, 6]
    raw = partial_layer(base, fraction=0.25, pairs="raw")
    assert raw.permutation[16:] == tuple(range(16, 32))
    with pytest.raises(PosencError, match=r"rotates 16 of 32; use at most 0\.5"):
        partial_layer(base, fraction=0.75)


def test_a_layer_without_rotation_gets_none():
    for layer, own in zip(
        make_scheme("partial", pairs="raw").build(spec("smollm3")).layers,
        spec("smollm3").layers,
        strict=True,
    ):
        assert (layer == own) == (not own.rotated)


@pytest.mark.parametrize("width", [4, 8, 12])
def test_scores_are_the_papers(width):
    positions = [0, 1, 5, 60]
    q, k = (
        torch.randn(4, 16, dtype=torch.float64, generator=torch.manual_seed(n)) for n in range(2)
    )
    layer = partial_layer(spec_of(16, theta=5e5), fraction=width / 16, pairs="raw")
    paper = reference.scores(
        reference.partial(5e5, width), q.tolist(), k.tolist(), positions, positions
    )
    torch.testing.assert_close(
        plan_scores(layer, q, k, torch.tensor(positions), torch.tensor(positions)),
        torch.tensor(paper, dtype=torch.float64),
        rtol=0,
        atol=2e-6,
    )
