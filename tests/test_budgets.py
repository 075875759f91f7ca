"""Budgets: what a calibration chooses for a scheme, and how the choice is kept."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import calibration_of, falling
from scheme_specs import spec
from tiny_models import logits, tiny_model

import hf_posenc
from hf_posenc import Calibration, PosencError, get_plan, load_model, patch_model, unpatch_model
from hf_posenc.checkpoint.stream import convert_checkpoint
from hf_posenc.model_spec import ModelSpec
from hf_posenc.plan import PositionPlan
from hf_posenc.schemes import as_scheme, compose, list_schemes, make_scheme

LLAMA = spec("llama")  # 8 layers, 8 pairs
ABLATION = [5.0, 1.0, 4.0, 1.0, 3.0, 1.0, 0.5, 2.0]
NORM = [0.0, 9.0, 1.0, 9.0, 2.0, 9.0, 9.0, 9.0]
LAYERS = calibration_of(LLAMA, layers={"ablation": ABLATION, "norm": NORM})


def unrotated(plan: PositionPlan) -> list[int]:
    return [index for index, layer in enumerate(plan.layers) if not layer.rotated]


def kept(plan: PositionPlan) -> list[list[int]]:
    return [[pair for pair, f in enumerate(layer.inv_freq) if f] for layer in plan.layers]


def pairs_of(rows: list[list[float]]) -> Calibration:
    """A calibration by sensitivity; columns are pairs, missing layers and pairs are not missed."""
    full = [[*row, *[0.0] * (8 - len(row))] for row in [*rows, *[[]] * (8 - len(rows))]]
    return calibration_of(LLAMA, pairs={"sensitivity": full})


class TestLayers:
    @pytest.mark.parametrize(
        ("schedule", "chosen"),
        [
            ("auto:1", [6]),
            ("auto:2", [1, 6]),  # 1, 3 and 5 are tied: the first layers go first
            ("auto:3", [1, 3, 6]),
            ("auto:5", [1, 3, 5, 6, 7]),
            ("auto:8", list(range(8))),
            ("auto:2:norm", [0, 2]),
            ("auto:2:ablation", [1, 6]),
        ],
    )
    def test_the_least_missed_layers_lose_their_rotation(self, schedule: str, chosen: list[int]):
        plan = make_scheme("nope_interleaved", layers=schedule).build(LLAMA, LAYERS)
        assert unrotated(plan) == chosen
        assert plan.scheme_dict == {"name": "nope_interleaved", "layers": schedule}
        assert plan.chosen_dict == {"name": "nope_interleaved", "layers": chosen}

    @pytest.mark.parametrize("name", sorted(set(list_schemes()) - {"compose"}))
    def test_every_scheme_takes_a_budget(self, name: str):
        options: dict[str, Any] = {"interleaved": {"preserve": False}}.get(name, {})
        scheme = make_scheme(name, layers="auto:3", **options)
        plan = scheme.build(LLAMA, LAYERS)
        assert plan == make_scheme(name, layers=[1, 3, 6], **options).build(LLAMA)
        assert plan.scheme_dict == json.loads(json.dumps(scheme.describe()))
        again = as_scheme(plan.chosen_dict).build(LLAMA)
        assert again == plan and again.digest == plan.digest

    def test_layers_without_rotation_are_never_chosen(self):
        base = spec("smollm3")  # layers 3 and 7 are not rotated
        missed = calibration_of(base, layers={"ablation": [4, 3, 2, 0, 4, 3, 2, 0]})
        plan = make_scheme("nope", layers="auto:2").build(base, missed)
        assert unrotated(plan) == [2, 3, 6, 7]
        with pytest.raises(PosencError, match="auto:7 is out of range; there are 6 rotated"):
            make_scheme("nope", layers="auto:7").build(base, missed)

    def test_a_plan_keeps_its_choice_through_json(self):
        plan = make_scheme("nope", layers="auto:3").build(LLAMA, LAYERS)
        again = PositionPlan.from_json(json.loads(json.dumps(plan.to_json())))
        assert (again, again.chosen, again.digest) == (plan, plan.chosen, plan.digest)
        plain = make_scheme("nope", layers=[1, 3, 6]).build(LLAMA, LAYERS)
        assert plain.chosen is None and "chosen" not in plain.to_json()
        assert plain == plan and plain.digest == plan.digest


class TestPairs:
    def test_uniform_keeps_what_is_missed_most_in_sum(self):
        missed = pairs_of([[1, 0, 0, 5, 0, 2], [1, 0, 0, 0, 0, 2], [3]])  # sums 5, 0, 0, 5, 0, 4
        plan = make_scheme("p_rope", p=0.375, select="sensitivity").build(LLAMA, missed)
        assert kept(plan) == [[0, 3, 5]] * 8
        own = LLAMA.layers[0].inv_freq
        assert all(value in (0.0, own[i]) for i, value in enumerate(plan.layers[0].inv_freq))
        assert plan.scheme_dict == {"name": "p_rope", "p": 0.375, "select": "sensitivity"}
        assert plan.chosen_dict == {"name": "p_rope", "select": [0, 3, 5]}
        assert as_scheme(plan.chosen_dict).build(LLAMA) == plan

    def test_ties_go_to_the_faster_pair(self):
        plan = make_scheme("p_rope", p=0.25, select="sensitivity").build(LLAMA, pairs_of([]))
        assert kept(plan) == [[0, 1]] * 8

    @pytest.mark.parametrize("name", ["llama", "llama_wide", "llama3", "stablelm"])
    def test_the_fastest_pairs_are_p_rope_bit_for_bit(self, name: str):
        base = spec(name)
        for count in range(1, base.num_frequencies + 1):
            p = count / base.num_frequencies
            high = make_scheme("p_rope", p=p).build(base)
            by_norm = make_scheme("p_rope", p=p, select="norm").build(base, falling(base))
            assert by_norm == high
            assert make_scheme("p_rope", select=list(range(count))).build(base) == high

    def test_only_the_layers_that_change_count(self):
        missed = pairs_of([[9, 9], [0, 0, 1, 2], [0, 0, 3, 1]])
        scheme = make_scheme("p_rope", layers="1-2", p=0.125, select="sensitivity")
        plan = scheme.build(LLAMA, missed)
        assert kept(plan) == [list(range(8)), [2], [2], *[list(range(8))] * 5]
        own = make_scheme("p_rope", layers="1-2", p=0.125, select="sensitivity", per_layer=True)
        assert kept(own.build(LLAMA, missed))[1:3] == [[3], [2]]

    def test_per_layer_spends_one_budget_over_all_layers(self):
        rows = [[8, 7, 6, 5], [0, 4, 0, 3], [2, 0, 1]]
        scheme = make_scheme("p_rope", p=0.125, select="sensitivity", per_layer=True)
        plan = scheme.build(LLAMA, pairs_of(rows))  # 8 pairs for 8 layers
        assert kept(plan) == [[0, 1, 2, 3], [1, 3], [0, 2], [], [], [], [], []]
        assert plan.scheme_dict["per_layer"] is True
        assert plan.chosen_dict == {"name": "p_rope", "select": kept(plan)}
        assert as_scheme(plan.chosen_dict).build(LLAMA) == plan

    def test_layers_and_pairs_are_chosen_together(self):
        missed = dataclasses.replace(LAYERS, pairs=pairs_of([[9], [0, 1], [9], [0, 0, 3]]).pairs)
        scheme = make_scheme("p_rope", layers="auto:3", p=0.125, select="sensitivity")
        plan = scheme.build(LLAMA, missed)
        assert [i for i, pairs in enumerate(kept(plan)) if pairs == [2]] == [1, 3, 6]
        assert plan.chosen_dict == {"name": "p_rope", "layers": [1, 3, 6], "select": [2]}

    def test_layers_without_rotation_take_no_part(self):
        base = spec("smollm3")
        table = [[0.0, 1.0], [0.0, 1.0], [0.0, 1.0], [9.0, 0.0]] * 2
        rows = [[*row, *[0.0] * 6] for row in table]
        missed = calibration_of(base, pairs={"score": rows})
        options = {"p": 0.125, "select": "score"}
        plan = make_scheme("p_rope", **options).build(base, missed)
        assert kept(plan) == [[1], [1], [1], []] * 2
        own = make_scheme("p_rope", **options, per_layer=True).build(base, missed)
        assert kept(own) == [[1], [1], [1], []] * 2

    def test_pairs_by_name(self):
        scheme = make_scheme("p_rope", select=[5, 0, 5])
        assert scheme.describe() == {"name": "p_rope", "select": [0, 5]}
        assert kept(scheme.build(LLAMA)) == [[0, 5]] * 8
        lists = [[0], [], [7, 1], *[[2]] * 5]
        own = make_scheme("p_rope", select=lists, layers="0-2").build(LLAMA)
        assert kept(own) == [[0], [], [1, 7], *[list(range(8))] * 5]


class TestCompose:
    def test_a_scheme_chooses_inside_its_group(self):
        groups = [
            {"layers": "0-4", "scheme": {"name": "nope_interleaved", "layers": "auto:2"}},
            {"layers": "5-7", "scheme": {"name": "p_rope", "p": 0.125, "select": "sensitivity"}},
        ]
        rows = [[9.0]] * 5 + [[0, 0, 1.0]] * 3
        missed = dataclasses.replace(LAYERS, pairs=pairs_of(rows).pairs)
        scheme = compose(groups)
        plan = scheme.build(LLAMA, missed)
        assert unrotated(plan) == [1, 3]
        assert kept(plan)[5:] == [[2]] * 3
        assert plan.layers[0] == LLAMA.layers[0]
        assert plan.scheme_dict == json.loads(json.dumps(scheme.describe()))
        assert as_scheme(plan.chosen_dict).build(LLAMA) == plan

    def test_the_layers_of_a_group_may_be_chosen(self):
        scheme = compose([{"layers": "auto:3", "scheme": "nope"}])
        assert unrotated(scheme.build(LLAMA, LAYERS)) == [1, 3, 6]
        inside = make_scheme(
            "compose", layers="0-4", groups=[{"layers": "auto:3", "scheme": "nope"}]
        )
        assert unrotated(inside.build(LLAMA, LAYERS)) == [1, 3, 4]

    def test_the_layers_of_the_composition_may_be_chosen(self):
        groups = [{"layers": "0-1", "scheme": "nope"}, {"layers": "4-5", "scheme": "nope"}]
        scheme = make_scheme("compose", layers="auto:3", groups=groups)
        assert unrotated(scheme.build(LLAMA, LAYERS)) == [1, 4, 5]

    def test_groups_choose_among_what_no_other_holds(self):
        groups = [{"layers": "auto:3", "scheme": "nope"}, {"layers": "0-1", "scheme": "rope"}]
        assert unrotated(compose(groups).build(LLAMA, LAYERS)) == [3, 5, 6]
        two = [
            {"layers": "auto:2", "scheme": "nope"},
            {"layers": "auto:2", "scheme": {"name": "p_rope", "p": 0.5}},
        ]
        plan = compose(two).build(LLAMA, LAYERS)
        assert unrotated(plan) == [1, 6]
        assert [i for i, pairs in enumerate(kept(plan)) if len(pairs) == 4] == [3, 5]
        assert as_scheme(plan.chosen_dict).build(LLAMA) == plan
        with pytest.raises(PosencError, match="auto:7 is out of range; there are 6 rotated"):
            compose([groups[1], {"layers": "auto:7", "scheme": "nope"}]).build(LLAMA, LAYERS)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("nope", {"layers": "auto:9"}, "auto:9 is out of range; there are 8 rotated layers"),
        ("nope", {"layers": "auto:2:score"}, "(--statistics score)"),
        ("p_rope", {"select": "sensitivity"}, "(--statistics sensitivity)"),
        ("p_rope", {"select": "norm", "p": 0.1}, "p=0.1 keeps none of 8 frequencies"),
    ],
)
def test_what_the_calibration_cannot_give_is_refused(
    name: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(PosencError) as error:
        make_scheme(name, **options).build(LLAMA, LAYERS)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_calibration_of_another_model_is_refused_by_any_scheme() -> None:
    for scheme in (make_scheme("nope", layers="auto:2"), make_scheme("nope")):
        with pytest.raises(PosencError, match="made for another model"):
            scheme.build(spec("llama_wide"), LAYERS)


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and a calibration of it on which layers 0 and 2 are missed least."""
    root = tmp_path_factory.mktemp("disk")
    model = tiny_model("llama")
    model.save_pretrained(root / "model")
    base = ModelSpec.from_model(model)
    rows = [[1.0, 0.0, 2.0, *[0.0] * 5]] * 4
    made = calibration_of(
        base, layers={"ablation": [1.0, 3.0, 2.0, 4.0]}, pairs={"sensitivity": rows}
    )
    made.save(root / "calibration.json")
    return root


