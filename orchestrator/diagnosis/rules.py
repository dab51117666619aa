"""From facts to a verdict: a pure function. What each witness speaks for is a claim; the strongest one is said.

The order, from the strongest: what happened to the place; a card or driver that is broken, where the log shows only
what a program sees of that; a kill for want of memory; the first lasting trouble at the log's end; an earlier one, if
the end holds only consequences; figures; an exception that no entry knows; consequences alone; a bare signal. Without
any claim a bad end is *unknown*.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from orchestrator.diagnosis import sizes
from orchestrator.diagnosis.catalogue import BY_ID, CAUSES
from orchestrator.diagnosis.conditions import of_a_changed_environment
from orchestrator.diagnosis.elastic import rank_first, readings
from orchestrator.diagnosis.facts import Facts
from orchestrator.diagnosis.figures import FACTS
from orchestrator.diagnosis.model import HEALTHY, UNKNOWN, Cause, Claim, Confidence, Evidence, Pattern, Verdict, first
from orchestrator.diagnosis.trouble import Trouble, earliest, ended_badly, last_cluster, troubles

_END, _EARLIER, _LONG_BEFORE = 90, 80, 78
_GENERIC, _ECHO, _WARNING = 60, 50, 45
# errors that a broken card or driver shows as
_SEEN_OF_A_BROKEN_CARD = frozenset({"cuda", "hardware", "driver"})


def patterns(causes: Iterable[Cause] = CAUSES) -> list[tuple[Cause, Pattern]]:
    """Every pattern with its cause, in the order that the numbers of matches mean."""
    return [(cause, pattern) for cause in causes for pattern in cause.patterns]


def diagnose(facts: Facts, causes: Sequence[Cause] = CAUSES) -> Verdict:
    """What went wrong, as far as the facts show it. Nothing is read or asked here."""
    found, warnings = troubles(facts, patterns(causes))
    bad = _ended_badly(facts, found)
    log_claim = _from_log(facts, found, bad)
    claims = [claim for cause in causes if (claim := _from_facts(facts, cause, log_claim, bad)) is not None]
    if log_claim is not None:
        claims.insert(0, log_claim)
    if not bad and facts.phase != "finished":
        claims += _from_warnings(warnings, ended=bool(facts.exit))
    best = first(claims)
    if best is None:
        return _unknown(facts, found) if bad else _healthy(facts, found, warnings)
    return _verdict(facts, best, claims, warnings)


def _ended_badly(facts: Facts, found: Sequence[Trouble]) -> bool:
    if facts.exit is not None and facts.phase not in ("finished",):
        return facts.phase in ("failed", "lost", "stopped") or facts.exit.code != 0
    if facts.phase == "finished" or facts.active:
        return False
    if facts.phase in ("failed", "lost"):
        return True
    return ended_badly(facts, found)


# ---- claims --------------------------------------------------------------------------------------


def _from_log(facts: Facts, found: Sequence[Trouble], bad: bool) -> Claim | None:
    if not bad:
        return None
    elastic = readings(facts)
    lasting = [one for one in found if not one.got_over]
    at_end = [one for one in lasting if not one.went_on]
    terminal = not facts.exit or ended_badly(facts, lasting) or facts.phase == "lost"
    cluster = last_cluster(at_end) if terminal else []
    known = [one for one in cluster if one.cause is not None and not one.is_echo]
    generic = [one for one in cluster if one.cause is None]
    rank = rank_first(facts)
    if known:
        return _claim(facts, _pick(known, generic, rank), _END, "high" if facts.exit else "medium")
    if elastic:
        return replace(elastic, strength=_END)
    if generic:
        return _claim(facts, earliest(_of_rank(generic, rank)), _GENERIC, "high" if facts.exit else "medium")
    echoes = [one for one in cluster if one.is_echo]
    if not echoes:
        return None
    before = [one for one in at_end if not one.is_echo and one.end <= echoes[0].offset]
    if before:
        last = last_cluster(before)
        named = [one for one in last if one.cause is not None]
        chosen = _pick(named, [one for one in last if one.cause is None], rank) if named else earliest(last)
        return _claim(facts, chosen, _EARLIER if named else _GENERIC, "medium")
    gone_on = [one for one in lasting if not one.is_echo and one.end <= echoes[0].offset]
    if gone_on:
        named = [one for one in gone_on if one.cause is not None]
        return _claim(facts, earliest(named or gone_on), _LONG_BEFORE if named else _GENERIC, "medium")
    top = max(one.cause.precedence for one in echoes if one.cause is not None)
    strongest = [one for one in echoes if one.cause is not None and one.cause.precedence == top]
    return _claim(facts, earliest(strongest), _ECHO, "medium" if facts.exit else "low")


def _pick(known: Sequence[Trouble], generic: Sequence[Trouble], rank: int | None) -> Trouble:
    """The first of those that are known, unless another rank raised something unknown before it."""
    chosen = earliest(_of_rank(known, rank))
    broken = [one for one in known if one.cause and one.cause.family in ("hardware", "driver")]
    if broken and chosen.cause and chosen.cause.family == "cuda":
        return earliest(broken)  # what the program sees of it comes first
    same_place = [one for one in known if one.rank == chosen.rank and 0 <= one.offset - chosen.offset < 4096]
    better = [
        one
        for one in same_place
        if one.cause and chosen.cause and one.cause.precedence > chosen.cause.precedence + 25 and one.trace is not None
    ]
    if chosen.trace is None and better:
        chosen = earliest(better)
    for one in generic:
        if one.rank is not None and one.rank != chosen.rank and one.end < chosen.offset and rank in (None, one.rank):
            return one
    return chosen


def _of_rank(found: Sequence[Trouble], rank: int | None) -> Sequence[Trouble]:
    return [one for one in found if one.rank == rank] or found if rank is not None else found


def _claim(facts: Facts, one: Trouble, strength: int, confidence: Confidence) -> Claim:
    cause = one.cause or BY_ID["uncaught-exception"]
    line = one.match.line if one.match else one.trace.line if one.trace else None
    text = one.text if one.match else (one.trace.exception if one.trace else one.text)
    offset = one.offset
    if one.match is None and one.trace is not None and one.trace.raised:
        offset = one.trace.raised[-1].offset
    place = f"{facts.log.name}:{line}" if line else f"{facts.log.name} at byte {offset}"
    rank = one.rank if one.rank is not None or cause.id != "rank-died" else rank_first(facts)
    seen = [Evidence("log", place, text[:2000], offset, line, rank), *one.witnesses]
    if cause.id == "dense-attention-oom":
        seen += _arithmetic(facts, one, seen)
    if facts.exit is not None and facts.exit.code != 0:
        seen.append(Evidence("exit record", "exit record", facts.exit.reason))
    return Claim(cause, strength, confidence, tuple(seen), one.trace.text if one.trace else None)


def _arithmetic(facts: Facts, one: Trouble, seen: Sequence[Evidence]) -> list[Evidence]:
    """The frames, and the allocation set against the recipe's shape."""
    out = []
    if one.trace is not None:
        frame = next(
            (line for line in one.trace.text.splitlines() if "math_attention" in line or "sdpa_dense" in line), ""
        )
        if frame:
            out.append(Evidence("frames", "traceback", frame.strip()))
    tried = sizes.tried(one.text)
    if tried is None or facts.attention is None or any(item.witness == "recipe" for item in seen):
        return out
    for width in (4, 2):
        whole = facts.attention.bytes(width)
        if abs(tried - whole) <= 0.01 * whole:
            return [*out, Evidence("recipe", "recipe", sizes.product(facts.attention, width, tried))]
    return out


