"""Ranks as processes of their own with their companions, over a store: whoever ends, all end, and the log says who.

The ranks here train nothing, and do not even import torch: each is this file, run with what it should do. Times are
only limits.
"""

import contextlib
import datetime
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from trainer import watchdog
from trainer.store_client import StoreClient
from trainer.watchdog import runs

ROOT = Path(__file__).parents[2]
LIMIT = 30  # seconds
SILENCE = 3.0  # in place of the watchdog's own, which would take long


def rank_program(rank: int, size: int, port: int, prefix: str, deed: str) -> None:
    """What the process of a rank does: `deed`, and then nothing for long."""
    watchdog.SILENCE = watchdog.COME = SILENCE
    watchdog.OWN_END = watchdog.ECHO = 1.0
    connect = partial(StoreClient, "127.0.0.1", port, prefix, silence=SILENCE)
    if deed == "never comes":
        print("watched", flush=True)
        time.sleep(LIMIT)
    watch = watchdog.Watchdog(rank=rank, size=size, place=f"place{rank}", connect=connect)
    if deed == "handles":
        signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
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
    if deed == "crashes":
        os._exit(3)
    if deed == "holds the lock":  # as an import does that loads for seconds: none of this process's threads runs
        import ctypes

        ctypes.PyDLL(None).sleep(LIMIT)
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
time.sleep(600)
"""
# a launcher: starts its rank, says its pid, and looks after it ten times a second, as torchrun does
LAUNCHER = """
import subprocess, sys, time
rank = subprocess.Popen(sys.argv[1:], start_new_session=True)
print("pid", rank.pid, flush=True)
while rank.poll() is None:
    time.sleep(0.1)
sys.exit(rank.returncode)
"""


@pytest.fixture(scope="module")
def shared_store() -> Iterator[subprocess.Popen]:
    store = start_store()
    yield store
    end_store(store)


def start_store() -> subprocess.Popen:
    store = subprocess.Popen([sys.executable, "-c", STORE], stdout=subprocess.PIPE, text=True)
    store.port = int(store.stdout.readline())
    return store


def end_store(store: subprocess.Popen) -> None:
    store.kill()
    store.communicate()


class Job:
    """Ranks, each under a launcher of its own, as on machines of their own; and keys of their own in a store."""

    def __init__(self, folder: Path, store: subprocess.Popen):
        self.folder, self.store, self.prefix = folder, store, uuid.uuid4().hex
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
            program = [sys.executable, "-m", "tests.trainer.test_watchdog", str(rank), str(len(deeds))]
            words = [*program, str(self.store.port), self.prefix, deed]
            self.launchers.append(self._popen([sys.executable, "-c", LAUNCHER, *words], f"rank{rank}"))
        for launcher in self.launchers:
            words = launcher.stdout.readline(), launcher.stdout.readline()
            self.pids += [int(word.split()[1]) for word in words if word.startswith("pid")]
            assert "watched\n" in words
        return self

    def until_all_beat(self) -> None:
        """Companions connect on their own; from here on each knows of the others."""
        store = StoreClient("127.0.0.1", self.store.port, self.prefix, silence=LIMIT)
        for rank in range(len(self.pids)):
            eventually(lambda key=f"beat/{rank}": store.get(key))
        store.close()

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
        for process in self.launchers:
            process.kill()
            process.communicate()

    def leftovers(self) -> list[int]:
        """Processes of the ranks, of their companions and guards, all of which have the rank's command line."""
        start, end = "-m\0tests.trainer.test_watchdog\0", f"\0{self.prefix}\0"
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
def job(tmp_path: Path, shared_store: subprocess.Popen) -> Iterator[Job]:
    yield from new_job(tmp_path, shared_store)


@pytest.fixture
def own_store() -> Iterator[subprocess.Popen]:
    store = start_store()
    yield store
    end_store(store)


@pytest.fixture
def job_and_its_store(tmp_path: Path, own_store: subprocess.Popen) -> Iterator[Job]:
    yield from new_job(tmp_path, own_store)


def new_job(folder: Path, store: subprocess.Popen) -> Iterator[Job]:
    job = Job(folder, store)
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


