"""Stopping: whatever a run's processes do, they are gone afterwards, and nothing else is."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.remote import processes, tmux
from orchestrator.remote.frames import OpError
from orchestrator.remote.rundir import ACTIVE

from .remote_runs import Client, clean_up, eventually, gone

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")

LONG = "import time\nprint('up', flush=True)\ntime.sleep(300)"
STUBBORN = "import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(300)"


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    yield Client(tmp_path)
    clean_up(tmp_path)


def up(client: Client, program: str, **more: Any) -> tuple[str, int, int]:
    """(run, runner's pid, trainer's pid) of a run whose trainer has said something."""
    run = client.launch(program, **more)
    eventually(lambda: Path(client.dir(run).console).read_bytes())
    state = eventually(lambda: (s := client.look(run)["state"]).get("trainer") and s)
    return run, state["runner"]["pid"], state["trainer"]["pid"]


def family(tmp_path: Path) -> str:
    """A trainer that ignores SIGTERM, with a child of its own session that forked twice and a stopped one."""
    return f"""
import os, signal, subprocess, sys, time
signal.signal(15, signal.SIG_IGN)
sleeper = 'import time; time.sleep(300)'
pids = [os.getpid()]
stopped = subprocess.Popen([sys.executable, '-c', sleeper], env={{}})
os.kill(stopped.pid, signal.SIGSTOP)
pids.append(stopped.pid)
read, write = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(write, str(os.getpid()).encode())
        os.execv(sys.executable, [sys.executable, '-c', sleeper])
    os._exit(0)
