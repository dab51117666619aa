"""Every rank has a companion process, so that one rank's end ends the job everywhere within seconds.

Without it, the others wait inside a collective until its time-out, in C++ code that no Python signal reaches. The
companion is forked before the rank has any thread or group. It holds a pipe to its rank, so it knows at once when
that is gone; it beats in torchrun's store, which is a process of its own and outlives every rank; and it watches the
beats of the other companions. Whoever notices an end first names the rank in the store, once for all, so that every
place's log tells the same culprit. Then each companion tells its rank to end, and kills it if it cannot.

A rank whose launcher is gone is ended too: nobody else would do it. A companion ends with its rank.

Torch takes seconds to import, and a rank can end then too. So a guard is forked first, which is small: it only waits,
imports torch when its rank has ended by itself, and names it. The companion takes its place.
"""

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

BEAT = 0.5  # seconds between two looks
SILENCE = 15.0  # a companion that is silent for so long is lost, with its machine or its network; and so is the store
CONNECT = 30.0  # seconds in which the store must be reached at all
GUARD_CONNECT = 5.0  # the same for one with a word to leave, who should not be the last
GRACE = 2.0  # seconds that a rank has to end after it was told
OWN_END = 10.0  # seconds that a rank has to end by the error that it has told of
ECHO = 2.0  # seconds in which another rank may be named before one whose connections broke names itself

LEFT, FAILED, BROKE = "left", "failed ", "broke "  # lines that a rank writes to its companion


def place_here() -> str:
    return os.environ.get("ORCH_PLACE") or socket.gethostname()


class Watchdog:
    """In the rank: the ends of the pipes, and a thread that ends the rank when the companion says so.

    Made as early as can be; `begin` when torch is there. `connect` gives a connection of one's own to the store,
    within so many seconds.
    """

    def __init__(self, *, rank: int, place: str, connect: Callable[[float], "dist.Store"]):
        self.rank, self.place, self.connect = rank, place, connect
        self._over = False  # what the companion's end would mean is known
        life, self._life = os.pipe()
        rank_pid, launcher = os.getpid(), os.getppid()
        _flush()
        if os.fork() == 0:
            os.close(self._life)
            with contextlib.suppress(BaseException):
                self._guard(life, rank_pid, launcher)
            os._exit(0)
        os.close(life)

    @classmethod
    def of_this_rank(cls) -> "Watchdog":
        """Of one that torchrun has started."""
        return cls(rank=int(os.environ["RANK"]), place=place_here(), connect=store_of_the_launcher)

    def _guard(self, life: int, rank_pid: int, launcher: int) -> None:
        asked: list[int] = []
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda number, _: asked.append(number))
        said = b""
        while True:
            ready, _, _ = select.select([life], [], [], BEAT)
            part = os.read(life, 4096) if ready else b""
            said += part
            if (ready and not part) or os.getppid() != rank_pid:
                break
        lines = said.decode(errors="replace").splitlines()
        if LEFT in lines or (asked and not lines):
            return  # the companion is there; or the launcher ended the rank, for another one's sake
        reason = f"failed: {_without_mark(lines[0])}" if lines else "ended before it met the others: killed, or crashed"
        print(f"error: rank {self.rank} at {self.place} {reason}", file=sys.stderr, flush=True)
        time.sleep(2 * BEAT)
        if runs(launcher):  # else it has ended the ranks, all as young as this one, and there is nobody to tell
            _name(self.connect(GUARD_CONNECT), self.rank, self.place, reason)

    def begin(self, *, size: int) -> None:
        """The companion takes over from the guard."""
        life, own = os.pipe()
        self._word, word = os.pipe()
        rank_pid, launcher = os.getpid(), os.getppid()
        _flush()
        if os.fork() == 0:
            for descriptor in (self._life, own, self._word):
                os.close(descriptor)
            with contextlib.suppress(BaseException):
                _Companion(self, size, life, word, rank_pid, launcher).run()
            os._exit(0)
        os.close(life)
        os.close(word)
        self._tell(LEFT)
        os.close(self._life)
        self._life = own
        threading.Thread(target=self._listen, name="watchdog", daemon=True).start()

    def _listen(self) -> None:
        said = b""
        while part := os.read(self._word, 4096):
            said += part
        if not said and not self._over:  # nothing would end this rank any more, and the others hear it no more
            said = b"the watchdog of this rank was killed"
            with contextlib.suppress(Exception):
                _name(self.connect(GUARD_CONNECT), self.rank, self.place, "lost its watchdog, which was killed")
        if said:
            print(f"error: {said.decode()}", file=sys.stderr, flush=True)
            os._exit(1)

    def failed(self, error: BaseException) -> None:
        """This rank is about to end by `error`: its own, or the echo of another rank's end. An echo is waited out
        here: then the other is named and this process ended, or nobody else is to blame."""
        self._over = True
        text = f"{type(error).__name__}: {error}".replace("\n", " ")[:400]
        echo = is_echo(error)
        self._tell((BROKE if echo else FAILED) + text)
        if echo:
            time.sleep(ECHO + 2.0)

    def left(self) -> None:
        """This rank has done its work; that it ends means nothing."""
        self._over = True
        self._tell(LEFT)

    def _tell(self, line: str) -> None:
        with contextlib.suppress(OSError):
            os.write(self._life, line.encode() + b"\n")


