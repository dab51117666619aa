"""Conditions that the catalogue names: on a matched line and what stands around it, and on everything but the log."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.diagnosis import sizes
from orchestrator.diagnosis.facts import Facts, KernelLine, Match, Traceback
from orchestrator.diagnosis.model import Confidence, Evidence

Witnesses = tuple[Evidence, ...]


@dataclass(frozen=True)
class Found:
    """What a condition on the facts says: how strongly it speaks for its cause, and why."""

    strength: int
    evidence: Witnesses
    confidence: Confidence = "medium"


# ---- on a line of the log ------------------------------------------------------------------------


def dense_bytes(match: Match, trace: Traceback | None, facts: Facts) -> Witnesses | None:
    """The attempted allocation is the recipe's score matrix, to the percent."""
    tried = sizes.tried(match.text)
    if tried is None or facts.attention is None:
        return None
    for width in (4, 2):
        whole = facts.attention.bytes(width)
        if whole >= 1 << 28 and abs(tried - whole) <= 0.01 * whole:
            return (Evidence("recipe", "recipe", sizes.product(facts.attention, width, tried)),)
    return None


def fragmented(match: Match, trace: Traceback | None, facts: Facts) -> Witnesses | None:
    """What is reserved and unused, with what is free, would do; and it is no small part of the card."""
    said = sizes.report(match.text)
    if said.tried is None or said.unused is None or said.free is None:
        return None
    enough = said.unused + said.free >= said.tried and said.unused >= 0.05 * (said.total or said.tried)
    return () if enough and said.unused >= said.tried // 4 else None


def other_process(match: Match, trace: Traceback | None, facts: Facts) -> Witnesses | None:
    """Without what another process holds, the request would fit."""
    said = sizes.report(match.text)
    if said.tried is None or not said.others:
        return None
    held = sum(said.others.values())
    if held < 0.05 * (said.total or 0) or held + (said.free or 0) < said.tried:
        return None
    return ()


def deadlock_stacks(match: Match, trace: Traceback | None, facts: Facts) -> Witnesses | None:
    """Beside the thread that compiles a backward pass another one waits for the autograd engine while tracing."""
    return () if sizes.is_compile_deadlock(facts.stacks or facts.log.tail) else None


MATCH: dict[str, Callable[[Match, Traceback | None, Facts], Witnesses | None]] = {
    "dense_bytes": dense_bytes,
    "fragmented": fragmented,
    "other_process": other_process,
    "deadlock_stacks": deadlock_stacks,
}


# ---- on the exit record --------------------------------------------------------------------------


def _record(facts: Facts, text: str = "") -> Evidence:
    assert facts.exit is not None
    return Evidence("exit record", "exit record", text or facts.exit.reason)


def _signal(facts: Facts) -> int | None:
    """The signal that ended the trainer, or what it started and passed on."""
    if facts.exit is None:
        return None
    if facts.exit.signal is not None:
        return facts.exit.signal
    code = facts.exit.code
    return code - 128 if code is not None and 128 < code < 128 + 65 else None


def _rank_killed(facts: Facts) -> bool:
    return re.search(r"exitcode\s*:?\s*-9\b", facts.log.tail) is not None


def cgroup_oom_kill(facts: Facts) -> Found | None:
    """The cgroup's own count rose while the run went on."""
    if facts.exit is None or facts.phase not in (None, "failed", "lost"):
        return None
    kernel = [line for line in within(facts) if _of_cgroup(line, facts)]
    seen = tuple(Evidence("kernel log", "kernel log", line.text) for line in kernel[-2:])
    killed = _signal(facts) == 9
    if facts.exit.oom_kills:
        count = Evidence("memory.events", "cgroup", f"oom_kill rose by {facts.exit.oom_kills} during the run")
        return Found(96 if killed else 85, (count, _record(facts), *seen), "high")
    if not facts.exit.machine_oom_kills or facts.exit.oom_kills == 0 or not (killed or _rank_killed(facts)):
        return None
    count = Evidence("vmstat", "/proc/vmstat", f"oom_kill rose by {facts.exit.machine_oom_kills} on the machine")
    if seen:
        return Found(96, (*seen, count, _record(facts)), "high")
    if facts.memory_limit is not None:
        limit = Evidence("limit", "container", f"the container may use {sizes.human(facts.memory_limit)}")
        return Found(86, (count, limit, _record(facts)), "medium")
    return None


