"""Everything that `status` shows, in one answer; the log by offset; the pane. Every part fails by itself."""

from __future__ import annotations

import os
import time
from typing import Any, Callable, Dict, List, Optional, Tuple, TypeVar

from . import logs, metrics, nvidia_smi, processes, tmux
from .cgroup import MemoryGroup
from .derive import LOST, Standing, once
from .frames import OpError
from .rundir import ACTIVE, ENDED, RunDir, find, list_runs, read_json

MOST_RUNS = 200
LOG_OF_ONE = 1 << 20  # bytes of one run's log, where several are asked for
RESULT = 64 << 10  # bytes of a result.json: a trainer's summary, not its data
FEW, TAIL_OF_MANY = 8, 32 << 10  # bytes of metrics read for each of more than a few runs
LONGEST_WAIT = 60.0
POLL = 0.15
READABLE = ("console.log", "events.jsonl", "metrics.jsonl", "gpu.jsonl")

T = TypeVar("T")
Signature = Tuple[Any, ...]


def probe(args: Dict[str, Any], call: Any) -> Tuple[Dict[str, Any], bytes]:
    """One look at the place. All arguments may be missing.

    `runs`: [id...] | "active" (not ended by their record, lost ones too) | "latest" (the
    active ones, and if there is none the newest) | "all"; `tail_lines`:
    lines of each log where no offset is given; `offset`: {run: {"inode", "offset"}}; `limit`: bytes of log a
    run; `screen`, `gpus`: whether wanted; `wait`: seconds (at most 60) until something changes; `known`:
    {run: phase} that the caller knows, so that no change between two calls is missed.

    Answer: `{"time", "boot_id", "uptime", "memory", "gpus", "runs", "problems", "more"}`, `gpus` as
    `nvidia_smi.Query.outcome` or None, `memory` as `cgroup.MemoryGroup.report`. Each run: `Standing.report`
    and `"metrics"` as `metrics.read`, `"result"` (result.json or None), `"log"` as `logs.read` and `"from"`,
    `"length"` within the payload, `"tmux"` as `tmux.pane` and `"screen"`. A part that failed is None with a
    line in `problems` (`{"run", "part", "why"}`).
    """
    problems: List[Dict[str, Any]] = []
    runs, more = _choose(args.get("runs", "active"), call.root)
    wait = _seconds(args.get("wait"))
    if wait > 0:
        _wait_for_change(runs, args, wait)
    # asked first and collected last: it takes the longest
    query = _guard(problems, None, "gpus", nvidia_smi.Query) if args.get("gpus") else None
    answer: Dict[str, Any] = {
        "time": time.time(),
        "boot_id": processes.boot_id(),
        "uptime": processes.uptime(),
        "memory": _guard(problems, None, "memory", lambda: MemoryGroup().report()),
        "runs": [],
        "problems": problems,
        "more": more,
    }
    payload = bytearray()
    snapshot = once()
    for run in runs:
        answer["runs"].append(_one(run, args, payload, len(runs), problems, snapshot))
    answer["gpus"] = None
    if query is not None:
        query.wait()
        answer["gpus"] = query.outcome()
    return answer, bytes(payload)


def _choose(wanted: Any, root: str) -> Tuple[List[RunDir], int]:
    """(the runs asked for, newest first; how many more there are)."""
    if isinstance(wanted, list):
        return [find(root, name) for name in wanted[:MOST_RUNS]], max(0, len(wanted) - MOST_RUNS)
    found = list_runs(root)
    if wanted in ("active", "latest"):
        active = [run for run in found if _may_be_active(run)]
        found = active or (found[:1] if wanted == "latest" else [])
    elif wanted != "all":
        raise OpError("usage", "runs: %r is neither a list of runs, nor active, latest, all" % (wanted,))
    return found[:MOST_RUNS], max(0, len(found) - MOST_RUNS)


def _may_be_active(run: RunDir) -> bool:
    """By its record. One whose state cannot be read may be: it is shown, with the reason; one without a state is the
    rest of a claim that was cut off."""
    state, _ = run.state()
    if state is None:
        return os.path.exists(run.file("state.json"))
    return state.get("phase") in ACTIVE


def _one(
    run: RunDir,
    args: Dict[str, Any],
    payload: bytearray,
    of: int,
    problems: List[Dict[str, Any]],
    snapshot: Callable[[], processes.Snapshot],
) -> Dict[str, Any]:
    standing = _guard(problems, run.run, "state", lambda: Standing(run, snapshot))
    empty: Dict[str, Any] = {
        "run": run.run,
        "state": None,
        "phase": None,
        "why": None,
        "lock": None,
        "alive": [],
    }
    out: Dict[str, Any] = standing.report() if standing is not None else empty
    out["metrics"] = _guard(problems, run.run, "metrics", lambda: _metrics(run, out["state"], of))
    out["result"] = _guard(problems, run.run, "result", lambda: _result(run))
    out["log"] = _guard(problems, run.run, "log", lambda: _log(run, args, payload, of))
    # a terminal of a run that ended long ago is worth a call only to who asks for that very run
    named = isinstance(args.get("runs"), list) or args.get("runs") == "latest"
    out["tmux"] = None
    if named or out["phase"] in ACTIVE or args.get("screen"):
        out["tmux"] = _guard(problems, run.run, "tmux", lambda: _pane(run, bool(args.get("screen"))))
    return out


