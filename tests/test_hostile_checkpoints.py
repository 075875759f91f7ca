"""Damaged, dishonest and impossible checkpoints: one clear line, source untouched, no output."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model

from hf_posenc.checkpoint import stream
from hf_posenc.checkpoint.safe_reader import read_shard
from hf_posenc.checkpoint.stream import convert_checkpoint
from hf_posenc.errors import PosencError

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound checkpoint of several shards."""
    folder = tmp_path_factory.mktemp("clean") / "source"
    tiny_model("llama", num_hidden_layers=2).save_pretrained(folder, max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.fixture
def source(clean: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    shutil.copytree(clean, tmp_path / "source")
    return tmp_path / "source"


def _state(folder: Path) -> dict[str, Any]:
    """Names, links, modes, times and bytes of everything in a folder."""
    return {
        str(path.relative_to(folder)): (
            path.lstat().st_mode,
            path.lstat().st_mtime_ns,
            path.readlink() if path.is_symlink() else None,
            path.read_bytes() if path.is_file() else None,
        )
        for path in sorted(folder.rglob("*"))
    }


def _refused(source: Path, target: Path, message: str, scheme: str = "nope", **options: Any) -> str:
    """Conversion fails with one line that matches, and leaves everything as it was."""
    around = sorted(target.parent.iterdir()) if target.parent.is_dir() else None
    before = _state(source)
    with pytest.raises(PosencError, match=message) as caught:
        convert_checkpoint(source, target, scheme, progress=False, **options)
    line = str(caught.value)
    assert "\n" not in line
    assert _state(source) == before
    assert (sorted(target.parent.iterdir()) if target.parent.is_dir() else None) == around
    return line


def _shards(source: Path) -> list[Path]:
    return sorted(source.glob("*.safetensors"))


def _edit_index(source: Path, change: Callable[[dict[str, Any]], None]) -> None:
    index = json.loads((source / INDEX).read_text())
    change(index)
    (source / INDEX).write_text(json.dumps(index))


def _edit_header(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Rewrite a header in place, the data unchanged."""
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    replaced = change(header)
    text = (replaced if isinstance(replaced, str) else json.dumps(header)).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def _entries(header: dict[str, Any]) -> list[dict[str, Any]]:
    """The entries of a header in the order of their data."""
    tensors = [value for key, value in header.items() if key != "__metadata__"]
    return sorted(tensors, key=lambda value: value["data_offsets"])


# --- the index ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shard",
    ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "x.bin", 7, None]
    + ["..\\outside.safetensors", "/tmp/x.safetensors"],
)
def test_an_index_that_points_elsewhere(shard: Any, source: Path, tmp_path: Path) -> None:
    shutil.copy(_shards(source)[0], tmp_path / "outside.safetensors")
    _edit_index(source, lambda index: index["weight_map"].update({"model.norm.weight": shard}))
    _refused(source, tmp_path / "out", "not a safetensors file of this folder")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"weight_map": []}', "\x00\xff", "null", "[" * 200_000]
)
def test_a_damaged_index(text: str, source: Path, tmp_path: Path) -> None:
    (source / INDEX).write_text(text)
    _refused(source, tmp_path / "out", "index")


def test_a_missing_shard(source: Path, tmp_path: Path) -> None:
    _shards(source)[1].unlink()
    _refused(source, tmp_path / "out", r"00002-of-\d+.safetensors: missing")


def test_a_tensor_in_two_shards(source: Path, tmp_path: Path) -> None:
    first, second = _shards(source)[:2]
    tensors = load_file(second)
    tensors["model.embed_tokens.weight"] = torch.zeros(2)
    assert "model.embed_tokens.weight" in load_file(first)
    save_file(tensors, second, {"format": "pt"})
    _refused(source, tmp_path / "out", "'model.embed_tokens.weight' is also in")


def test_a_tensor_twice_in_one_header(source: Path, tmp_path: Path) -> None:
    def twice(header: dict[str, Any]) -> str:
        text = json.dumps(header)
        name, value = next((k, v) for k, v in header.items() if k != "__metadata__")
        return text[:-1] + f", {json.dumps(name)}: {json.dumps(value)}}}"

    _edit_header(_shards(source)[0], twice)
    _refused(source, tmp_path / "out", "twice")


def test_an_index_that_names_the_wrong_shard_or_no_tensor(source: Path, tmp_path: Path) -> None:
    index = json.loads((source / INDEX).read_text())["weight_map"]
    other = next(shard for shard in index.values() if shard != index["model.norm.weight"])
    _edit_index(source, lambda index: index["weight_map"].update({"model.norm.weight": other}))
    _refused(source, tmp_path / "out", "'model.norm.weight' is in .* but it is in")
    _edit_index(source, lambda index: index["weight_map"].update({"new": other}))
    _edit_index(
        source,
        lambda edited: edited["weight_map"].update(
            {"model.norm.weight": index["model.norm.weight"]}
        ),
    )
    _refused(source, tmp_path / "out", "'new' is in .* nowhere")


def test_an_index_and_a_single_file(source: Path, tmp_path: Path) -> None:
    shutil.copy(_shards(source)[0], source / "model.safetensors")
    _refused(source, tmp_path / "out", "engines differ")


# --- safetensors files ----------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 9, 200, -1])
def test_a_truncated_shard(keep: int, source: Path, tmp_path: Path) -> None:
    path = _shards(source)[1]
    path.write_bytes(path.read_bytes()[:keep])
    _refused(source, tmp_path / "out", "truncated")


@pytest.mark.parametrize("length", [0, 3, 10**6, 10**9, 2**63, 2**64 - 1])
def test_a_header_length_that_lies(length: int, source: Path, tmp_path: Path) -> None:
    path = _shards(source)[0]
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
    _refused(source, tmp_path / "out", "truncated|damaged")


def test_overlapping_tensors(source: Path, tmp_path: Path) -> None:
    def overlap(header: dict[str, Any]) -> None:
        first, second = _entries(header)[:2]
        size = second["data_offsets"][1] - second["data_offsets"][0]
        second["data_offsets"] = [first["data_offsets"][0], first["data_offsets"][0] + size]

    _edit_header(_shards(source)[1], overlap)
    _refused(source, tmp_path / "out", "overlaps")


def test_a_gap_between_tensors_and_bytes_after_them(source: Path, tmp_path: Path) -> None:
    path = _shards(source)[1]
    whole = path.read_bytes()
    path.write_bytes(whole + b"x")
    _refused(source, tmp_path / "out", "longer than its header says")

    def gap(header: dict[str, Any]) -> None:
        for entry in _entries(header)[1:]:
            entry["data_offsets"] = [offset + 2 for offset in entry["data_offsets"]]

    path.write_bytes(whole + b"xx")
    _edit_header(path, gap)
    _refused(source, tmp_path / "out", "leaves a gap")


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [3], "data_offsets": [0, 13]},
        {"dtype": "F99", "shape": [3], "data_offsets": [0, 12]},
        {"dtype": "F32", "shape": [-3], "data_offsets": [0, 12]},
        {"dtype": "F32", "shape": [3.0], "data_offsets": [0, 12]},
        {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": "3", "data_offsets": [0, 12]},
        {"dtype": "F32", "shape": [3], "data_offsets": [12, 0]},
        {"dtype": "F32", "shape": [3], "data_offsets": [0]},
        {"dtype": "F32", "shape": [3]},
        {"dtype": ["F32"], "shape": [3], "data_offsets": [0, 12]},
        "text",
        None,
    ],
)
def test_an_impossible_entry(entry: Any, source: Path, tmp_path: Path) -> None:
    def change(header: dict[str, Any]) -> None:
        header[next(key for key in header if key != "__metadata__")] = entry

    _edit_header(_shards(source)[0], change)
    _refused(source, tmp_path / "out", "damaged|cannot fill")


@pytest.mark.parametrize("header", ["[]", "3", "{", "[" * 20_000, '{"a": NaN}', "\udcff"])
def test_a_header_that_is_no_json_object(header: str, source: Path, tmp_path: Path) -> None:
    data = header.encode("utf-8", "surrogateescape")
    _shards(source)[0].write_bytes(struct.pack("<Q", len(data)) + data)
    _refused(source, tmp_path / "out", "damaged")


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.integers(0, 399), st.binary(min_size=1, max_size=4), st.booleans())
def test_whatever_safetensors_refuses_is_refused(
    tmp_path: Path, position: int, junk: bytes, insert: bool
) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.arange(6.0), "b.c": torch.ones(2, 3, dtype=torch.bfloat16)}, path)
    data = bytearray(path.read_bytes())
    data[position : position + (0 if insert else len(junk))] = junk
    path.write_bytes(bytes(data))
    try:
        found = {t.name: list(t.shape) for t in read_shard(path, path.name).tensors}
    except PosencError:
        return
    try:
        with safe_open(path, "pt") as file:
            expected = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:  # pragma: no cover
        raise AssertionError(f"accepted what safetensors refuses: {error}") from None
    assert found == expected


# --- links ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["shard", INDEX, "config.json", "tokenizer.json", "LICENSE"])
def test_a_link_that_leaves_the_folder(name: str, source: Path, tmp_path: Path) -> None:
    path = _shards(source)[0] if name == "shard" else source / name
    outside = tmp_path / "elsewhere" / path.name
    outside.parent.mkdir()
    if path.exists():
        path.rename(outside)
    else:
        outside.write_text("secret")
    path.symlink_to(outside)
    _refused(source, tmp_path / "out", "a link that leaves the folder")


@pytest.mark.parametrize("target", ["nowhere", "itself"])
def test_a_broken_link(target: str, source: Path, tmp_path: Path) -> None:
    path = _shards(source)[0]
    path.unlink()
    path.symlink_to(path.name if target == "itself" else target)
    _refused(source, tmp_path / "out", "link")


def test_a_pipe_instead_of_a_file(source: Path, tmp_path: Path) -> None:
    os.mkfifo(source / "tokenizer.json")
    with pytest.raises(PosencError, match="not a regular file"):
        convert_checkpoint(source, tmp_path / "out", "nope", progress=False)


def test_links_inside_the_folder_and_of_a_hub_snapshot_are_followed(
    source: Path, tmp_path: Path
) -> None:
    expected = convert_checkpoint(source, tmp_path / "a" / "out", "nope", progress=False)
    model = tmp_path / "hub" / "models--owner--some-model"
    snapshot, blobs = model / "snapshots" / "0123abc", model / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(source.iterdir())):
        shutil.copy(path, blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    result = convert_checkpoint(snapshot, tmp_path / "b" / "out", "nope", progress=False)
    for path in expected.iterdir():
        assert not (result / path.name).is_symlink()
        if path.name != "README.md":
            assert (result / path.name).read_bytes() == path.read_bytes()
    card = (result / "README.md").read_text()
    assert "base_model: owner/some-model" in card
    assert "- revision: `0123abc`" in card

    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(source / "config.json")
    _refused(snapshot, tmp_path / "out", "leaves the folder")

    inner = _shards(source)[0]
    inner.rename(source / "weights")
    inner.symlink_to("weights")
    result = convert_checkpoint(source, tmp_path / "c", "nope", progress=False)
    assert (result / inner.name).read_bytes() == (source / "weights").read_bytes()


# --- places ---------------------------------------------------------------------------------


def test_outputs_that_are_in_the_way(source: Path, tmp_path: Path) -> None:
    full, file, link = tmp_path / "full", tmp_path / "file", tmp_path / "link"
    full.mkdir()
    (full / "mine").write_text("keep")
    file.write_text("keep")
    link.symlink_to("nowhere")
    _refused(source, full, "exists and is not empty")
    _refused(source, file, "exists and is not a folder")
    _refused(source, link, "is a link")
    _refused(source, source, "is the source")
    _refused(source, source / "out", "is in the source")
    _refused(source, source / "a" / ".." / "out", "is in the source")
    _refused(source, tmp_path, "contains the source")
    (tmp_path / "alias").symlink_to(source)
    _refused(source, tmp_path / "alias" / "out", "is in the source")
    assert (full / "mine").read_text() == file.read_text() == "keep"


def test_a_partial_folder_of_someone_else_is_left_alone(source: Path, tmp_path: Path) -> None:
    partial = tmp_path / ".out.partial"
    partial.mkdir()
    (partial / "mine").write_text("keep")
    _refused(source, tmp_path / "out", "was not left by a conversion")
    assert (partial / "mine").read_text() == "keep"
    shutil.rmtree(partial)
    partial.symlink_to(source)
    _refused(source, tmp_path / "out", "is in the way")


@contextlib.contextmanager
def _mounted(folder: Path, size: int) -> Iterator[Path]:
    """A small file system in memory; skipped where mounting is not permitted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip(f"mounting is not permitted: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_full(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with _mounted(tmp_path / "disk", 256 * 1024) as disk:
        _refused(source, disk / "out", "make room or choose another disk")
        monkeypatch.setattr(stream, "check_space", lambda *_: None)  # filled up by someone else
        line = _refused(source, disk / "out", "No space left on device")
        assert "was not written" in line


def test_errors_of_the_disk_wherever_they_strike(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    countdown = 0

    def failing(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal countdown
            countdown -= 1
            if countdown == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return original(*args, **kwargs)

        return wrapped

    for name in ("copy_file_range", "fsync"):
        monkeypatch.setattr(os, name, failing(getattr(os, name)))
    for failures in range(1, 1000):
        countdown = failures
        try:
            convert_checkpoint(source, tmp_path / "out", "nope", progress=False)
        except PosencError as error:
            assert "No space left on device" in str(error)
            assert [path.name for path in tmp_path.iterdir()] == ["source"]
        else:
            break
    assert failures > 2 * len(_shards(source))


def test_a_source_that_cannot_be_written(source: Path, tmp_path: Path) -> None:
    with _mounted(tmp_path / "disk", 8 * 2**20) as disk:
        shutil.copytree(source, disk / "model")
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        before = _state(disk / "model")
        result = convert_checkpoint(disk / "model", tmp_path / "out", "nope", progress=False)
        assert _state(disk / "model") == before
        _refused(disk / "model", disk / "out", "Read-only file system")
    (result / "README.md").write_text("writable")


def test_a_read_only_folder_gives_a_writable_output(source: Path, tmp_path: Path) -> None:
    for path in source.iterdir():
        path.chmod(0o444)
    source.chmod(0o555)
    try:
        result = convert_checkpoint(source, tmp_path / "out", "nope", progress=False)
    finally:
        source.chmod(0o755)
    assert result.stat().st_mode & 0o200
    assert all(path.stat().st_mode & 0o200 for path in result.iterdir())


def test_a_source_that_changes_meanwhile(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = stream.write_shard

    def meddling(shard: Any, *rest: Any) -> None:
        write(shard, *rest)
        os.utime(shard.path, ns=(5, 5))

    monkeypatch.setattr(stream, "write_shard", meddling)
    with pytest.raises(PosencError, match="changed while it was converted"):
        convert_checkpoint(source, tmp_path / "out", "nope", progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


# --- weights and configs --------------------------------------------------------------------


def _retype(source: Path, dtype: torch.dtype) -> None:
    for path in _shards(source):
        tensors = load_file(path)
        for name in tensors:
            if name.endswith("q_proj.weight"):
                tensors[name] = tensors[name].to(dtype)
        save_file(tensors, path, {"format": "pt"})


def _edit_config(source: Path, **values: Any) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, **values}))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8])
def test_quantised_rows_do_not_move(dtype: torch.dtype, source: Path, tmp_path: Path) -> None:
    _retype(source, dtype)
    _refused(source, tmp_path / "out", "quantised", "partial", pairs="raw", fraction=0.5)
    _edit_config(source, quantization_config={"quant_method": "fp8"})
    line = _refused(source, tmp_path / "out", "quantised .*fp8", "interleaved")
    assert "unquantised" in line


def test_quantised_weights_stay_as_they_are_where_no_row_moves(
    source: Path, tmp_path: Path
) -> None:
    _retype(source, torch.float8_e4m3fn)
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    _edit_config(source, quantization_config=quantization)
    result = convert_checkpoint(source, tmp_path / "out", "nope", progress=False)
    for path in _shards(source):
        assert (result / path.name).read_bytes() == path.read_bytes()
    assert json.loads((result / "config.json").read_text())["quantization_config"] == quantization


def test_weights_that_do_not_fit_the_config(source: Path, tmp_path: Path) -> None:
    _edit_config(source, num_hidden_layers=3)
    _refused(source, tmp_path / "out", "no tensor 'model.layers.2.", "interleaved")
    _edit_config(source, num_hidden_layers=2, num_key_value_heads=4)
    _refused(source, tmp_path / "out", r"shape \[32, 64\], config.json asks for", "interleaved")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model_type": "unheard_of"}', "{}"])
def test_a_damaged_config(text: str, source: Path, tmp_path: Path) -> None:
    (source / "config.json").write_text(text)
    _refused(source, tmp_path / "out", "config.json")


def test_models_and_plans_that_do_not_fit(source: Path, tmp_path: Path) -> None:
    _refused(source, tmp_path / "out", "unknown scheme 'nop'", "nop")
    _refused(source, tmp_path / "out", "no option 'evry'", "nope_interleaved", evry=3)
    converted = convert_checkpoint(source, tmp_path / "converted", "nope", progress=False)
    _refused(converted, tmp_path / "out", "converted already .nope")
    tiny_model("phi3", num_hidden_layers=2).save_pretrained(tmp_path / "fused")
    _refused(tmp_path / "fused", tmp_path / "out", "no q_proj", "interleaved")
    tiny_model("cohere", num_hidden_layers=2).save_pretrained(tmp_path / "cohere")
    _refused(tmp_path / "cohere", tmp_path / "out", "cohere", "interleaved")


def test_folders_that_hold_no_safetensors(source: Path, tmp_path: Path) -> None:
    for path in [*_shards(source), source / INDEX]:
        path.unlink()
    _refused(source, tmp_path / "out", "has neither")
    (source / "pytorch_model.bin").write_bytes(b"pickle")
    _refused(source, tmp_path / "out", "pickles")
    with pytest.raises(PosencError, match="no such file or folder"):
        convert_checkpoint(tmp_path / "not there", tmp_path / "out", "nope", progress=False)


def test_a_hub_id_without_a_network(tmp_path: Path) -> None:
    with pytest.raises(PosencError, match="cannot be had from the hub"):
        convert_checkpoint("owner/not-here", tmp_path / "out", "nope", progress=False)
    assert not list(tmp_path.iterdir())
