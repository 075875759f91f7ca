"""What is shipped: the wheel carries its data, pins satisfy bounds, README and CI say the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the working tree without build isolation (so without a network)."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out)]
    done = subprocess.run([*command, str(ROOT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


@pytest.mark.parametrize("folder", ["recipes", "eval/tasks"])
def test_wheel_carries_recipes_and_tasks(wheel: Path, folder: str) -> None:
    files = [
        path
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    assert files, f"{folder} is empty"
    with zipfile.ZipFile(wheel) as archive:
        for path in files:
            member = f"hf_posenc/_data/{path.relative_to(ROOT).as_posix()}"
            assert archive.read(member) == path.read_bytes()


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (n for n in names if n.endswith(".dist-info/METADATA"))
        (entry_points,) = (n for n in names if n.endswith(".dist-info/entry_points.txt"))
        assert b"License-Expression: Apache-2.0" in archive.read(metadata)
        assert b"hf-posenc = hf_posenc.cli:main" in archive.read(entry_points)
    assert "hf_posenc/py.typed" in names
    assert {name.split("/")[0] for name in names} == {"hf_posenc", metadata.split("/")[0]}
    assert not [name for name in names if "__pycache__" in name]


def test_installed_copy_finds_its_own_data(wheel: Path, tmp_path: Path) -> None:
    """Away from the repository, recipes and tasks come from inside the package."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    script = (
        "from hf_posenc import resources as r; print(r.recipes_dir(), r.tasks_dir(), sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    data = tmp_path / "site" / "hf_posenc" / "_data"
    assert done.stdout.splitlines() == [str(data / "recipes"), str(data / "eval" / "tasks")]


def test_constraints_pin_every_direct_dependency_within_its_bounds() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    pinned = {canonicalize_name(name): version for name, version in pins.items()}
    wanted = [*PYPROJECT["dependencies"], *PYPROJECT["optional-dependencies"]["dev"]]
    for requirement in map(Requirement, wanted):
        version = pinned[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} excludes {version}"


def test_runtime_dependencies_have_an_upper_bound() -> None:
    open_ended = [
        text
        for text in PYPROJECT["dependencies"]
        if not any(spec.operator in ("<", "==") for spec in Requirement(text).specifier)
    ]
    assert not open_ended


def readme_command(name: str) -> str:
    text = (ROOT / "README.md").read_text()
    found = re.findall(rf"<!-- command: {name} -->\n```bash\n(.*?)\n```", text, re.DOTALL)
    assert len(found) == 1, f"README has {len(found)} commands called {name!r}"
    return found[0]


@pytest.mark.parametrize(
    ("name", "last"), [("quickstart", "hf-posenc run quickstart"), ("tests", "-m pytest -n 2")]
)
def test_readme_commands_do_all_the_set_up(name: str, last: str) -> None:
    command = readme_command(name)
    steps = [step.strip() for step in command.replace("\\\n", " ").split("&&")]
    assert steps[0] == "python3 -m venv .venv"
    assert any("pip install" in step and "-c constraints.txt" in step for step in steps)
    assert steps[-1].endswith(last)
    assert len(command.splitlines()) <= 2


def test_ci_runs_the_readme_command() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    (extraction,) = (line for line in script.read_text().splitlines() if "command=$(" in line)
    done = subprocess.run(
        ["bash", "-euc", f'{extraction}\nprintf %s "$command"'],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == readme_command("tests")


def test_the_readme_lists_every_scheme_and_command() -> None:
    import typer.main

    from hf_posenc.cli import app
    from hf_posenc.schemes import list_schemes

    text = (ROOT / "README.md").read_text()
    assert [name for name in list_schemes() if f"| `{name}` |" not in text] == []
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert [name for name in commands if f"hf-posenc {name}" not in text] == []