pids.append(int(os.read(read, 20)))
with open({str(tmp_path / "pids")!r}, 'w') as f: f.write(' '.join(map(str, pids)))
print('up', flush=True)
time.sleep(300)
"""


def test_a_polite_trainer_is_stopped(client: Client) -> None:
    program = "import signal, sys, time\ndef bye(*_):\n print('saved', flush=True); sys.exit(0)\n"
    run, runner, trainer = up(client, program + "signal.signal(15, bye)\nprint('up', flush=True)\ntime.sleep(300)")
    begin = time.monotonic()
    answer = client.call("stop", run=run, by="ada@desk", grace=20)
    assert time.monotonic() - begin < 5
    assert (answer["phase"], answer["already"], answer["left"]) == ("stopped", False, [])
    assert answer["state"]["exit"]["code"] == 0
    assert answer["state"]["stop"]["by"] == "ada@desk"
    assert gone(runner) and gone(trainer)
    assert "saved" in Path(client.dir(run).console).read_text()
    assert client.look(run)["tmux"]["session"] is False
    assert client.events
    assert {"stop_requested", "stopping", "ended"} <= {event["event"] for event in client.events_of(run)}


def test_a_family_that_does_not_want_to_is_gone(client: Client, tmp_path: Path) -> None:
    run, runner, _ = up(client, family(tmp_path))
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert not any(gone(pid) for pid in pids)
    bystander = subprocess.Popen([sys.executable, "-c", LONG], stdout=subprocess.DEVNULL)
    try:
        begin = time.monotonic()
        answer = client.call("stop", run=run, by="ada", grace=0.6)
        assert 0.5 < time.monotonic() - begin < 6
        assert answer["phase"] == "stopped"
        assert answer["state"]["exit"]["signal"] == 9
        assert all(gone(pid) for pid in [*pids, runner])
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_kill_at_once_also_while_a_graceful_stop_is_under_way(client: Client) -> None:
    run, _, trainer = up(client, STUBBORN)
    path = client.dir(run).file("stop.json")
    Path(path).write_text('{"by": "ada", "at": 1, "grace": 100, "kill": false}')  # the runner finds it by itself
    eventually(lambda: "stopping" in [event["event"] for event in client.events_of(run)])
    assert not gone(trainer)
    begin = time.monotonic()
    answer = client.call("stop", run=run, by="ada", kill=True)
    assert answer["phase"] == "stopped" and gone(trainer)
    assert time.monotonic() - begin < 60  # the grace would be 100


@pytest.mark.parametrize("program", ["plain", "family"])
def test_a_run_whose_runner_was_killed(client: Client, tmp_path: Path, program: str) -> None:
    run, runner, trainer = up(client, family(tmp_path) if program == "family" else LONG)
    pids = [int(p) for p in (tmp_path / "pids").read_text().split()] if program == "family" else [trainer]
    os.kill(runner, signal.SIGKILL)
    found = client.until(run, "lost")
    assert f"pid {runner}" in found["why"] and "still live" in found["why"]
    assert trainer in [one["pid"] for one in found["alive"]]
    answer = client.call("stop", run=run, by="ada", grace=0.3)
    assert (answer["phase"], answer["already"]) == ("stopped", False)
    assert all(gone(pid) for pid in pids)
    assert "runner was gone" in answer["state"]["exit"]["reason"]
    assert client.look(run)["phase"] == "stopped"


def test_a_runner_that_does_not_answer(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    from orchestrator.remote import stop

    monkeypatch.setattr(stop, "BEYOND", 0.5)
    run, runner, trainer = up(client, STUBBORN)
    real_send = processes.send

    def send(who: dict[str, Any] | None, signum: int) -> bool:
        if signum == signal.SIGCONT:
            return real_send(who, signal.SIGSTOP)  # it stays stopped, whatever is tried
        return real_send(who, signum)

    monkeypatch.setattr(processes, "send", send)
    answer = client.call("stop", run=run, by="ada", grace=0.2)
    assert answer["phase"] == "stopped"
    assert gone(runner) and gone(trainer)


def test_a_run_in_preparation_by_another(client: Client, tmp_path: Path) -> None:
    run = client.claim()["run"]
    other = Client(tmp_path)
    answer = other.call("stop", run=run, by="bob@desk")
    assert answer["phase"] == "stopped"
    assert other.look(run)["phase"] == "stopped"
    with pytest.raises(OpError, match="stopped by bob@desk") as caught:
        client.start(run, LONG)
    assert caught.value.code == "refused"
    state = client.look(run)["state"]
    assert state["phase"] == "stopped" and state["exit"]["reason"] == "stopped before it began"
    assert tmux.pane(run)["session"] is False


@pytest.mark.parametrize("mine", [True, False])
def test_a_run_in_preparation_that_nobody_or_the_asker_prepares(client: Client, mine: bool) -> None:
    run = client.claim()["run"]
    if not mine:
        client.die()
    assert client.call("stop", run=run, by="ada")["state"]["phase"] == "stopped"
    with pytest.raises(OpError):
        client.start(run, LONG)
    assert client.claim()["run"] != run


def test_the_latest_of_a_recipe_is_not_stopped_where_another_can_be_meant(client: Client) -> None:
    """Two projects may have a recipe of the same name; a run that is named is stopped all the same."""
    mine, theirs = client.launch(LONG, digest="mine"), client.launch(LONG, digest="theirs")
    with pytest.raises(OpError, match=f"not the only one .*{theirs}.*{mine}|not the only one .*{mine}.*{theirs}"):
        client.call("stop", run=theirs, by="ada", recipe="demo")
    assert {client.look(run)["phase"] for run in (mine, theirs)} <= set(ACTIVE)
    assert client.call("stop", run=theirs, by="ada", kill=True)["phase"] == "stopped"
    with pytest.raises(OpError, match=mine):  # the latest has ended: another is not taken for it
        client.call("stop", run=theirs, by="ada", recipe="demo")
    assert client.call("stop", run=mine, by="ada", recipe="demo", kill=True)["phase"] == "stopped"
    assert client.call("stop", run=mine, by="ada", recipe="demo")["already"]


def test_an_ended_run_says_so(client: Client) -> None:
    run = client.launch("pass")
    client.until(run, "finished")
    answer = client.call("stop", run=run, by="ada")
    assert (answer["phase"], answer["already"]) == ("finished", True)
    assert tmux.pane(run)["session"] is False
    with pytest.raises(OpError) as caught:
        client.call("stop", run="demo-1", by="ada")
    assert caught.value.code == "not_found"


def test_a_stop_called_from_within_the_run(client: Client, tmp_path: Path) -> None:
    """Who asks is spared, so that it can hear the answer; the trainer above it is not."""
    here = str(Path(__file__).parents[2])
    code = (
        "import sys; sys.path[:0] = [sys.argv[1]]\n"
        "from pathlib import Path\n"
        "from tests.unit.remote_runs import Client\n"
        "a = Client(Path(sys.argv[2])).call('stop', run=sys.argv[3], by='itself', grace=0.5)\n"
        "Path(sys.argv[2], 'answer').write_text(a['phase'])\n"
    )
    program = (
        "import os, subprocess, sys\n"
        f"subprocess.run([sys.executable, '-c', {code!r}, {here!r}, {str(tmp_path)!r}, os.environ['ORCH_RUN_ID']])\n"
    )
    run = client.launch(program)
    found = client.until(run, "stopped", "failed", "finished", "lost")
    assert found["phase"] == "stopped"
    eventually((tmp_path / "answer").exists)
    assert (tmp_path / "answer").read_text() == "stopped"


def test_a_runner_that_died_after_the_trainers_end(client: Client) -> None:
    """Its record of the exit decides, also when a stop comes later."""
    run = client.launch("import sys; sys.exit(3)")
    state = client.until(run, "failed")["state"]
    eventually(lambda: gone(state["runner"]["pid"]))
    state["phase"] = "training"
    client.dir(run).write_state(state)
    found = client.look(run)
    assert found["phase"] == "failed" and "exit 3" in found["why"]
    answer = client.call("stop", run=run, by="ada")
    assert (answer["phase"], answer["already"], answer["state"]["phase"]) == ("failed", True, "failed")
