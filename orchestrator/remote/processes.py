"""Processes as /proc shows them: who one is, which belong to a run, and ending those and no others.

A pid alone is re-used, so a process is known by pid + start time (clock ticks since boot, field 22 of
`stat`) + boot id. Where there is no /proc these facts are None, and nothing is ever signalled on a guess.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Set, Tuple

PROC = "/proc"
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


class Stat(NamedTuple):
    """What `/proc/<pid>/stat` says. `state` is its letter (R, S, D, T, Z ...)."""

    pid: int
    comm: str
    state: str
    parent: int
    start_ticks: int


def boot_id() -> Optional[str]:
    """What names the running kernel's boot; None where the kernel does not tell (macOS)."""
    try:
        with open(PROC + "/sys/kernel/random/boot_id") as f:
            return f.read().strip() or None
    except OSError:
        return None


def uptime() -> Optional[float]:
    """Seconds since boot; under lxcfs, since the container's start. None if unknown."""
    try:
        with open(PROC + "/uptime") as f:
            return float(f.read().split()[0])
    except (OSError, ValueError, IndexError):
        return None


def kernel_began() -> Optional[float]:
    """When the kernel started, by Unix time; not the container's start, which lxcfs puts in its place."""
    try:
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    except (AttributeError, OSError):
        up = uptime()
        return None if up is None else time.time() - up


def stat(pid: int) -> Optional[Stat]:
    """The process of that pid, zombies too; None if there is none, or no /proc."""
    try:
        with open("%s/%d/stat" % (PROC, pid), "rb") as f:
            text = f.read().decode("utf-8", "replace")
    except OSError:
        return None
    # the name may hold spaces and brackets: what follows the last bracket has a fixed form
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    try:
        return Stat(pid, head.partition("(")[2], fields[0], int(fields[1]), int(fields[19]))
    except (IndexError, ValueError):
        return None


def identity(pid: int) -> Dict[str, Any]:
    """`{"pid", "start_ticks", "boot_id", "init_ticks"}`; what is unknown is None.

    `init_ticks` is the start of pid 1: in a container it changes when the container restarts, the boot id
    does not.
    """
    found, init = stat(pid), stat(1)
    return {
        "pid": pid,
        "start_ticks": found.start_ticks if found else None,
        "boot_id": boot_id(),
        "init_ticks": init.start_ticks if init else None,
    }


def is_alive(who: Optional[Dict[str, Any]]) -> Optional[bool]:
    """Whether that very process lives (a zombie does not). None: cannot be told."""
    if not who or not isinstance(who.get("pid"), int):
        return None
    if who.get("start_ticks") is None or boot_id() is None:
        return None
    if who.get("boot_id", boot_id()) != boot_id():
        return False
    found = stat(who["pid"])
    return found is not None and found.start_ticks == who["start_ticks"] and found.state not in "ZX"


def send(who: Optional[Dict[str, Any]], signum: int) -> bool:
    """Signal that very process; False if it is gone, or cannot be told from another."""
    if not is_alive(who):
        return False
    assert who is not None
    try:
        os.kill(who["pid"], signum)
    except OSError:
        return False
    return True


def become_subreaper() -> bool:
    """Orphaned descendants become children of this process, so that none is lost sight of. False where that
    fails."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        return int(libc.prctl(_SUBREAPER, 1, 0, 0, 0)) == 0
    except (OSError, AttributeError, ValueError):
        return False


def everything() -> Dict[int, Stat]:
    """All processes that this one can see; empty where there is no /proc."""
    found = {}
    try:
        names = os.listdir(PROC)
    except OSError:
        return {}
    for name in names:
        if name.isdigit():
            one = stat(int(name))
            if one is not None:
                found[one.pid] = one
    return found


def environ(pid: int) -> Dict[bytes, bytes]:
    """The environment that the process began with; empty if it is another user's, a zombie, or gone."""
    try:
        with open("%s/%d/environ" % (PROC, pid), "rb") as f:
            text = f.read()
    except OSError:
        return {}
    return dict(item.partition(b"=")[::2] for item in text.split(b"\0") if item)


def ancestors(pid: int, until: Iterable[int] = ()) -> List[int]:
    """The parents of a process, nearest first, up to pid 1 or one of `until` (both left out)."""
    stop, out = {0, 1, *until}, []
    found = stat(pid)
    while found is not None and found.parent not in stop and found.parent not in out:
        out.append(found.parent)
        found = stat(found.parent)
    return out


