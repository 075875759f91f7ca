"""Where the files that travel with the package lie: in the repository, or inside the wheel."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def recipes_dir() -> Path:
    """The folder of recipes (`recipes/` of the repository)."""
    return _locate("recipes")


def tasks_dir() -> Path:
    """The folder of lm-eval task files (`eval/tasks/` of the repository)."""
    return _locate("eval/tasks")


def _locate(relative: str) -> Path:
    # The wheel carries both folders under hf_posenc/_data (see pyproject.toml).
    for root in (_PACKAGE / "_data", _PACKAGE.parent):
        if (root / relative).is_dir():
            return root / relative
    raise FileNotFoundError(f"{relative} is missing from this installation of hf_posenc")