def _from_facts(facts: Facts, cause: Cause, log: Claim | None, bad: bool) -> Claim | None:
    found = [one for name in cause.structured if (one := FACTS[name](facts)) is not None]
    if not found:
        return None
    top = max(found, key=lambda one: one.strength)
    strength, confidence = top.strength, top.confidence
    seen = tuple(item for one in found for item in one.evidence)
    agrees = log is not None and log.cause.id == cause.id
    if agrees and log is not None:
        return Claim(cause, max(strength, log.strength) + 5, "high", (*log.evidence, *seen), log.traceback)
    if cause.id == "environment-drift":
        if not bad:
            return None
        if log is not None and of_a_changed_environment(facts, log.cause.id, _raised(log), log.traceback or ""):
            return Claim(cause, log.strength + 5, "high", (*log.evidence, *seen), log.traceback)
    if cause.family in ("hardware", "driver") or cause.id == "illegal-memory-access":
        if not bad:
            # a broken card beside a run that goes on, or ended well, is not yet what is wrong with it
            return None
        if log is not None and not _may_be_of_a_card(log):
            return None
        if log is not None and cause.id == "illegal-memory-access" and log.cause.id == "cuda-launch-failure":
            return None
        seen = (*seen, *(log.evidence if log is not None else ()))
    return Claim(cause, strength, confidence, seen, log.traceback if log is not None else None)


def _raised(log: Claim) -> str:
    """The line of the log that a claim rests on."""
    return next((item.text for item in log.evidence if item.witness == "log"), "")


def _may_be_of_a_card(log: Claim) -> bool:
    """Whether what the log shows may be what a program sees of a broken card or driver."""
    if log.cause.family in _SEEN_OF_A_BROKEN_CARD or log.strength <= _ECHO:
        return True
    if log.cause.id != "uncaught-exception":
        return False
    text = "\n".join((*(item.text for item in log.evidence), log.traceback or ""))
    return any(word in text for word in ("CUDA", "cuda", "NVML", "nvidia", "GPU", "device"))


