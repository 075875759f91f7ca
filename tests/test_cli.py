"""Every command through typer: what it prints and leaves, and how it refuses bad input."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from run_folders import make_run
from tiny_models import tiny_config, tokens
from tiny_runs import LENGTH, save_model, save_recipe, save_texts

from hf_posenc import get_plan, load_model, patch_model
from hf_posenc.cli.options import parse_lengths, parse_settings
from hf_posenc.errors import PosencError
from hf_posenc.evaluation import texts as evaluation_texts
from hf_posenc.heal import list_recipes, load_recipe
from hf_posenc.schemes import as_scheme, list_schemes

COMMANDS = ("run", "schemes", "show", "calibrate", "convert", "export", "heal", "eval", "report")
NOPE = ("--scheme", "nope_interleaved", "--set", "every=2")


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, texts and a recipe, shared by the tests, which write elsewhere."""
    root = tmp_path_factory.mktemp("disk")
    save_recipe(root / "tiny.yaml", save_model(root / "model"), save_texts(root / "texts"))
    return root


def refused(result: Any, *parts: str, folder: Path | None = None) -> None:
    """Exit code 2, one line on stderr that holds `parts`, nothing on stdout or in `folder`."""
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("hf-posenc: ") and result.stderr.count("\n") == 1, result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""
    for part in parts:
        assert part in result.stderr
    if folder is not None:
        assert list(folder.iterdir()) == []


@pytest.mark.parametrize("command", COMMANDS)
def test_help_ends_with_an_example(call: Any, command: str) -> None:
    result = call(command, "--help")
    assert result.exit_code == 0
    assert f"Example: hf-posenc {command} " in " ".join(result.stdout.split()) + " "


def test_no_arguments_print_the_commands(call: Any) -> None:
    result = call()
    assert result.exit_code == 0 and result.stderr == ""
    for command in COMMANDS:
        assert command in result.stdout


def test_schemes_lists_options_defaults_and_sources(call: Any) -> None:
    table = call("schemes").stdout
    found = json.loads(call("schemes", "--json").stdout)
    assert set(found) == set(list_schemes())
    assert found["p_rope"]["options"] == {
        **{"layers": "all", "p": "0.25", "select": "high", "per_layer": "False"}
    }
    for name, about in found.items():
        assert name in table and about["source"] and about["summary"]
    assert "every=4" in table


def test_show_prints_the_checkpoints_own_plan_and_that_of_a_scheme(call: Any, disk: Path) -> None:
    own = call("show", disk / "model")
    assert own.exit_code == 0
    assert re.search(r"0-3\s+8 of 8\s+theta 500,000\s+6.28 to 609k", own.stdout)
    changed = call("show", disk / "model", *NOPE)
    assert re.search(r"0, 2\s+8 of 8", changed.stdout)
    assert re.search(r"1, 3\s+0 of 8\s+none\s+none \(NoPE\)", changed.stdout)
    assert re.search(r"^ +1  ·{8}$", changed.stdout, re.MULTILINE)
    assert "\x1b" not in changed.stdout


def test_show_needs_no_weights_and_draws_a_png(call: Any, tmp_path: Path) -> None:
    tiny_config("qwen3").save_pretrained(tmp_path / "config_only")
    result = call("show", tmp_path / "config_only", "--scheme", "p_rope", "--set", "p=.5",
                  "--png", "plan.png")  # fmt: skip
    assert result.exit_code == 0, result.output
    assert re.search(r"0-3\s+6 of 12", result.stdout)
    assert Path("plan.png").read_bytes()[:4] == b"\x89PNG"


def test_show_json_is_the_plan(call: Any, disk: Path) -> None:
    found = json.loads(call("show", disk / "model", *NOPE, "--json").stdout)
    model = patch_model(load_model(disk / "model"), "nope_interleaved", every=2)
    assert found["plan"] == get_plan(model).to_json()
    assert found["rows"][1]["layers"] == "1, 3"


def test_show_reads_a_converted_checkpoint_and_refuses_another_scheme_on_it(
    call: Any, disk: Path, tmp_path: Path
) -> None:
    assert call("convert", disk / "model", tmp_path / "new", *NOPE).exit_code == 0
    assert "nope_interleaved(every=2)" in call("show", tmp_path / "new").stdout
    refused(call("show", tmp_path / "new", "--scheme", "nope"), "converted already")
    refused(call("convert", tmp_path / "new", tmp_path / "x", "--scheme", "nope"), "converted")
    assert not (tmp_path / "x").exists()