def _of_cgroup(line: KernelLine, facts: Facts) -> bool:
    """Whether the kernel's line tells of a cgroup's limit; of this container's, where its name is there."""
    if "emory cgroup out of memory" not in line.text and "CONSTRAINT_MEMCG" not in line.text:
        return False
    container = facts.place.partition("/")[2]
    named = re.search(r"oom_memcg=\S*?/(?:lxc(?:\.payload\.)?/?)([\w.-]+)", line.text)
    return named is None or not container or named.group(1) == container


def machine_oom_kill(facts: Facts) -> Found | None:
    """The kernel killed something for want of memory meanwhile, but not for this container's limit."""
    if facts.exit is None or not facts.exit.machine_oom_kills or facts.exit.oom_kills:
        return None
    if not (_signal(facts) == 9 or _rank_killed(facts)):
        return None
    lines = [line for line in within(facts) if re.search(r"Out of memory: Kill|CONSTRAINT_(?:NONE|CPUSET)", line.text)]
    seen = tuple(Evidence("kernel log", "kernel log", line.text) for line in lines[-2:])
    count = Evidence("vmstat", "/proc/vmstat", f"oom_kill rose by {facts.exit.machine_oom_kills} on the machine")
    return Found(84, (*seen, count, _record(facts)), "high" if seen else "low")


def _ended_by_runner(facts: Facts) -> bool:
    """What the record tells is how the runner ended the rest: something else had ended before."""
    return facts.first is not None and (facts.followed or facts.first.get("rank") is not None)


def sigkill(facts: Facts) -> Found | None:
    if _signal(facts) != 9 or _ended_by_runner(facts):
        return None
    return Found(55, (_record(facts),), "high" if facts.exit and facts.exit.oom_kills == 0 else "medium")


def sighup(facts: Facts) -> Found | None:
    return Found(55, (_record(facts),), "high") if _signal(facts) == 1 else None


def sigterm(facts: Facts) -> Found | None:
    if _ended_by_runner(facts):
        return None
    if facts.exit is not None and "without a request to stop" in facts.exit.reason:
        return Found(58, (_record(facts),), "high")
    return Found(42, (_record(facts),), "medium") if _signal(facts) == 15 and not facts.stop else None


def crash_signal(facts: Facts) -> Found | None:
    """SEGV, ABRT, BUS, ILL, FPE."""
    return Found(43, (_record(facts),), "medium") if _signal(facts) in (4, 6, 7, 8, 11) else None


def rank_first(facts: Facts) -> Found | None:
    """The runner saw a rank of this place end before everything else."""
    if facts.first is None or facts.followed or not isinstance(facts.first.get("rank"), int):
        return None
    seen = Evidence("record", "runner", str(facts.first.get("said")), rank=facts.first["rank"])
    return Found(57, (seen,), "high")


def other_place_failed(facts: Facts) -> Found | None:
    return _other_place(facts, "failed")


def other_place_silent(facts: Facts) -> Found | None:
    return _other_place(facts, "silent")


def _other_place(facts: Facts, kind: str) -> Found | None:
    if facts.first is None or not facts.followed or facts.first.get("kind") != kind:
        return None
    return Found(98, (Evidence("record", "runner", str(facts.first.get("said"))), _record(facts)), "high")


def not_started(facts: Facts) -> Found | None:
    if facts.exit is None or not facts.exit.reason.startswith("could not be started"):
        return None
    return Found(92, (_record(facts),), "high")


def exit_127(facts: Facts) -> Found | None:
    if facts.exit is None or facts.exit.code not in (126, 127):
        return None
    return Found(52, (_record(facts),), "medium")


def stop_asked(facts: Facts) -> Found | None:
    if facts.phase != "stopped":
        return None
    by = (facts.stop or {}).get("by") or "someone"
    return Found(99, (Evidence("record", "stop.json", f"stopped by {by}"),), "high")


# ---- on the place --------------------------------------------------------------------------------


def _why(facts: Facts, witness: str) -> Witnesses:
    return (Evidence(witness, witness, facts.why or ""),)


