"""A first objective before the main one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from heal_case import converted, tiny_recipe, word_tokenizer
from tiny_models import tiny_model, tokens

import hf_posenc
from hf_posenc.errors import PosencError
from hf_posenc.heal import HealRecord, Recipe, heal
from hf_posenc.heal.adapter import attach_adapter
from hf_posenc.heal.data import collate, make_row
from hf_posenc.heal.objective import Objective
from hf_posenc.heal.sections import LoraSection

LORA = LoraSection(r=4, alpha=8, targets=("q_proj",), dropout=0)


def _heal(recipe: Recipe, out: Path) -> HealRecord:
    model = converted(recipe, scale=6.0)
    return heal(recipe, out=out, model=model, tokenizer=word_tokenizer())


def _losses(record: HealRecord) -> list[float]:
    return [entry["loss"] for entry in record.log]


def test_the_first_objective_gives_way_to_the_main_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ("heal.tokens=320", "heal.heldout_rows=0")
    recipe = tiny_recipe(tmp_path, "heal.first={objective: {hidden: 2}, share: 0.4}", *common)
    weights: list[dict[str, float]] = []
    usual = Objective.__call__

    def call(self: Objective, *args: Any) -> Any:
        weights.append(self.weights)
        return usual(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Objective, "__call__", call)
        record = _heal(recipe, tmp_path / "both")
    assert weights == [{"hidden": 2.0}] * 2 + [{"kl": 1.0}] * 3
    assert record.objective == {"kl": 1.0}
    assert record.first == {"objective": {"hidden": 2.0}, "share": 0.4}
    alone = _heal(tiny_recipe(tmp_path, "heal.objective={hidden: 2}", *common), tmp_path / "alone")
    assert _losses(record)[:2] == _losses(alone)[:2]
    assert _losses(record)[2] != _losses(alone)[2]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("{objective: kl, share: 1}", "first.share: "),
        ("{objective: {kll: 1}}", "first.objective.kll: "),
        ("{objective: {kl: 0}}", "first.objective: needs at least one weight above 0"),
        ("{share: 0.5}", "first.objective: is missing"),
        ("{objective: kl, share: 0.1}", "0.1 of 4 steps, which leaves one of the two objectives"),
        ("{objective: kl, share: 0.9}", "0.9 of 4 steps, which leaves one of the two objectives"),
    ],
)
def test_a_first_objective_needs_steps(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(PosencError, match=message):
        _heal(tiny_recipe(tmp_path, f"heal.first={override}"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_objective_computes_only_what_its_weights_need(monkeypatch: pytest.MonkeyPatch) -> None:
    healing = attach_adapter(
        hf_posenc.patch_model(tiny_model("llama"), "nope"), LORA, train_norms=True
    )
    batch = collate([make_row([tokens(1, 24)[0].tolist()])])
    hidden = Objective(healing, {"hidden": 1.0})
    ce = hidden.weighted({"ce": 1.0})
    expected = Objective(healing, {"ce": 1.0})(healing, batch)
    outputs: list[int] = []
    usual = Objective._run

    def run(self: Objective, *args: Any) -> Any:
        result = usual(self, *args)
        outputs.append(len(result.layers))
        return result

    monkeypatch.setattr(Objective, "_run", run)
    assert torch.equal(ce(healing, batch), expected)
    assert outputs == [0]  # no teacher, no layer outputs
    monkeypatch.setattr(Objective, "_logits", None)
    assert hidden(healing, batch) > 0
    assert outputs == [0, 4, 4]  # and no vocabulary