def test_convert_saves_what_patch_model_makes(call: Any, disk: Path, tmp_path: Path) -> None:
    result = call("convert", disk / "model", tmp_path / "new", *NOPE)
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == str(tmp_path / "new")
    expected = patch_model(load_model(disk / "model"), "nope_interleaved", every=2)
    ids = tokens(1, 80)
    with torch.no_grad():
        found = load_model(tmp_path / "new")(ids).logits
        assert torch.equal(found, expected(ids).logits)
    assert (tmp_path / "new" / "tokenizer.json").is_file()


def test_export_writes_a_stock_checkpoint_and_refuses_what_has_none(
    call: Any, disk: Path, tmp_path: Path
) -> None:
    assert call("convert", disk / "model", tmp_path / "new", *NOPE).exit_code == 0
    result = call("export", tmp_path / "new", tmp_path / "stock")
    assert result.exit_code == 0, result.output
    assert "SmolLM3ForCausalLM" in result.output
    config = json.loads((tmp_path / "stock" / "config.json").read_text())
    assert config["model_type"] == "smollm3" and "posenc" not in config
    shown = call("show", tmp_path / "stock")
    assert shown.exit_code == 0 and "smollm3" in shown.output

    assert call("convert", disk / "model", tmp_path / "bias", "--scheme", "alibi").exit_code == 0
    refused(call("export", tmp_path / "bias", tmp_path / "none"), "bias")
    assert not (tmp_path / "none").exists()
    refused(call("export", tmp_path / "new", tmp_path / "x", "--target", "smolm3"), "smollm3")


def test_convert_takes_a_composition_from_a_file(call: Any, disk: Path, tmp_path: Path) -> None:
    file = tmp_path / "scheme.yaml"
    file.write_text(
        "name: compose\ngroups:\n- {layers: 0-1, scheme: nope}\n"
        "- {layers: '2', scheme: {name: p_rope, p: 0.5}}\n"
    )
    result = call("convert", disk / "model", tmp_path / "new", "--scheme-file", file)
    assert result.exit_code == 0, result.output
    plan = get_plan(load_model(tmp_path / "new"))
    assert [layer.num_rotated for layer in plan.layers] == [0, 0, 4, 8]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("--scheme", "nope_interleavd"), ("did you mean 'nope_interleaved'?",)),
        (("--scheme", "nope_interleaved", "--set", "evry=4"), ("did you mean 'every'?",)),
        (("--scheme", "p_rope", "--set", "p=1.5"), ("p=1.5",)),
        (("--scheme", "p_rope", "--set", "p=0"), ("p=0",)),
        (("--scheme", "p_rope", "--set", "p=NaN"), ("p=nan",)),
        (("--scheme", "partial", "--set", "fraction=-0.5"), ("fraction=-0.5",)),
        (("--scheme", "partial", "--set", "fraction=0.3125"), ("rotary",)),
        (("--scheme", "nope", "--set", "layers=0-9"), ("layer 9", "layers 0 to 3")),
        (("--scheme", "nope", "--set", "layers=auto:2"), ("needs a calibration",)),
        (("--scheme", "nope", "--set", "layers"), ("option=value",)),
        (("--scheme", "nope", "--set", "layers=0", "--set", "layers=1"), ("given twice",)),
        (("--scheme", "nope", "--set", "layers={"), ("neither JSON nor YAML",)),
        (("--set", "every=4"), ("--scheme",)),
        ((), ("no scheme given",)),
        (("--scheme-file", "absent.yaml"), ("absent.yaml",)),
        (("--scheme", "nope", "--scheme-file", "absent.yaml"), ("leave out --scheme",)),
        (("--scheme", "nope", "--dtype", "bf16"), ("did you mean 'bfloat16'?",)),
    ],
)
def test_a_bad_scheme_or_option_is_refused_before_anything_is_written(
    call: Any, disk: Path, tmp_path: Path, arguments: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    refused(call("convert", disk / "model", "new", *arguments), *parts, folder=tmp_path)


@pytest.mark.parametrize("text", ["- a\n- b\n", "name: [", "\x00"])
def test_a_bad_scheme_file_is_refused(call: Any, disk: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "scheme.json").write_text(text)
    refused(call("convert", disk / "model", "new", "--scheme-file", "scheme.json"), "scheme.json")
    assert not (tmp_path / "new").exists()


def corrupt_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00not json")


def corrupt_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama", ')


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize("spoil", [corrupt_weights, corrupt_config, no_weights])
def test_a_damaged_checkpoint_is_refused(call: Any, tmp_path: Path, spoil: Any) -> None:
    folder = save_model(tmp_path / "model")
    spoil(folder)
    refused(call("convert", folder, tmp_path / "new", *NOPE), str(folder))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


@pytest.mark.parametrize("command", ["show", "convert", "eval"])
@pytest.mark.parametrize(
    ("model", "part"),
    [
        ("./absent", "no such file or folder"),
        ("a/b/c", "no such file or folder"),
        ("empty", "no config.json"),
        ("notes.txt", "not a model"),
    ],
)
def test_a_model_that_is_not_there_is_refused(
    call: Any, tmp_path: Path, command: str, model: str, part: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("not a model")
    extra = ("new",) if command == "convert" else ()
    scheme = () if command == "show" else NOPE
    refused(call(command, model, *extra, *scheme), part)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "notes.txt"]


@pytest.mark.parametrize("family", ["bert", "t5", "mamba"])
def test_a_model_without_a_rotary_decoder_is_refused(
    call: Any, tmp_path: Path, family: str
) -> None:
    from transformers import AutoConfig

    small = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 32}
    AutoConfig.for_model(family, **small).save_pretrained(tmp_path / "model")
    refused(call("convert", tmp_path / "model", tmp_path / "new", *NOPE))
    refused(call("show", tmp_path / "model"))
    assert not (tmp_path / "new").exists()


