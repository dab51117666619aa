"""The directory of a run: atomic files, locks, events."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orchestrator.remote import rundir
from orchestrator.remote.derive import Standing
from orchestrator.remote.processes import identity
from orchestrator.remote.rundir import RunDir, append_line, list_runs, lock_file, read_json, write_json


def make(root: Path, run: str, **state: object) -> RunDir:
    found = RunDir.of(str(root), run)
    Path(found.path).mkdir(parents=True)
    found.write_state({"run": run, "phase": "preparing", **state})
    return found


@pytest.mark.parametrize("name", ["", "..", "a/b", "/etc", ".x", "A", "x\n", "é", 5, None, "x" * 81])
def test_names_that_are_no_run(tmp_path: Path, name: object) -> None:
    with pytest.raises(ValueError, match="is not a run id"):
        RunDir.of(str(tmp_path), name)


def test_a_file_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    write_json(str(path), {"a": 1})

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        write_json(str(path), {"a": 2})
    monkeypatch.undo()
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


@pytest.mark.parametrize(
    ("content", "word"), [(None, "No such file"), ("", "Expecting"), ("[1]", "not an object"), ("{", "Expecting")]
)
def test_what_cannot_be_read_has_a_reason(tmp_path: Path, content: str | None, word: str) -> None:
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content)
    value, why = read_json(str(path))
    assert value is None and why is not None and word in why and why.startswith("x.json: ")


def test_a_half_written_line_costs_itself_only(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    append_line(str(path), '{"a": 1}')
    with path.open("a") as f:
        f.write('{"half')
    append_line(str(path), '{"b": 2}')
    assert path.read_text().splitlines() == ['{"a": 1}', '{"half', '{"b": 2}']


def test_the_lock_goes_with_its_holder(tmp_path: Path) -> None:
    run = make(tmp_path, "demo-1")
    assert run.lock_held() is False
    code = "import sys; from orchestrator.remote.rundir import RunDir; r = RunDir(sys.argv[1]); "
    code += "print(r.try_lock() is not None, flush=True); sys.stdin.read()"
    holder = subprocess.Popen(
        [sys.executable, "-c", code, run.path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert holder.stdout is not None and holder.stdout.readline() == b"True\n"
    assert run.lock_held() is True and run.try_lock() is None
    begin = time.monotonic()
    assert run.try_lock(0.2) is None
    assert time.monotonic() - begin >= 0.2
    holder.kill()
    holder.communicate()
    fd = run.try_lock(2)
    assert fd is not None and run.lock_held() is True  # one's own counts
    assert os.get_inheritable(fd) is False
    os.close(fd)


def test_locked_says_when_it_is_held(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    fd = lock_file(path)
    with pytest.raises(TimeoutError), rundir.locked(path, 0.05):
        pass
    assert fd is not None
    os.close(fd)
    with rundir.locked(path, 0.05):
        pass


def test_newest_first_and_no_strangers(tmp_path: Path) -> None:
    assert list_runs(str(tmp_path)) == []
    make(tmp_path, "b-1", created=1)
    make(tmp_path, "a-1", created=2)
    make(tmp_path, "c-1", created=1)
    (tmp_path / "runs" / ".claim.lock").touch()
    (tmp_path / "runs" / "file").touch()
    (tmp_path / "runs" / "empty").mkdir()  # no state: its own time counts
    assert [run.run for run in list_runs(str(tmp_path))] == ["empty", "a-1", "c-1", "b-1"]


# ---- the phase that a run really is in -------------------------------------------------------


def test_lost_for_three_reasons(tmp_path: Path) -> None:
    dead = {**identity(os.getpid()), "pid": 1 << 30}
    run = make(tmp_path, "demo-1", phase="training", runner=dead)
    standing = Standing(run)
    assert standing.phase == "lost" and standing.lock == "free"
    assert standing.why == f"its runner (pid {1 << 30}) is gone without an exit record, and so is all of the run"
    run.write_state({"run": run.run, "phase": "training", "runner": {**dead, "boot_id": "another"}})
    assert (Standing(run).why or "").startswith("the container or its machine was restarted")
    for began, what in ((1.0, "the machine"), (time.time(), "the container")):
        run.write_state({"run": run.run, "phase": "training", "started": began, "runner": {**dead, "boot_id": "x"}})
        assert (Standing(run).why or "").startswith(f"{what} was restarted (another boot id)")
    run.write_state({"run": run.run, "phase": "training", "runner": {**dead, "init_ticks": 999999999}})
    assert (Standing(run).why or "").startswith("the container was restarted")


@pytest.mark.parametrize(("code", "phase"), [(0, "finished"), (1, "failed"), (None, "failed")])
def test_a_runner_that_recorded_the_exit_and_no_more(tmp_path: Path, code: int | None, phase: str) -> None:
    dead = {**identity(os.getpid()), "pid": 1 << 30}
    record = {"code": code, "signal": None, "reason": f"exit {code}"}
    run = make(tmp_path, "demo-1", phase="training", runner=dead, exit=record)
    assert Standing(run).phase == phase
    write_json(run.file("stop.json"), {"by": "ada"})
    assert Standing(run).phase == "stopped"


def test_held_is_alive_and_unknown_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(tmp_path, "demo-1", phase="training", runner=identity(os.getpid()))
    fd = run.try_lock()
    assert fd is not None
    assert (Standing(run).phase, Standing(run).lock, Standing(run).why) == ("training", "held", None)
    os.close(fd)
    monkeypatch.setattr(RunDir, "lock_held", lambda self: None)
    standing = Standing(run)
    assert standing.phase == "training" and standing.lock is None and standing.why
