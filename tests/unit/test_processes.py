"""Who a process is, which belong to a run, and ending those and no others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.remote import processes

from .remote_runs import eventually, gone

SLEEP = "import time; time.sleep(300)"


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    found: list[subprocess.Popen[bytes]] = []
    yield found
    for process in found:
        process.kill()
        process.wait()


def spawn(started: list[subprocess.Popen[bytes]], code: str = SLEEP, **env: str) -> int:
    started.append(subprocess.Popen([sys.executable, "-c", code], env=env, start_new_session=True))
    eventually(lambda: (s := processes.stat(started[-1].pid)) and s.comm.startswith("python"))
    return started[-1].pid


def test_identity_is_more_than_a_pid() -> None:
    me = processes.identity(os.getpid())
    assert processes.is_alive(me) is True
    assert processes.is_alive({**me, "start_ticks": me["start_ticks"] + 1}) is False
    assert processes.is_alive({**me, "boot_id": "another"}) is False
    assert processes.is_alive({**me, "pid": 1 << 30}) is False
    for unknown in (None, {}, {"pid": None}, {"pid": os.getpid(), "start_ticks": None}):
        assert processes.is_alive(unknown) is None
        assert processes.send(unknown, 0) is False


def test_a_zombie_is_not_alive(started: list[subprocess.Popen[bytes]]) -> None:
    pid = spawn(started)
    who = processes.identity(pid)
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: (s := processes.stat(pid)) and s.state == "Z")
    assert processes.is_alive(who) is False
    assert processes.send(who, 0) is False


def test_an_odd_name_does_not_break_the_reading(tmp_path: Path, started: list[subprocess.Popen[bytes]]) -> None:
    program = tmp_path / "a) R 1 (b"
    program.symlink_to(sys.executable)
    started.append(subprocess.Popen([str(program), "-c", SLEEP]))
    found = eventually(lambda: (s := processes.stat(started[-1].pid)) and s.comm != "pytest" and s)
    assert found.parent == os.getpid()


def test_those_of_a_run_and_no_others(tmp_path: Path, started: list[subprocess.Popen[bytes]]) -> None:
    here = str(tmp_path)
    parent = (
        f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {SLEEP!r}], env={{}}); time.sleep(300)"
    )
    mine = spawn(started, parent, ORCH_RUN_ID="demo-1", ORCH_RUN_DIR=here)
    others = [
        spawn(started, ORCH_RUN_ID="demo-10", ORCH_RUN_DIR=here),
        spawn(started, ORCH_RUN_ID="demo-1", ORCH_RUN_DIR=here + "/elsewhere"),
        spawn(started, X_ORCH_RUN_ID="demo-1"),
        spawn(started),
    ]
    child = eventually(lambda: [one.pid for one in processes.everything().values() if one.parent == mine])[0]
    found = eventually(lambda: (f := [one.pid for one in processes.of_run("demo-1", here)]) and len(f) == 2 and f)
    assert sorted(found) == sorted([mine, child])
    assert [one.pid for one in processes.of_run("demo-1", here, spare=[mine])] == [child]
    assert [one.pid for one in processes.of_run("other", here, roots=[mine])] == [child]
    ended, left = processes.end_all(lambda: processes.of_run("demo-1", here), lambda: time.monotonic() + 5)
    assert sorted(one.pid for one in ended) == sorted([mine, child]) and left == []
    assert gone(mine) and gone(child) and not any(gone(pid) for pid in others)


def test_what_cannot_be_ended_is_returned_in_time(started: list[subprocess.Popen[bytes]]) -> None:
    pid = spawn(started)
    one = processes.stat(pid)
    assert one is not None
    stale = one._replace(start_ticks=one.start_ticks + 1)  # never signalled: the pid is another's by now
    begin = time.monotonic()
    _, left = processes.end_all(lambda: [stale], lambda: begin + 0.1, patience=0.2)
    assert time.monotonic() - begin < 1
    assert left == [stale] and not gone(pid)


def test_parents() -> None:
    assert processes.ancestors(os.getpid())[0] == os.getppid()
    assert processes.ancestors(os.getpid(), until=[os.getppid()]) == []


def test_without_proc_nothing_is_known_and_nothing_breaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "PROC", str(tmp_path / "none"))
    me = processes.identity(os.getpid())
    assert me == {"pid": os.getpid(), "start_ticks": None, "boot_id": None, "init_ticks": None}
    assert processes.is_alive(me) is None
    assert processes.uptime() is None and processes.everything() == {} and processes.of_run("x", "/x") == []
