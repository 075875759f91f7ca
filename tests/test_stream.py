"""convert_checkpoint against patch_model + save_pretrained, and against being killed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from matrix import BY_ID, FAMILIES, SCHEMES, SchemeRow, options_for
from patching import patch
from safetensors import safe_open
from tiny_models import logits, tiny_model
from transformers import AutoModelForCausalLM

import hf_posenc
from hf_posenc.checkpoint import shard_writer
from hf_posenc.checkpoint.stream import convert_checkpoint
from hf_posenc.errors import PosencError

_SHARDED = "60KB"
# Every family meets each kind of change to stored rows; every scheme meets the family with most
# kinds of tensors to move.
_CASES = [
    *(("qwen3", row.id) for row in SCHEMES if not row.id.startswith(("rope-", "p_rope-"))),
    ("qwen3", "rope-longrope"),
    *(
        (family, row)
        for family in FAMILIES
        for row in ("interleaved", "partial-raw")
        if family != "qwen3"
    ),
    ("granite", "nope_interleaved"),
    ("olmo2", "partial-raw"),
]


def _save(family: str, folder: Path, dtype: torch.dtype = torch.bfloat16, **config: Any) -> Path:
    model = tiny_model(family, **config).to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(folder, max_shard_size=_SHARDED)
    return folder


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a dict)
                assert name not in found
                found[name] = file.get_tensor(name)
    return found


def _files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _convert(source: Path, target: Path, row: SchemeRow | str, **more: Any) -> Path:
    row = BY_ID[row] if isinstance(row, str) else row
    config = hf_posenc.ModelSpec.from_config(AutoModelForCausalLM.from_pretrained(source).config)
    options = options_for(row, config.num_frequencies)
    return convert_checkpoint(source, target, row.scheme, progress=False, **options, **more)


@pytest.mark.parametrize(("family", "row"), _CASES)
def test_equals_patching_and_saving(family: str, row: str, tmp_path: Path) -> None:
    # Olmo2's tables are float32 in every precision, so patching takes it in float32 only.
    dtype = torch.float32 if family == "olmo2" else torch.bfloat16
    source = _save(family, tmp_path / "source", dtype)
    model = AutoModelForCausalLM.from_pretrained(source)
    patch(model, row).save_pretrained(tmp_path / "patched", max_shard_size=_SHARDED)
    result = _convert(source, tmp_path / "out", row)
    expected, found = _tensors(tmp_path / "patched"), _tensors(result)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert tensor.dtype == found[name].dtype
        assert torch.equal(tensor, found[name]), name
    for name in ("config.json", "posenc_stub.py", "generation_config.json"):
        assert (result / name).read_text() == (tmp_path / "patched" / name).read_text(), name


@pytest.mark.parametrize("row", ["partial-raw", "interleaved", "interleaved-some"])
def test_some_rows_move_and_all_others_do_not(row: str, tmp_path: Path) -> None:
    source = _save("qwen3", tmp_path / "source", attention_bias=True)
    before, after = _tensors(source), _tensors(_convert(source, tmp_path / "out", row))
    moved = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    layers = (0, 2) if row == "interleaved-some" else range(4)
    kinds = ("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")
    norms = ("q_norm.weight", "k_norm.weight")
    assert moved == {
        f"model.layers.{layer}.self_attn.{kind}" for layer in layers for kind in (*kinds, *norms)
    }


def test_files_are_copied_whole_where_no_row_moves(tmp_path: Path) -> None:
    source = _save("llama", tmp_path / "source")
    for row in ("nope_interleaved", "interleaved-repaired"):
        result = _convert(source, tmp_path / row, row)
        for path in source.glob("*.safetensors"):
            assert path.read_bytes() == (result / path.name).read_bytes()


@pytest.mark.parametrize("row", ["compose", "interleaved"])
def test_the_output_computes_what_the_patched_model_does(row: str, tmp_path: Path) -> None:
    source = _save("qwen2", tmp_path / "source", torch.float32)
    expected = logits(patch(AutoModelForCausalLM.from_pretrained(source), row))
    loaded = AutoModelForCausalLM.from_pretrained(_convert(source, tmp_path / "out", row))
    assert hf_posenc.get_plan(loaded) is not None
    assert torch.equal(logits(loaded), expected)


def test_weights_of_one_file_and_the_decoder_alone(tmp_path: Path) -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    model.model.save_pretrained(tmp_path / "decoder")
    result = _convert(tmp_path / "decoder", tmp_path / "out", "partial-raw")
    assert not list(result.glob("*.index.json"))
    assert "layers.0.self_attn.q_proj.weight" in _tensors(result)
    loaded = AutoModelForCausalLM.from_pretrained(result, attn_implementation="eager")
    assert torch.equal(logits(loaded), logits(patch(model, "partial-raw")))


def test_pieces_smaller_than_a_tensor_and_no_help_from_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = _save("llama", tmp_path / "source")
    expected = _files(_convert(source, tmp_path / "plain" / "out", "compose"))
    monkeypatch.setattr(shard_writer, "_PIECE", 3000)
    monkeypatch.setattr(shard_writer, "_STEP", 777)
    assert _files(_convert(source, tmp_path / "pieces" / "out", "compose")) == expected

    def refuse(*_: Any, **__: Any) -> int:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "copy_file_range", refuse)
    assert _files(_convert(source, tmp_path / "other" / "out", "compose")) == expected


def test_the_index_lists_every_tensor_and_its_size_is_right(tmp_path: Path) -> None:
    source = _save("llama", tmp_path / "source")
    path = source / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    right = index["metadata"]["total_size"]
    index["metadata"]["total_size"] = 7
    path.write_text(json.dumps(index))
    written = json.loads((_convert(source, tmp_path / "out", "nope") / path.name).read_text())
    assert written["metadata"] == {**index["metadata"], "total_size": right}
    assert written["weight_map"] == index["weight_map"]


def test_companions_come_along_and_the_rest_stays(tmp_path: Path) -> None:
    source = _save("llama", tmp_path / "source")
    taken = {
        **{"tokenizer.json": "{}", "tokenizer_config.json": "{}", "chat_template.jinja": "x"},
        **{"LICENSE": "terms", "NOTICE.txt": "n", "additional_chat_templates/tool.jinja": "y"},
        **{"merges.txt": "a b", "tokenizer.model": "binary"},
    }
    left = ("pytorch_model.bin", "optimizer.pt", "modeling_x.py", "consolidated.safetensors")
    left += ("params.json", "model.gguf", ".gitattributes", "tokenizer.model.pkl")
    (source / "additional_chat_templates").mkdir()
    (source / "original").mkdir()
    for name, text in (taken | dict.fromkeys(left, "no")).items():
        (source / name).write_text(text)
    result = _convert(source, tmp_path / "out", "nope")
    for name, text in taken.items():
        assert (result / name).read_text() == text
    shards = {path.name for path in source.glob("model-*.safetensors")}
    ours = {"config.json", "model.safetensors.index.json", "README.md", "posenc_stub.py"}
    assert _files(result).keys() == shards | ours | taken.keys() | {"generation_config.json"}
    with_code = _convert(source, tmp_path / "code", "nope", keep_code=True)
    assert _files(with_code).keys() - _files(result).keys() == {"modeling_x.py"}


def test_a_hub_id_fetches_what_is_needed_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = _save("llama", tmp_path / "source")
    needed = [path.name for path in source.iterdir()]
    needed += ["tokenizer.json", "LICENSE", "README.md", "additional_chat_templates/x.jinja"]
    others = ["pytorch_model.bin", "consolidated.safetensors", "original/model.safetensors"]
    others += ["adapter_model.safetensors", "modeling.py", "model.gguf", "onnx/model.onnx"]
    asked: list[str] = []

    def snapshot_download(repo: str, **filters: Any) -> str:
        assert repo == "owner/name"
        asked.extend(filter_repo_objects(needed + others, **filters))
        return str(source)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    out = convert_checkpoint("owner/name", tmp_path / "out", "nope", progress=False)
    assert sorted(asked) == sorted(needed)
    assert (out / "model.safetensors.index.json").is_file()


def test_an_empty_output_folder_is_used_and_a_relative_one_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = _save("llama", tmp_path / "source")
    (tmp_path / "empty").mkdir()
    assert (_convert(source, tmp_path / "empty", "nope") / "config.json").is_file()
    monkeypatch.chdir(tmp_path)
    assert (_convert(Path("source"), Path("here"), "nope") / "config.json").is_file()


_WRITES: tuple[tuple[Any, str], ...] = (
    *((os, name) for name in ("copy_file_range", "fsync", "replace", "unlink", "mkdir")),
    *((Path, name) for name in ("replace", "unlink", "mkdir")),
    (shard_writer, "_write_all"),
)


def _killed_at(
    event: int, work: Callable[[], Any], watched: tuple[tuple[Any, str], ...] = _WRITES
) -> bool:
    """Run `work` in a child that kills itself at its n-th `watched` call; whether it got there."""
    child = os.fork()
    if child == 0:
        count = [0]

        def counting(function: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                count[0] += 1
                if count[0] == event:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **kwargs)

            return wrapped

        for owner, name in watched:
            setattr(owner, name, counting(getattr(owner, name)))
        try:
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def test_killed_anywhere_and_resumed_it_is_bitwise_the_same(tmp_path: Path) -> None:
    source = _save("llama", tmp_path / "source", num_hidden_layers=2)
    target = tmp_path / "out"
    before = _files(source)
    expected = _files(_convert(source, tmp_path / "whole" / "out", "partial-raw"))

    def work() -> None:
        convert_checkpoint(source, target, "partial", fraction=0.5, pairs="raw", progress=False)

    event, kills = 1, 0
    while _killed_at(event, work):
        kills += 1
        if target.exists():  # the rename was done; at most the marks are left
            left = _files(target)
            assert {name: left[name] for name in expected} == expected
        else:
            work()
            assert _files(target) == expected
        for path in (target, tmp_path / ".out.partial"):
            if path.exists():
                _remove(path)
        event += 4
    assert kills > 10
    assert _files(source) == before


def test_finished_shards_are_not_done_again(tmp_path: Path) -> None:
    source = _save("llama", tmp_path / "source")
    target, partial = tmp_path / "out", tmp_path / ".out.partial"

    def work() -> None:
        _convert(source, target, "partial-raw")

    inodes: dict[str, int] = {}
    for _ in range(3):  # each run ends when its third shard is about to be finished
        assert _killed_at(3, work, ((os, "fsync"),))
        now = {path.name: path.stat().st_ino for path in partial.glob("*.safetensors")}
        assert inodes.items() <= now.items()
        assert len(now) > len(inodes)
        inodes = now
    work()
    for name, inode in inodes.items():
        assert (target / name).stat().st_ino == inode
    assert not partial.exists()


@pytest.mark.parametrize("change", ["scheme", "source", "asked", "shard"])
def test_what_does_not_belong_together_is_begun_anew(change: str, tmp_path: Path) -> None:
    source = _save("llama", tmp_path / "source")
    target, partial = tmp_path / "out", tmp_path / ".out.partial"
    assert _killed_at(25, lambda: _convert(source, target, "partial-raw"))
    done = sorted(partial.glob("*.safetensors"))
    assert done
    row, more = "partial-raw", {}
    if change == "scheme":
        row = "interleaved"
    elif change == "source":
        _save("llama", source, rms_norm_eps=1e-5)
        for path in source.glob("*.safetensors"):
            os.utime(path, ns=(1, 1))
    elif change == "asked":
        more = {"resume": False}
    else:
        done[0].write_bytes(done[0].read_bytes()[:-1])
    marker = done[-1].stat().st_ino, done[-1].stat().st_mtime_ns
    _convert(source, target, row, **more)
    _convert(source, tmp_path / "whole" / "out", row)
    assert _files(target) == _files(tmp_path / "whole" / "out")
    written = target / done[-1].name
    kept = marker == (written.stat().st_ino, written.stat().st_mtime_ns)
    assert kept == (change == "shard")


def test_two_conversions_to_one_place_do_not_mix(tmp_path: Path) -> None:
    from hf_posenc.checkpoint.partial import partial_folder

    source = _save("llama", tmp_path / "source")
    with (
        partial_folder(tmp_path / "out", {}, resume=True),
        pytest.raises(PosencError, match="another conversion"),
    ):
        _convert(source, tmp_path / "out", "nope")


def _remove(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()
