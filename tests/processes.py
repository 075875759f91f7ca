"""Running Python in a process of its own, as a user's machine would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_TESTS = Path(__file__).parent


def run_python(code: str, *arguments: str) -> str:
    """What `code` prints to stdout; a failure shows its stderr. Nothing is imported for it."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join((str(_TESTS.parent), str(_TESTS))),
    }
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        stdin=subprocess.DEVNULL,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
