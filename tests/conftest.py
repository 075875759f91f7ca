"""What every test runs under: one thread, no network, deprecations as failures, slow on request."""

from __future__ import annotations

import os

# Before torch, tokenizers and the hub client are imported anywhere.
os.environ.update(
    {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "MPLBACKEND": "Agg",
    }
)

import logging
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

torch.set_num_threads(1)

_WATCHED_LOGGERS = ("transformers", "peft", "accelerate")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run tests marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow") or "slow" in (config.getoption("-m") or ""):
        return
    kept = [item for item in items if "slow" not in item.keywords]
    left_out = [item for item in items if "slow" in item.keywords]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that leaves this machine fails the test."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        local = self.family == getattr(socket, "AF_UNIX", None) or address[0] in (
            "127.0.0.1",
            "::1",
            "localhost",
        )
        if not local:
            raise AssertionError(f"a test tried to reach {address}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)


@pytest.fixture(autouse=True)
def _no_logged_deprecations() -> Iterator[None]:
    """transformers logs some deprecations instead of warning: those fail the test too."""
    seen: list[str] = []

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            message = record.getMessage()
            if re.search(r"deprecat|will be removed in", message, re.IGNORECASE):
                seen.append(message)

    watch = Watch(logging.WARNING)
    for name in _WATCHED_LOGGERS:
        logging.getLogger(name).addHandler(watch)
    yield
    for name in _WATCHED_LOGGERS:
        logging.getLogger(name).removeHandler(watch)
    assert not seen, f"deprecated use: {seen}"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of fetched and converted files, for this test alone."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("HF_POSENC_CACHE", str(folder))
    return folder


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a command line in an empty folder; results carry stdout, stderr and exit code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("HF_POSENC_DEBUG", raising=False)

    def run(*arguments: object) -> Any:
        # Here, since the package must see the environment set above.
        from typer.testing import CliRunner

        from hf_posenc.cli import app

        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return run