def _metrics(run: RunDir, state: Optional[Dict[str, Any]], of: int) -> Dict[str, Any]:
    found = metrics.read(run.file("metrics.jsonl"), metrics.TAIL if of <= FEW else TAIL_OF_MANY)
    if found["eval"] is None and state is not None:
        found["eval"] = state.get("eval")  # the runner has seen the whole file
    return found


def _result(run: RunDir) -> Optional[Dict[str, Any]]:
    """What the trainer wrote at its end, if it did."""
    path = run.file("result.json")
    if not os.path.lexists(path):
        return None
    result, why = read_json(path, RESULT)
    if result is None:
        raise ValueError(why)
    return result


def _log(run: RunDir, args: Dict[str, Any], payload: bytearray, of: int) -> Dict[str, Any]:
    limit = min(_count(args.get("limit"), logs.LIMIT), logs.LIMIT if of == 1 else LOG_OF_ONE)
    limit = min(limit, logs.LIMIT - len(payload))
    known = (args.get("offset") or {}).get(run.run)
    if known:
        position, data = logs.read(run.console, known.get("inode"), known.get("offset"), limit)
    else:
        position, data = logs.read(run.console, limit=limit, tail_lines=_count(args.get("tail_lines"), 0))
    position["from"], position["length"] = len(payload), len(data)
    payload += data
    return position


def _pane(run: RunDir, screen: bool) -> Dict[str, Any]:
    out = tmux.pane(run.run)
    out["screen"] = None
    if screen and out["session"]:
        out["screen"], out["error"] = tmux.screen(run.run)
    return out


def _guard(problems: List[Dict[str, Any]], run: Optional[str], part: str, read: Callable[[], T]) -> Optional[T]:
    """One bad part is unknown, with its reason; it never costs the rest."""
    try:
        return read()
    except Exception as e:
        problems.append({"run": run, "part": part, "why": "%s: %s" % (type(e).__name__, e)})
        return None


# ---- waiting --------------------------------------------------------------------------------


def _wait_for_change(runs: List[RunDir], args: Dict[str, Any], wait: float) -> None:
    """Until a log, metrics or phase changes, or `wait` seconds are over. Only `stat` is called meanwhile;
    whether a runner is gone is looked at once a second."""
    end = time.monotonic() + min(wait, LONGEST_WAIT)
    offsets, known = args.get("offset") or {}, args.get("known") or {}
    for run in runs:
        at = offsets.get(run.run)
        files = _files(run)
        if at and files[0] is not None and files[0] != (at.get("inode"), at.get("offset")):
            return
    snapshot = once()  # of a lost run only its phase counts here
    phases = {run.run: Standing(run, snapshot).phase for run in runs}
    if all(phase in (*ENDED, LOST) for phase in phases.values()):
        return  # nothing more will come
    if any(run in phases and phases[run] != phase for run, phase in known.items()):
        return
    before = [_files(run) for run in runs]
    states = [_stat(run.file("state.json")) for run in runs]
    looked = time.monotonic()
    while time.monotonic() < end:
        time.sleep(min(POLL, max(0.0, end - time.monotonic())))
        if [_files(run) for run in runs] != before:
            return
        now = [_stat(run.file("state.json")) for run in runs]
        if now != states or time.monotonic() - looked > 1.0:
            looked, states = time.monotonic(), now
            if any(Standing(run, snapshot).phase != phases[run.run] for run in runs):
                return


def _files(run: RunDir) -> Tuple[Optional[Signature], Optional[Signature]]:
    return _stat(run.console), _stat(run.file("metrics.jsonl"))


def _stat(path: str) -> Optional[Signature]:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size


# ---- the other two --------------------------------------------------------------------------


def read_log(args: Dict[str, Any], call: Any) -> Tuple[Dict[str, Any], bytes]:
    """`{run, inode, offset, limit, tail_lines, name, wait}` -> `logs.read`'s position with `"run"`,
    `"phase"`, `"why_phase"`.

    `name`: console.log or one of the run's other line files. `wait`: seconds until there is something beyond
    offset.
    """
    run = find(call.root, args.get("run"))
    name = args.get("name") or READABLE[0]
    if name not in READABLE:
        raise OpError("usage", "%r is no log of a run: %s" % (name, ", ".join(READABLE)))
    path = run.file(name)
    inode, offset = args.get("inode"), args.get("offset")
    limit = _count(args.get("limit"), logs.LIMIT)
    tail = None if args.get("tail_lines") is None else _count(args.get("tail_lines"), 0)
    end = time.monotonic() + min(_seconds(args.get("wait")), LONGEST_WAIT)
    standing = Standing(run)
    while offset is not None and standing.phase in ACTIVE and _stat(path) in ((inode, offset), None):
        if time.monotonic() >= end:
            break
        time.sleep(POLL)
        standing = Standing(run)
    position, data = logs.read(path, inode, offset, limit, tail)
    position.update({"run": run.run, "phase": standing.phase, "why_phase": standing.why})
    return position, data


def pane(args: Dict[str, Any], call: Any) -> Dict[str, Any]:
    """`{run}` -> `tmux.pane` with `"screen"`: what is shown, with all its history; None with `"error"`
    saying why."""
    run = find(call.root, args.get("run"))
    out = tmux.pane(run.run)
    out["screen"], error = tmux.screen(run.run, history=True)
    out["error"] = out["error"] or error
    return out


def _seconds(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 else 0.0


def _count(value: Any, otherwise: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else otherwise


OPS = {"probe": probe, "read_log": read_log, "pane": pane}
