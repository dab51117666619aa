"""The runner with real processes and a real tmux: how runs begin, go on, and end."""

from __future__ import annotations

import json
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

from orchestrator.remote import processes, spawn, tmux
from orchestrator.remote.cgroup import MemoryGroup
from orchestrator.remote.rundir import RunDir
from orchestrator.remote.runs import runner_command

from .remote_runs import LAB_SMI, Client, clean_up, eventually, gone, launch_of

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")

LONG = "import time\nprint('up', flush=True)\ntime.sleep(300)"
ROOT = pytest.mark.skipif(os.getuid() != 0, reason="needs root")


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    yield Client(tmp_path)
    clean_up(tmp_path)


def bare_run(client: Client, program: str, **launch: Any) -> RunDir:
    """A run that is ready to be taken over, without tmux."""
    run = client.dir(client.claim()["run"])
    Path(run.file("launch.json")).write_text(json.dumps(launch_of(program, **launch)))
    state = run.state()[0]
    assert state is not None
    state["phase"] = "starting"
    run.write_state(state)
    client.die()
    return run


def runner_process(run: RunDir) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        runner_command(run.real),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


# ---- ends -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "phase"), [(0, "finished"), (3, "failed")])
def test_the_exit_status_is_recorded_and_shown(client: Client, code: int, phase: str) -> None:
    run = client.launch(f"import sys; print('hello'); sys.exit({code})")
    found = client.until(run, "finished", "failed")
    assert found["phase"] == phase
    record = found["state"]["exit"]
    assert (record["code"], record["signal"], record["reason"]) == (code, None, f"exit {code}")
    # only the trainer's bytes
    assert Path(client.dir(run).console).read_text() == "hello\n"
    pane = eventually(lambda: (p := client.look(run, screen=True)["tmux"])["pane_dead"] and p)
    lines = pane["screen"].splitlines()
    assert "hello" in lines
    assert f"[orch] {phase}: exit {code}" in lines
    assert pane["pane_status"] in (code, None)
    names = [event["event"] for event in client.events_of(run)]
    assert names[0] == "claimed" and "started" in names and names[-1] == "ended"


def test_the_trainer_killed_from_outside(client: Client) -> None:
    run = client.launch(LONG)
    trainer = eventually(lambda: (client.look(run)["state"] or {}).get("trainer"))
    os.kill(trainer["pid"], signal.SIGKILL)
    record = client.until(run, "failed")["state"]["exit"]
    assert (record["code"], record["signal"]) == (None, 9)
    assert "SIGKILL" in record["reason"]
    if MemoryGroup().oom_kills()[0] is not None:
        assert record["oom_kills"] == 0
        assert "no out-of-memory kill" in record["reason"]


@pytest.mark.parametrize(
    ("returncode", "kills", "machine", "words"),
    [
        (-9, 1, 1, "ended by signal 9 (SIGKILL); the kernel killed a process here for want of memory"),
        (-9, 0, 3, "ended by signal 9 (SIGKILL); the kernel counted no out-of-memory kill"),
        (-9, None, 0, "ended by signal 9 (SIGKILL); the kernel counted no out-of-memory kill"),
        (-9, None, 2, "meanwhile the kernel killed 2 processes for want of memory, here or elsewhere"),
        (-9, None, None, "whether memory ran out is unknown (no cgroup)"),
        (1, 2, 2, "exit 1; the kernel killed 2 processes here for want of memory"),
        (137, 0, 0, "exit 137 (a program below it was ended by SIGKILL); the kernel counted no out-of-memory kill"),
        (0, 0, 0, "exit 0"),
        (-44, 0, 0, "ended by signal 44 (signal 44)"),
    ],
)
def test_how_an_end_is_put_into_words(returncode: int, kills: int | None, machine: int | None, words: str) -> None:
    record = spawn.exit_record(returncode, 1.0, kills, machine, "no cgroup")
    assert words in record["reason"]
    assert (record["code"], record["signal"]) == ((None, -returncode) if returncode < 0 else (returncode, None))
    assert (record["oom_kills"], record["machine_oom_kills"]) == (kills, machine)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"argv": ["/nonexistent/python"]}, "No such file"),
        ({"cwd": "/nonexistent"}, "no such directory"),
        ({"argv": []}, "names no program"),
    ],
)
def test_a_trainer_that_cannot_be_started(client: Client, change: dict[str, Any], word: str) -> None:
    run = client.launch("", **change)
    found = client.until(run, "failed")
    assert word in found["state"]["exit"]["reason"]
    assert found["state"]["exit"]["code"] is None


