"""The command line `hf-posenc`."""

from __future__ import annotations

from hf_posenc.cli import calibrating, plans, work  # noqa: F401  they register with `app`
from hf_posenc.cli.group import app

__all__ = ["app", "main"]


def main() -> None:
    """Run the command line; exits with 0, 2 on bad input, 130 when interrupted."""
    app()
