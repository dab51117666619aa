"""How values, names and paths are put into a sentence: quoted, shortened, never raw."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_LONGEST = 40
_ESCAPES = {'"': '\\"', "\\": "\\\\"}


def quote(value: Any) -> str:
    """A value as a sentence shows it: one line, printable, at most some forty characters."""
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    text = value if isinstance(value, str) else str(value)
    if len(text) > _LONGEST:
        text = text[: _LONGEST - 1] + "…"
    return '"' + "".join(_ESCAPES.get(c) or (c if c.isprintable() else _escape(c)) for c in text) + '"'


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` was most likely meant to be, if any is near."""
    by_folded = {candidate.casefold().replace("-", "_"): candidate for candidate in known}
    found = difflib.get_close_matches(name.casefold().replace("-", "_"), by_folded, n=1, cutoff=0.6)
    return by_folded[found[0]] if found else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` (did you mean "demo"?)`, or nothing."""
    found = nearest(name, known)
    return f" (did you mean {quote(found)}?)" if found else ""


def listing(names: Iterable[str], most: int = 20) -> str:
    """`a, b, c`, or `none`; a long list says how many more there are."""
    every = sorted(names)
    rest = len(every) - most
    return (", ".join(every[:most]) + (f" and {rest} more" if rest > 0 else "")) or "none"


def shown(path: Path) -> str:
    """The path as a user would type it: relative below the current directory, `~` below home."""
    for base, prefix in ((Path.cwd, ""), (Path.home, "~/")):
        try:
            return prefix + path.relative_to(base()).as_posix()
        except (ValueError, OSError, RuntimeError):
            continue  # not below it, or there is no such directory
    return str(path)