def test_the_last_screen_of_a_long_traceback_is_not_lost(client: Client) -> None:
    run = client.launch("import sys\nfor i in range(5000): print('line', i)\nsys.exit(1)")
    client.until(run, "failed")
    eventually(lambda: client.look(run)["tmux"]["pane_dead"])
    screen = client.call("pane", run=run)["screen"].splitlines()
    assert "line 4999" in screen
    assert screen[-1] == "[orch] failed: exit 1"


def test_leftovers_end_with_the_trainer(client: Client, tmp_path: Path) -> None:
    """A child that forked twice, with a session of its own and none of the run's environment."""
    pids = tmp_path / "pids"
    sleeper = f"import os, time; open({str(pids)!r}, 'w').write(str(os.getpid())); time.sleep(300)"
    survivor = f"""
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execve(sys.executable, [sys.executable, '-c', {sleeper!r}], {{}})
    os._exit(0)
os.wait()
while not os.path.exists({str(pids)!r}) or not open({str(pids)!r}).read():
    time.sleep(0.02)
"""
    run = client.launch(survivor)
    client.until(run, "finished")
    assert gone(int(pids.read_text()))
    ended = [event for event in client.events_of(run) if event["event"] == "leftovers_ended"]
    assert [p["pid"] for p in ended[0]["processes"]] == [int(pids.read_text())]


# ---- what the trainer is given --------------------------------------------------------------