def _from_warnings(warnings: Sequence[Trouble], ended: bool) -> list[Claim]:
    if ended or not warnings:
        return []
    one = warnings[0]
    assert one.cause is not None and one.match is not None
    seen = Evidence("log", f"console.log:{one.match.line}", one.text[:2000], one.offset, one.match.line, one.rank)
    return [Claim(one.cause, _WARNING, "high", (seen,))]


# ---- verdicts ------------------------------------------------------------------------------------


def _verdict(facts: Facts, best: Claim, claims: Sequence[Claim], warnings: Sequence[Trouble]) -> Verdict:
    trace = best.traceback
    if trace is None and facts.log.tracebacks and best.cause.theme not in ("place", "training"):
        trace = facts.log.tracebacks[-1].text if best.cause.id not in _WITHOUT_TRACEBACK else None
    if best.cause.id == "rank-died" and "ChildFailedError" in (trace or ""):
        trace = None  # the launcher's own
    seen = tuple(dict.fromkeys(best.evidence))
    independent = {item.witness for item in seen} - {"exit record"}
    confidence: Confidence = "high" if len(independent) > 1 and best.confidence == "medium" else best.confidence
    return Verdict(
        cause=best.cause.id,
        title=best.cause.title,
        confidence=confidence,
        evidence=seen,
        advice=best.advice or best.cause.advice,
        command=best.cause.command,
        retry=best.cause.retry,
        traceback=trace,
        notes=tuple(_notes(facts, best, claims, warnings)),
    )


_WITHOUT_TRACEBACK = frozenset({"container-memory", "host-memory", "gpu-off-bus", "dense-attention-running"})


def _unknown(facts: Facts, found: Sequence[Trouble]) -> Verdict:
    """A bad end that nothing explains: what there is, whole."""
    seen = []
    if facts.exit is not None:
        seen.append(Evidence("exit record", "exit record", facts.exit.reason))
    elif facts.why:
        seen.append(Evidence("record", "record", facts.why))
    last = next((line for line in reversed(facts.log.tail.splitlines()) if line.strip()), "")
    if last:
        seen.append(Evidence("log", f"{facts.log.name}, last line", last[:2000]))
    elif facts.log.why:
        seen.append(Evidence("log", facts.log.name, facts.log.why))
    traces = facts.log.tracebacks
    return Verdict(
        UNKNOWN,
        "no entry of the catalogue fits",
        "low",
        tuple(seen),
        ("Read the end of the log; if it names a cause, a rule of your own can tell it the next time (rules:).",),
        "orch logs {run} --tail 200",
        False,
        traces[-1].text if traces else None,
        tuple(_notes(facts, None, (), ())),
    )


def _healthy(facts: Facts, found: Sequence[Trouble], warnings: Sequence[Trouble]) -> Verdict:
    if facts.active:
        text, confidence = f"it is {facts.phase}", "medium"
    elif facts.exit is not None:
        text, confidence = facts.exit.reason, "high"
    else:
        text, confidence = "the log shows no bad end", "medium" if facts.log.size else "low"
    seen = Evidence("exit record" if facts.exit else "record" if facts.phase else "log", facts.log.name, text)
    notes = _notes(facts, None, (), warnings)
    return Verdict(HEALTHY, "nothing is wrong", confidence, (seen,), notes=tuple(notes))  # type: ignore[arg-type]


def _notes(facts: Facts, best: Claim | None, claims: Sequence[Claim], warnings: Sequence[Trouble]) -> list[str]:
    """What else was seen that a reader should know, without being the cause."""
    notes = []
    for claim in claims:
        if best is not None and claim.cause.id != best.cause.id and claim.strength >= 35 and claim.evidence:
            item = claim.evidence[0]
            if item in best.evidence:
                continue  # the same line, read otherwise
            notes.append(f"also seen: {claim.cause.title} ({item.place}: {item.text[:120]})")
    if warnings and (best is None or not best.cause.id.startswith("dense-attention")):
        cause = warnings[0].cause
        notes.append(f"also seen: {cause.title if cause else 'a warning'} (console.log:{_line(warnings[0])})")
    if facts.clock_skew is not None and 2 < abs(facts.clock_skew) < 30:
        notes.append(f"the place's clock is {facts.clock_skew:+.1f} s off this machine's")
    if facts.tmux is False and facts.phase in ("failed", "lost"):
        notes.append("its tmux server is gone too")
    if facts.environment is not None and facts.environment.later:
        notes.append(f"its environment was changed since, or nothing says when: {facts.environment.later[0]}")
    if facts.log.why:
        notes.append(f"the log could not be read: {facts.log.why}")
    if facts.kernel_why:
        notes.append(f"the kernel log could not be read: {facts.kernel_why}")
    return notes[:5]


def _line(one: Trouble) -> int | None:
    return one.match.line if one.match else None