class Snapshot:
    """All processes at one moment, and which carry the marks of a run."""

    def __init__(self) -> None:
        self.table = everything()
        self.children: Dict[int, List[int]] = {}
        self.marked: Dict[int, Tuple[bytes, Optional[bytes]]] = {}
        own_names = _pid_namespace("self")
        for pid, one in self.table.items():
            self.children.setdefault(one.parent, []).append(pid)
            env = environ(pid)
            # a like-named run in a container below is not one of this place
            if b"ORCH_RUN_ID" in env and _pid_namespace(str(pid)) == own_names:
                self.marked[pid] = env[b"ORCH_RUN_ID"], env.get(b"ORCH_RUN_DIR")


def of_run(
    run: str,
    run_dir: str,
    roots: Iterable[int] = (),
    spare: Iterable[int] = (),
    snapshot: Optional[Snapshot] = None,
) -> List[Stat]:
    """The living processes of a run: those that carry its id and directory in their environment or write to its
    log, and all descendants of these and of `roots`. The roots themselves, `spare` and this process are left out."""
    now = snapshot if snapshot is not None else Snapshot()
    wanted_id, wanted_dir = os.fsencode(run), os.fsencode(run_dir)
    found = {pid for pid, (name, where) in now.marked.items() if name == wanted_id and where in (None, wanted_dir)}
    roots = set(roots)
    found |= _writers(now, os.path.join(run_dir, "console.log"))
    todo = list(found | roots)
    while todo:
        for child in now.children.get(todo.pop(), ()):
            if child not in found:
                found.add(child)
                todo.append(child)
    found -= {os.getpid(), *spare, *roots}
    return sorted(now.table[pid] for pid in found if pid in now.table and now.table[pid].state not in "ZX")


def _writers(snapshot: Snapshot, log: str) -> Set[int]:
    """Whose stdout or stderr is this file: a daemon may have cleared its environment, and its parent be gone."""
    wanted = os.path.realpath(log)
    found = set()
    for pid in snapshot.table:
        for fd in (1, 2):
            with contextlib.suppress(OSError):
                if os.readlink("%s/%d/fd/%d" % (PROC, pid, fd)) == wanted:
                    found.add(pid)
    return found


def _pid_namespace(pid: str) -> Optional[str]:
    try:
        return os.readlink("%s/%s/ns/pid" % (PROC, pid))
    except OSError:
        return None


def kill_each(found: Iterable[Stat], signum: int) -> int:
    """Signal each, unless its pid went to another meanwhile. A stopped one is woken so that it can answer."""
    sent = 0
    for one in found:
        now = stat(one.pid)
        if now is None or now.start_ticks != one.start_ticks:
            continue
        with contextlib.suppress(OSError):
            os.kill(one.pid, signum)
            sent += 1
            if signum != signal.SIGKILL:
                os.kill(one.pid, signal.SIGCONT)
    return sent


def end_all(
    find: Callable[[], List[Stat]],
    deadline: Callable[[], float],
    patience: float = 5.0,
    tick: Optional[Callable[[], None]] = None,
) -> Tuple[List[Stat], List[Stat]]:
    """End what `find` finds: SIGTERM, at `deadline()` SIGKILL, until nothing is found or `patience` seconds
    went by.

    `deadline` is on the monotonic clock and may come nearer meanwhile. `find` is asked again all the while,
    since processes make others while they end. `tick` is called between looks.
    Returns (those that were signalled, those that remain: a process in an uninterruptible state cannot be
    ended).
    """
    signalled: Dict[Tuple[int, int], Stat] = {}
    termed: Set[Tuple[int, int]] = set()
    found = find()
    while found and time.monotonic() < deadline():
        fresh = [one for one in found if (one.pid, one.start_ticks) not in termed]
        for one in fresh:
            termed.add((one.pid, one.start_ticks))
            signalled[one.pid, one.start_ticks] = one
        kill_each(fresh, signal.SIGTERM)
        _pause(tick)
        found = find()
    end = time.monotonic() + patience
    while found:
        for one in found:
            signalled[one.pid, one.start_ticks] = one
        kill_each(found, signal.SIGKILL)
        _pause(tick)
        found = find()
        if time.monotonic() >= end:
            break
    return sorted(signalled.values()), found


def _pause(tick: Optional[Callable[[], None]]) -> None:
    if tick is not None:
        tick()
    time.sleep(0.05)


def describe(found: Iterable[Stat]) -> List[Dict[str, Any]]:
    """`[{"pid", "name", "state"}]`, the first twenty."""
    return [{"pid": one.pid, "name": one.comm, "state": one.state} for one in list(found)[:20]]
