"""Reading a log's findings as a story: what went wrong for good, what was got over, and what came first.

A *trouble* is a line that a pattern met with all its conditions, or a traceback. Those that the log ends with count;
an earlier one counts only if the end shows nothing but consequences.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from orchestrator.diagnosis.catalogue.words import FINISHED, PARTING, PREFIX, PROGRESS, RECOVERED
from orchestrator.diagnosis.conditions import MATCH, Witnesses
from orchestrator.diagnosis.facts import Facts, Match, Raised, Traceback
from orchestrator.diagnosis.model import Cause, Pattern

GAP = 32 << 10  # bytes of other output that set two troubles apart
_ORDINARY = 80  # lines after the last trouble that show that the program went on
_PREFIX = re.compile(PREFIX)
_RANK = re.compile(r"\[(?:rank|default)?(\d+)\]")
_OPEN_QUOTE = re.compile(r"(?<!\w)['\"“`]")
_TIMED = re.compile(r"\W?\d{4}-\d\d-\d\d[ T]|\[\d\d:\d\d:\d\d\]|INFO\b")
_DATA = re.compile(
    r"(?:sample|example|text|prompt|document|row|input|output|target|question|answer)\w*\s*[\d#]*\s*[:=]", re.I
)
_TIME = re.compile(r"\b(\d{4})-(\d\d)-(\d\d)[ T_](\d\d):(\d\d):(\d\d)(?:[.,](\d+))?")
_GLOG = re.compile(r"[EWIF](\d\d)(\d\d) (\d\d):(\d\d):(\d\d)(?:\.(\d+))?")


@dataclass(frozen=True)
class Trouble:
    """One thing that went wrong. `cause` is None for a traceback that no pattern knows."""

    offset: int
    end: int
    text: str
    rank: int | None
    time: float | None
    cause: Cause | None
    pattern: Pattern | None
    match: Match | None
    trace: Traceback | None
    witnesses: Witnesses = ()
    got_over: bool = False  # its own words say that what it stopped went on
    went_on: bool = False  # progress follows it
    weak: bool = False  # an exception that another one came of while it was being handled

    @property
    def is_echo(self) -> bool:
        return self.pattern is not None and self.pattern.role == "echo"


def troubles(facts: Facts, rules: Sequence[tuple[Cause, Pattern]]) -> tuple[list[Trouble], list[Trouble]]:
    """(troubles in the order of the log, warnings)."""
    found: list[Trouble] = []
    warnings: list[Trouble] = []
    for match in facts.log.matches:
        cause, pattern = rules[match.rule]
        trace = _around(match, facts.log.tracebacks)
        witnesses = _holds(pattern, match, trace, facts)
        if witnesses is None:
            continue
        one = _of_match(match, cause, pattern, trace, witnesses)
        (warnings if pattern.role == "warning" else found).append(one)
    known = {one.trace.offset for one in found if one.trace is not None}
    found += [_of_trace(trace) for trace in facts.log.tracebacks if trace.offset not in known]
    found = _strongest(found)
    return sorted(found, key=lambda one: one.offset), sorted(warnings, key=lambda one: one.offset)


def _holds(pattern: Pattern, match: Match, trace: Traceback | None, facts: Facts) -> Witnesses | None:
    if (
        trace is not None
        and match.body[:1] in (" ", "\t")
        and not any(raised.offset <= match.offset <= raised.offset + len(raised.text) for raised in trace.raised)
    ):
        return None  # a line of source that a frame shows
    if not pattern.regex.startswith("^") and _quoted(pattern, match.body):
        return None
    around = "\n".join((match.text, *match.after))
    if pattern.frames and not (trace is not None and re.search(pattern.frames, trace.text)):
        return None
    if pattern.after and not re.search(pattern.after, around, re.DOTALL):
        return None
    if pattern.without and re.search(pattern.without, around if trace is None else f"{around}\n{trace.text}"):
        return None
    return MATCH[pattern.when](match, trace, facts) if pattern.when else ()


def _quoted(pattern: Pattern, body: str) -> bool:
    """Whether the words stand in quotes, as in data that a program prints."""
    at = min((body.find(literal) for literal in pattern.literals if literal in body), default=0)
    before = re.sub(r"(?<!\w)'[^']*'|\"[^\"]*\"|`[^`]*`", "", body[:at])
    return bool(_OPEN_QUOTE.search(before) or _DATA.match(body))


def _around(match: Match, traces: Sequence[Traceback]) -> Traceback | None:
    rank = rank_of(match.text)
    inside = [trace for trace in traces if trace.offset <= match.offset <= trace.end]
    same = [trace for trace in inside if rank_of(trace.first_line) == rank]
    return (same or [None])[-1]  # type: ignore[list-item]


def _of_match(match: Match, cause: Cause, pattern: Pattern, trace: Traceback | None, seen: Witnesses) -> Trouble:
    end = max(match.offset + len(match.text.encode("utf-8", "replace")), trace.end if trace else 0)
    after = trace.after if trace is not None else match.after
    raised = _raised_at(trace, match.offset)
    return Trouble(
        offset=match.offset,
        end=end,
        text=match.body,
        rank=rank_of(match.text),
        time=time_of(match.text),
        cause=cause,
        pattern=pattern,
        match=match,
        trace=trace,
        witnesses=seen,
        got_over=_got_over(match.body if trace is None else "", match.text, after),
        went_on=_went_on(after),
        weak=raised is not None and raised.then == "during",
    )


def _of_trace(trace: Traceback) -> Trouble:
    return Trouble(
        offset=trace.offset,
        end=trace.end,
        text=trace.exception,
        rank=rank_of(trace.first_line),
        time=None,
        cause=None,
        pattern=None,
        match=None,
        trace=trace,
        got_over=_got_over("", trace.exception, trace.after),
        went_on=_went_on(trace.after),
    )


def _raised_at(trace: Traceback | None, offset: int) -> Raised | None:
    if trace is None:
        return None
    before = [raised for raised in trace.raised if raised.offset <= offset]
    return before[-1] if before else None


def _got_over(body: str, text: str, after: Sequence[str]) -> bool:
    """Whether the line itself, or the next one that says anything, tells that it was dealt with."""
    if body and (RECOVERED.search(body) or re.match(r"\s*(?:WARN(?:ING)?|DEBUG|INFO)\b", body)):
        return True
    told = next((line for line in after if line.strip() and not PARTING.search(line)), "")
    return bool(RECOVERED.search(told)) and not _PREFIX.sub("", told, count=1).startswith("Traceback")


def _went_on(after: Sequence[str]) -> bool:
    return sum(1 for line in after if PROGRESS.search(line)) >= 3


def _strongest(found: Sequence[Trouble]) -> list[Trouble]:
    """Of several readings of one line the most exact; of one chain of tracebacks its earliest that is not weak."""
    best: dict[int, Trouble] = {}
    for one in found:
        other = best.get(one.offset)
        if other is None or _rank(one) > _rank(other):
            best[one.offset] = one
    chains: dict[int, list[Trouble]] = {}
    out = []
    for one in best.values():
        if one.trace is not None and one.cause is not None:
            chains.setdefault(one.trace.offset, []).append(one)
        else:
            out.append(one)
    for chain in chains.values():
        firm = [one for one in chain if not one.weak and not one.is_echo] or [one for one in chain if not one.weak]
        last = chain[0].trace.raised[-1] if chain[0].trace and chain[0].trace.raised else None
        if not firm and last is not None and last.then == "last" and not _same_family(chain):
            # what was handled is no cause: the last exception is, and no pattern knows it
            assert chain[0].trace is not None
            out.append(_of_trace(chain[0].trace))
            continue
        firm = firm or chain
        top = max(one.cause.precedence for one in firm if one.cause is not None)
        strong = [one for one in firm if one.cause is not None and one.cause.precedence >= top - 15]
        out.append(min(strong, key=lambda one: one.offset))
    return out


def _same_family(chain: Sequence[Trouble]) -> bool:
    """Whether the chain's last exception is worded like the one before it (a library's own wrapping)."""
    trace = chain[0].trace
    if trace is None or len(trace.raised) < 2:
        return True
    last = trace.raised[-1].text
    return any(one.text.partition(": ")[2][:40] and one.text.partition(": ")[2][:40] in last for one in chain)


def _rank(one: Trouble) -> tuple[int, int]:
    return (0 if one.is_echo else 1, one.cause.precedence if one.cause else 0)


# ---- the end of the log --------------------------------------------------------------------------


def ended_badly(facts: Facts, found: Sequence[Trouble]) -> bool:
    """Whether the log by itself shows that the program ended in its last trouble."""
    lasting = [one for one in found if not one.got_over]
    if not lasting:
        return False
    rest = _rest(facts, max(one.end for one in lasting))
    if rest is None:
        return False
    ordinary = [line for line in rest if not PARTING.search(line)]
    if any(FINISHED.search(_PREFIX.sub("", line, count=1)) for line in ordinary):
        return False
    told = sum(1 for line in ordinary if PROGRESS.search(line) or _TIMED.match(line))
    return told < 2 and len(ordinary) < _ORDINARY


def _rest(facts: Facts, end: int) -> list[str] | None:
    """The lines after `end`; None where there are more of them than the log's tail holds."""
    at = end - facts.log.tail_offset
    if at < 0:
        return None
    text = facts.log.tail.encode("utf-8", "replace")[at:].decode("utf-8", "replace")
    return re.split(r"\r?\n|\r", text)[1:]