@pytest.mark.parametrize(
    ("scheme", "options", "explicit"),
    [
        ("nope_interleaved", {"layers": "auto:2"}, {"layers": [0, 2]}),
        ("p_rope", {"p": 0.25, "select": "sensitivity"}, {"select": [0, 2]}),
        (
            "p_rope",
            {"p": 0.25, "select": "sensitivity", "per_layer": True, "layers": "1-3"},
            {"select": [[], [0, 2], [0, 2], [0, 2]], "layers": "1-3"},
        ),
    ],
)
def test_a_chosen_plan_lives_on_without_its_calibration(
    disk: Path, tmp_path: Path, scheme: str, options: dict[str, Any], explicit: dict[str, Any]
) -> None:
    model = tiny_model("llama")
    stock = logits(model)
    patch_model(model, scheme, calibration=str(disk / "calibration.json"), **options)
    changed = logits(model)
    assert not torch.equal(changed, stock)
    model.save_pretrained(tmp_path / "new")
    loaded = load_model(tmp_path / "new", attn_implementation="eager")
    assert get_plan(loaded) == get_plan(model)
    assert get_plan(loaded).chosen_dict == {"name": scheme, **explicit}
    assert get_plan(loaded).scheme_dict == make_scheme(scheme, **options).describe()
    assert torch.equal(logits(loaded), changed)
    unpatch_model(model)
    assert torch.equal(logits(model), stock)
    assert torch.equal(logits(patch_model(model, scheme, **explicit)), changed)


