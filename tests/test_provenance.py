"""Provenance: complete, plain JSON, and silent about who and where."""

from __future__ import annotations

import getpass
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_posenc import provenance


def test_record_is_complete_and_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/home/someone/bin/hf-posenc", "run", "a b.yaml"])
    record = provenance.collect(seed=3, tokens=5, texts={"python_docs": "ab"})
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert record["command"] == "hf-posenc run 'a b.yaml'"
    assert (record["seed"], record["tokens"]) == (3, 5)
    assert record["texts"] == {"python_docs": "ab"}
    assert record["versions"]["torch"] == torch.__version__
    assert record["python"] == ".".join(str(part) for part in sys.version_info[:3])
    machine = record["machine"]
    assert machine["torch_threads"] == torch.get_num_threads()
    assert machine["memory_gib"] > 0 and machine["cpu"] and machine["usable_cores"] >= 1
    assert str(Path.home()) not in json.dumps(record) and "hostname" not in json.dumps(record)
    assert getpass.getuser() not in machine.values()


def test_extra_entries_cannot_replace_our_own() -> None:
    with pytest.raises(ValueError, match="machine"):
        provenance.collect(machine="another")


def test_commit_is_the_repository_s_own() -> None:
    root = Path(provenance.__file__).parent.parent
    head = subprocess.run(
        ["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    git = provenance.collect()["git"]
    if head.returncode == 0:
        assert git["commit"] == head.stdout.strip() and isinstance(git["dirty"], bool)
    else:
        assert git is None


def test_commit_of_a_surrounding_repository_is_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy installed inside somebody's repository must not report that one's commit."""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    command = ["git", "-C", tmp_path, *identity, "commit", "-q", "--allow-empty", "-m", "x"]
    subprocess.run(command, check=True)
    copy = tmp_path / "site-packages" / "provenance.py"
    copy.parent.mkdir()
    copy.write_text("")
    monkeypatch.setattr(provenance, "__file__", str(copy))
    assert provenance.collect()["git"] is None
    subprocess.run(["git", "-C", tmp_path, "add", "."], check=True)
    subprocess.run([*command[:-1], "y"], check=True)
    assert provenance.collect()["git"]["dirty"] is False
    copy.write_text("changed")
    assert provenance.collect()["git"]["dirty"] is True
