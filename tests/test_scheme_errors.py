"""Options out of range: one clear line, before any model is touched."""

from __future__ import annotations

import pytest
from plan_math import spec_of
from scheme_specs import spec

from hf_posenc.errors import PosencError
from hf_posenc.schemes import as_scheme, compose, make_scheme

NAN, INF = float("nan"), float("inf")


def refuse(words: str, action):
    with pytest.raises(PosencError) as error:
        action()
    message = str(error.value)
    assert words in message
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("partial", {"fraction": 0}, "fraction=0 must be a number above 0 and at most 1"),
        ("partial", {"fraction": -0.5}, "at most 1"),
        ("partial", {"fraction": 1.01}, "at most 1"),
        ("partial", {"fraction": NAN}, "at most 1"),
        ("partial", {"fraction": INF}, "at most 1"),
        ("partial", {"fraction": 10**400}, "at most 1"),
        ("partial", {"fraction": True}, "not bool"),
        ("partial", {"fraction": "0.5"}, "not str"),
        ("partial", {"fraction": None}, "not NoneType"),
        ("partial", {"pairs": "mached"}, "did you mean 'matched'?"),
        ("partial", {"pairs": 1}, "pairs=1 is unknown"),
        ("p_rope", {"p": 0}, "p=0 must be"),
        ("p_rope", {"p": 1.5}, "at most 1"),
        ("p_rope", {"p": NAN}, "at most 1"),
        ("p_rope", {"select": "hihg"}, "did you mean 'high'?"),
        ("p_rope", {"select": "sensitivty"}, "did you mean 'sensitivity'?"),
        ("p_rope", {"select": "ablation"}, "choose one of: high"),
        ("p_rope", {"select": []}, "with at least one pair"),
        ("p_rope", {"select": [[], []]}, "with at least one pair"),
        ("p_rope", {"select": [0, [1]]}, "with at least one pair"),
        ("p_rope", {"select": {0, 1}}, "with at least one pair"),
        ("p_rope", {"select": 3}, "with at least one pair"),
        ("p_rope", {"select": [-1]}, "-1 is no pair"),
        ("p_rope", {"select": [0, True]}, "True is no pair"),
        ("p_rope", {"select": [[0], [1.0]]}, "1.0 is no pair"),
        ("p_rope", {"select": ["0"]}, "'0' is no pair"),
        ("p_rope", {"select": [0, 1], "p": 0.5}, "leave out p=0.5"),
        ("p_rope", {"per_layer": True}, "goes with a calibrated choice"),
        ("p_rope", {"per_layer": True, "select": [0]}, "goes with a calibrated choice"),
        ("p_rope", {"per_layer": 1, "select": "norm"}, "true or false"),
        ("rope", {"theta": 1}, "above 1"),
        ("rope", {"theta": -1e4}, "above 1"),
        ("rope", {"theta": NAN}, "above 1"),
        ("rope", {"theta": "1e4"}, "not str"),
        ("rope", {"scaling": "yarm:4"}, "did you mean 'yarn'?"),
        ("rope", {"scaling": "yarn"}, "needs 'factor'"),
        ("rope", {"scaling": "yarn:x"}, "'x' is no number"),
        ("rope", {"scaling": "yarn:nan"}, "above 0"),
        ("rope", {"scaling": 4}, "must be a mapping"),
        ("rope", {"scaling": {"factor": 4}}, "needs one 'type'"),
        ("rope", {"scaling": {"type": "yarn", "rope_type": "pi", "factor": 4}}, "needs one 'type'"),
        ("rope", {"scaling": {"type": ["yarn"], "factor": 4}}, "is unknown"),
        ("rope", {"scaling": {"type": "yarn", "factor": 0.5}}, "at least 1"),
        ("rope", {"scaling": {"type": "yarn", "factor": True}}, "not bool"),
        ("rope", {"scaling": {"type": "yarn", "factor": 4, "beta_fats": 1}}, "'beta_fast'?"),
        ("rope", {"scaling": {"type": "yarn", "factor": 4, "beta_fast": 1}}, "below beta_fast"),
        ("rope", {"scaling": {"type": "yarn", "factor": 4, "truncate": 1}}, "true or false"),
        ("rope", {"scaling": {"type": "linear", "factor": 4, "rope_theta": 1e4}}, "option theta="),
        (
            "rope",
            {"scaling": {"type": "llama3", "factor": 4, "low_freq_factor": 4}},
            "below high_freq_factor",
        ),
        (
            "rope",
            {
                "scaling": {
                    "type": "llama3",
                    "factor": 4,
                    "original_max_position_embeddings": 0,
                }
            },
            "at least 1",
        ),
        ("rope", {"scaling": {"type": "longrope", "short_factor": [1.0]}}, "needs 'long_factor'"),
        (
            "rope",
            {"scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [0.0]}},
            "above 0",
        ),
        ("rope", {"scaling": {"type": "default", "factor": 2}}, "takes no parameters"),
        ("interleaved", {"preserve": 1}, "true or false"),
        ("nope", {"layers": "auto"}, "'auto:N' or 'auto:N:statistic'"),
        ("nope", {"layers": "auto:0"}, "at least 1"),
        ("nope", {"layers": "auto:7:sensitivty"}, "did you mean 'sensitivity'?"),
        ("nope", {"layers": [-1]}, "no layer number"),
        ("nope_interleaved", {"every": 0}, "at least 1"),
        ("nope_interleaved", {"every": 2.0}, "whole number"),
        ("nope_interleaved", {"every": True}, "whole number"),
        ("nope_interleaved", {"offset": 4}, "0 to 3 with every=4"),
        ("nope_interleaved", {"offset": -1}, "0 to 3 with every=4"),
        ("nope_interleaved", {"layers": "3", "every": 2}, "leave out every"),
        ("nope_interleaved", {"layers": "auto:7", "every": 2}, "leave out every"),
        ("nope_interleaved", {"layers": "3", "offset": 1}, "leave out every"),
        ("dual", {"every": 0}, "at least 1"),
        ("dual", {"theta_local": 0}, "above 1"),
        ("dual", {"theta_global": NAN}, "above 1"),
        ("dual", {"p_global": 0}, "p_global=0"),
        ("compose", {}, "needs the option 'groups'"),
        ("compose", {"groups": []}, "at least one group"),
        ("compose", {"groups": "all"}, "must be a list"),
        ("compose", {"groups": ["all"]}, "must be a mapping"),
        ("compose", {"groups": [{"layers": "all"}]}, "lacks 'scheme'"),
        ("compose", {"groups": [{"layer": "all"}]}, "did you mean 'layers'?"),
        ("compose", {"groups": [{"layers": "all", "scheme": "nop"}]}, "did you mean 'nope'?"),
        ("nope_interleave", {}, "did you mean 'nope_interleaved'?"),
        ("nope_interleaved", {"evry": 4}, "did you mean 'every'?"),
        ("p_rope", {"fraction": 0.5}, "no option 'fraction'"),
    ],
)
def test_options_are_refused_without_a_model(name, options, words):
    refuse(words, lambda: make_scheme(name, **options))
    refuse(words, lambda: as_scheme({"name": name, **options}))


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        # 16-wide heads, 8 layers
        ("partial", {"fraction": 0.01}, "use 0.125 (2 features)"),
        ("partial", {"fraction": 1 / 16}, "use 0.125 (2 features)"),
        ("partial", {"fraction": 5 / 16}, "use 0.25 (4 features) or 0.375 (6 features)"),
        ("partial", {"fraction": 0.3}, "is 4.8 features"),
        ("p_rope", {"p": 0.1}, "use at least 0.125"),
        ("p_rope", {"p": 0.1, "select": "uniform"}, "use at least 0.125"),
        ("dual", {"p_global": 0.1}, "p_global=0.1 keeps none"),
        ("nope", {"layers": [8]}, "layers 0 to 7"),
        ("nope_interleaved", {"every": 9}, "selects no layer"),
        ("dual", {"every": 9}, "selects no layer"),
        ("p_rope", {"layers": "0-8"}, "out of range"),
        ("p_rope", {"select": [0, 8]}, "pair 8 in select is out of range; this model has pairs 0"),
        ("p_rope", {"select": [[0]] * 7}, "pairs of 7 layers; this model has 8"),
        ("p_rope", {"select": "norm"}, "needs a calibration of the model; make one with"),
        ("nope", {"layers": "auto:7"}, "layers=auto:7) needs a calibration"),
        ("compose", {"groups": [{"layers": "auto:2", "scheme": "nope"}]}, "needs a calibration"),
        ("interleaved", {"layers": "0-3"}, "cannot be limited to layers"),
        (
            "rope",
            {"scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "short_factor has 1 entries; this model has 8",
        ),
        ("compose", {"groups": [{"layers": "0-8", "scheme": "nope"}]}, "out of range"),
        ("compose", {"groups": [{"layers": "0-3", "scheme": "interleaved"}]}, "limited"),
    ],
)
def test_options_that_do_not_fit_the_model_are_refused(name, options, words):
    refuse(words, lambda: make_scheme(name, **options).build(spec("llama")))