def test_files_are_converted_as_models_are(disk: Path, tmp_path: Path) -> None:
    made = Calibration.load(disk / "calibration.json")
    convert_checkpoint(
        disk / "model",
        tmp_path / "new",
        "nope_interleaved",
        layers="auto:2",
        calibration=made,
        progress=False,
    )
    plan = get_plan(load_model(tmp_path / "new"))
    assert unrotated(plan) == [0, 2]
    assert plan.chosen_dict == {"name": "nope_interleaved", "layers": [0, 2]}
    card = (tmp_path / "new" / "README.md").read_text()
    assert "chosen by calibration: nope_interleaved(layers=[0, 2])" in card


@pytest.mark.parametrize(
    ("calibration", "words"),
    [
        (None, "needs a calibration of the model; make one with `hf-posenc calibrate MODEL"),
        ("absent.json", "absent.json: no such file"),
        (7, "calibration=7 must be a Calibration or the path"),
        (LAYERS, "made for another model"),
    ],
)
def test_patching_refuses_a_calibration_that_does_not_fit(calibration: Any, words: str) -> None:
    model = tiny_model("llama")
    with pytest.raises(PosencError) as error:
        patch_model(model, "nope_interleaved", layers="auto:2", calibration=calibration)
    assert words in str(error.value) and "\n" not in str(error.value)
    assert get_plan(model) is None


