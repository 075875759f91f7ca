"""Budgets on the command line: `calibrate`, --calibration, and runs that calibrate first."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from calibrations import calibration_of
from scheme_specs import spec
from test_cli import refused
from tiny_runs import save_model, save_recipe, save_texts
from typer.testing import CliRunner

from hf_posenc import Calibration, PosencError, get_plan, load_model, pipeline
from hf_posenc.calibration import tables, watched
from hf_posenc.cli import app
from hf_posenc.heal import heal, load_recipe
from hf_posenc.preview import downloads
from hf_posenc.schemes.pairs import drop_rotation

AUTO = ("--scheme", "nope_interleaved", "--set", "layers=auto:2")
SMALL = ("--tokens", "256", "--row-tokens", "64")
BUDGET = {
    "scheme": "{name: nope_interleaved, layers: 'auto:2'}",
    "heal": "{tokens: 128, rows: 2, heldout_rows: 0, save_steps: 0}",
    "eval": "{tasks: []}",
}


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, texts, a recipe with a budget, and a calibration by the command."""
    root = tmp_path_factory.mktemp("disk")
    texts = save_texts(root / "texts")
    save_recipe(root / "tiny.yaml", save_model(root / "model"), texts, **BUDGET)
    result = CliRunner().invoke(
        app,
        ["calibrate", str(root / "model"), str(root / "made.json"), "--texts", str(texts), *SMALL],
    )
    assert result.exit_code == 0, result.output
    (root / "printed.txt").write_text(result.stdout)
    return root


def harmless(path: Path, count: int = 2) -> list[int]:
    return list(Calibration.load(path).harmless_layers(count))


def test_calibrate_writes_a_calibration_and_prints_its_ranking(disk: Path) -> None:
    made = Calibration.load(disk / "made.json")
    assert (made.tokens, made.provenance["row_tokens"]) == (256, 64)
    assert made.provenance["texts"] == ["texts"]
    assert set(made.layers) == {"norm", "score", "sensitivity", "ablation"}
    printed = (disk / "printed.txt").read_text()
    rows = [line.split() for line in printed.splitlines() if line.strip()[:1].isdigit()]
    ranked = [int(layer) for _, layer, *values in rows if len(values) == 4]
    damage = made.layers["ablation"]
    assert sorted(ranked) == [0, 1, 2, 3]
    assert [damage[layer] for layer in ranked] == sorted(damage)
    assert "damage of pair 0 (fastest) to 7, score" in printed
    assert printed.splitlines()[-1].endswith("made.json")


def test_only_what_is_asked_for_is_measured(call: Any, disk: Path) -> None:
    result = call("calibrate", disk / "model", "few.json", "--texts", disk / "texts", *SMALL,
                  "--statistics", "norm", "--dtype", "float32")  # fmt: skip
    assert result.exit_code == 0, result.output
    made = Calibration.load("few.json")
    assert set(made.layers) == set(made.pairs) == {"norm"}
    refused(call("show", disk / "model", "--scheme", "p_rope", "--set", "select=score",
                 "--calibration", "few.json"), "--statistics score")  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("old.json",), ("old.json: exists",)),
        (("new.json", "--statistics", "norm,ablaton"), ("did you mean 'ablation'?",)),
        (("new.json", "--statistics", " , "), ("--statistics is empty",)),
        (("new.json", "--row-tokens", "1024"), ("exceeds the model's 512 positions",)),
        (("new.json", "--tokens", "10"), ("at least one row",)),
        (("new.json", "--texts", "absent.txt"), ("absent.txt",)),
        (("new.json", "--texts", "short.txt"), ("short.txt", "give another text")),
        (("new.json", "--dtype", "bf16"), ("did you mean 'bfloat16'?",)),
        ((), ("FILE", "--help")),
    ],
)
def test_calibrate_refuses_before_it_measures(
    call: Any,
    disk: Path,
    tmp_path: Path,
    arguments: tuple[str, ...],
    parts: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watched, "calibrate_watched", None)
    (tmp_path / "old.json").write_text("keep")
    (tmp_path / "short.txt").write_text("a few words")
    refused(call("calibrate", disk / "model", *arguments), *parts)
    assert (tmp_path / "old.json").read_text() == "keep"
    assert not (tmp_path / "new.json").exists()


