"""Compensation from the command line and in runs."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from test_cli import refused
from tiny_runs import save_model, save_recipe, save_texts

from hf_posenc import PosencError, get_plan, load_model, pipeline
from hf_posenc.heal import heal, load_recipe
from hf_posenc.preview import command_lines

SCHEME = ("--scheme", "nope_interleaved", "--set", "every=2")
SMALL = ("--tokens", "256", "--row-tokens", "64")
CHANGES = {
    "compensate": "true",
    "heal": "{tokens: 128, rows: 2, heldout_rows: 0, save_steps: 0}",
    "eval": "{tasks: []}",
}


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("disk")
    save_recipe(
        root / "tiny.yaml", save_model(root / "model"), save_texts(root / "texts"), **CHANGES
    )
    return root


def gained(folder: Path) -> list[bool]:
    plan = get_plan(load_model(folder))
    assert plan is not None
    return [layer.gained for layer in plan.layers]


def test_convert_compensates_and_show_says_so(call: Any, disk: Path, tmp_path: Path) -> None:
    source = ("--compensate", *SMALL, "--texts", disk / "texts")
    done = call("convert", disk / "model", tmp_path / "out", *SCHEME, *source)
    assert done.exit_code == 0, done.output
    assert "gains: KL to the base" in done.stderr
    assert gained(tmp_path / "out") == [False, True, False, True]
    shown = call("show", tmp_path / "out")
    assert "with gains" in shown.stdout
    assert "with gains" in (tmp_path / "out" / "README.md").read_text()


def test_a_run_compensates_and_goes_on(disk: Path, tmp_path: Path) -> None:
    recipe = load_recipe(disk / "tiny.yaml")
    said: list[str] = []
    run = pipeline.run(recipe, tmp_path / "run", say=said.append)
    assert any(line.startswith("compensate:") for line in said)
    assert any(line.startswith("gains: KL") for line in said)
    assert gained(tmp_path / "run" / "converted") == [False, True, False, True]
    assert run.plan is not None and run.plan.gained
    again: list[str] = []
    pipeline.run(recipe, tmp_path / "run", say=again.append)
    assert "convert: done before, skipped" in again
    with pytest.raises(PosencError, match=r"another recipe \(compensate"):
        pipeline.run(load_recipe(disk / "tiny.yaml", ["compensate=false"]), tmp_path / "run")


def test_the_same_by_hand(call: Any, disk: Path, tmp_path: Path) -> None:
    recipe = load_recipe(disk / "tiny.yaml")
    lines = command_lines(recipe, "run", str(disk / "tiny.yaml"))
    line = next(line for line in lines if " convert " in line)
    assert call(*shlex.split(line)[1:]).exit_code == 0
    assert gained(tmp_path / "run" / "converted") == [False, True, False, True]


def test_what_cannot_be_is_refused(call: Any, disk: Path, tmp_path: Path) -> None:
    texts = ("--texts", disk / "texts")
    refused(call("convert", disk / "model", "a", *SCHEME, *texts), "--compensate alone reads it")
    rope = ("--scheme", "rope", "--compensate", *SMALL, *texts)
    refused(call("convert", disk / "model", "b", *rope), "drops no pair")
    fused = save_model(tmp_path / "phi3", "phi3")
    refused(call("convert", fused, "c", *SCHEME, "--compensate", *SMALL, *texts), "has no q_proj")
    auto = [f"model={fused}", "scheme={name: nope_interleaved, layers: 'auto:2'}"]
    with pytest.raises(PosencError, match="has no q_proj"):
        pipeline.run(load_recipe(disk / "tiny.yaml", auto), tmp_path / "run")
    assert not (tmp_path / "run").exists(), "refused before anything is calibrated"
    recipe = load_recipe(disk / "tiny.yaml")
    with pytest.raises(PosencError, match="convert --compensate"):
        heal(recipe, out=tmp_path / "healed")
    plain = load_recipe(disk / "tiny.yaml", ["compensate=false"])
    assert "compensate" not in plain.to_yaml()
    assert not any((tmp_path / name).exists() for name in "abc")
