"""Every rank has a companion process, so that one rank's end ends the job everywhere within seconds.

Without it, the others wait inside a collective until its time-out, in C++ code that no Python signal reaches. The
companion is forked before the rank has any thread or group. It holds a pipe to its rank, so it knows at once when
that is gone; it beats in torchrun's store, which is a process of its own and outlives every rank; and it watches the
beats of the other companions. Whoever notices an end first names the rank in the store, once for all, so that every
place's log tells the same culprit. Then each companion tells its rank to end, and kills it if it cannot.

A rank whose launcher is gone is ended too: nobody else would do it. A companion ends with its rank.
"""

import contextlib
import datetime
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

BEAT = 0.5  # seconds between two looks
SILENCE = 15.0  # a companion that is silent for so long is lost, with its machine or its network
GRACE = 2.0  # seconds that a rank has to end after it was told

ECHO = 2.0  # seconds in which another rank may be named before one whose connections broke names itself

LEFT, FAILED, BROKE = b"left\n", b"failed ", b"broke "


class Watchdog:
    """In the rank: the ends of the pipes, and a thread that ends the rank when the companion says so."""

    def __init__(self, connect: Callable[[], dist.Store], *, rank: int, size: int, place: str):
        life, self._life = os.pipe()
        self._word, word = os.pipe()
        rank_pid, launcher = os.getpid(), os.getppid()
        sys.stdout.flush()
        sys.stderr.flush()
        if os.fork() == 0:
            os.close(self._life)
            os.close(self._word)
            with contextlib.suppress(BaseException):
                _Companion(connect(), rank, size, place, life, word, rank_pid, launcher).run()
            os._exit(0)
        os.close(life)
        os.close(word)
        threading.Thread(target=self._listen, name="watchdog", daemon=True).start()

    def _listen(self) -> None:
        said = b""
        while part := os.read(self._word, 4096):
            said += part
        if said:
            print(f"error: {said.decode()}", file=sys.stderr, flush=True)
            os._exit(1)

    def failed(self, reason: str, *, echo: bool) -> None:
        """This rank is about to end by an error: its own, or perhaps the echo of another rank's end."""
        self._tell((BROKE if echo else FAILED) + reason.replace("\n", " ").encode()[:400] + b"\n")

    def left(self) -> None:
        """This rank has done its work; that it ends means nothing."""
        self._tell(LEFT)

    def _tell(self, message: bytes) -> None:
        with contextlib.suppress(OSError):
            os.write(self._life, message)


class _Companion:
    def __init__(
        self, store: dist.Store, rank: int, size: int, place: str, life: int, word: int, rank_pid: int, launcher: int
    ):
        self.store, self.rank, self.size, self.life, self.word = store, rank, size, life, word
        self.rank_pid, self.launcher, self.place = rank_pid, launcher, place
        self.seen: dict[int, tuple[bytes, float]] = {}

    def run(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # what ends the rank; then we see it go
        try:
            self.store.set(f"place/{self.rank}", self.place)
            self._watch()
        except Exception as error:  # the store goes with the launcher of its place
            self._end(f"the store of the run no longer answers rank {self.rank} at {self.place}: {error}")

    def _watch(self) -> None:
        number, heard, broke = 0, b"", None
        while True:
            ready, _, _ = select.select([self.life], [], [], BEAT)
            if ready:
                part = os.read(self.life, 4096)
                heard += part
                if LEFT in heard:
                    self.store.set(f"beat/{self.rank}", LEFT)
                    return
                if heard.startswith(FAILED):
                    self._name(self.rank, f"failed: {heard[len(FAILED) :].decode(errors='replace').strip()}")
                    return
                if heard.startswith(BROKE) and broke is None:
                    broke = time.monotonic()
                if not part and broke is None:
                    self._name(self.rank, "ended first, without a word: it was killed, or crashed")
                    return
            if broke is not None and time.monotonic() - broke > ECHO:
                self._name(self.rank, f"failed: {heard[len(BROKE) :].decode(errors='replace').strip()}")
                return
            number += 1
            self.store.set(f"beat/{self.rank}", str(number))
            if not Path(f"/proc/{self.launcher}").exists():
                return self._end(f"the launcher of rank {self.rank} at {self.place} is gone")
            if self.store.check(["first"]):
                return self._end(f"{self.store.get('first').decode()}; rank {self.rank} only followed")
            if lost := self._lost():
                return self._end(f"{lost}; rank {self.rank} only followed")

    def _lost(self) -> str:
        now = time.monotonic()
        for other in range(self.size):
            if other == self.rank or not self.store.check([f"beat/{other}"]):
                continue
            beat = self.store.get(f"beat/{other}")
            if other not in self.seen or self.seen[other][0] != beat:
                self.seen[other] = beat, now
            elif beat != LEFT and now - self.seen[other][1] > SILENCE:
                return self._name(other, f"is lost: its machine or network has been silent for {SILENCE:.0f} s")
        return ""

    def _name(self, rank: int, reason: str) -> str:
        """The first to be named stays; -> what is said of it."""
        place = self.store.get(f"place/{rank}").decode() if self.store.check([f"place/{rank}"]) else "an unknown place"
        said = f"rank {rank} at {place} {reason}"
        return self.store.compare_set("first", "", said).decode() or said

    def _end(self, why: str) -> None:
        """Of our rank: it is told, and killed if it does not go."""
        os.write(self.word, why.encode())
        os.close(self.word)
        ready, _, _ = select.select([self.life], [], [], GRACE)
        while ready and os.read(self.life, 4096):  # what it still says is of no more interest; its end is
            ready, _, _ = select.select([self.life], [], [], GRACE)
        if not ready:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.rank_pid, signal.SIGKILL)


def store_of_the_launcher() -> dist.Store:
    """A connection of one's own to torchrun's store."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    patience = datetime.timedelta(seconds=30)
    run = os.environ.get("TORCHELASTIC_RUN_ID", "run")
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"watch/{run}/{restart}", dist.TCPStore(address, port, is_master=False, timeout=patience))
