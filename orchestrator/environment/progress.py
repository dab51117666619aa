"""How long work tells how it goes."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Told again and again while work goes on; must return at once."""

    def __call__(self, what: str, done: int, total: int | None, unit: str, /) -> None:
        """`done` of `total` (None: not known) in `unit`: "B" for bytes, or a plural such as "wheels"."""


def silent(what: str, done: int, total: int | None, unit: str, /) -> None:
    """Tells nobody."""