def last_cluster(found: Sequence[Trouble]) -> list[Trouble]:
    """The troubles at the end that lie close together."""
    cluster: list[Trouble] = []
    start = None
    for one in sorted(found, key=lambda one: one.end, reverse=True):
        if start is not None and start - one.end > GAP:
            break
        cluster.append(one)
        start = one.offset if start is None else min(start, one.offset)
    return sorted(cluster, key=lambda one: one.offset)


def earliest(found: Sequence[Trouble]) -> Trouble:
    """The first by time where every one tells its time, else by its place in the log."""
    if all(one.time is not None for one in found):
        return min(found, key=lambda one: (one.time or 0.0, one.offset))
    return min(found, key=lambda one: one.offset)


def rank_of(text: str) -> int | None:
    """The rank that a line's prefix names."""
    found = _RANK.match(text)
    return int(found.group(1)) if found else None


def time_of(text: str) -> float | None:
    """The time at a line's beginning, in seconds; comparable only with others of the same log."""
    head = text[:80]
    found = _TIME.search(head)
    if found:
        year, month, day, hour, minute, second = (int(found.group(i)) for i in range(1, 7))
        return _stamp(year, month, day, hour, minute, second, found.group(7))
    found = _GLOG.search(head)
    if found:
        month, day, hour, minute, second = (int(found.group(i)) for i in range(1, 6))
        return _stamp(2000, month, day, hour, minute, second, found.group(6))
    return None


def _stamp(year: int, month: int, day: int, hour: int, minute: int, second: int, part: str | None) -> float | None:
    try:
        whole = datetime(year, month, day, hour, minute, second, tzinfo=timezone.utc).timestamp()
    except ValueError:
        return None
    return whole + (float(f"0.{part}") if part else 0.0)
