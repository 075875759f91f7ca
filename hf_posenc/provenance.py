"""How a result was made: command, versions, commit, machine."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

_PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "peft",
    "accelerate",
    "datasets",
    "lm_eval",
    "numpy",
)


def collect(*, seed: int | None = None, tokens: int | None = None, **extra: Any) -> dict[str, Any]:
    """Provenance as plain JSON values; `extra` entries are added under their own names.

    The machine is described, never named: no host, user or folder. The commit is that of the
    repository this package is tracked in, or None. Errors: ValueError when `extra` would replace
    an entry.
    """
    record: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *map(unplaced, sys.argv[1:])]),
        "python": platform.python_version(),
        "versions": _versions(),
        "git": _git(),
        "machine": _machine(),
        "seed": seed,
        "tokens": tokens,
    }
    if clash := sorted(record.keys() & extra.keys()):
        raise ValueError(f"provenance already has {', '.join(clash)}")
    return record | extra


def unplaced(argument: str) -> str:
    """The last part of an absolute path, which would say where somebody's files lie."""
    return Path(argument).name if Path(argument).is_absolute() else argument


def _versions() -> dict[str, str | None]:
    return {"hf_posenc": _version("hf-posenc")} | {name: _version(name) for name in _PACKAGES}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _git() -> dict[str, Any] | None:
    here = Path(__file__).resolve()
    # An installed copy inside some other repository must not report that repository's commit.
    if _run("git", "-C", str(here.parent), "ls-files", "--error-unmatch", here.name) is None:
        return None
    commit = _run("git", "-C", str(here.parent), "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _run("git", "-C", str(here.parent), "status", "--porcelain", "-uno")
    return {"commit": commit, "dirty": changes != ""}


def _machine() -> dict[str, Any]:
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "accelerator": _accelerator(),
        "torch_threads": torch.get_num_threads(),
        "os": f"{platform.system()} {platform.release()}",
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    if platform.system() == "Darwin":
        return _run("sysctl", "-n", "machdep.cpu.brand_string") or platform.machine()
    return platform.processor() or platform.machine()


def _accelerator() -> str | None:
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    kind = torch.accelerator.current_accelerator(check_available=True)
    return kind.type if kind is not None else None


def _run(*command: str) -> str | None:
    """Standard output of a command, or None when it fails or is missing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