def test_an_output_that_holds_something_is_refused_before_the_model_is_read(
    call: Any, tmp_path: Path
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("keep")
    refused(call("convert", "no/such-model", "full", *NOPE), "full: exists and is not empty")
    assert (tmp_path / "full" / "mine.txt").read_text() == "keep"
    (tmp_path / "old.json").write_text("keep")
    refused(call("eval", "no/such-model", "--out", "old.json"), "old.json: exists")
    refused(call("show", "no/such-model", "--png", "plan.svg"), "ends in .png")


def test_eval_prints_every_score_and_writes_the_record(
    call: Any, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation_texts, "ESSAYS", str(disk / "texts"))
    common = ("eval", disk / "model", "--tasks", "ppl_bins", "--lengths", "64", "--limit", "3")
    assert call(*common, "--out", "stock.json").exit_code == 0
    result = call(*common, *NOPE, "--variant", "converted", "--out", "new.json")
    assert result.exit_code == 0, result.output
    stock, new = (json.loads(Path(name).read_text()) for name in ("stock.json", "new.json"))
    assert (new["variant"], new["model"]) == ("converted", str(disk / "model"))
    assert new["scheme"] == {"name": "nope_interleaved", "every": 2} and stock["scheme"] is None
    assert [s["value"] for s in stock["scores"]] != [s["value"] for s in new["scores"]]
    for score in new["scores"]:
        assert f"{score['value']:.4f}" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("--tasks", "ppl_bins", "--lengths", "4k"), ("4096", "512")),
        (("--lengths", "1x"), ("1x",)),
        (("--limit", "0"), ("limit 0",)),
        (("--limit", "many"), ("--limit", "--help")),
        (("--texts", "absent.txt", "--tasks", "ppl_bins", "--lengths", "64"), ("absent.txt",)),
    ],
)
def test_eval_refuses_what_it_cannot_score(
    call: Any, disk: Path, tmp_path: Path, arguments: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    refused(call("eval", disk / "model", *arguments, "--out", "x.json"), *parts, folder=tmp_path)


def test_heal_trains_and_can_be_called_again(call: Any, disk: Path, tmp_path: Path) -> None:
    result = call("heal", disk / "tiny.yaml", "--out", tmp_path / "healed")
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == str(tmp_path / "healed")
    record = (tmp_path / "healed" / "heal.json").read_bytes()
    assert call("heal", disk / "tiny.yaml", "--out", tmp_path / "healed").exit_code == 0
    assert (tmp_path / "healed" / "heal.json").read_bytes() == record
    refused(call("heal", disk / "tiny.yaml", "--out", tmp_path / "healed", "--set", "heal.lr=1"),
            "another recipe")  # fmt: skip


def test_heal_takes_a_converted_checkpoint(call: Any, disk: Path, tmp_path: Path) -> None:
    call("convert", disk / "model", tmp_path / "converted", *NOPE, "--dtype", "float32")
    result = call("heal", disk / "tiny.yaml", "--model", tmp_path / "converted", "--out", "healed")
    assert result.exit_code == 0, result.output
    assert not (tmp_path / "healed" / "base").exists()
    adapter = load_model(tmp_path / "healed" / "adapter")
    assert get_plan(adapter).label == "nope_interleaved(every=2)"
    refused(call("heal", disk / "tiny.yaml", "--model", disk / "model", "--out", "x"))
    refused(call("heal", disk / "tiny.yaml", "--control", "--out", "x"), "without ce")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("command", ["run", "heal"])
@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("quickstrt",), ("did you mean 'quickstart'?",)),
        (("absent.yaml",), ("absent.yaml",)),
        (("quickstart", "--set", "heal.lrr=1"), ("heal.lr",)),
        (("quickstart", "--set", "scheme={name: nop}"), ("nop",)),
        (("quickstart", "--set", "heal.lr=fast"), ("heal.lr",)),
        ((), ("RECIPE", "--help")),
    ],
)
def test_a_bad_recipe_is_refused(
    call: Any, tmp_path: Path, command: str, arguments: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    refused(call(command, *arguments), *parts, folder=tmp_path)


def test_heal_refuses_a_text_shorter_than_one_row(call: Any, tmp_path: Path, disk: Path) -> None:
    texts = save_texts(tmp_path / "short", files=2, sentences=2)
    recipe = save_recipe(tmp_path / "short.yaml", disk / "model", texts)
    refused(call("heal", recipe, "--out", "healed"), "less than one row")
    refused(call("run", recipe, "--out", "run", "--set", "eval.tasks=[]"), "less than one row")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["short", "short.yaml"]


@pytest.mark.parametrize("recipe", list_recipes())
def test_dry_run_prints_commands_that_parse_and_touches_nothing(
    call: Any, tmp_path: Path, recipe: str
) -> None:
    result = call("run", recipe, "--dry-run")
    assert result.exit_code == 0, result.output
    assert list(tmp_path.iterdir()) == []
    lines = [line for line in result.stdout.splitlines() if line.startswith("hf-posenc ")]
    loaded = load_recipe(recipe)
    commands = [line.split()[1] for line in lines]
    if as_scheme(loaded.scheme).needs_calibration:
        assert commands.pop(0) == "calibrate"
    assert commands[0] == "convert" and ("heal" in commands) == (loaded.heal.tokens > 0)
    assert commands.count("eval") == 2 + commands.count("heal")
    assert lines[-1] == f"hf-posenc report runs/{recipe}"


def test_dry_run_commands_do_what_run_does(
    call: Any, disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shlex

    monkeypatch.setattr(evaluation_texts, "ESSAYS", str(disk / "texts"))
    changes = ("--set", "eval.tasks=[ppl_bins]", "--set", "eval.limit=2")
    printed = call("run", disk / "tiny.yaml", "--out", "by_hand", *changes, "--dry-run").stdout
    for line in (line for line in printed.splitlines() if line.startswith("hf-posenc ")):
        result = call(*shlex.split(line)[1:])
        assert result.exit_code == 0, (line, result.output)
    assert call("run", disk / "tiny.yaml", "--out", "by_run", *changes).exit_code == 0
    for variant in ("stock", "converted", "healed"):
        by_hand, by_run = (
            json.loads((tmp_path / way / "eval" / f"{variant}.json").read_text())
            for way in ("by_hand", "by_run")
        )
        assert by_hand["scores"] == by_run["scores"]
    assert (tmp_path / "by_hand" / "report.html").is_file()


def test_report_names_its_file(call: Any, tmp_path: Path) -> None:
    one, two = make_run(tmp_path / "one"), make_run(tmp_path / "two")
    assert call("report", one).stdout.strip() == str(one / "report.html")
    assert call("report", one, two).stdout.strip() == "comparison.html"
    assert call("report", one, "--out", "x.html").stdout.strip() == "x.html"
    refused(call("report", tmp_path / "absent"), "absent")
    (one / "eval" / "stock.json").write_text("{")
    refused(call("report", one, "--out", "y.html"), "stock.json")
    assert not Path("y.html").exists()


def test_debug_shows_the_traceback(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_POSENC_DEBUG", "1")
    result = call("convert", "./absent", "new", *NOPE)
    assert isinstance(result.exception, PosencError)


def test_an_interrupt_says_how_to_go_on(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_posenc.show.read_plan", interrupted)
    result = call("show", "model")
    assert result.exit_code == 130 and "go on from here" in result.stderr


def test_settings_read_numbers_lists_and_text() -> None:
    texts = ["p=.5", "theta=1e6", "layers=0-3,8", "more=[1, 2]", "scaling={type: yarn, factor: 4}"]
    assert parse_settings([*texts, "preserve=false", "none=null", "eq=a=b"]) == {
        **{"p": 0.5, "theta": 1e6, "layers": "0-3,8", "more": [1, 2]},
        **{"scaling": {"type": "yarn", "factor": 4}, "preserve": False, "none": None, "eq": "a=b"},
    }
    assert parse_lengths("1k, 2048,320") == [1024, 2048, LENGTH]


def test_the_module_is_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_posenc.cli import main

    monkeypatch.setattr(sys, "argv", ["hf-posenc", "schemes", "--json"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 0
