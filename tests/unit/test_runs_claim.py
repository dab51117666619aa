"""Claiming and starting: one run for the same launch, one trainer for a run, wherever a client broke off."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.remote import processes, tmux
from orchestrator.remote.frames import OpError
from orchestrator.remote.runs import runner_command

from .remote_runs import Client, clean_up, eventually, launch_of

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")

LONG = "import time\nprint('up', flush=True)\ntime.sleep(300)"


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    yield Client(tmp_path)
    clean_up(tmp_path)


def counting(path: Path) -> str:
    """A trainer that marks each of its starts."""
    return f"import time\nwith open({str(path)!r}, 'a') as f: f.write('x')\ntime.sleep(300)"


def prepare(client: Client, run: str, program: str) -> None:
    """What `start` does up to tmux."""
    Path(client.dir(run).file("launch.json")).write_text(json.dumps(launch_of(program)))
    state = client.dir(run).state()[0]
    assert state is not None
    state["phase"] = "starting"
    client.dir(run).write_state(state)


# ---- claim ----------------------------------------------------------------------------------


def test_a_new_run(client: Client) -> None:
    found = client.claim()
    assert found["how"] == "new"
    assert found["run"].startswith("demo-2")
    state = client.look(found["run"])["state"]
    assert state["phase"] == "preparing" and state["version"] == 1
    assert state["launcher"]["user"] == "ada" and state["launcher"]["workstation"] == "desk"
    assert stat.S_IMODE(Path(client.dir(found["run"]).path).stat().st_mode) == 0o700


def test_a_claim_that_fails_or_was_cut_off_leaves_no_run(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = tmp_path / "runs" / ".claim-demo-20200101-000000"
    half.mkdir(parents=True)
    (half / "lock").touch()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            client.claim()
    assert client.call("list_runs")["runs"] == []
    run = client.claim()["run"]
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [".claim.lock", run]


def test_of_two_claims_at_once_one_is_new_and_one_is_busy(client: Client, tmp_path: Path) -> None:
    clients = [Client(tmp_path) for _ in range(6)]
    answers: list[dict[str, Any]] = []
    barrier = threading.Barrier(len(clients))

    def go(one: Client) -> None:
        barrier.wait()
        answers.append(one.claim())

    threads = [threading.Thread(target=go, args=(one,)) for one in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answer["how"] for answer in answers) == ["busy"] * 5 + ["new"]
    assert len({answer["run"] for answer in answers}) == 1
    busy = next(answer for answer in answers if answer["how"] == "busy")
    assert busy["state"]["launcher"]["user"] == "ada"
    assert abs(busy["state"]["launcher"]["at"] - time.time()) < 10
    for one in clients:
        one.die()


def test_a_look_at_the_lock_is_no_launcher(client: Client, tmp_path: Path) -> None:
    run = client.claim()["run"]
    client.die()
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            client.dir(run).lock_held()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for _ in range(50):
            other = Client(tmp_path)
            assert other.claim()["how"] == "continue"
            other.die()
    finally:
        stop.set()
        thread.join()


def test_another_recipe_user_or_a_wish_for_a_new_one(client: Client, tmp_path: Path) -> None:
    first = client.claim()["run"]
    others = [client.claim("d2"), Client(tmp_path, "bob").claim(), client.claim(new=True)]
    assert [other["how"] for other in others] == ["new"] * 3
    assert len({first, *(other["run"] for other in others)}) == 4


def test_runs_of_two_roots_never_share_a_tmux_server(client: Client, tmp_path: Path) -> None:
    others = [Client(tmp_path / name) for name in ("a", "b")]
    try:
        runs = [one.claim()["run"] for one in (client, *others)]
        assert len(set(runs)) == 3
        assert tmux.pane(runs[0])["session"] is False
        client.start(runs[0], LONG)
        others[0].start(runs[1], LONG)
        others[0].call("stop", run=runs[1], by="ada")
        assert client.look(runs[0])["tmux"]["session"] is True
    finally:
        for one in others:
            clean_up(Path(one.root))


def test_what_broke_off_is_continued_by_the_next(client: Client, tmp_path: Path) -> None:
    run = client.claim()["run"]
    client.die()
    assert "launching again" in client.look(run)["why"]
    other = Client(tmp_path)
    found = other.claim()
    assert (found["how"], found["run"]) == ("continue", run)
    assert Client(tmp_path).claim()["how"] == "busy"
    other.die()


def test_a_running_run_is_said_and_an_ended_or_lost_one_is_not_reused(client: Client, tmp_path: Path) -> None:
    run = client.launch(LONG)
    found = Client(tmp_path).claim()
    assert (found["how"], found["run"]) == ("running", run)
    state = eventually(lambda: (s := client.look(run)["state"]).get("trainer") and s)
    os.kill(state["runner"]["pid"], signal.SIGKILL)
    client.until(run, "lost")
    os.kill(state["trainer"]["pid"], signal.SIGKILL)
    eventually(lambda: not client.look(run)["alive"])
    again = client.claim()
    assert again["how"] == "new" and again["run"] != run
    client.start(again["run"], "pass")
    client.until(again["run"], "finished")
    third = client.claim()
    assert third["how"] == "new" and third["run"] not in (run, again["run"])


@pytest.mark.parametrize("recipe", ["../x", "", "A", "a/b", None, "x" * 41])
def test_a_bad_recipe_name(client: Client, recipe: Any) -> None:
    with pytest.raises(OpError) as caught:
        client.claim(recipe=recipe)
    assert caught.value.code == "usage"


# ---- start ----------------------------------------------------------------------------------


def test_start_twice_is_one_trainer(client: Client, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    run = client.claim()["run"]
    first = client.start(run, counting(mark))
    assert first["already"] is False and first["state"]["runner"]
    second = client.start(run, counting(mark))
    assert second["already"] is True
    eventually(mark.exists)
    time.sleep(0.3)
    assert mark.read_text() == "x"


def test_start_needs_the_claim(client: Client, tmp_path: Path) -> None:
    run = client.claim()["run"]
    with pytest.raises(OpError) as caught:
        Client(tmp_path).start(run, LONG)
    assert caught.value.code == "refused"
    with pytest.raises(OpError) as caught:
        client.start("demo-20200101-000000", LONG)
    assert caught.value.code == "not_found"
    with pytest.raises(OpError) as caught:
        client.start("../../etc", LONG)
    assert caught.value.code == "usage"


@pytest.mark.parametrize("name", ["state.json", "../x", "a/b", ".hidden", "lock", "secrets.json", "console.log"])
def test_start_writes_only_its_own_files(client: Client, name: str) -> None:
    run = client.claim()["run"]
    with pytest.raises(OpError) as caught:
        client.call("start", run=run, files={name: "x", "launch.json": "{}"})
    assert caught.value.code == "usage"


def test_the_client_died_before_tmux(client: Client, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    run = client.claim()["run"]
    prepare(client, run, counting(mark))
    client.die()
    other = Client(tmp_path)
    assert other.claim()["how"] == "continue"
    assert other.start(run, counting(mark))["already"] is False
    eventually(mark.exists)
    assert mark.read_text() == "x"


def test_the_client_died_right_after_tmux(client: Client, tmp_path: Path) -> None:
    """The runner waits for the lock; whether it or another launch is first, there is one trainer."""
    mark = tmp_path / "mark"
    for number in range(3):
        digest = f"d{number}"
        run = client.claim(digest)["run"]
        prepare(client, run, counting(mark))
        assert tmux.start(run, runner_command(client.dir(run).real), "/") is None
        client.die()
        other = Client(tmp_path)
        how = other.claim(digest)["how"]
        assert how in ("continue", "running", "busy")
        if how == "continue":
            other.start(run, counting(mark))
        eventually(lambda run=run: client.look(run)["state"]["trainer"])
        time.sleep(0.3)
        assert mark.read_text() == "x" * (number + 1)


def test_a_dead_pane_of_an_earlier_try_is_replaced(client: Client, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    run = client.claim()["run"]
    assert tmux.start(run, ["false"], "/") is None
    eventually(lambda: tmux.pane(run)["pane_dead"])
    assert client.start(run, counting(mark))["state"]["runner"]
    eventually(mark.exists)


def test_a_runner_that_does_not_start_is_said_with_its_screen(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    from orchestrator.remote import runs

    monkeypatch.setattr(runs, "runner_command", lambda path: ["sh", "-c", "echo no python here >&2; exit 9"])
    run = client.claim()["run"]
    with pytest.raises(OpError, match="no python here"):
        client.start(run, LONG, secrets={"TOKEN": "hunter2"})
    assert not Path(client.dir(run).file("secrets.json")).exists()
    # nothing is lost: the same claim starts it once that is repaired
    monkeypatch.undo()
    assert client.start(run, LONG)["already"] is False


def test_without_tmux_it_is_said(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tmux, "program", lambda: None)
    run = client.claim()["run"]
    with pytest.raises(OpError, match="tmux is not installed"):
        client.start(run, LONG, secrets={"TOKEN": "hunter2"})
    assert not Path(client.dir(run).file("secrets.json")).exists()


def test_the_runner_outlives_the_server_that_started_it(client: Client, tmp_path: Path) -> None:
    """The server is killed with its whole session right after the start."""
    mark = tmp_path / "mark"
    code = (
        "import sys; sys.path[:0] = [sys.argv[1]]\n"
        "from pathlib import Path\n"
        "from tests.unit.remote_runs import Client\n"
        "c = Client(Path(sys.argv[2])); run = c.claim()['run']; c.start(run, sys.argv[3]); print(run, flush=True)\n"
        "import time; time.sleep(60)\n"
    )
    here = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", code, here, str(tmp_path), counting(mark)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    assert server.stdout is not None
    run = server.stdout.readline().decode().strip()
    os.killpg(server.pid, signal.SIGKILL)
    server.communicate()
    eventually(mark.exists)
    state = client.look(run)["state"]
    assert processes.is_alive(state["runner"])
    assert client.look(run)["phase"] == "starting"


def test_runs_are_listed_newest_first(client: Client) -> None:
    runs = [client.claim(f"d{number}")["run"] for number in range(3)]
    listed = client.call("list_runs", limit=2)
    assert [entry["run"] for entry in listed["runs"]] == runs[:0:-1]
    assert listed["more"] == 1
    Path(client.dir(runs[1]).file("state.json")).write_text("{half")
    broken = {entry["run"]: entry for entry in client.call("list_runs")["runs"]}[runs[1]]
    assert broken["state"] is None and "state.json" in broken["why"]


# ---- what ended runs leave ------------------------------------------------------------------


def test_a_new_run_ends_the_terminals_of_runs_that_ended_a_day_ago(client: Client) -> None:
    old, fresh, alive = (
        client.launch(program, digest=digest) for program, digest in (("pass", "o"), ("pass", "f"), (LONG, "a"))
    )
    for run in (old, fresh):
        client.until(run, "finished")
    state = client.dir(old).state()[0]
    assert state is not None
    state["exit"]["at"] -= 25 * 3600
    client.dir(old).write_state(state)
    client.claim("n")
    assert not Path(tmux.socket_path(old)).exists()
    assert tmux.pane(fresh)["session"] is True
    assert client.look(alive)["phase"] in ("starting", "training")
