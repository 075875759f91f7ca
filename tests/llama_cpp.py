"""Asking llama.cpp what a GGUF file computes, in a process of its own."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# A Python that has xllamacpp, when the one running the tests does not.
VARIABLE = "HF_POSENC_LLAMA_CPP_PYTHON"


@functools.cache
def interpreter() -> str:
    """The Python to run llama.cpp in; without one the test is skipped with the reason."""
    python = os.environ.get(VARIABLE, sys.executable)
    done = subprocess.run([python, "-c", "import xllamacpp"], capture_output=True, check=False)
    return python if done.returncode == 0 else ""


def ask(path: Path, request: dict[str, Any]) -> dict[str, Any]:
    """What llama.cpp answers; see llama_cpp_run.py."""
    if not interpreter():
        pytest.skip(f"xllamacpp is not installed (pip install xllamacpp, or set {VARIABLE})")
    done = subprocess.run(
        [interpreter(), str(Path(__file__).parent / "llama_cpp_run.py"), str(path)],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout[done.stdout.index('{"logprobs"') :])
    return result
