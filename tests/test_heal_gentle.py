"""Gentle dropping: exact tables on the way, exactly the plan at the end, resume, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from heal_case import converted, tiny_recipe, word_tokenizer
from safetensors.torch import load_file
from tiny_models import layer_tables, logits, tiny_model

import hf_posenc
from hf_posenc.errors import PosencError
from hf_posenc.heal import HealRecord, Recipe, heal
from hf_posenc.heal.gentle import Transition
from hf_posenc.heal.objective import Objective
from hf_posenc.heal.sections import GentleSection
from hf_posenc.heal.trainer import HealTrainer
from hf_posenc.parts import Window
from hf_posenc.plan import DynamicNTK, LayerPlan, LongFactors, PositionPlan, float32
from hf_posenc.runtime.install import installation_of, retabled

OWN = tuple(LayerPlan((1.0, 0.3, 0.1, 0.03)) for _ in range(4))
NOPE = LayerPlan((0.0,) * 4)
FREQUENCIES = "heal.gentle={by: frequencies, share: 0.5}"
LAYERS = "heal.gentle={by: layers, share: 1.0, order: [3, 0, 2, 1]}"


def _transition(*layers: LayerPlan, own: tuple[LayerPlan, ...] = OWN, **gentle: Any) -> Transition:
    return Transition.of(PositionPlan(layers, base="x"), own, GentleSection(**gentle))


def _heal(recipe: Recipe, out: Path, **options: Any) -> HealRecord:
    model = options.pop("model", None) or converted(recipe, scale=6.0)
    return heal(recipe, out=out, model=model, tokenizer=word_tokenizer(), **options)


def _losses(record: HealRecord) -> list[float]:
    return [entry["loss"] for entry in record.log]


def test_frequencies_move_linearly_and_arrive_exactly() -> None:
    fewer = LayerPlan((1.0, 0.3, 0.0, 0.0), rope_scale=1.5)
    faster = LayerPlan((2.0, 0.3, 0.1, 0.03))
    target = (NOPE, OWN[1], fewer, faster)
    way = _transition(*target, by="frequencies", share=0.5)
    quarter = way.at(0.125)
    down = tuple(float32(value * 0.75) for value in OWN[0].inv_freq)
    assert quarter[0].inv_freq == down
    assert quarter[1] == OWN[1]
    assert quarter[2] == LayerPlan((1.0, OWN[0].inv_freq[1], *down[2:]), rope_scale=1.125)
    assert quarter[3].inv_freq == (1.25, *OWN[0].inv_freq[1:])
    assert way.at(0.5) == way.at(0.75) == way.at(1.0) == target


def test_long_frequencies_move_too_and_dynamic_ones_are_refused() -> None:
    long = LongFactors(64, (0.5, 0.2, 0.05, 0.01))
    own = tuple(LayerPlan(layer.inv_freq, stretch=long) for layer in OWN)
    dropped = LayerPlan((1.0, 0.3, 0.0, 0.0))
    half = _transition(*(dropped,) * 4, own=own, by="frequencies", share=1.0).at(0.5)
    assert isinstance(half[0].stretch, LongFactors) and half[0].stretch.original_length == 64
    assert half[0].stretch.inv_freq == pytest.approx((0.75, 0.25, 0.025, 0.005), rel=1e-6)
    dynamic = LayerPlan((1.0, 0.3, 0.0, 0.0), stretch=DynamicNTK(64, 1e4, 4.0))
    with pytest.raises(PosencError, match=r"layer 0 has dynamic NTK.*use by: layers"):
        _transition(dynamic, *OWN[1:], by="frequencies")


@pytest.mark.parametrize(
    ("order", "arrivals"), [("depth", "023"), ("deepest", "320"), ((2, 3, 0), "230")]
)
def test_layers_take_the_plan_one_after_another(order: Any, arrivals: str) -> None:
    target = (NOPE, OWN[1], NOPE, NOPE)
    way = _transition(*target, by="layers", share=0.6, order=order)
    found = []
    for step in range(10):
        layers = way.at((step + 1) / 10)
        assert all(layer in (OWN[i], target[i]) for i, layer in enumerate(layers))
        found.append({i for i, layer in enumerate(layers) if layer == NOPE})
    counts = (1, 1, 2, 2, 3, 3, 3, 3, 3, 3)
    assert found == [{int(layer) for layer in arrivals[:count]} for count in counts]


def test_only_tables_wait() -> None:
    planned = LayerPlan((0.0,) * 4, window=Window(5), permutation=(1, 0, *range(2, 8)))
    for by in ("layers", "frequencies"):
        way = _transition(planned, planned, *OWN[2:], by=by, share=1.0)
        waiting = way.at(0.1)[1]
        assert (waiting.window, waiting.permutation) == (planned.window, planned.permutation)
        assert waiting.rotated


def test_transitions_that_make_no_sense_are_refused() -> None:
    for order in ((0,), (0, 1, 2), (0, 0, 1), (0, 2)):
        with pytest.raises(PosencError, match=r"the plan changes layers \[0, 1\]"):
            _transition(NOPE, NOPE, *OWN[2:], by="layers", order=order)
    with pytest.raises(PosencError, match="changes no frequency"):
        _transition(*OWN, by="frequencies")
    with pytest.raises(PosencError, match="changes layer 2 alone"):
        _transition(*OWN[:2], NOPE, OWN[3], by="layers")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("{by: frequencies, order: deepest}", "gentle.order: has no effect by frequencies"),
        ("{by: layer}", "gentle.by: "),
        ("{by: layers, share: 0}", "gentle.share: "),
        ("{share: 0.2}", "gentle.by: is missing"),
        ("{by: layers, order: shallow}", "gentle.order: "),
        ("{by: layers, step: 3}", "gentle.step: unknown key"),
        ("{by: layers, share: 0.2}", "0.2 of 4 steps, so the plan would come in at once"),
        ("{by: layers, order: [0, 1]}", r"the plan changes layers \[0, 1, 2, 3\]"),
    ],
)
def test_requests_are_checked_before_anything_is_written(
    tmp_path: Path, override: str, message: str
) -> None:
    with pytest.raises(PosencError, match=message):
        _heal(tiny_recipe(tmp_path, f"heal.gentle={override}", scheme="nope"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_plan_without_new_frequencies_cannot_come_in_gently(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, FREQUENCIES, "scheme.keep_rope=true", scheme="alibi")
    with pytest.raises(PosencError, match=r"alibi\(keep_rope=True\) changes no frequency"):
        _heal(recipe, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_retabled_runs_other_tables_and_gives_the_plans_back() -> None:
    stock = tiny_model("qwen3", scale=6.0)
    model = hf_posenc.patch_model(tiny_model("qwen3", scale=6.0), "nope")
    plan, own = hf_posenc.get_plan(model), installation_of(model).spec.layers
    plain, changed = logits(stock), logits(model)
    half = Transition.of(plan, own, GentleSection(by="frequencies", share=1.0)).at(0.5)
    rehooked = hf_posenc.patch_model(
        tiny_model("qwen3", scale=6.0), PositionPlan(half, base=plan.base)
    )
    with retabled(model, half):
        assert torch.equal(logits(model), logits(rehooked))
        assert hf_posenc.get_plan(model) == plan
        with hf_posenc.unpatched(model):
            assert torch.equal(logits(model), plain)
    with pytest.raises(KeyError), retabled(model, (*own[:2], *plan.layers[2:])):
        mine, theirs = layer_tables(model), layer_tables(stock)
        for index in (0, 1):
            assert all(map(torch.equal, mine[index], theirs[index]))
        assert all((mine[index][0] == 1).all() for index in (2, 3))
        raise KeyError
    assert torch.equal(logits(model), changed)
    with pytest.raises(PosencError, match="not patched"), retabled(stock, half):
        pass


def _ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, tuple[LayerPlan, ...]]]:
    """(finished steps, what each layer of the student is to run) of every step."""
    seen: list[tuple[int, tuple[LayerPlan, ...]]] = []
    usual = HealTrainer.compute_loss

    def compute_loss(self: HealTrainer, *args: Any, **kwargs: Any) -> Any:
        installed = installation_of(self.healing)
        kinds = self.objective.decoder.rotary_emb.kinds
        seen.append((self.state.global_step, tuple(kinds[p.planned] for p in installed.picks)))
        return usual(self, *args, **kwargs)

    monkeypatch.setattr(HealTrainer, "compute_loss", compute_loss)
    return seen


@pytest.mark.parametrize(
    ("gentle", "checkpointing"), [(FREQUENCIES, "false"), (LAYERS, "true")], ids=["freq", "layers"]
)
def test_each_step_runs_its_tables_and_all_else_runs_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gentle: str, checkpointing: str
) -> None:
    options = ("heal.tokens=512", "heal.heldout_every=2", "heal.lr=1.0e-3")
    recipe = tiny_recipe(
        *(tmp_path, gentle, *options, f"heal.gradient_checkpointing={checkpointing}"), scheme="nope"
    )
    model = converted(recipe, scale=6.0)
    plan, own = hf_posenc.get_plan(model), installation_of(model).spec.layers
    measured = []
    usual = Objective.cross_entropy

    def cross_entropy(self: Objective, *args: Any) -> Any:
        measured.append(self.decoder.rotary_emb.kinds[0])
        return usual(self, *args)

    monkeypatch.setattr(Objective, "cross_entropy", cross_entropy)
    ran = _ran(monkeypatch)
    record = _heal(recipe, tmp_path / "out", model=model)
    way = Transition.of(plan, own, recipe.heal.gentle)
    assert ran == [(step, way.at((step + 1) / 8)) for step in range(8)]
    assert len({layers for _, layers in ran}) == 4
    assert ran[0][1] != plan.layers and ran[-1][1] == plan.layers
    assert len(measured) == 5 and set(measured) == set(plan.layers)
    assert hf_posenc.get_plan(model) == plan
    assert all((cos == 1).all() for cos, _ in layer_tables(model))
    assert record.gentle == recipe.heal.gentle.model_dump(mode="json")
    assert HealRecord.read(tmp_path / "out" / "heal.json") == record
    loaded = hf_posenc.load_model(tmp_path / "out" / "adapter")
    assert hf_posenc.get_plan(loaded) == plan
    assert torch.equal(logits(loaded), logits(model.eval()))


class _Killed(Exception):
    pass


@pytest.mark.parametrize("gentle", [FREQUENCIES, LAYERS], ids=["freq", "layers"])
def test_a_run_stopped_on_the_way_goes_on_as_if_it_had_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gentle: str
) -> None:
    recipe = tiny_recipe(
        *(tmp_path, gentle, "heal.first={objective: hidden, share: 0.4}"),
        *("heal.save_steps=2", "heal.tokens=512"),
        scheme="nope",
    )
    whole = _heal(recipe, tmp_path / "whole")
    model, out = converted(recipe, scale=6.0), tmp_path / "out"
    usual = Objective.__call__

    def call(self: Objective, *args: Any) -> Any:
        if (out / "checkpoints" / "checkpoint-2").is_dir():
            assert not all((cos == 1).all() for cos, _ in layer_tables(self.model))
            raise _Killed
        return usual(self, *args)

    with monkeypatch.context() as patch, pytest.raises(_Killed):
        patch.setattr(Objective, "__call__", call)
        _heal(recipe, out, model=model)
    assert all((cos == 1).all() for cos, _ in layer_tables(model))
    ran = _ran(monkeypatch)
    resumed = _heal(recipe, out)
    assert [step for step, _ in ran] == list(range(2, 8))
    assert _losses(resumed) == _losses(whole)
    assert resumed.heldout == whole.heldout
    a, b = (
        load_file(tmp_path / name / "adapter" / "adapter_model.safetensors")
        for name in ("whole", "out")
    )
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_the_control_has_nothing_to_come_in(tmp_path: Path) -> None:
    options = ("heal.objective=ce", "heal.heldout_rows=0", "heal.tokens=192")
    recipes = [
        tiny_recipe(tmp_path, *options, *more) for more in (("heal.gentle={by: frequencies}",), ())
    ]
    controls = [
        _heal(recipe, tmp_path / f"c{n}", model=tiny_model("llama", scale=6.0), variant="control")
        for n, recipe in enumerate(recipes)
    ]
    assert _losses(controls[0]) == _losses(controls[1])
    assert controls[0].gentle is None
    healed = [_heal(recipe, tmp_path / f"h{n}") for n, recipe in enumerate(recipes)]
    assert _losses(healed[0]) != _losses(healed[1])