def test_a_rank_that_left_is_not_missed_nor_one_lost_that_was_stopped(job):
    job.start("leaves", "hangs", "hangs").until_all_beat()
    job.go(0)
    assert job.ended(0) == [""]
    os.kill(job.pids[1], signal.SIGSTOP)
    time.sleep(SILENCE + 3)  # longer than any lost machine has
    assert runs(job.pids[1]) and runs(job.pids[2])
    os.kill(job.pids[2], signal.SIGKILL)
    assert "rank 2 at place2 ended first" in job.ended(1)[0]


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
    assert "the launcher of rank 0 at place0 is gone; rank 1 only followed" in said[1]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_ranks_whose_store_is_gone_or_silent_end(job_and_its_store, number):
    job = job_and_its_store
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


def test_a_rank_that_is_killed_before_it_has_torch_is_named(job):
    job.start("hangs", "hangs")
    os.kill(job.pids[0], signal.SIGKILL)  # while the other may still be on its way
    assert "rank 0 at place0 ended first, without a word" in job.ended(1)[0]
    eventually(lambda: "(signal 9)" in job.said(0))  # its own place's log too, where no other rank is left to tell


def test_a_rank_that_crashes_is_named_with_its_status(job):
    job.start("crashes", "hangs").go(0)
    assert "rank 0 at place0 ended first, without a word: it was killed, or crashed (exit 3)" in job.ended(1)[0]
    eventually(lambda: "error: rank 0 at place0 ended first" in job.said(0))  # its own place's log too


def test_a_rank_that_is_loading_something_ends_with_the_others(job):
    job.start("hangs", "holds the lock").until_all_beat()
    job.go(1)
    os.kill(job.pids[0], signal.SIGKILL)
    assert "rank 0 at place0 ended first" in job.ended(1)[0]


def test_a_rank_that_never_came_is_named(job):
    job.start("never comes", "hangs")
    assert "rank 0 at a place unknown has not come" in job.ended(1)[0]
    os.kill(job.pids[0], signal.SIGKILL)


def test_a_rank_that_its_launcher_ends_is_not_to_blame(job):
    job.start("hangs", "hangs").until_all_beat()
    os.killpg(job.pids[0], signal.SIGTERM)  # as torchrun does
    assert job.ended(0) == [""]
    assert "error: the launcher at place0 has ended its ranks; rank 1 only followed" in job.ended(1)[0]


def test_ranks_that_launchers_end_leave_the_blame_to_the_one_that_was_killed(job):
    job.start("hangs", "hangs", "handles").until_all_beat()
    os.killpg(job.pids[1], signal.SIGTERM)
    os.killpg(job.pids[2], signal.SIGTERM)
    assert job.launchers[2].stdout.readline() == "asked\n"  # and it goes on, to save what it has
    os.kill(job.pids[0], signal.SIGKILL)
    assert "rank 0 at place0 ended first" in job.ended()[2]
    assert job.said(1) == ""


def test_a_store_client_and_torch_understand_each_other(shared_store):
    import torch.distributed as dist

    patience = datetime.timedelta(seconds=LIMIT)
    theirs = dist.TCPStore("127.0.0.1", shared_store.port, is_master=False, timeout=patience)
    theirs = dist.PrefixStore("some", theirs)
    ours = StoreClient("127.0.0.1", shared_store.port, "some", silence=LIMIT)
    other = StoreClient("127.0.0.1", shared_store.port, "some", silence=LIMIT)
    other.wait_for("later")
    ours.set("one", "größer")
    assert theirs.get("one").decode() == ours.get("one") == "größer"
    assert ours.get("two") is None
    assert ours.compare_set("two", "", "x" * 9000) == "x" * 9000
    assert ours.compare_set("two", "", "y") == theirs.get("two").decode() == "x" * 9000
    assert theirs.compare_set("two", "x" * 9000, "z") == b"z" and ours.get("two") == "z"
    assert select.select([other], [], [], 0.1)[0] == []
    theirs.set("later", "")
    other.waited()
    assert ours.get("later") == ""
    for client in (ours, other):
        client.close()


@pytest.mark.parametrize("text", ["[../gloo/x.cc:1] Timed out", "NCCL error", "Connection reset by peer"])
def test_errors_of_connections_are_echoes(text):
    assert watchdog.is_echo(RuntimeError(text))
    assert not watchdog.is_echo(RuntimeError("CUDA out of memory"))


if __name__ == "__main__":
    rank_program(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
