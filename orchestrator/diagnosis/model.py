"""What the catalogue is made of, and what a diagnosis says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

HEALTHY, UNKNOWN = "healthy", "unknown"

Role = Literal["cause", "echo", "warning"]
Confidence = Literal["high", "medium", "low"]


@dataclass(frozen=True)
class Pattern:
    """How a cause shows itself in the log file.

    A line that holds one of `literals` is tried against `regex` once its prefix (a time, a rank) is taken off.
    The other fields are further conditions on what stands around it: `frames` must be found in the traceback that
    the line ends, `after` in the line or the lines that follow, `without` in none of them, and `when` names a
    condition of `conditions.MATCH`.

    Roles: a "cause" is one by itself. An "echo" is mostly the consequence of something earlier, and counts only
    where nothing else is found. A "warning" ends nothing: it says something of a run that goes on.
    """

    literals: tuple[str, ...]
    regex: str
    role: Role = "cause"
    frames: str = ""
    after: str = ""
    without: str = ""
    when: str = ""


@dataclass(frozen=True)
class Cause:
    """One entry of the catalogue.

    `structured` names conditions of `conditions.FACTS`: evidence beside the log. Of two causes that one and the
    same line tells of, that with the higher `precedence` is meant. `family` groups causes that one witness can
    stand for ("cuda": errors that a broken card shows as).
    """

    id: str
    title: str
    theme: str
    patterns: tuple[Pattern, ...]
    advice: tuple[str, ...]
    command: str = ""
    retry: bool = False
    structured: tuple[str, ...] = ()
    precedence: int = 50
    family: str = ""


@dataclass(frozen=True)
class Evidence:
    """One observation. `place` says where it was made: `console.log:1234`, `kernel log`, `exit record`, …"""

    witness: str
    place: str
    text: str
    offset: int | None = None  # bytes into console.log
    line: int | None = None
    rank: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "witness": self.witness,
            "place": self.place,
            "text": self.text,
            "offset": self.offset,
            "line": self.line,
            "rank": self.rank,
        }


@dataclass(frozen=True)
class Verdict:
    """What is wrong, how sure that is, why, and what to do. `cause` is an entry's id, `unknown` or `healthy`."""

    cause: str
    title: str
    confidence: Confidence
    evidence: tuple[Evidence, ...] = ()
    advice: tuple[str, ...] = ()
    command: str = ""
    retry: bool = False
    traceback: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def witnesses(self) -> tuple[str, ...]:
        """The independent sources that agree, in the order of the evidence."""
        return tuple(dict.fromkeys(item.witness for item in self.evidence))

    @property
    def bad(self) -> bool:
        return self.cause != HEALTHY

    def to_json(self) -> dict[str, Any]:
        """The shape of `orch diagnose --json`, version 1."""
        return {
            "cause": self.cause,
            "title": self.title,
            "confidence": self.confidence,
            "evidence": [item.to_json() for item in self.evidence],
            "witnesses": list(self.witnesses),
            "advice": list(self.advice),
            "command": self.command or None,
            "retry": self.retry,
            "traceback": self.traceback,
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class Claim:
    """A cause that something speaks for; the strongest claim becomes the verdict."""

    cause: Cause
    strength: int
    confidence: Confidence
    evidence: tuple[Evidence, ...]
    traceback: str | None = None
    advice: tuple[str, ...] = field(default=())


def first(claims: Sequence[Claim]) -> Claim | None:
    """The strongest; of equals the one named first."""
    return max(claims, key=lambda claim: claim.strength, default=None)
