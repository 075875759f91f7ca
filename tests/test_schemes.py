"""What each scheme plans: against transformers' tables with ==, and against the papers."""

from __future__ import annotations

import math

import pytest
import reference
import torch
from plan_math import apply_layer, llama_config, plan_scores, spec_of
from scheme_specs import CONFIGS, LLAMA3, spec
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_posenc.model_spec import ModelSpec
from hf_posenc.plan import DynamicNTK, LongFactors
from hf_posenc.schemes import make_scheme

POSITIONS = torch.tensor([0, 1, 2, 3, 37, 1000, 4095, 99_999])


def layers_of(spec: ModelSpec, name: str, **options):
    return make_scheme(name, **options).build(spec).layers


def stock_table(rope_type: str, config, **kwargs):
    """(inv_freq as floats, attention factor) straight from transformers."""
    table, factor = ROPE_INIT_FUNCTIONS[rope_type](config, "cpu", **kwargs)
    return tuple(table.tolist()), factor


def plain_table(width: int, theta: float) -> tuple[float, ...]:
    """The expression that stands in every stock family, in float32."""
    exponents = torch.arange(0, width, 2, dtype=torch.int64).float() / width
    return tuple((1.0 / (theta**exponents)).tolist())


def random_heads(head_dim: int, tokens: int = len(POSITIONS), seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, head_dim, dtype=torch.float64, generator=torch.manual_seed(seed))


def paper_scores(rotate, q, k):
    positions = POSITIONS.tolist()
    return torch.tensor(
        reference.scores(rotate, q.tolist(), k.tolist(), positions, positions), dtype=torch.float64
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_null_schemes_plan_exactly_the_checkpoint(name):
    base = spec(name)
    for scheme, options in [
        ("rope", {}),
        ("p_rope", {"p": 1}),
        ("partial", {"fraction": base.rotary_dim / base.head_dim}),
        ("partial", {"fraction": base.rotary_dim / base.head_dim, "pairs": "raw"}),
        ("interleaved", {}),
        ("dual", {"theta_local": None, "theta_global": None}),
    ]:
        assert layers_of(base, scheme, **options) == base.layers, scheme


class TestRope:
    @pytest.mark.parametrize(
        "scaling",
        [
            {"type": "pi", "factor": 4},
            {"rope_type": "linear", "factor": 2.5},
            {"rope_type": "yarn", "factor": 4},
            {"type": "yarn", "factor": 8.0, "beta_fast": 16, "truncate": False, "mscale": 0.7},
            {"type": "llama3", "factor": 8},
            {"type": "llama3", "factor": 2, "low_freq_factor": 1.5, "high_freq_factor": 3},
            {
                "type": "longrope",
                "short_factor": [1.0 + 0.1 * i for i in range(32)],
                "long_factor": [4.0 + i for i in range(32)],
                "original_max_position_embeddings": 1024,
            },
            {"type": "dynamic", "factor": 2.0},
        ],
        ids=lambda scaling: scaling.get("type") or scaling["rope_type"],
    )
    @pytest.mark.parametrize("theta", [None, 1e6])
    @pytest.mark.parametrize("own", [{}, LLAMA3], ids=["plain", "on llama3"])
    def test_scaling_is_transformers_table_at_the_checkpoints_base(self, scaling, theta, own):
        base = spec_of(64, 2, **{**own, "theta": 5e5, "rope_theta": 5e5})
        (layer, other) = layers_of(base, "rope", scaling=scaling, theta=theta)
        assert layer == other
        values = {**scaling}
        rope_type = values.pop("type", None) or values.pop("rope_type")
        rope_type = "linear" if rope_type == "pi" else rope_type
        original = own.get("original_max_position_embeddings", 4096)
        if rope_type in ("yarn", "llama3", "longrope"):
            values.setdefault("original_max_position_embeddings", original)
        if rope_type == "llama3":
            values = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, **values}
        config = llama_config(64, theta=theta or 5e5, **{**values, "rope_type": rope_type})
        table, factor = stock_table(rope_type, config)
        assert layer.inv_freq == table
        assert layer.rope_scale == factor
        if rope_type == "longrope":
            long, _ = stock_table(rope_type, config, seq_len=1025)
            assert layer.stretch == LongFactors(1024, long)
        elif rope_type == "dynamic":
            assert layer.stretch == DynamicNTK(4096, theta or 5e5, 2.0)
        else:
            assert layer.stretch is None

    def test_static_ntk_is_dynamic_ntk_held_at_one_length(self):
        base = spec_of(64, theta=5e5)
        (layer,) = layers_of(base, "rope", scaling={"type": "ntk", "factor": 4.0})
        # Dynamic NTK at length n grows theta by (4 n / 4096 - 3)^(d/(d-2)): 4 at n = 7168.
        config = llama_config(64, theta=5e5, rope_type="dynamic", factor=4.0)
        assert layer.inv_freq == stock_table("dynamic", config, seq_len=7168)[0]
        assert layer.stretch is None

    def test_text_is_short_for_type_and_factor(self):
        assert make_scheme("rope", scaling="yarn:4") == make_scheme(
            "rope", scaling={"type": "yarn", "rope_type": "yarn", "factor": 4}
        )

    def test_another_base_keeps_the_checkpoints_scaling(self):
        layers = layers_of(spec("llama3"), "rope", theta=1e6)
        config = llama_config(16, **{**LLAMA3, "rope_theta": 1e6})
        assert layers[0].inv_freq == stock_table("llama3", config)[0]
        assert layers_of(spec("longrope"), "rope", theta=1e6)[0].stretch is not None
        proportional = layers_of(spec("proportional"), "rope", theta=1e6)[0]
        assert proportional.inv_freq == (*plain_table(16, 1e6)[:6], 0.0, 0.0)

    def test_default_removes_the_checkpoints_scaling(self):
        layers = layers_of(spec("longrope"), "rope", scaling="default")
        assert layers[0].inv_freq == plain_table(16, 1e4)
        assert layers[0].stretch is None and layers[0].rope_scale == 1.0

    def test_a_layer_without_rotation_gets_none(self):
        layers = layers_of(spec("smollm3"), "rope", theta=1e4)
        assert [layer.num_rotated for layer in layers] == [8, 8, 8, 0] * 2
        assert layers[0].inv_freq == plain_table(16, 1e4)

    def test_scores_are_the_papers(self):
        q, k = random_heads(16), random_heads(16, seed=1)
        (layer,) = layers_of(spec_of(16), "rope")
        expected = paper_scores(reference.rope(1e4), q, k)
        # float32 frequencies (2^-25 relative) over angles up to 1e5 radians
        torch.testing.assert_close(
            plan_scores(layer, q, k, POSITIONS, POSITIONS), expected, rtol=0, atol=2e-2
        )
        near = POSITIONS < 100
        torch.testing.assert_close(
            plan_scores(layer, q[near], k[near], POSITIONS[near], POSITIONS[near]),
            expected[near][:, near],
            rtol=0,
            atol=2e-6,
        )


