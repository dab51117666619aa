"""Ranks as processes of their own with their companions, over a store: whoever ends, all end, and the log says who.

The ranks here train nothing: each is this file, run with what it should do. Times are only limits.
"""

import contextlib
import datetime
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trainer import watchdog
from trainer.watchdog import runs

ROOT = Path(__file__).parents[2]
LIMIT = 30  # seconds
SILENCE = 4.0  # in place of the watchdog's own, which would take long


def rank_program(rank: int, size: int, port: int, deed: str) -> None:
    """What the process of a rank does: `deed`, and then nothing for long."""
    import torch.distributed as dist

    watchdog.SILENCE, watchdog.OWN_END = SILENCE, 2.0

    def connect(patience: float) -> "dist.Store":
        return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=patience))

    watch = watchdog.Watchdog(rank=rank, place=f"place{rank}", connect=connect)
    if deed != "guarded":
        watch.begin(size=size)
    print("watched", flush=True)
    sys.stdin.readline()  # until the test says so
    if deed == "raises":
        error: BaseException = ValueError("this is where it began")
    elif deed == "echoes":
        error = RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer")
    elif deed == "full":
        error = OSError("no more space is left")  # ends as the line of a rank that has left
    if deed in ("raises", "echoes", "full"):
        watch.failed(error)
        sys.exit(1)
    if deed == "raises and hangs":
        watch.failed(ValueError("this is where it began"))
    if deed == "leaves":
        watch.left()
        sys.exit(0)
    if deed == "forks":  # something that holds the pipes open
        if os.fork() == 0:
            time.sleep(LIMIT)
            os._exit(0)
        print("forked", flush=True)
    while True:
        time.sleep(1)


STORE = """
import datetime, sys, time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(300)
"""
# a launcher: starts its rank, says its pid, and waits
LAUNCHER = """
import subprocess, sys
rank = subprocess.Popen(sys.argv[1:], start_new_session=True)
print("pid", rank.pid, flush=True)
sys.exit(rank.wait())
"""


class Job:
    """A store and ranks, each under a launcher of its own, as on machines of their own."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.store = self._popen([sys.executable, "-c", STORE], "store")
        self.port = int(self.store.stdout.readline())
        self.launchers: list[subprocess.Popen] = []
        self.pids: list[int] = []

    def _popen(self, words: list[str], name: str) -> subprocess.Popen:
        return subprocess.Popen(
            words,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(self.folder / f"{name}.err").open("w"),
            text=True,
        )

    def start(self, *deeds: str) -> "Job":
        for rank, deed in enumerate(deeds):
            program = [sys.executable, "-m", "tests.trainer.test_watchdog", str(rank), str(len(deeds)), str(self.port)]
            self.launchers.append(self._popen([sys.executable, "-c", LAUNCHER, *program, deed], f"rank{rank}"))
        for launcher in self.launchers:
            words = launcher.stdout.readline(), launcher.stdout.readline()
            self.pids += [int(word.split()[1]) for word in words if word.startswith("pid")]
            assert "watched\n" in words
        return self

    def until_all_beat(self) -> None:
        """Companions connect on their own; from here on each knows of the others."""
        import torch.distributed as dist

        store = dist.TCPStore("127.0.0.1", self.port, is_master=False, timeout=datetime.timedelta(seconds=LIMIT))
        store.wait([f"beat/{rank}" for rank in range(len(self.pids))])

    def go(self, rank: int) -> None:
        self.launchers[rank].stdin.write("go\n")
        self.launchers[rank].stdin.flush()

    def ended(self, *ranks: int) -> list[str]:
        """Waits for the end of these ranks, or of all; -> what each wrote to stderr."""
        chosen = ranks or range(len(self.launchers))
        for rank in chosen:
            eventually(lambda pid=self.pids[rank]: not runs(pid))
        return [self.said(rank) for rank in chosen]

    def said(self, rank: int) -> str:
        return (self.folder / f"rank{rank}.err").read_text()

    def close(self) -> None:
        for pid in (*self.pids, *self.leftovers()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in (*self.launchers, self.store):
            process.kill()
            process.communicate()

    def leftovers(self) -> list[int]:
        """Processes of the ranks, of their companions and guards, all of which have the rank's command line."""
        start, end = "-m\0tests.trainer.test_watchdog\0", f"\0{self.port}\0"
        return [
            pid
            for pid in processes()
            if (words := command_of(pid)).partition("\0")[2].startswith(start) and end in words
        ]


def processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and runs(int(path.name))]


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def eventually(holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < ends, "this has not come about"
        time.sleep(0.05)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    left = []
    try:
        eventually(lambda: not job.leftovers())
    except AssertionError:
        left = job.leftovers()
    job.close()
    assert not left, "processes that nobody ends"


def test_a_killed_rank_ends_the_others_which_name_it(job):
    job.start("hangs", "hangs", "hangs").until_all_beat()
    os.kill(job.pids[1], signal.SIGKILL)
    for said in job.ended(0, 2):
        assert "rank 1 at place1 ended first, without a word" in said


def test_a_rank_is_seen_to_go_though_a_child_of_it_holds_its_pipes(job):
    job.start("forks", "hangs").until_all_beat()
    job.go(0)
    assert job.launchers[0].stdout.readline() == "forked\n"
    child = [pid for pid in job.leftovers() if watchdog._parent(pid) == job.pids[0] and pid != job.pids[0]]
    os.kill(job.pids[0], signal.SIGKILL)
    assert "rank 0 at place0 ended first" in job.ended(1)[0]
    for pid in child:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_the_rank_with_an_error_of_its_own_is_named_and_not_those_whose_connections_broke(job):
    job.start("echoes", "raises", "echoes").until_all_beat()
    for rank in (0, 2, 1):  # the echoes first
        job.go(rank)
    for said in job.ended(0, 2):
        assert "rank 1 at place1 failed: ValueError: this is where it began" in said


def test_a_connection_that_broke_for_no_reason_anybody_tells_is_named(job):
    job.start("echoes", "hangs").until_all_beat()
    job.go(0)
    assert "rank 0 at place0 failed: RuntimeError: [gloo" in job.ended()[1]


def test_an_error_whose_text_ends_as_a_farewell_is_an_error(job):
    job.start("full", "hangs").until_all_beat()
    job.go(0)
    assert "rank 0 at place0 failed: OSError: no more space is left" in job.ended()[1]


def test_a_rank_that_told_its_error_and_cannot_end_is_ended(job):
    job.start("raises and hangs", "hangs").until_all_beat()
    job.go(0)
    assert "rank 0 at place0 failed: ValueError" in job.ended()[1]


def test_a_rank_that_left_is_not_missed(job):
    job.start("leaves", "hangs", "hangs").until_all_beat()
    job.go(0)
    assert job.ended(0) == [""]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[__name__], "LIMIT", 4)  # a look or two of the others
        with pytest.raises(AssertionError):
            eventually(lambda: not runs(job.pids[1]) or not runs(job.pids[2]))
    os.kill(job.pids[2], signal.SIGKILL)
    assert "rank 2 at place2 ended first" in job.ended(1)[0]


def test_a_stopped_rank_is_not_lost_and_is_ended_with_the_others(job):
    job.start("hangs", "hangs").until_all_beat()
    os.kill(job.pids[0], signal.SIGSTOP)
    time.sleep(SILENCE + 3)  # longer than any lost machine has
    assert runs(job.pids[0]) and runs(job.pids[1])
    os.kill(job.pids[1], signal.SIGKILL)
    job.ended(0)


def test_a_silent_machine_is_lost(job):
    job.start("hangs", "hangs").until_all_beat()
    machine = [pid for pid in job.leftovers() if pid == job.pids[0] or watchdog._parent(pid) == job.pids[0]]
    assert len(machine) == 2  # the rank and its companion
    for pid in machine:
        os.kill(pid, signal.SIGSTOP)
    assert "rank 0 at place0 is lost: its machine or network has been silent" in job.ended(1)[0]
    for pid in machine:  # it comes back, and finds that it was given up
        os.kill(pid, signal.SIGCONT)
    assert "rank 0 at place0 is lost" in job.ended(0)[0]


def test_a_rank_without_its_launcher_ends(job):
    job.start("hangs", "hangs").until_all_beat()
    job.launchers[0].kill()  # not waited for: a zombie, as under an init that reaps nothing
    said = job.ended()
    assert "the launcher of rank 0 at place0 is gone" in said[0]
    assert "rank 0 at place0" in said[1]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_ranks_whose_store_is_gone_or_silent_end(job, number):
    job.start("hangs", "hangs").until_all_beat()
    os.kill(job.store.pid, number)
    for rank, said in enumerate(job.ended()):
        assert "the store of the run" in said and f"rank {rank} at place{rank}" in said


def test_a_rank_whose_companion_was_killed_ends_and_says_so(job):
    job.start("hangs", "hangs").until_all_beat()
    (companion,) = (pid for pid in job.leftovers() if watchdog._parent(pid) == job.pids[0])
    os.kill(companion, signal.SIGKILL)
    assert "the watchdog of this rank was killed" in job.ended(0)[0]
    assert "rank 0 at place0 lost its watchdog" in job.ended(1)[0]


def test_a_rank_that_the_launcher_ends_before_it_has_torch_is_not_to_blame(job):
    job.start("guarded", "hangs").go(0)
    os.killpg(job.pids[0], signal.SIGTERM)  # as torchrun does
    assert job.ended(0) == [""]
    eventually(lambda: not [pid for pid in job.leftovers() if watchdog._parent(pid) == 1])
    os.kill(job.pids[1], signal.SIGKILL)
    assert job.ended() == ["", ""]


@pytest.mark.parametrize("text", ["[../gloo/x.cc:1] Timed out", "NCCL error", "Connection reset by peer"])
def test_errors_of_connections_are_echoes(text):
    assert watchdog.is_echo(RuntimeError(text))
    assert not watchdog.is_echo(RuntimeError("CUDA out of memory"))


if __name__ == "__main__":
    rank_program(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
