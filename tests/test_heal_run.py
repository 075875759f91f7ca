"""heal() end to end on tiny models: records, determinism, resume, control, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from heal_case import converted, tiny_recipe, word_tokenizer
from peft import PeftModel
from safetensors.torch import load_file
from tiny_models import difference, tiny_model, tokens

from hf_posenc.checkpoint.io import load_model
from hf_posenc.errors import PosencError
from hf_posenc.heal import HealRecord, Recipe, heal
from hf_posenc.heal.trainer import HealTrainer

SOFT = 6.0  # q/k scale: attention that a few steps can move


def _heal(recipe: Recipe, out: Path, **options: Any) -> HealRecord:
    model = options.pop("model", None) or converted(recipe, scale=SOFT)
    return heal(recipe, out=out, model=model, tokenizer=word_tokenizer(), **options)


def _losses(record: HealRecord) -> list[float]:
    return [entry["loss"] for entry in record.log]


def _weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "adapter" / "adapter_model.safetensors")


class _Killed(Exception):
    pass


def _kill_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    usual = HealTrainer.log

    def log(self: HealTrainer, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and self.state.global_step > step:
            raise _Killed
        usual(self, logs, start_time)

    monkeypatch.setattr(HealTrainer, "log", log)


def test_healing_lowers_the_loss_and_leaves_a_complete_folder(tmp_path: Path) -> None:
    options = ("heal.tokens=7680", "heal.rows=8", "heal.heldout_every=10", "heal.lr=3.0e-3")
    recipe = tiny_recipe(tmp_path, *options, scheme="nope")
    out = tmp_path / "out"
    model = converted(recipe, scale=SOFT)
    record = _heal(recipe, out, model=model)
    written_files = {path.name for path in out.iterdir()}
    assert written_files == {"adapter", "base", "heal.json", "log.jsonl", "loss.png", "recipe.yaml"}
    assert sum(_losses(record)[-5:]) < 0.7 * sum(_losses(record)[:5])

    written = json.loads((out / "heal.json").read_text())
    assert HealRecord.read(out / "heal.json") == record
    assert (written["schema"], written["kind"], written["variant"]) == (1, "heal", "healed")
    assert written["scheme"] == {"name": "nope"}
    assert (written["tokens"], written["steps"], written["seed"]) == (7680, 30, 0)
    assert written["objective"] == {"kl": 1.0}
    assert [entry["step"] for entry in written["log"]] == list(range(1, 31))
    assert [entry["tokens"] for entry in written["log"]] == list(range(256, 7681, 256))
    assert written["log"][0]["lr"] == pytest.approx(3e-3)
    assert [entry["step"] for entry in written["heldout"]] == [0, 10, 20, 30]
    assert all(0 < entry["n_tokens"] <= 62 for entry in written["heldout"])
    assert written["seconds"] == pytest.approx(written["log"][-1]["seconds"], abs=0.01)
    assert written["tokens_per_second"] == pytest.approx(7680 / written["seconds"])
    assert written["peak_memory_bytes"] > 100 * 2**20
    assert written["provenance"]["versions"]["torch"]
    lines = (out / "log.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == written["log"]
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")

    model.eval()
    loaded = load_model(out / "adapter")
    assert isinstance(loaded, PeftModel)
    ids = tokens(2, 30)
    with torch.no_grad():
        assert torch.equal(
            loaded(input_ids=ids).logits, model(input_ids=ids, use_cache=False).logits
        )
    moved = tmp_path / "elsewhere"
    out.rename(moved)
    with torch.no_grad():
        assert torch.equal(
            load_model(moved / "adapter")(input_ids=ids).logits, loaded(input_ids=ids).logits
        )


def test_the_seed_decides_everything(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, "lora.dropout=0.1")
    first, again = (_heal(recipe, tmp_path / name) for name in ("a", "b"))
    assert _losses(first) == _losses(again)
    a, b = _weights(tmp_path / "a"), _weights(tmp_path / "b")
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    other = _heal(tiny_recipe(tmp_path, "lora.dropout=0.1", "seed=1"), tmp_path / "c")
    assert _losses(other) != _losses(first)


@pytest.mark.parametrize("norms", ["true", "false"])
def test_a_killed_run_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, norms: str
) -> None:
    recipe = tiny_recipe(
        *(tmp_path, "heal.save_steps=2", "heal.tokens=512", "lora.dropout=0.1"),
        *(f"heal.train_norms={norms}", "heal.gradient_accumulation=2", "heal.rows=1"),
    )
    whole = _heal(recipe, tmp_path / "whole")
    out = tmp_path / "out"
    with monkeypatch.context() as patch, pytest.raises(_Killed):
        _kill_after(patch, 5)
        _heal(recipe, out)
    assert [path.name for path in out.iterdir()] == ["checkpoints"]
    assert len((out / "checkpoints" / "log.jsonl").read_text().splitlines()) == 5
    # A kill in the middle of saving leaves a checkpoint without its last file.
    (out / "checkpoints" / "checkpoint-6").mkdir()

    with pytest.raises(PosencError, match=r"heal\.lr was 0\.01, is 0\.02"):
        _heal(recipe.model_copy(update={"heal": recipe.heal.model_copy(update={"lr": 0.02})}), out)

    seen: list[int] = []
    usual = HealTrainer.compute_loss

    def counted(self: HealTrainer, *args: Any, **kwargs: Any) -> Any:
        seen.append(self.state.global_step)
        return usual(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(HealTrainer, "compute_loss", counted)
        resumed = _heal(recipe, out)
    assert seen == [4, 4, 5, 5, 6, 6, 7, 7]
    assert _losses(resumed) == _losses(whole)
    assert resumed.heldout == whole.heldout
    a, b = _weights(tmp_path / "whole"), _weights(out)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not (out / "checkpoints").exists()


def test_a_finished_run_is_read_back_and_never_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny_recipe(tmp_path, "heal.heldout_rows=0")
    record = _heal(recipe, tmp_path / "out")
    assert record.heldout == []
    monkeypatch.setattr(HealTrainer, "train", None)
    assert _heal(recipe, tmp_path / "out") == record
    with pytest.raises(PosencError, match="another recipe"):
        _heal(tiny_recipe(tmp_path, "seed=5"), tmp_path / "out")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(PosencError, match="not empty"):
        _heal(recipe, tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "precious"


@pytest.mark.parametrize("objective", ["kl", "{ce: 1, hidden: 0.5}"])
def test_accumulation_steps_as_one_batch(tmp_path: Path, objective: str) -> None:
    """8 rows as 1 x 8 and as 8 x 1: equal losses and gradient norms."""
    common = (f"heal.objective={objective}", "heal.tokens=768", "heal.lr=1.0e-3")
    one, eight = (
        _heal(
            tiny_recipe(tmp_path, *common, f"heal.rows={r}", f"heal.gradient_accumulation={a}"),
            tmp_path / f"{r}x{a}",
        )
        for r, a in ((8, 1), (1, 8))
    )
    assert len(one.log) == 3
    for name in ("loss", "grad_norm"):
        assert [e[name] for e in one.log] == pytest.approx([e[name] for e in eight.log], rel=1e-4)


@pytest.mark.parametrize("checkpointing", ["true", "reentrant"])
def test_checkpointed_training_is_the_same(tmp_path: Path, checkpointing: str) -> None:
    plain = _heal(tiny_recipe(tmp_path), tmp_path / "plain")
    recipe = tiny_recipe(tmp_path, f"heal.gradient_checkpointing={checkpointing}")
    saved = _heal(recipe, tmp_path / "saved")
    assert _losses(saved) == pytest.approx(_losses(plain), rel=1e-5)


def test_the_control_is_the_unconverted_model_on_the_same_tokens(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, "heal.objective=ce", "heal.tokens=1280")
    assert recipe.wants_control
    stock = tiny_model("llama", scale=SOFT)
    record = _heal(recipe, tmp_path / "control", model=stock, variant="control")
    assert (record.variant, record.scheme, record.plan_digest) == ("control", None, None)
    assert record.log[-1]["loss"] < record.log[0]["loss"]
    healed = _heal(recipe, tmp_path / "healed")
    assert [e["tokens"] for e in healed.log] == [e["tokens"] for e in record.log]
    assert healed.heldout[0]["n_tokens"] == record.heldout[0]["n_tokens"]
    assert healed.heldout[0]["loss"] != record.heldout[0]["loss"]
    loaded = load_model(tmp_path / "control" / "adapter")
    assert loaded.get_base_model().config.model_type == "llama"


def test_requests_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    out = tmp_path / "out"
    refused: list[tuple[str, Recipe, dict[str, Any]]] = [
        (r"heal\.tokens is 0", tiny_recipe(tmp_path, "heal.tokens=0"), {}),
        ("control is the unconverted model itself", recipe, {"variant": "control"}),
        ("not converted", recipe, {"model": tiny_model("llama")}),
        ("runs p_rope", recipe, {"model": converted(tiny_recipe(tmp_path, scheme="p_rope"))}),
        (
            r"row_tokens is 512.*at most 256",
            tiny_recipe(tmp_path, "data.row_tokens=512", "heal.heldout_rows=0"),
            {},
        ),
        ("no such text source", tiny_recipe(tmp_path, "data.sources=nowhere"), {}),
        (r"less than one row", tiny_recipe(tmp_path, "data.row_tokens=100000"), {}),
        (
            "this one runs nope_interleaved",
            tiny_recipe(tmp_path, "heal.objective=ce"),
            {"variant": "control"},
        ),
        ("layers 0 to 3", tiny_recipe(
            tmp_path, "heal.objective=hidden", "heal.hidden_layers=[9]"), {}),
    ]  # fmt: skip
    for message, bad, options in refused:
        with pytest.raises(PosencError, match=message):
            _heal(bad, out, **options)
        assert not out.exists()


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, "heal.heldout_rows=0", "heal.save_steps=1", "heal.lr=1e25")
    out = tmp_path / "out"
    with pytest.raises(PosencError, match=r"loss is nan at step 2.*lower heal\.lr"):
        _heal(recipe, out)
    assert [path.name for path in out.iterdir()] == ["checkpoints"]
    saved = [path.name for path in (out / "checkpoints").glob("checkpoint-*")]
    assert saved == ["checkpoint-1"]


def test_a_damaged_model_is_refused(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    model = converted(recipe)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(PosencError, match="not finite"):
        _heal(recipe, tmp_path / "out", model=model)
    assert not (tmp_path / "out").exists()


def test_bfloat16_base_trains_an_fp32_adapter(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, "dtype=bfloat16", "heal.tokens=1280", "heal.objective=ce")
    stock = tiny_model("llama", scale=SOFT)
    stock.to(torch.bfloat16).save_pretrained(tmp_path / "stock")
    word_tokenizer().save_pretrained(tmp_path / "stock")
    recipe = recipe.model_copy(update={"model": str(tmp_path / "stock")})
    record = heal(recipe, out=tmp_path / "out")
    assert sum(_losses(record)[-5:]) < sum(_losses(record)[:5])
    weights = _weights(tmp_path / "out")
    lora = [tensor for name, tensor in weights.items() if "lora_" in name]
    assert lora and all(tensor.dtype == torch.float32 for tensor in lora)
    loaded = load_model(tmp_path / "out" / "adapter")
    assert next(loaded.get_base_model().parameters()).dtype == torch.bfloat16
    with torch.no_grad():
        healed = loaded(input_ids=tokens(1, 20)).logits
        with loaded.disable_adapter():
            assert difference(healed, loaded(input_ids=tokens(1, 20)).logits) > 0.1