def container_restarted(facts: Facts) -> Found | None:
    return Found(97, _why(facts, "boot identity"), "high") if facts.restarted == "container" else None


def host_rebooted(facts: Facts) -> Found | None:
    return Found(97, _why(facts, "boot identity"), "high") if facts.restarted == "host" else None


def container_not_running(facts: Facts) -> Found | None:
    said = facts.connection or ""
    if not re.search(r"is not running|not running!|status: stopped", said):
        return None
    return Found(98, (Evidence("host", "host", said),), "high")


def container_frozen(facts: Facts) -> Found | None:
    said = facts.connection or ""
    if facts.frozen:
        return Found(97, (Evidence("host", "host", said or "the container's cgroup is frozen"),), "high")
    if "may be frozen" in said:
        return Found(90, (Evidence("host", "host", said),), "low")
    return None


def runner_gone(facts: Facts) -> Found | None:
    if facts.phase != "lost" or facts.restarted or facts.exit is not None:
        return None
    return Found(56, _why(facts, "record"), "medium")


def tmux_server_gone(facts: Facts) -> Found | None:
    if facts.tmux is not False or facts.phase not in ("starting", "compiling", "training"):
        return None
    return Found(
        15, (Evidence("tmux", "tmux", "there is no server at the run's socket, and the run is alive"),), "high"
    )


def clock_is_off(facts: Facts) -> Found | None:
    if facts.clock_skew is None or abs(facts.clock_skew) < 30:
        return None
    ahead = "ahead of" if facts.clock_skew > 0 else "behind"
    text = f"the place's clock is {abs(facts.clock_skew):.0f} s {ahead} this machine's"
    return Found(14, (Evidence("clock", "clock", text),), "high")


def no_room(facts: Facts) -> Found | None:
    if facts.phase not in ("failed", "lost", None) or facts.exit is None:
        return None
    if facts.disk_free is not None and facts.disk_free < 1 << 20:
        text = f"{facts.disk_free} bytes are free where the run writes"
    elif facts.inodes_free == 0:
        text = "no inode is free where the run writes"
    else:
        return None
    return Found(72, (Evidence("disk", "disk", text), _record(facts)), "medium")


def environment_polluted(facts: Facts) -> Found | None:
    """It was changed while the run went on: by itself a hint; with a failure of that kind, the cause."""
    if facts.environment is None or not facts.environment.changes:
        return None
    place = f"environment {facts.environment.id}"
    return Found(36, tuple(Evidence("environment", place, text) for text in facts.environment.changes), "low")


_OF_LIBRARIES = re.compile(
    r"^(?:\w+\.)*(?:ImportError|AttributeError): |undefined symbol|compiled against|DLL load failed"
)
_OF_THE_PROGRAM = re.compile(
    r"'(?:NoneType|dict|list|tuple|str|bytes|int|float|bool|function)' object has no attribute"
)


def of_a_changed_environment(facts: Facts, cause: str, raised: str, traceback: str) -> bool:
    """Whether an exception is what libraries raise that were changed under a program: it names one of these, or
    comes out of one, or is of a kind that tells of libraries that do not fit."""
    names = facts.environment.names if facts.environment is not None else frozenset()
    if cause not in ("import-error", "uncaught-exception", "python-syntax"):
        return False
    frames = re.findall(r'File "([^"]*)"', traceback)
    package = re.search(r"/site-packages/(\w+)", frames[-1]) if frames else None
    if package is not None and package.group(1) in names:
        return True
    missing = re.search(r"No module named '?(\w+)", raised)
    if missing is not None:
        return missing.group(1) in names
    return _OF_LIBRARIES.search(raised) is not None and _OF_THE_PROGRAM.search(raised) is None


def _within(line: KernelLine, facts: Facts) -> bool:
    """While the run went on, or in the moment of its end; what comes later is its teardown."""
    if line.at is None:
        return True
    end = facts.exit.at if facts.exit is not None and facts.exit.at else facts.now
    return (facts.started or 0) - 5 <= line.at and (end is None or line.at <= end + 5)


def within(facts: Facts) -> list[KernelLine]:
    """The kernel's lines of the time of the run."""
    return [line for line in facts.kernel if _within(line, facts)]
