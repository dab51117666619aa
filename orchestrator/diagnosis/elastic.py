"""torchelastic's own record: its error files, and the rank that its summary names first."""

from __future__ import annotations

import re

from orchestrator.diagnosis.catalogue import BY_ID, CAUSES
from orchestrator.diagnosis.facts import ElasticError, Facts
from orchestrator.diagnosis.model import Cause, Claim, Evidence

_ROOT = re.compile(r"Root Cause \(first observed failure\):.*?\n.*?rank\s*:\s*(\d+) ", re.DOTALL)


def rank_first(facts: Facts) -> int | None:
    """The rank that failed first: as the runner saw it, else by the error files' times, else as the summary at the
    log's end has it."""
    if facts.first is not None and not facts.followed and isinstance(facts.first.get("rank"), int):
        return int(facts.first["rank"])
    error = _first_error(facts)
    if error is not None and error.rank is not None:
        return error.rank
    named = _ROOT.findall(facts.log.tail)
    return int(named[-1]) if named else None


def readings(facts: Facts) -> Claim | None:
    """What the first error file says, where it names a cause or at least an exception."""
    error = _first_error(facts)
    if error is None or not error.message.strip():
        return None
    cause = _cause(error.message) or BY_ID["uncaught-exception"]
    text = error.message.strip().splitlines()[0]
    place = f"error file {error.file}"
    return Claim(
        cause, 0, "high", (Evidence("error file", place, text[:2000], rank=error.rank),), error.message.strip()
    )


def _first_error(facts: Facts) -> ElasticError | None:
    timed = [error for error in facts.elastic if error.time is not None]
    return min(timed, key=lambda error: error.time or 0.0) if timed else next(iter(facts.elastic), None)


def _cause(message: str) -> Cause | None:
    """The most exact entry that one of the message's lines meets; patterns that need a traceback look in the whole."""
    best: Cause | None = None
    for cause in CAUSES:
        for pattern in cause.patterns:
            if pattern.role != "cause" or pattern.when:
                continue
            if pattern.frames and not re.search(pattern.frames, message):
                continue
            if pattern.without and re.search(pattern.without, message):
                continue
            if pattern.after and not re.search(pattern.after, message, re.DOTALL):
                continue
            if any(re.search(pattern.regex, line) for line in message.splitlines()) and (
                best is None or cause.precedence > best.precedence
            ):
                best = cause
    return best
