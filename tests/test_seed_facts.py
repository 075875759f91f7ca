"""The worked numbers that people learn positional encodings from, through this package's plans."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from plan_math import apply_layer, llama_config, plan_scores, plan_table, spec_of
from torch import nn
from transformers import LlamaForCausalLM, SmolLM3Config

from hf_posenc import patch_model
from hf_posenc.checkpoint.permute import interleaved_order
from hf_posenc.plan import LayerPlan
from hf_posenc.schemes import make_scheme

TWENTY_DEGREES = math.radians(20)
ONE_PAIR = LayerPlan((TWENTY_DEGREES,))


def at(layer: LayerPlan, vector: list[float], position: int) -> list[float]:
    return apply_layer(layer, torch.tensor([vector]), torch.tensor([position]))[0].tolist()


def score(layer: LayerPlan, q: list[float], k: list[float], m: int, n: int) -> float:
    """q . k after rotation, not divided by sqrt(D)."""
    scores = plan_scores(
        layer, torch.tensor([q]), torch.tensor([k]), torch.tensor([m]), torch.tensor([n])
    )
    return scores.item() * math.sqrt(len(q))


def three(values: list[float]):
    return pytest.approx(values, abs=6e-4)


class TestRotation:
    def test_one_pair_at_20_degrees_per_position(self):
        assert at(ONE_PAIR, [1, 5], 2) == three([-2.448, 4.473])
        assert at(ONE_PAIR, [1, 5], 5) == three([-5.098, 0.117])
        for position in range(50):
            assert math.hypot(*at(ONE_PAIR, [1, 5], position)) == pytest.approx(math.sqrt(26))

    def test_scores_depend_on_the_distance_alone(self):
        pair = [1.0, 5.0]
        assert score(ONE_PAIR, pair, pair, 0, 0) == pytest.approx(26)
        assert score(ONE_PAIR, pair, pair, 5, 2) == pytest.approx(13)
        assert score(ONE_PAIR, pair, pair, 5, 3) == pytest.approx(19.92, abs=5e-3)
        assert score(ONE_PAIR, pair, pair, 5 + 3, 2 + 3) == pytest.approx(13)

    def test_split_half_pairs_of_an_8_wide_head(self):
        (own,) = make_scheme("rope").build(spec_of(8)).layers
        assert own.inv_freq == pytest.approx([1, 0.1, 0.01, 0.001])
        # The example counts in units of 20 degrees: 20, 2, 0.2 and 0.02 degrees per position.
        layer = LayerPlan(tuple(TWENTY_DEGREES * frequency for frequency in own.inv_freq))
        numbers = [1.0, 2, 3, 4, 5, 6, 7, 8]
        assert at(layer, numbers, 2) == three(
            [-2.448, 1.577, 2.951, 3.994, 4.473, 6.125, 7.021, 8.003]
        )
        assert at(layer, numbers, 5) == three(
            [-5.098, 0.928, 2.877, 3.986, 0.117, 6.256, 7.051, 8.007]
        )
        for pair in range(4):  # (1, 5), (2, 6), (3, 7), (4, 8)
            alone = [0.0] * 8
            alone[pair], alone[pair + 4] = numbers[pair], numbers[pair + 4]
            turned = at(layer, alone, 5)
            assert [turned[pair], turned[pair + 4]] == pytest.approx(
                [at(layer, numbers, 5)[pair], at(layer, numbers, 5)[pair + 4]]
            )

    def test_tables(self):
        (layer,) = make_scheme("rope").build(spec_of(8)).layers
        cos, sin = plan_table(layer, torch.arange(3))
        assert cos[2, :4].tolist() == pytest.approx(
            [-0.416147, 0.980067, 0.9998, 0.999998], abs=1e-6
        )
        assert sin[2, :4].tolist() == pytest.approx([0.909297, 0.198669, 0.019999, 0.002], abs=1e-6)
        (wide,) = make_scheme("rope").build(spec_of(128)).layers
        cos, sin = plan_table(wide, torch.arange(1024))
        # One column per pair; the family wants each of the 64 twice, side by side in halves.
        assert cos[:, :64].shape == sin[:, :64].shape == (1024, 64)
        assert torch.equal(cos[:, :64], cos[:, 64:])

    def test_adjacent_pairs(self):
        (layer,) = make_scheme("interleaved", preserve=False).build(spec_of(4, theta=100)).layers
        assert layer.inv_freq == pytest.approx([1, 0.1])
        vector = [1.0, 0.0, 1.0, 0.0]
        assert score(layer, vector, vector, 2, 0) == pytest.approx(0.564, abs=5e-4)
        assert score(layer, vector, vector, 3, 1) == pytest.approx(0.564, abs=5e-4)

    def test_the_order_that_turns_split_half_into_interleaved(self):
        order = [0, 4, 1, 5, 2, 6, 3, 7]
        assert list(interleaved_order(8)) == order
        (split,) = make_scheme("rope").build(spec_of(8)).layers
        (adjacent,) = make_scheme("interleaved", preserve=False).build(spec_of(8)).layers
        q, k = torch.randn(2, 5, 8, dtype=torch.float64, generator=torch.manual_seed(0))
        m, n = torch.arange(5), torch.arange(5) + 7
        memory = [order.index(feature) for feature in range(8)]
        assert list(adjacent.permutation) == memory
        # Re-ordered first, adjacent pairs turn as the halves did, in that order ...
        turned = torch.empty_like(q)
        turned[:, memory] = apply_layer(adjacent, q[:, order], m)
        assert torch.equal(turned, apply_layer(split, q, m)[:, order])
        reordered = plan_scores(adjacent, q[:, order], k[:, order], m, n)
        torch.testing.assert_close(reordered, plan_scores(split, q, k, m, n), rtol=0, atol=1e-12)
        # ... and without the re-ordering it is another function.
        assert (plan_scores(adjacent, q, k, m, n) - reordered).abs().max() > 0.1

    def test_v_is_never_rotated(self):
        model = tiny_model(1)
        seen: dict[str, torch.Tensor] = {}
        attention = model.model.layers[0].self_attn

        def keep(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            seen["v"] = output

        attention.v_proj.register_forward_hook(keep)
        patch_model(model, "p_rope", p=0.5)
        # Every key alike: attention is uniform over the prefix whatever the positions are, so
        # o_proj must receive plain running means of v.
        attention.k_proj.weight.data.zero_()
        attention.o_proj.register_forward_pre_hook(lambda _, args: seen.update(mixed=args[0]))
        with torch.no_grad():
            model(torch.arange(3, 11)[None], use_cache=False)
        steps = torch.arange(1, 9)[None, :, None]
        torch.testing.assert_close(seen["mixed"], seen["v"].cumsum(1) / steps, rtol=0, atol=1e-6)


class TestPartial:
    def test_minimax_m3_rotates_64_of_128(self):
        (layer,) = make_scheme("partial", fraction=0.5).build(spec_of(128, theta=5e6)).layers
        assert layer.num_rotated == 32
        assert len(layer.inv_freq) == 64
        saved = 2 * (64 - layer.num_rotated) * 2**20  # cos and sin values at 1 M positions
        assert saved * 16 / 8 == 128 * 2**20
        assert saved * 2 / 1e9 == pytest.approx(0.134, abs=5e-4)
        # NVFP4: 4 bits a value and an 8-bit scale for each block of 16
        assert saved * (4 + 8 / 16) / 8 == 36 * 2**20

    def test_gemma_4_rotates_the_first_quarter_of_512(self):
        plan = make_scheme("dual", p_global=0.25).build(spec_of(512, 12))
        for index, layer in enumerate(plan.layers):
            if (index + 1) % 6 == 0:
                assert 2 * layer.num_rotated == 128
                assert (
                    layer.inv_freq[:64]
                    == make_scheme("p_rope").build(spec_of(512, theta=1e6)).layers[0].inv_freq[:64]
                )
                assert layer.inv_freq[1] == pytest.approx(1e6 ** (-2 / 512))
            else:
                assert layer.num_rotated == 256
                assert layer.inv_freq[1] == pytest.approx(1e4 ** (-2 / 512))


class TestNope:
    @pytest.mark.parametrize("scheme", ["nope", "rope"])
    def test_the_mask_alone_carries_order(self, scheme):
        (layer,) = make_scheme(scheme).build(spec_of(8)).layers
        same = torch.ones(4, 8, dtype=torch.float64)
        positions = torch.arange(4)
        scores = plan_scores(layer, same, same, positions, positions)
        scores = scores.masked_fill(torch.ones(4, 4).triu(1).bool(), -math.inf)
        first_token = torch.tensor([1.0, 0, 0, 0], dtype=torch.float64)
        averages = (scores.softmax(-1) @ first_token).tolist()
        if scheme == "nope":
            assert averages == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4])
        else:
            assert averages[2:] != pytest.approx([1 / 3, 1 / 4], abs=1e-3)

    def test_smollm3_drops_the_fourth_of_36_layers(self):
        plan = make_scheme("nope_interleaved").build(spec_of(8, 36))
        rotated = [layer.rotated for layer in plan.layers]
        assert rotated == [True, True, True, False] * 9
        assert rotated == [bool(value) for value in SmolLM3Config().no_rope_layers]

    def test_position_reaches_a_layer_without_rotation_through_the_residual_stream(self):
        tokens = torch.arange(3, 11)[None]
        swapped = tokens[:, [1, 0, 2, 3, 4, 5, 6, 7]]

        def moved(depth: int, **options: Any) -> float:
            """How far the last token's logits move when the first two tokens change places."""
            model = patch_model(tiny_model(depth), "nope", **options)
            with torch.no_grad():
                first, second = (
                    model(ids, use_cache=False).logits[0, -1] for ids in (tokens, swapped)
                )
            return (first - second).abs().max().item()

        assert moved(1) < 1e-6
        assert moved(2) > 1e-4
        assert moved(2, layers=[1]) > 1e-4


def tiny_model(layers: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = llama_config(16, layers)
    config.vocab_size, config.intermediate_size, config.initializer_range = 32, 32, 0.3
    return LlamaForCausalLM(config).eval()