class TestInterleaved:
    def test_preserving_changes_the_stored_layout_only(self):
        plan = make_scheme("interleaved").build(spec("llama"))
        assert plan.pairing == "interleaved"
        assert not plan.permuted

    def test_re_pairing_is_the_interleaved_rope_of_the_paper(self):
        plan = make_scheme("interleaved", preserve=False).build(spec_of(8))
        (layer,) = plan.layers
        assert plan.pairing == "interleaved"
        assert layer.permutation == (0, 2, 4, 6, 1, 3, 5, 7)
        q, k = random_heads(8), random_heads(8, seed=1)
        near = POSITIONS < 100
        ours = plan_scores(layer, q[near], k[near], POSITIONS[near], POSITIONS[near])
        paper = paper_scores(reference.interleaved(1e4), q, k)[near][:, near]
        torch.testing.assert_close(ours, paper, rtol=0, atol=2e-6)
        assert (paper_scores(reference.rope(1e4), q, k)[near][:, near] - paper).abs().max() > 0.1

    def test_features_outside_the_rotary_part_stay(self):
        order = layers_of(spec("stablelm"), "interleaved", preserve=False)[0].permutation
        assert order == (*range(0, 16, 2), *range(1, 16, 2), *range(16, 32))

    def test_re_pairing_some_layers_stores_them_as_they_are_used(self):
        plan = make_scheme("interleaved", preserve=False, layers="0-1").build(spec("llama"))
        assert plan.pairing == "half_split"
        assert [layer.permutation is not None for layer in plan.layers] == [True] * 2 + [False] * 6


class TestPRope:
    def test_half_of_a_16_wide_head(self):
        (layer,) = layers_of(spec_of(16), "p_rope", p=0.5)
        assert layer.inv_freq == pytest.approx([1, 0.3162, 0.1, 0.0316, 0, 0, 0, 0], abs=5e-5)
        assert layer.inv_freq[4:] == (0.0,) * 4
        assert layer.permutation is None

    @pytest.mark.parametrize("head_dim", [16, 20, 64, 80, 96, 128, 512])
    @pytest.mark.parametrize("p", [0.1, 0.25, 0.3, 1 / 3, 0.5, 0.61, 0.75, 0.99, 1])
    def test_is_transformers_proportional_bit_for_bit(self, head_dim, p):
        config = llama_config(
            head_dim, theta=5e5, rope_type="proportional", partial_rotary_factor=p
        )
        table, _ = stock_table("proportional", config)
        if any(table):
            (layer,) = layers_of(spec_of(head_dim, theta=5e5), "p_rope", p=p)
            assert layer.inv_freq == table

    def test_selections_keep_the_checkpoints_own_values(self):
        own = spec("llama3").layers[0].inv_freq
        for select, kept in [
            ("high", [0, 1, 2]),
            ("low", [5, 6, 7]),
            ("uniform", [0, 2, 5]),  # floor(k * 8 / 3)
        ]:
            for layer in layers_of(spec("llama3"), "p_rope", p=0.375, select=select):
                assert layer.inv_freq == tuple(
                    value if index in kept else 0.0 for index, value in enumerate(own)
                )

    def test_stretch_and_attention_factor_stay_with_the_dropped_pairs_gone(self):
        own = spec("longrope").layers[0]
        layer = layers_of(spec("longrope"), "p_rope", p=0.25)[0]
        assert layer.stretch == LongFactors(1024, (*own.stretch.inv_freq[:2], *(0.0,) * 6))
        assert layer.rope_scale == own.rope_scale != 1.0
        dynamic = layers_of(spec("dynamic"), "p_rope", p=0.25)[0]
        assert dynamic.stretch == spec("dynamic").layers[0].stretch is not None

    @pytest.mark.parametrize("p", [0.25, 0.5, 0.7])
    def test_scores_are_the_papers(self, p):
        q, k = random_heads(16), random_heads(16, seed=1)
        (layer,) = layers_of(spec_of(16, theta=5e5), "p_rope", p=p)
        near = POSITIONS < 100
        torch.testing.assert_close(
            plan_scores(layer, q[near], k[near], POSITIONS[near], POSITIONS[near]),
            paper_scores(reference.p_rope(5e5, p), q, k)[near][:, near],
            rtol=0,
            atol=2e-6,
        )