def test_a_finished_plan_takes_no_calibration(disk: Path) -> None:
    model = tiny_model("llama")
    plan = make_scheme("nope").build(ModelSpec.from_model(model))
    with pytest.raises(PosencError, match=r"\['calibration'\] have no effect on a finished plan"):
        patch_model(model, plan, calibration=disk / "calibration.json")


@pytest.mark.parametrize(
    "change",
    [
        {"layers": {"ablation": [[1.0], [2.0], [3.0], [4.0]]}},
        {"pairs": {"norm": [1.0, 2.0, 3.0, 4.0]}},
        {"pairs": {"norm": "1234"}},
        {"layers": {"ablation": [1.0, 2.0, 3.0]}},
        {"layers": {"ablation": [1.0, 2.0, 3.0, float("nan")]}},
        {"schema": 99},
    ],
)
def test_a_damaged_file_is_named(disk: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    content = json.loads((disk / "calibration.json").read_text())
    (tmp_path / "bad.json").write_text(json.dumps({**content, **change}))
    with pytest.raises(PosencError) as error:
        patch_model(
            tiny_model("llama"),
            "nope_interleaved",
            layers="auto:2",
            calibration=tmp_path / "bad.json",
        )
    assert "calibration" in str(error.value) and "\n" not in str(error.value)


def test_the_names_are_at_the_top_of_the_package() -> None:
    assert {"calibrate", "Calibration"} <= set(hf_posenc.__all__)
    assert callable(hf_posenc.calibrate)


def test_pairs_that_make_up_for_each_other_go_together() -> None:
    """Once pair 2 is gone, dropping pair 5 costs less than any other: .3, where alone it is 1.5."""
    size, layers = LLAMA.num_frequencies, LLAMA.num_layers
    matrix = [[float(row == column) for column in range(size)] for row in range(size)]
    matrix[2][2], matrix[5][5] = 0.5, 1.5
    matrix[2][5] = matrix[5][2] = -0.6
    frozen = tuple(tuple(row) for row in matrix)
    alone = tuple(frozen[pair][pair] for pair in range(size))
    single = calibration_of(LLAMA, pairs={"score": [alone] * layers})
    joint = dataclasses.replace(single, joint={"score": (frozen,) * layers})
    every = set(range(size))
    for per_layer in (False, True):
        kept = joint.kept_pairs(size - 2, per_layer=per_layer)
        assert [every - set(pairs) for pairs in kept] == [{2, 5}] * layers
        kept = single.kept_pairs(size - 2, per_layer=per_layer)
        assert all(2 in every - set(pairs) and 5 in pairs for pairs in kept)


def test_a_joint_of_another_shape_is_refused() -> None:
    size, layers = LLAMA.num_frequencies, LLAMA.num_layers
    matrix = ((1.0,) * size,) * (size - 1)
    made = calibration_of(LLAMA, pairs={"score": [(1.0,) * size] * layers})
    with pytest.raises(PosencError, match="joint 'score' is damaged"):
        dataclasses.replace(made, joint={"score": (matrix,) * layers}).check(LLAMA)