def is_echo(error: BaseException) -> bool:
    """An error of a connection is mostly the echo of another rank's end."""
    text = str(error)
    return type(error).__name__.startswith("Dist") or any(sign in text for sign in ("gloo", "NCCL", "onnection"))


class _Companion:
    def __init__(self, watchdog: Watchdog, size: int, life: int, word: int, rank_pid: int, launcher: int):
        self.rank, self.place, self.connect = watchdog.rank, watchdog.place, watchdog.connect
        self.size, self.life, self.word, self.rank_pid, self.launcher = size, life, word, rank_pid, launcher
        # both in looks of our own, not by the clock: a machine that was stopped and goes on has missed nothing
        self.seen: dict[int, tuple[bytes, int]] = {}  # beats of the others, and when they were new
        self.silent = -CONNECT / BEAT  # how long the store has been

    def run(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # what ends the rank; then we see it go
        threading.Thread(target=self._watch_store, daemon=True).start()
        try:
            self.store = self.connect(CONNECT)
            self.silent = 0
            self.store.set(f"place/{self.rank}", self.place)
            self._watch()
        except Exception as error:  # the store goes with the launcher of its place
            self._end(f"the store of the run no longer answers rank {self.rank} at {self.place}: {_first_line(error)}")

    def _watch_store(self) -> None:
        """A store whose machine is lost does not refuse: it is silent, and whoever asks it waits."""
        while self.silent * BEAT < SILENCE:
            time.sleep(BEAT)
            self.silent += 1
        self._end(f"the store of the run has not answered rank {self.rank} at {self.place} for {SILENCE:.0f} s")
        os._exit(0)

    def _watch(self) -> None:
        number, heard, broke = 0, "", None
        while True:
            ready, _, _ = select.select([self.life], [], [], BEAT)
            part = os.read(self.life, 4096).decode(errors="replace") if ready else ""
            heard += part
            # a process that the rank has forked may hold the pipe open; then the rank's end shows otherwise
            gone = (ready and not part) or os.getppid() != self.rank_pid
            lines = heard.splitlines()
            if LEFT in lines:
                self.store.set(f"beat/{self.rank}", LEFT)
                return
            own = [line for line in lines if line.startswith(FAILED)]
            if not own and broke is not None and time.monotonic() - broke > ECHO:
                own = lines
            if own:
                _name(self.store, self.rank, self.place, f"failed: {_without_mark(own[0])}")
                return self._see_it_gone(OWN_END)
            if lines and broke is None:
                broke = time.monotonic()
            if gone and broke is None:
                _name(self.store, self.rank, self.place, "ended first, without a word: it was killed, or crashed")
                return
            if gone:  # it told of broken connections; what broke them is found below
                time.sleep(BEAT)
            number += 1
            self.store.set(f"beat/{self.rank}", str(number))
            if _parent(self.rank_pid) not in (self.launcher, None):
                return self._end(f"the launcher of rank {self.rank} at {self.place} is gone")
            if self.store.check(["first"]):
                return self._end(f"{self.store.get('first').decode()}; rank {self.rank} only followed")
            if number % 4 == 0 and (lost := self._lost(number)):
                return self._end(f"{lost}; rank {self.rank} only followed")
            self.silent = 0

    def _lost(self, now: int) -> str:
        for other in range(self.size):
            if other == self.rank or not self.store.check([f"beat/{other}"]):
                continue
            beat = self.store.get(f"beat/{other}")
            if other not in self.seen or self.seen[other][0] != beat:
                self.seen[other] = beat, now
            elif beat != LEFT.encode() and (now - self.seen[other][1]) * BEAT > SILENCE:
                place = self.store.get(f"place/{other}").decode()
                reason = f"is lost: its machine or network has been silent for {SILENCE:.0f} s"
                return _name(self.store, other, place, reason)
        return ""

    def _end(self, why: str) -> None:
        """Of our rank: it is told, and killed if it does not go."""
        self.silent = -float("inf")
        with contextlib.suppress(OSError):  # it is gone already
            os.write(self.word, why.encode())
        os.close(self.word)
        self._see_it_gone(GRACE)

    def _see_it_gone(self, patience: float) -> None:
        self.silent = -float("inf")
        ends = time.monotonic() + patience
        while os.getppid() == self.rank_pid:
            if time.monotonic() > ends:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.rank_pid, signal.SIGKILL)
                return
            time.sleep(0.05)


def _name(store: "dist.Store", rank: int, place: str, reason: str) -> str:
    """The first to be named stays; -> what is said of it."""
    said = f"rank {rank} at {place} {reason}"
    return store.compare_set("first", "", said).decode() or said


def _without_mark(line: str) -> str:
    return line.split(" ", 1)[-1].strip()


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]


def runs(pid: int) -> bool:
    """Whether there is such a process, and no mere zombie of it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (OSError, IndexError):
        return False


def _parent(pid: int) -> int | None:
    """None where there is no such process. A launcher that has ended may stay a zombie, but has no children."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except (OSError, IndexError):
        return None


def _flush() -> None:
    """What is buffered would be written by both after a fork."""
    sys.stdout.flush()
    sys.stderr.flush()


def store_of_the_launcher(patience: float) -> "dist.Store":
    """A connection of one's own to torchrun's store, within so many seconds."""
    import datetime

    import torch.distributed as dist

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    limit = datetime.timedelta(seconds=patience)
    run = os.environ.get("TORCHELASTIC_RUN_ID", "run")
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"watch/{run}/{restart}", dist.TCPStore(address, port, is_master=False, timeout=limit))