class TestNope:
    @pytest.mark.parametrize("name", CONFIGS)
    def test_nothing_turns_in_any_layer(self, name):
        base = spec(name)
        for layer, own in zip(layers_of(base, "nope"), base.layers, strict=True):
            assert set(layer.inv_freq) == {0.0}
            assert layer.stretch is None
            assert layer.rope_scale == own.rope_scale

    def test_dropped_rotation_is_cos_1_sin_0(self):
        q, k = random_heads(16), random_heads(16, seed=1)
        (layer,) = layers_of(spec_of(16), "nope")
        assert torch.equal(apply_layer(layer, q, POSITIONS), q)
        torch.testing.assert_close(
            plan_scores(layer, q, k, POSITIONS, POSITIONS),
            paper_scores(reference.nope, q, k),
            rtol=0,
            atol=1e-12,
        )

    @pytest.mark.parametrize(
        ("options", "unrotated"),
        [
            ({}, [3, 7]),
            ({"every": 3}, [2, 5]),
            ({"every": 3, "offset": 0}, [0, 3, 6]),
            ({"every": 1}, list(range(8))),
            ({"layers": [5, 6, 1]}, [1, 5, 6]),
            ({"layers": "0-1,7", "every": 4}, [0, 1, 7]),
        ],
    )
    def test_interleaved_drops_the_named_layers_only(self, options, unrotated):
        base = spec("yarn")
        layers = layers_of(base, "nope_interleaved", **options)
        assert [i for i, layer in enumerate(layers) if not layer.rotated] == unrotated
        assert all(
            layer == own
            for i, (layer, own) in enumerate(zip(layers, base.layers, strict=True))
            if i not in unrotated
        )

    def test_every_4_is_stock_smollm3(self):
        as_llama = ModelSpec.from_config(llama_config(16, 8, theta=2e6))
        assert layers_of(as_llama, "nope_interleaved") == spec("smollm3").layers
        assert layers_of(spec("smollm3"), "nope_interleaved") == spec("smollm3").layers


class TestDual:
    def test_each_layer_has_the_table_of_its_base(self):
        layers = layers_of(spec("llama"), "dual", every=3)
        local, far = plain_table(16, 1e4), plain_table(16, 1e6)
        expected = [local, local, far, local, local, far, local, local]
        assert [layer.inv_freq for layer in layers] == expected

    def test_is_stock_gemma3(self):
        base = spec("gemma3")
        assert {layer.inv_freq for layer in base.layers} == {
            plain_table(16, 1e4),
            plain_table(16, 1e6),
        }
        assert layers_of(spec("llama"), "dual") == base.layers

    def test_global_layers_may_keep_a_fraction(self):
        layers = layers_of(spec("llama"), "dual", every=2, p_global=0.25, theta_global=1e5)
        config = llama_config(16, theta=1e5, rope_type="proportional", partial_rotary_factor=0.25)
        assert layers[1].inv_freq == stock_table("proportional", config)[0]
        assert layers[0].inv_freq == plain_table(16, 1e4)

    def test_a_given_base_replaces_the_scaling_and_none_keeps_it(self):
        base = spec("llama3")
        layers = layers_of(base, "dual", every=2, theta_global=None)
        assert layers[0].inv_freq == plain_table(16, 1e4)
        assert layers[1] == base.layers[1]
        yarn = layers_of(spec("yarn"), "dual", every=2)
        assert {layer.rope_scale for layer in yarn} == {1.0}

    def test_a_layer_without_rotation_gets_none(self):
        layers = layers_of(spec("smollm3"), "dual", every=2)
        assert [layer.num_rotated for layer in layers] == [8, 8, 8, 0] * 2


def test_plans_carry_their_scheme_and_base():
    plan = make_scheme("nope_interleaved").build(spec("llama"))
    assert plan.base == spec("llama").fingerprint
    assert plan.label == "nope_interleaved(every=4)"
    assert make_scheme("rope").build(spec("llama")).label == "rope"
    assert math.prod(len(layer.inv_freq) for layer in plan.layers) == 8**8