def test_overlapping_groups_are_refused():
    groups = [{"layers": "0-3", "scheme": "nope"}, {"layers": "every:4", "scheme": "p_rope"}]
    refuse("layer 3 lies in two groups", lambda: compose(groups).build(spec("llama")))


def test_a_group_whose_scheme_would_do_nothing_is_refused():
    groups = [{"layers": "0-2", "scheme": "nope_interleaved"}]
    refuse("plans none of the layers", lambda: compose(groups).build(spec("llama")))
    nowhere = make_scheme("compose", layers="7", groups=[{"layers": "0-2", "scheme": "nope"}])
    refuse("holds no layer", lambda: nowhere.build(spec("llama")))


def test_one_base_for_several_is_refused():
    refuse("differ by layer type", lambda: make_scheme("rope", theta=1e5).build(spec("gemma3")))
    refuse(
        "no single rope_theta", lambda: make_scheme("rope", scaling="pi:2").build(spec("gemma3"))
    )
    both = make_scheme("rope", theta=1e5, scaling="default").build(spec("gemma3"))
    assert len(set(both.layers)) == 1


@pytest.mark.parametrize("scaling", ["ntk:2", "dynamic:2"])
def test_ntk_needs_more_than_one_pair(scaling):
    refuse("rotary width 2", lambda: make_scheme("rope", scaling=scaling).build(spec_of(2)))


@pytest.mark.parametrize("value", [None, 3, ["nope"], {}, {"name": 3}, {"nmae": "nope"}])
def test_what_is_no_scheme_is_refused(value):
    refuse("is no scheme", lambda: as_scheme(value))


def test_options_belong_to_a_name():
    assert as_scheme("nope_interleaved", every=2) == make_scheme("nope_interleaved", every=2)
    refuse("'every' goes with the name", lambda: as_scheme(make_scheme("nope"), every=2))
    refuse("'every' goes with the name", lambda: as_scheme({"name": "nope"}, every=2))
