"""Regular expressions that logs of any size are searched with: which plain text must be there first."""

from __future__ import annotations

import re
from typing import Any

SHORTEST = 3


def searchable(pattern: str) -> str:
    """The pattern; ValueError unless it is a regular expression that some plain text must be there for."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(str(error)) from error
    if not literal_of(pattern):
        raise ValueError("no plain text")
    return pattern


def literal_of(pattern: str) -> str:
    """The longest text that every line that matches must hold, as far as that is plain to see; "" if too short.

    A log of any size is searched for it first. Alternatives and what may be left out do not count.
    """
    import re._parser as parser  # type: ignore[import-not-found,unused-ignore]

    try:
        tree = parser.parse(pattern)
    except re.error:
        return ""
    if tree.state.flags & re.IGNORECASE:
        return ""
    best = max(_runs(tree), key=len, default="")
    return best if len(best) >= SHORTEST else ""


def _runs(tree: Any) -> list[str]:
    runs, now = [], ""
    for op, value in tree:
        name = str(op)
        if name == "LITERAL":
            now += chr(value)
            continue
        runs.append(now)
        now = ""
        if name == "SUBPATTERN" and not (value[1] or value[2]):
            runs += _runs(value[-1])
        elif name in ("MAX_REPEAT", "MIN_REPEAT") and value[0] >= 1:
            runs += _runs(value[2])
    return [*runs, now]
