"""Schemes limited to layers, and several side by side."""

from __future__ import annotations

import pytest
from scheme_specs import spec

from hf_posenc.model_spec import ModelSpec
from hf_posenc.schemes import compose, make_scheme


def layers_of(spec: ModelSpec, name: str, **options):
    return make_scheme(name, **options).build(spec).layers


class TestLayerLimit:
    @pytest.mark.parametrize(
        ("name", "options"),
        [
            ("rope", {"theta": 1e6}),
            ("partial", {"pairs": "raw"}),
            ("p_rope", {}),
            ("nope", {}),
            ("dual", {"every": 2, "theta_local": 5e5}),
            ("interleaved", {"preserve": False}),
        ],
    )
    def test_other_layers_stay_the_checkpoints(self, name, options):
        base = spec("llama")
        everywhere = layers_of(base, name, **options)
        limited = layers_of(base, name, **options, layers="1-2,7")
        for index in range(8):
            expected = everywhere if index in (1, 2, 7) else base.layers
            assert limited[index] == expected[index]
        assert limited != base.layers


class TestCompose:
    def test_each_group_has_its_scheme_and_the_rest_stays(self):
        base = spec("llama")
        plan = compose(
            [
                {"layers": "0-1", "scheme": {"name": "p_rope", "p": 0.5}},
                {"layers": [4], "scheme": "nope"},
                {"layers": "every:8", "scheme": make_scheme("partial", pairs="raw")},
            ]
        ).build(base)
        assert plan.layers[:2] == layers_of(base, "p_rope", p=0.5)[:2]
        assert plan.layers[4] == layers_of(base, "nope")[4]
        assert plan.layers[7] == layers_of(base, "partial", pairs="raw")[7]
        for index in (2, 3, 5, 6):
            assert plan.layers[index] == base.layers[index]
        assert plan.scheme_dict["groups"][1] == {"layers": [4], "scheme": {"name": "nope"}}

    def test_a_scheme_in_a_group_counts_layers_of_the_whole_model(self):
        groups = [{"layers": "2-6", "scheme": {"name": "nope_interleaved", "every": 2}}]
        layers = compose(groups).build(spec("llama")).layers
        assert [i for i, layer in enumerate(layers) if not layer.rotated] == [3, 5]

    def test_nests_and_can_be_limited(self):
        inner = {"name": "compose", "groups": [{"layers": "0-3", "scheme": "nope"}]}
        layers = make_scheme(
            "compose", layers="1-7", groups=[{"layers": "0-2", "scheme": inner}]
        ).build(spec("llama"))
        assert [i for i, layer in enumerate(layers.layers) if not layer.rotated] == [1, 2]

    def test_stored_pairing_is_interleaved_only_when_a_group_is_the_whole_model(self):
        whole = compose([{"layers": "all", "scheme": "interleaved"}]).build(spec("llama"))
        assert whole == make_scheme("interleaved").build(spec("llama"))
        re_pair = {"name": "interleaved", "preserve": False}
        some = compose([{"layers": "0-3", "scheme": re_pair}]).build(spec("llama"))
        assert some.pairing == "half_split"
        assert some.layers[0].permutation is not None
