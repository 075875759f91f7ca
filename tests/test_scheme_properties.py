"""What holds for every scheme on every kind of checkpoint, found by hypothesis."""

from __future__ import annotations

import dataclasses
import json
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheme_specs import CONFIGS, spec

from hf_posenc.errors import PosencError
from hf_posenc.plan import LongFactors, PositionPlan
from hf_posenc.schemes import Scheme, as_scheme, list_schemes, make_scheme

LAYERS = 8

schedules = st.one_of(
    st.just("all"),
    st.integers(1, LAYERS).map("every:{}".format),
    st.lists(st.integers(0, LAYERS - 1), min_size=1, unique=True),
    st.tuples(st.integers(0, 3), st.integers(4, LAYERS - 1)).map(
        lambda ends: f"{ends[0]}-{ends[1]}"
    ),
)
thetas = st.floats(1.5, 1e8)
scalings = st.one_of(
    st.tuples(st.sampled_from(["pi", "ntk", "dynamic", "yarn", "llama3"]), st.floats(1, 64)).map(
        lambda pair: {"type": pair[0], "factor": pair[1]}
    ),
    st.just("default"),
)


windows = st.integers(1, 64)
every = st.integers(1, LAYERS)
scales = st.one_of(
    st.floats(0.1, 10),
    st.just("per_head"),
    st.tuples(st.sampled_from(["llama4", "log", "inkling", "drope"]), st.floats(1.5, 1e5)).map(
        lambda pair: {"kind": pair[0], "floor": pair[1]}
    ),
)


def options(**values):
    """Keyword options, each left out sometimes."""
    return st.fixed_dictionaries({}, optional={**values, "layers": schedules})


OPTIONS = {
    "rope": options(theta=thetas, scaling=scalings, window=windows, logit_scale=scales),
    "interleaved": options(preserve=st.booleans()),
    "partial": options(
        fraction=st.sampled_from([1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1]),
        pairs=st.sampled_from(["matched", "raw"]),
    ),
    "p_rope": st.one_of(
        options(p=st.floats(0.13, 1), select=st.sampled_from(["high", "low", "uniform"])),
        options(select=st.lists(st.integers(0, 7), min_size=1)),
        options(select=st.lists(st.lists(st.integers(0, 7)), min_size=8, max_size=8).filter(any)),
    ),
    "nope": options(logit_scale=scales),
    "nope_interleaved": st.one_of(
        st.integers(1, LAYERS).flatmap(
            lambda every: st.fixed_dictionaries(
                {"every": st.just(every)},
                optional={"offset": st.integers(0, every - 1)},
            )
        ),
        st.fixed_dictionaries({"layers": schedules}),
    ),
    "dual": options(
        every=st.integers(1, LAYERS),
        theta_local=st.none() | thetas,
        theta_global=st.none() | thetas,
        p_global=st.floats(0.13, 1),
        window=windows,
    ),
    "alibi": options(keep_rope=st.booleans()),
    "t5_bias": options(
        buckets=st.integers(1, 16).map(lambda half: 2 * half),
        max_distance=st.integers(17, 256),
        share_layers=st.booleans(),
        keep_rope=st.booleans(),
    ),
    "query_bias": options(
        rank=st.integers(1, 16), extent=st.integers(1, 1024), keep_rope=st.booleans()
    ),
    "sinusoidal": options(scale_embeddings=st.booleans(), keep_rope=st.booleans()),
    "learned_absolute": options(
        max_positions=st.integers(1, 256),
        init=st.sampled_from(["zero", "sinusoidal"]),
        keep_rope=st.booleans(),
    ),
    "gemma4": options(every=every, window=windows, p=st.floats(0.13, 1)),
    "smollm3": st.fixed_dictionaries({}, optional={"every": every}),
    "irope": options(every=every, chunk=windows, scale_floor=windows, scale_alpha=st.floats(0, 1)),
    "rnope_swa": options(every=every, window=windows, theta=thetas),
    "swan": st.fixed_dictionaries(
        {"every": st.just(4)},
        optional={
            "offset": st.integers(0, 3),
            "window": windows,
            "scale_base": st.floats(1.5, 1e5),
        },
    ),
    "drope": options(scale_c=st.floats(0.01, 1), trained_length=st.integers(1, 10**6)),
}
simple = st.one_of(
    *(
        given_options.map(lambda o, n=name: make_scheme(n, **o))
        for name, given_options in OPTIONS.items()
    )
)
composed = st.tuples(simple, simple).map(
    lambda pair: make_scheme(
        "compose",
        groups=[{"layers": "0-3", "scheme": pair[0]}, {"layers": [4, 6, 7], "scheme": pair[1]}],
    )
)
schemes = st.one_of(simple, composed)
specs = st.sampled_from(sorted(CONFIGS)).map(spec)


def test_every_registered_scheme_is_covered():
    assert set(OPTIONS) | {"compose"} == set(list_schemes())


@given(schemes)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_a_description_gives_the_scheme_back(scheme):
    description = json.loads(json.dumps(scheme.describe()))
    again = as_scheme(description)
    assert again == scheme
    assert again.describe() == scheme.describe()
    assert hash(again) == hash(scheme)
    assert pickle.loads(pickle.dumps(scheme)) == scheme


@given(schemes, specs)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_plans_are_sound(scheme, base):
    try:
        plan = scheme.build(base)
    except PosencError as error:
        assert "\n" not in str(error)
        return
    again = as_scheme(scheme.describe()).build(base)
    assert plan == again and hash(plan) == hash(again) and plan.digest == again.digest
    text = json.dumps(plan.to_json(), allow_nan=False)
    read = PositionPlan.from_json(json.loads(text))
    assert read == plan and read.digest == plan.digest and read.scheme == plan.scheme
    assert as_scheme(read.scheme_dict) == scheme

    assert len(plan.layers) == base.num_layers
    assert plan.base == base.fingerprint
    for index, (layer, own) in enumerate(zip(plan.layers, base.layers, strict=True)):
        assert len(layer.inv_freq) == base.num_frequencies
        assert own.rotated or not layer.rotated
        if layer.permutation is not None:
            assert sorted(layer.permutation) == list(range(base.head_dim))
        if isinstance(layer.stretch, LongFactors):
            dropped = [f == 0 for f in layer.inv_freq]
            assert [f == 0 for f in layer.stretch.inv_freq] == dropped
        if not scheme.selected(base.num_layers)[index]:
            assert layer == own


@given(OPTIONS["p_rope"], specs)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_p_rope_keeps_values_of_the_checkpoint_at_their_places(given_options, base):
    plan = make_scheme("p_rope", **given_options).build(base)
    for layer, own in zip(plan.layers, base.layers, strict=True):
        for value, before in zip(layer.inv_freq, own.inv_freq, strict=True):
            # the last bit is transformers' own: its shorter table rounds some powers differently
            assert value == 0.0 or value == pytest.approx(before, rel=2e-7)
        assert layer.rope_scale == own.rope_scale
        assert layer.permutation is None


@pytest.mark.parametrize("name", sorted(list_schemes()))
def test_schemes_describe_themselves(name):
    scheme = list_schemes()[name]
    assert issubclass(scheme, Scheme)
    assert scheme.name == name
    assert scheme.source
    assert "Source: " in scheme.__doc__
    for field in dataclasses.fields(scheme):
        assert field.kw_only
        assert field.name == "layers" or f"\n    {field.name} " in scheme.__doc__, field.name
    with pytest.raises(dataclasses.FrozenInstanceError):
        (make_scheme(name) if name != "compose" else as_scheme("nope")).layers = "0"
