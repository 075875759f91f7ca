"""What recipes, records, reports and estimates say of how a model is healed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from heal_case import converted, tiny_recipe, word_tokenizer
from run_folders import make_run, plan
from tiny_models import tiny_model

from hf_posenc.checkpoint.card import write_card
from hf_posenc.errors import PosencError
from hf_posenc.estimate import Speed, heal_bytes, heal_seconds
from hf_posenc.evaluation.report import write_report
from hf_posenc.heal import HealRecord, heal, load_recipe


def test_recipes_without_the_options_are_told_apart_as_before(tmp_path: Path) -> None:
    written = tiny_recipe(tmp_path).model_dump(mode="json")
    assert not {"first", "gentle"} & written["heal"].keys()
    assert "full" not in written["lora"]
    options = ("heal.first={objective: ce}", "heal.gentle={by: layers}", "lora.full=true")
    recipes = [tiny_recipe(tmp_path), *(tiny_recipe(tmp_path, option) for option in options)]
    assert len({recipe.digest for recipe in recipes}) == 4
    for recipe in recipes:
        path = tmp_path / "again.yaml"
        path.write_text(recipe.to_yaml())
        assert load_recipe(path) == recipe


def test_records_from_before_the_options_are_read(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, "heal.heldout_rows=0")
    record = heal(recipe, out=tmp_path / "out", model=converted(recipe), tokenizer=word_tokenizer())
    path = tmp_path / "out" / "heal.json"
    content = json.loads(path.read_text())
    for name in ("first", "gentle", "full"):
        del content[name]
    path.write_text(json.dumps(content))
    assert HealRecord.read(path) == record
    del content["objective"]
    path.write_text(json.dumps(content))
    with pytest.raises(PosencError, match="not a healing record"):
        HealRecord.read(path)


def test_reports_and_cards_say_how_it_was_healed(tmp_path: Path) -> None:
    options = {
        "first": {"objective": {"hidden": 1.0}, "share": 0.3},
        "gentle": {"by": "layers", "share": 0.5, "order": "depth"},
        "full": True,
    }
    texts = []
    cases: list[tuple[str, dict[str, Any]]] = [("plain", {}), ("all", options)]
    for name, more in cases:
        run = make_run(tmp_path / name)
        path = run / "healed" / "heal.json"
        record = {**json.loads(path.read_text()), **more}
        path.write_text(json.dumps(record))
        card = write_card(tmp_path / name, plan(), base="somewhere", healing=record)
        texts.append((write_report([run]).read_text(), card.read_text()))
    (plain_page, plain_card), (page, card) = texts
    phrases = {
        page: (
            "distance of layer outputs for the first 30% of the steps, then KL divergence",
            "in by layers over the first 50% of the steps",
            "whole modules, not LoRA",
        ),
        card: ("hidden x 1, 30% of the steps", "in by layers, over 50%", "trained: whole modules"),
    }
    for phrase in phrases[page]:
        assert phrase in page and phrase not in plain_page
    for phrase in phrases[card]:
        assert phrase in card and phrase not in plain_card


def test_estimates_know_teachers_and_whole_modules(tmp_path: Path) -> None:
    speed = Speed(forward=1.0, training=3.0)
    options = ((), ("heal.objective=ce",), ("heal.objective=ce", "heal.first={objective: hidden}"))
    times = [heal_seconds(tiny_recipe(tmp_path, *more), speed) for more in options]
    assert times == pytest.approx([256 * 4.0, 256 * 3.0, 256 * 3.3])
    model = tiny_model("llama")
    recipe = tiny_recipe(tmp_path, "lora.full=true")
    assert heal_bytes(recipe, model) == 4 * 7 * 4 * (2 * 64 * 64 + 2 * 64 * 32)
