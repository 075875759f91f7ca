"""The one exception users see, and the hint that goes with an unknown name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PosencError(ValueError):
    """Bad input from a user: one line that names the value, the reason and the fix.

    The command line prints it and exits with code 2; nothing has been changed or half-written
    when it is raised.
    """


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """The closest of `choices` as a hint, or all of them when none is close."""
    known = sorted(choices)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"choose one of: {', '.join(known)}"
