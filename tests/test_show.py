"""Plans in words: a row per kind of layer, the base a person would name, a map without colours."""

from __future__ import annotations

import pytest
from run_folders import plan
from tiny_models import tiny_config

from hf_posenc.evaluation.figures import plan_map
from hf_posenc.model_spec import ModelSpec
from hf_posenc.plan import LayerPlan, LongFactors, PositionPlan
from hf_posenc.schemes import make_scheme
from hf_posenc.show import layers_text, plan_heat, plan_rows


def spec(theta: float = 1e5, **rope: object) -> ModelSpec:
    config = tiny_config("llama", head_dim=64, rope_parameters={"rope_theta": theta, **rope})
    return ModelSpec.from_config(config)


@pytest.mark.parametrize("theta", [1e4, 1e5, 5e5, 1e6])
@pytest.mark.parametrize("kept", [0.25, 0.5, 0.75])
def test_p_rope_keeps_its_theta_and_partial_names_its_width(theta: float, kept: float) -> None:
    p_rope = plan_rows(make_scheme("p_rope", p=kept).build(spec(theta)))[0]
    assert (p_rope.base, p_rope.rotated) == (f"theta {theta:,.0f}", f"{int(32 * kept)} of 32")
    partial = plan_rows(make_scheme("partial", fraction=kept, pairs="raw").build(spec(theta)))[0]
    assert partial.base == f"theta {theta:,.0f} over {int(32 * kept)} pairs"
    assert partial.order != "as stored"


def test_rows_tell_scale_stretch_and_own_frequencies() -> None:
    yarn = plan_rows(make_scheme("rope", scaling="yarn:4").build(spec()))[0]
    assert yarn.base == "own frequencies" and yarn.scale == "1.139"
    dynamic = plan_rows(make_scheme("rope", scaling="dynamic:4").build(spec()))[0]
    assert dynamic.stretch == "dynamic NTK x4 beyond 256"
    table = tuple(1e5 ** (-i / 4) for i in range(4))
    layer = LayerPlan(table, stretch=LongFactors(4096, tuple(f / 8 for f in table)))
    assert plan_rows(PositionPlan((layer,), base="x"))[0].stretch == "beyond 4k: 50.3 to 283k"


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ([0], "0"),
        ([0, 1, 2, 3], "0-3"),
        ([3, 7, 11, 15], "3, 7, ..., 15"),
        ([1, 3, 5], "1, 3, 5"),
        ([0, 1, 2, 4, 5, 6, 8], "0-2, 4-6, 8"),
    ],
)
def test_layers_read_short(layers: list[int], text: str) -> None:
    assert layers_text(layers) == text


def test_the_map_has_one_mark_per_pair_and_a_dot_where_nothing_rotates() -> None:
    lines = plan_heat(plan(layers=8, pairs=16)).plain.splitlines()
    assert lines[1] == "  0-2  ▁▁▂▂▃▃▄▄▅▅▆▆▇▇██"
    assert lines[2] == "    3  " + "·" * 16
    assert len(lines) == 1 + 4 + 1


def test_a_plan_without_any_rotation_draws() -> None:
    nope = PositionPlan((LayerPlan((0.0, 0.0)),), base="x")
    assert "··" in plan_heat(nope).plain
    plan_map(nope).canvas.draw()


@pytest.mark.parametrize("pairs", [1, 3, 128])
def test_figures_draw_at_any_width(pairs: int) -> None:
    plan_map(plan(layers=70, pairs=pairs), trained_length=2048, title="x" * 300).canvas.draw()
