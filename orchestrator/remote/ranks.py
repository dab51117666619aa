"""The ranks that torchrun started here, and the first of them that fails, known at once and with its status.

torchrun looks ten times a second, and once a rank has failed it waits for the others to end before it says so: 30 s
and more. A descriptor of a process (pidfd) wakes this thread when the process ends, while its status can still be
read from /proc: until torchrun collects it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

from . import processes

EVERY = 1.0  # seconds between two looks for new ranks
UNSEEN = 0.1  # where the kernel or this Python has no pidfd: seconds between two looks at the known ones


class Rank:
    """One rank's process. `fd` is -1 where there is no pidfd."""

    def __init__(self, pid: int, number: int, restarts_left: int) -> None:
        self.pid = pid
        self.number = number
        self.restarts_left = restarts_left
        self.fd = -1
        with contextlib.suppress(AttributeError, OSError):
            self.fd = os.pidfd_open(pid)  # type: ignore[attr-defined,unused-ignore]


class RankWatch(threading.Thread):
    """Watches the ranks below the trainer. `failed` becomes `{"rank", "what", "killed", "seen"}` for the first one that
    ends badly and is not to be started anew: `seen` on the monotonic clock, `killed` where a signal ended it that no
    program sends itself."""

    def __init__(self, trainer: int, wake: Callable[[], None]) -> None:
        super().__init__(name="ranks", daemon=True)
        self.failed: Optional[Dict[str, Any]] = None
        self._trainer = trainer
        self._wake = wake
        self._ranks: Dict[int, Rank] = {}
        self._known: Set[Tuple[int, int]] = set()

    def run(self) -> None:
        """Until one has failed."""
        looked = 0.0
        while self.failed is None and processes.stat(self._trainer) is not None:
            if time.monotonic() - looked >= EVERY:
                looked = time.monotonic()
                self._look()
            for rank in self._ended():
                self._end(rank)

    def _look(self) -> None:
        table = processes.everything()
        children: Dict[int, List[int]] = {}
        for pid, one in table.items():
            children.setdefault(one.parent, []).append(pid)
        todo = list(children.get(self._trainer, ()))
        while todo:
            pid = todo.pop()
            todo += children.get(pid, ())
            one = table[pid]
            if (pid, one.start_ticks) in self._known:
                continue
            # a rank's own children carry its marks too, and some outlive it
            env, above = processes.environ(pid), processes.environ(one.parent)
            if b"RANK" in env and b"TORCHELASTIC_RUN_ID" in env and above and b"RANK" not in above:
                self._known.add((pid, one.start_ticks))
                with contextlib.suppress(ValueError):
                    left = _number(env, b"TORCHELASTIC_MAX_RESTARTS") - _number(env, b"TORCHELASTIC_RESTART_COUNT")
                    self._ranks[pid] = Rank(pid, int(env[b"RANK"]), left)

    def _ended(self) -> List[Rank]:
        """Those that ended, after waiting a little for that."""
        fds = {rank.fd: rank for rank in self._ranks.values() if rank.fd >= 0}
        patience = EVERY if len(fds) == len(self._ranks) else UNSEEN
        poll = select.poll()
        for fd in fds:
            poll.register(fd, select.POLLIN)
        ended = [fds[fd] for fd, _ in poll.poll(patience * 1000)]
        for rank in self._ranks.values():
            if rank.fd < 0:
                found = processes.stat(rank.pid)
                if found is None or found.state in "ZX":
                    ended.append(rank)
        return ended

    def _end(self, rank: Rank) -> None:
        status = _exit_status(rank.pid)
        del self._ranks[rank.pid]
        if rank.fd >= 0:
            os.close(rank.fd)
        if not status or rank.restarts_left > 0 or self.failed is not None:
            return
        signum, code = status & 0x7F, status >> 8
        what = "was killed by signal %d (%s)" % (signum, _name(signum)) if signum else "ended with exit %d" % code
        killed = signum not in (0, signal.SIGTERM, signal.SIGABRT)
        self.failed = {"rank": rank.number, "what": what, "killed": killed, "seen": time.monotonic()}
        self._wake()


def _exit_status(pid: int) -> Optional[int]:
    """As `wait` gives it, of a process that nobody has collected yet; None if somebody has, or it may not be read."""
    try:
        with open("%s/%d/stat" % (processes.PROC, pid), "rb") as f:
            fields = f.read().decode("utf-8", "replace").rpartition(")")[2].split()
        return int(fields[49]) if fields[0] == "Z" else None
    except (OSError, ValueError, IndexError):
        return None


def _number(env: Dict[bytes, bytes], name: bytes) -> int:
    return int(env.get(name) or 0)


def _name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return "?"