def test_a_converted_model_is_not_calibrated(call: Any, disk: Path, tmp_path: Path) -> None:
    assert call("convert", disk / "model", "nope", "--scheme", "nope").exit_code == 0
    refused(
        call("calibrate", "nope", "new.json", "--texts", disk / "texts", *SMALL),
        "converted already",
    )
    assert not (tmp_path / "new.json").exists()


def test_show_and_convert_name_what_was_chosen(call: Any, disk: Path, tmp_path: Path) -> None:
    chosen = harmless(disk / "made.json")
    shown = call("show", disk / "model", *AUTO, "--calibration", disk / "made.json")
    assert shown.exit_code == 0, shown.output
    assert "nope_interleaved(layers=auto:2)" in shown.stdout
    assert f"chosen by calibration: nope_interleaved(layers={chosen})" in shown.stdout
    assert call("convert", disk / "model", "new", *AUTO, "--calibration", disk / "made.json"
                ).exit_code == 0  # fmt: skip
    plan = get_plan(load_model("new"))
    assert [i for i, layer in enumerate(plan.layers) if not layer.rotated] == chosen
    again = call("show", "new")
    assert f"chosen by calibration: nope_interleaved(layers={chosen})" in again.stdout
    own = call("show", disk / "model", "--scheme", "p_rope", "--set", "select=sensitivity", "--set",
               "per_layer=true", "--calibration", disk / "made.json", "--json")  # fmt: skip
    found = json.loads(own.stdout)["plan"]
    assert sum(map(len, found["chosen"]["select"])) == 4 * 2
    assert found["scheme"]["select"] == "sensitivity"


@pytest.mark.parametrize("command", ["show", "convert", "eval"])
@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (AUTO, "needs a calibration of the model; make one with"),
        ((*AUTO, "--calibration", "absent.json"), "absent.json: no such file"),
        ((*AUTO, "--calibration", "other.json"), "made for another model"),
        ((*AUTO, "--calibration", "list.json"), "list.json: not a calibration"),
        (("--calibration", "other.json"), "scheme"),
        (
            ("--scheme", "nope", "--set", "layers=auto:5", "--calibration", "made.json"),
            "auto:5 is out of range",
        ),
    ],
)
def test_a_calibration_that_does_not_fit_is_refused(
    call: Any, disk: Path, tmp_path: Path, command: str, arguments: tuple[str, ...], part: str
) -> None:
    calibration_of(spec("llama"), layers={"ablation": [1.0] * 8}).save(tmp_path / "other.json")
    (tmp_path / "made.json").write_bytes((disk / "made.json").read_bytes())
    (tmp_path / "list.json").write_text("[1]")
    extra = ("new",) if command == "convert" else ()
    refused(call(command, disk / "model", *extra, *arguments), part)
    assert not (tmp_path / "new").exists()


def test_a_ranking_without_pairs_has_no_heat_map() -> None:
    llama = spec("llama")
    made = calibration_of(llama, layers={"ablation": [1.0] * 8})
    assert tables.pair_heat(made) is None
    assert tables.layer_table(made, llama).row_count == 8
    still = tuple(map(drop_rotation, llama.layers[4:]))
    half = dataclasses.replace(llama, layers=llama.layers[:4] + still)
    assert tables.layer_table(made, half).row_count == 4


@pytest.fixture(scope="module")
def finished(disk: Path) -> tuple[Path, list[str]]:
    """A finished run of the recipe with a budget, and what was said; tests leave it as it is."""
    said: list[str] = []
    pipeline.run(load_recipe(disk / "tiny.yaml"), disk / "finished", say=said.append)
    return disk / "finished", said


