"""Progress on the terminal for work whose own tool shows none."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TransferSpeedColumn,
)

_POLL_SECONDS = 0.2


@contextmanager
def downloading(label: str, folder: Path, total: int | None) -> Iterator[None]:
    """Show the bytes that gather under `folder` (of `total`, when known) on stderr."""
    done = threading.Event()
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(label, total=total)

        def watch() -> None:
            while not done.wait(_POLL_SECONDS):
                progress.update(task, completed=_bytes_under(folder))

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
            if total is not None:
                progress.update(task, completed=total)
        finally:
            done.set()
            watcher.join()


def note(line: str) -> None:
    """One plain line on stderr."""
    Console(stderr=True).print(line, markup=False, highlight=False, soft_wrap=True)


def _bytes_under(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # pip moved it between the listing and the look
            continue
    return total