def test_the_trainers_environment_is_clean(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEAKED", "1")
    monkeypatch.setenv("ORCH_RUN_ID", "another-run")
    program = """
import json, os, signal
with open('/proc/self/oom_score_adj') as f: score = f.read().strip()
hangup = signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
print(json.dumps([dict(os.environ), os.getcwd(), os.getsid(0) == os.getpid(), hangup, score]))
"""
    run = client.launch(program, secrets={"HF_TOKEN": "hunter2-secret"}, cwd="/usr")
    client.until(run, "finished")
    env, cwd, leader, hangup, score = json.loads(Path(client.dir(run).console).read_text())
    assert "LEAKED" not in env and "TMUX" not in env
    assert env["COLOUR"] == "red" and env["HF_TOKEN"] == "hunter2-secret"
    assert env["PATH"].split(":")[0] == str(Path(sys.executable).parent)
    assert "/usr/bin" in env["PATH"].split(":")
    assert (env["LANG"], env["PYTHONNOUSERSITE"], env["PYTHONUNBUFFERED"]) == ("C.UTF-8", "1", "1")
    assert env["ORCH_RUN_ID"] == run and env["ORCH_RUN_DIR"] == client.dir(run).real
    assert env["ORCH_METRICS"] == client.dir(run).file("metrics.jsonl")
    assert (cwd, leader, hangup, score) == ("/usr", True, True, str(spawn.TRAINER_OOM_SCORE))


def test_secrets_are_in_no_file_and_no_command_line(client: Client) -> None:
    run = client.launch(LONG, secrets={"TOKEN": "hunter2-secret"})
    eventually(lambda: Path(client.dir(run).console).read_bytes())
    for path in Path(client.dir(run).path).rglob("*"):
        assert b"hunter2" not in path.read_bytes(), path
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes()
        except OSError:
            continue
        assert b"hunter2" not in line
    trainer = client.look(run)["state"]["trainer"]["pid"]
    assert processes.environ(trainer)[b"TOKEN"] == b"hunter2-secret"
    runner = client.look(run)["state"]["runner"]["pid"]
    assert b"hunter2" not in b"".join(processes.environ(runner).values())


@ROOT
def test_the_runner_is_the_last_to_be_killed_for_memory(client: Client) -> None:
    run = client.launch(LONG)
    state = eventually(lambda: (s := client.look(run)["state"]).get("trainer") and s)
    score = {who: int(Path(f"/proc/{state[who]['pid']}/oom_score_adj").read_text()) for who in ("runner", "trainer")}
    assert score["trainer"] == spawn.TRAINER_OOM_SCORE
    assert score["runner"] <= 0


# ---- progress -------------------------------------------------------------------------------

PROGRESS = """
import json, os, time
def put(line):
    with open(os.environ['ORCH_METRICS'], 'a') as f: f.write(json.dumps(line) + '\\n')
put({'phase': 'compiling'})
time.sleep(0.6)
for step in range(1, 6):
    put({'step': step, 'loss': 1.0, 'tokens': 100, 'time': 1000 + step})
put({'eval': {'loss': 0.5}})
time.sleep(300)
"""


def test_phases_throughput_and_health_mark(client: Client) -> None:
    run = client.launch(PROGRESS, health={"step": 4, "tokens_per_second": 50})
    client.until(run, "compiling")
    client.until(run, "training")
    state = eventually(lambda: (s := client.look(run)["state"]).get("health") and s)
    assert (state["step"], state["tokens_per_second"]) == (5, 100.0)
    assert state["health"]["fast_enough"] is True
    found = client.look(run)["metrics"]
    assert found["last"]["step"] == 5 and found["eval"]["eval"] == {"loss": 0.5} and found["count"] == 7
    marks = [event for event in client.events_of(run) if event["event"] == "health_mark"]
    assert len(marks) == 1 and marks[0]["step"] >= 4


def test_a_program_without_metrics_trains_at_once_and_the_heart_beats(client: Client) -> None:
    run = client.launch(LONG, metrics=False)
    first = client.until(run, "training")["state"]["heartbeat"]
    eventually(lambda: client.look(run)["state"]["heartbeat"] > first)


def test_gpu_samples_and_their_failure_once(client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = tmp_path / "gpus.json"
    scenario.write_text(json.dumps({"gpus": 2, "timeline": [{"call": 3, "fault": "mismatch"}]}))
    bindir = tmp_path / "bin"
    bindir.mkdir()
    smi = bindir / "nvidia-smi"
    smi.write_text(f'#!/bin/sh\nLAB_GPUS={scenario} exec {sys.executable} -IS {LAB_SMI} "$@"\n')
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{bindir}:{os.environ['PATH']}")
    run = client.launch(LONG, sample_seconds=0.1)
    path = Path(client.dir(run).file("gpu.jsonl"))
    eventually(lambda: path.exists() and len(path.read_text().splitlines()) >= 5)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [gpu["index"] for gpu in lines[0]["gpus"]] == [0, 1]
    assert [device["name"] for device in lines[0]["devices"]] == ["NVIDIA H200"] * 2
    assert "devices" not in lines[1]
    assert "mismatch" in lines[-1]["error"]
    readings = eventually(lambda: [e for e in client.events_of(run) if e["event"] == "gpu_reading"])
    time.sleep(0.5)
    assert len(readings) == 1 and readings[0]["ok"] is False


# ---- what it outlives -----------------------------------------------------------------------


def test_a_killed_tmux_server_ends_nothing(client: Client) -> None:
    run = client.launch("import time\nfor i in range(30):\n print(i, flush=True); time.sleep(0.05)")
    eventually(lambda: Path(client.dir(run).console).read_bytes())
    tmux.kill(run)
    found = client.until(run, "finished", "failed", "lost")
    assert found["phase"] == "finished"
    assert Path(client.dir(run).console).read_text().splitlines()[-1] == "29"
    assert found["tmux"]["session"] is False
    assert "pane_lost" in [event["event"] for event in client.events_of(run)]


def test_keys_pressed_in_the_pane_end_nothing(client: Client) -> None:
    run = client.launch("import time; print('a', flush=True); time.sleep(1.5)")
    eventually(lambda: Path(client.dir(run).console).read_bytes())
    for key in ("C-c", "C-\\", "C-z", "C-s"):
        assert tmux.call(run, "send-keys", "-t", tmux.SESSION, key)[0] == 0
    assert client.until(run, "finished", "failed", "lost")["phase"] == "finished"


def test_a_hangup_and_a_closed_output_end_nothing(client: Client) -> None:
    run = bare_run(client, "import time\nfor i in range(20): print('x' * 100, flush=True); time.sleep(0.05)")
    process = runner_process(run)
    assert process.stdout is not None
    eventually(lambda: (run.state()[0] or {}).get("trainer"))
    process.stdout.close()
    os.kill(process.pid, signal.SIGHUP)
    assert process.wait(15) == 0
    assert client.look(run.run)["phase"] == "finished"


def test_two_runners_start_one_trainer(client: Client, tmp_path: Path) -> None:
    started = tmp_path / "started"
    run = bare_run(client, f"import time; open({str(started)!r}, 'a').write('x'); time.sleep(0.7)")
    both = [runner_process(run) for _ in range(2)]
    assert [process.communicate(timeout=40) and process.returncode for process in both] == [0, 0]
    assert started.read_text() == "x"
    assert client.look(run.run)["phase"] == "finished"


@pytest.mark.parametrize(
    ("program", "status"), [("import sys; sys.exit(5)", 5), ("import os; os.kill(os.getpid(), 9)", 137)]
)
def test_the_runner_exits_as_the_trainer_did(client: Client, program: str, status: int) -> None:
    process = runner_process(bare_run(client, program))
    out, _ = process.communicate(timeout=15)
    assert process.returncode == status
    assert out.decode().splitlines()[-1].startswith("[orch] failed: ")


def test_a_shutdown_is_no_wish_to_stop(client: Client) -> None:
    run = bare_run(client, LONG)
    process = runner_process(run)
    eventually(lambda: Path(run.console).exists() and Path(run.console).read_bytes())
    process.terminate()
    process.communicate(timeout=15)
    found = client.look(run.run)
    assert found["phase"] == "failed"
    assert "without a request to stop" in found["state"]["exit"]["reason"]


@ROOT
def test_a_full_disk_costs_neither_trainer_nor_record(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.call(["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(small)], stderr=subprocess.DEVNULL):
        pytest.skip("cannot mount a small file system here")
    client = Client(small)
    try:
        gate = tmp_path / "gate"
        run = client.launch(f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.05)")
        eventually(lambda: client.look(run)["state"].get("trainer"))
        ballast = small / "ballast"
        with ballast.open("wb", buffering=0) as f, pytest.raises(OSError, match="No space"):
            while True:
                f.write(b"x" * 4096)
        trainer = client.look(run)["state"]["trainer"]["pid"]
        time.sleep(2.5)  # beyond a heartbeat
        assert not gone(trainer)
        gate.touch()
        eventually(lambda: gone(trainer))
        time.sleep(0.3)
        assert client.look(run)["phase"] == "starting"
        ballast.unlink()
        found = client.until(run, "finished", "failed", "lost")
        assert found["phase"] == "finished"
        kept = [event for event in client.events_of(run) if event["event"] == "records_failed"]
        assert kept and "No space" in kept[0]["why"] and kept[0]["until"] > kept[0]["since"]
    finally:
        clean_up(small)
        subprocess.call(["umount", "-l", str(small)])


@ROOT
def test_an_out_of_memory_kill_is_counted(client: Client) -> None:
    """With a real limit, in a cgroup of the test's own."""
    group = MemoryGroup()
    if group.path is None or not os.access(group.path, os.W_OK):
        pytest.skip("no memory cgroup to make one in")
    own = Path(group.path) / f"orch-test-{os.getpid()}"
    limit = "memory.max" if group.version == 2 else "memory.limit_in_bytes"
    try:
        own.mkdir()
        (own / limit).write_text(str(100 << 20))
    except OSError as e:
        if own.exists():
            own.rmdir()
        pytest.skip(f"cannot make a memory cgroup: {e}")
    try:
        run = bare_run(client, "import time; time.sleep(0.2); x = b'x' * (400 << 20); time.sleep(10)")
        command = ["sh", "-c", f'echo $$ > {own}/cgroup.procs; exec "$@"', "sh", *runner_command(run.real)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
        assert process.wait(30) == 137
        record = client.look(run.run)["state"]["exit"]
        assert record["signal"] == 9
        assert record["oom_kills"] >= 1
        assert "here for want of memory" in record["reason"]
    finally:
        eventually(lambda: not (own / "cgroup.procs").read_text())
        own.rmdir()