class TestRun:
    def test_it_calibrates_first(self, finished: tuple[Path, list[str]]) -> None:
        out, said = finished
        chosen = harmless(out / "calibration.json")
        plan = get_plan(load_model(out / "converted"))
        assert plan.chosen_dict == {"name": "nope_interleaved", "layers": chosen}
        assert json.loads((out / "plan.json").read_text()) == plan.to_json()
        record = json.loads((out / "healed" / "heal.json").read_text())
        assert record["plan_digest"] == plan.digest
        stages = [line.partition(":")[0] for line in said[2:]]
        assert stages[:3] == ["calibrate", "chosen by calibration", "convert"]
        assert said[1].startswith("about ") and ": calibrate " in said[1]

    def test_it_goes_on_with_the_calibration_it_has(
        self, finished: tuple[Path, list[str]], disk: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        out, _ = finished
        monkeypatch.setattr(pipeline, "calibrate_watched", None)
        said: list[str] = []
        pipeline.run(load_recipe(disk / "tiny.yaml"), out, say=said.append)
        assert "calibrate: done before, skipped" in said
        kept = (out / "calibration.json").read_bytes()
        (out / "calibration.json").unlink()
        try:  # the converted model says what was chosen
            pipeline.run(load_recipe(disk / "tiny.yaml"), out, say=said.append)
        finally:
            (out / "calibration.json").write_bytes(kept)

    def test_a_given_calibration_is_used(
        self, disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(pipeline, "calibrate_watched", None)
        made = Calibration.load(disk / "made.json")
        calibration_of_last = {"ablation": (4.0, 3.0, 2.0, 1.0)}
        Calibration(made.base, 1, layers=calibration_of_last).save(tmp_path / "mine.json")
        changes = [f"calibration={tmp_path / 'mine.json'}", "heal.tokens=0"]
        pipeline.run(load_recipe(disk / "tiny.yaml", changes), tmp_path / "out", say=lambda _: None)
        plan = get_plan(load_model(tmp_path / "out" / "converted"))
        assert plan.chosen_dict == {"name": "nope_interleaved", "layers": [2, 3]}
        assert not (tmp_path / "out" / "calibration.json").exists()

    @pytest.mark.parametrize(
        ("override", "part"),
        [
            ("scheme.layers=auto:5", "auto:5 is out of range"),
            ("scheme={name: p_rope, p: 0.1, select: norm}", "keeps none of 8"),
            ("calibration=absent.json", "absent.json: no such file"),
        ],
    )
    def test_bad_budgets_are_found_before_anything_is_written(
        self, disk: Path, tmp_path: Path, override: str, part: str
    ) -> None:
        with pytest.raises(PosencError, match=part):
            pipeline.run(load_recipe(disk / "tiny.yaml", [override]), tmp_path / "out")
        assert list(tmp_path.iterdir()) == []

    def test_another_choice_in_the_same_folder_is_refused(
        self, finished: tuple[Path, list[str]], disk: Path
    ) -> None:
        out, _ = finished
        kept = (out / "calibration.json").read_bytes()
        made = Calibration.load(out / "calibration.json")
        others = {"ablation": tuple(-value for value in made.layers["ablation"])}
        Calibration(made.base, 1, layers=others).save(out / "calibration.json")
        try:
            with pytest.raises(PosencError, match="or by another choice, not what the recipe"):
                pipeline.run(load_recipe(disk / "tiny.yaml"), out)
        finally:
            (out / "calibration.json").write_bytes(kept)

    def test_the_printed_commands_choose_the_same(
        self, call: Any, finished: tuple[Path, list[str]], disk: Path
    ) -> None:
        printed = call("run", disk / "tiny.yaml", "--out", "by_hand", "--dry-run").stdout
        lines = [line for line in printed.splitlines() if line.startswith("hf-posenc ")]
        assert [line.split()[1] for line in lines[:2]] == ["calibrate", "convert"]
        for line in lines[:2]:
            result = call(*shlex.split(line)[1:])
            assert result.exit_code == 0, (line, result.output)
        by_hand, by_run = Path("by_hand"), finished[0]
        made, run = (Calibration.load(out / "calibration.json") for out in (by_hand, by_run))
        assert (made.layers, made.pairs) == (run.layers, run.pairs)
        plans = [get_plan(load_model(out / "converted")) for out in (by_hand, by_run)]
        assert plans[0] == plans[1] and plans[0].chosen == plans[1].chosen

    def test_healing_alone_asks_for_a_calibration(self, disk: Path, tmp_path: Path) -> None:
        recipe = load_recipe(disk / "tiny.yaml")
        with pytest.raises(PosencError, match=r"`hf-posenc run` makes one.*calibration=FILE"):
            heal(recipe, out=tmp_path / "out")
        assert list(tmp_path.iterdir()) == []
        given = load_recipe(disk / "tiny.yaml", [f"calibration={disk / 'made.json'}"])
        record = heal(given, out=tmp_path / "out")
        assert record.scheme == {"name": "nope_interleaved", "layers": "auto:2"}

    def test_texts_are_fetched_for_the_calibration_alone(self, disk: Path) -> None:
        recipe = load_recipe(disk / "tiny.yaml", ["heal.tokens=0"])
        assert f"{disk / 'texts'}: on this machine" in downloads(recipe)


def test_a_recipe_without_a_calibration_reads_as_before(disk: Path) -> None:
    plain = load_recipe(disk / "tiny.yaml")
    assert "calibration" not in plain.model_dump() and "calibration" not in plain.to_yaml()
    given = load_recipe(disk / "tiny.yaml", ["calibration=x.json"])
    assert given.model_dump()["calibration"] == "x.json" and given.digest != plain.digest


def test_search_writes_a_scheme_that_convert_reads(call: Any, disk: Path, tmp_path: Path) -> None:
    source = ("--texts", disk / "texts", *SMALL)
    done = call("search", disk / "model", tmp_path / "found.yaml", "--drop", 2, *source)
    assert done.exit_code == 0, done.output
    text = (tmp_path / "found.yaml").read_text()
    assert text.count("#   layer ") == 2
    converted = call("convert", disk / "model", "out", "--scheme-file", tmp_path / "found.yaml")
    assert converted.exit_code == 0, converted.output
    plan = get_plan(load_model(tmp_path / "out"))
    dropped = sorted(int(line.split()[2][:-1]) for line in text.splitlines()[1:3])
    assert [i for i, layer in enumerate(plan.layers) if not layer.rotated] == dropped
    refused(call("search", disk / "model", tmp_path / "found.yaml", "--drop", 2, *source), "exists")
    for budget, unit in ((99, "layers"), (0, "pairs"), (1, "heads")):
        asked = ("--drop", budget, "--unit", unit, *source)
        refused(call("search", disk / "model", "x.yaml", *asked), unit)
    refused(call("search", tmp_path / "out", "x.yaml", "--drop", 1, *source), "converted")
    assert not (tmp_path / "x.yaml").exists()


def test_what_cannot_end_well_is_refused_before_it_begins(call: Any, disk: Path) -> None:
    """A file for a folder, rows beyond the model: found before anything is loaded or written."""
    texts = ("--texts", disk / "texts")
    below = disk / "made.json" / "x.json"
    refused(call("calibrate", disk / "model", below, *SMALL, *texts), "no folder to write to")
    long = ("--tokens", 2048, "--row-tokens", 1024)
    for command in (("calibrate",), ("search", "--drop", 1)):
        refused(call(*command, disk / "model", "new/x", *long, *texts), "exceeds the model's 512")
    convert = ("convert", disk / "model", "out", "--scheme", "nope", "--compensate")
    refused(call(*convert, *long, *texts), "exceeds the model's 512")
    refused(call("calibrate", disk / "model", "x", "--seed", -1, *SMALL, *texts), "seed")
    assert not Path("new").exists() and not Path("out").exists()
