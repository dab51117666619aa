"""Every rank has a companion process, so that one rank's end ends the job everywhere within seconds.

Without it, the others wait inside a collective until its time-out, in C++ code that no Python signal reaches. The
companion is forked before the rank has imported torch, which takes seconds in which a rank can end too, and does
without it. It holds a pipe to its rank, so it knows at once when that is gone; it beats in torchrun's store, which is
a process of its own and outlives every rank; and it watches the beats of the other companions. Whoever notices an end
first names the rank in the store, once for all, so that every place's log tells the same culprit. Then each companion
tells its rank to end, and kills it if it cannot.

A rank whose launcher is gone is ended too: nobody else would do it. A companion ends with its rank.
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

from trainer.store_client import StoreClient

BEAT = 0.5  # seconds between two looks
SILENCE = 15.0  # a companion that is silent for so long is lost, with its machine or its network; and so is the store
COME = 30.0  # the same for one that was never heard: its rank may be a slow start, or have ended before it had one
GRACE = 2.0  # seconds that a rank has to end after it was told
OWN_END = 10.0  # seconds that a rank has to end by the error that it has told of
ECHO = 2.0  # seconds in which another rank may be named before one whose connections broke names itself

LEFT, FAILED, BROKE = "left", "failed ", "broke "  # lines that a rank writes to its companion
ASKED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # what a launcher ends ranks with

Connect = Callable[[], StoreClient]


def place_here() -> str:
    return os.environ.get("ORCH_PLACE") or socket.gethostname()


class Watchdog:
    """In the rank: the ends of the pipes, and a thread that ends the rank when the companion says so.

    Made as early as can be, before any other thread. `connect` gives a connection of one's own to the store.
    """

    def __init__(self, *, rank: int, size: int, place: str, connect: Connect):
        self.rank, self.place, self.connect = rank, place, connect
        self._over = False  # what the companion's end would mean is known
        life, self._life = os.pipe()
        self._word, word = os.pipe()
        rank_pid, launcher = os.getpid(), os.getppid()
        _flush()
        if os.fork() == 0:
            os.close(self._life)
            os.close(self._word)
            with contextlib.suppress(BaseException):
                _Companion(self, size, life, word, rank_pid, launcher).run()
            os._exit(0)
        os.close(life)
        os.close(word)
        threading.Thread(target=self._listen, name="watchdog", daemon=True).start()

    @classmethod
    def of_this_rank(cls) -> "Watchdog":
        """Of one that torchrun has started."""
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return cls(rank=rank, size=size, place=place_here(), connect=store_of_the_launcher)

    def _listen(self) -> None:
        told = os.read(self._word, 1)
        if self._over and not told:
            return
        if not told:  # nothing would end this rank any more, and the others hear it no more
            _say("the watchdog of this rank was killed")
            with contextlib.suppress(OSError):
                _name(self.connect(), self.rank, self.place, "lost its watchdog, which was killed")
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
        self.asked = False  # the launcher ends this rank
        # beats of the others, and when they were new, in looks of our own and not by the clock: a machine that was
        # stopped and goes on has missed nothing
        self.seen: dict[int, tuple[str, int]] = {other: ("", 0) for other in range(size) if other != self.rank}

    def run(self) -> None:
        for number in ASKED:
            signal.signal(number, self._note)  # what ends the rank; then we see it go
        try:
            self.store, self.first = self.connect(), self.connect()
            self.first.wait_for("first")  # told at once: the store may go with its launcher soon after
            self.store.set(f"place/{self.rank}", self.place)
            self._watch()
        except OSError as error:  # the store goes with the launcher of its place
            self._end(f"the store of the run no longer answers rank {self.rank} at {self.place}: {error}")

    def _note(self, *_: object) -> None:
        self.asked = True

    def _watch(self) -> None:
        number, heard, broke = 0, "", None
        while True:
            ready, _, _ = select.select([self.life, self.first], [], [], BEAT)
            part = os.read(self.life, 4096).decode(errors="replace") if self.life in ready else ""
            heard += part
            # a process that the rank has forked may hold the pipe open; then the rank's end shows otherwise
            gone = (self.life in ready and not part) or os.getppid() != self.rank_pid
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
                return self._ended()
            if gone:  # it told of broken connections; what broke them is found below
                time.sleep(BEAT)
            number += 1
            self.store.set(f"beat/{self.rank}", str(number))
            if _parent(self.rank_pid) not in (self.launcher, None):
                gone_too = f"the launcher of rank {self.rank} at {self.place} is gone"
                self.store.compare_set("first", "", gone_too)
                return self._end(gone_too)
            if self.first in ready:
                self.first.waited()
            if first := self.store.get("first"):
                return self._end(f"{first}; rank {self.rank} only followed")
            if number % 4 == 0 and (lost := self._lost(number)):
                return self._end(f"{lost}; rank {self.rank} only followed")

    def _ended(self) -> None:
        """Our rank, without a word."""
        status = _status(self.rank_pid)
        if status in ASKED or (status is None and self.asked):
            # by its launcher, mostly for the sake of another rank, which is named soon or was before
            if not select.select([self.first], [], [], ECHO)[0]:
                self.store.compare_set("first", "", f"the launcher at {self.place} has ended its ranks")
            return
        how = f" ({_told(status)})" if status is not None else ""
        reason = f"ended first, without a word: it was killed, or crashed{how}"
        said = _name(self.store, self.rank, self.place, reason)
        if said.startswith(f"rank {self.rank} "):
            _say(said)  # the others may have no time to: this place's are ended too

    def _lost(self, now: int) -> str:
        for other, (known, since) in self.seen.items():
            beat = self.store.get(f"beat/{other}") or ""
            if beat != known:
                self.seen[other] = beat, now
            elif not known and (now - since) * BEAT > COME:
                return _name(self.store, other, "a place unknown", f"has not come within {COME:.0f} s")
            elif known not in ("", LEFT) and (now - since) * BEAT > SILENCE:
                place = self.store.get(f"place/{other}") or "a place unknown"
                reason = f"is lost: its machine or network has been silent for {SILENCE:.0f} s"
                return _name(self.store, other, place, reason)
        return ""

    def _end(self, why: str) -> None:
        """Of our rank: it is told, and killed if it does not go."""
        if os.getppid() != self.rank_pid:
            return
        _say(why)  # here, as the rank may be in an import that lets none of its threads run
        with contextlib.suppress(OSError):  # it is gone already
            os.write(self.word, b"!")
        self._see_it_gone(GRACE)

    def _see_it_gone(self, patience: float) -> None:
        ends = time.monotonic() + patience
        while os.getppid() == self.rank_pid:
            if time.monotonic() > ends:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.rank_pid, signal.SIGKILL)
                return
            time.sleep(0.05)


def _name(store: StoreClient, rank: int, place: str, reason: str) -> str:
    """The first to be named stays; -> what is said of it."""
    said = f"rank {rank} at {place} {reason}"
    return store.compare_set("first", "", said) or said


def _say(error: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"error: {error}\n")
        sys.stderr.flush()


def _without_mark(line: str) -> str:
    return line.split(" ", 1)[-1].strip()


def _stat(pid: int) -> list[str]:
    """The fields of a process from its state on; none where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return []


def runs(pid: int) -> bool:
    """Whether there is such a process, and no mere zombie of it."""
    return _stat(pid)[:1] not in ([], ["Z"])


def _parent(pid: int) -> int | None:
    """None where there is no such process. A launcher that has ended may stay a zombie, but has no children."""
    fields = _stat(pid)
    return int(fields[1]) if fields else None


def _status(pid: int) -> int | None:
    """Of a process whose pipes have closed: the signal that ended it, or its status in the upper bits, as `wait` gives
    it. None where its parent has collected it already."""
    for _ in range(20):
        fields = _stat(pid)
        if not fields:
            return None
        if fields[0] == "Z":
            return int(fields[49])
        time.sleep(0.005)
    return None


def _told(status: int) -> str:
    return f"signal {status & 0x7F}" if status & 0x7F else f"exit {status >> 8}"


def _flush() -> None:
    """What is buffered would be written by both after a fork."""
    sys.stdout.flush()
    sys.stderr.flush()


def store_of_the_launcher() -> StoreClient:
    """A connection of one's own to torchrun's store."""
    run = os.environ.get("TORCHELASTIC_RUN_ID", "run")
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return StoreClient(address, port, f"watch/{run}/{restart}", silence=SILENCE)
