"""Run directories that nobody's program wrote so: each is shown as far as it can be, and costs no other run."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator import history
from orchestrator.remote import frames
from orchestrator.run import from_probe
from orchestrator.survey import gpu_of

from .remote_runs import Client, clean_up, eventually, gone
from .test_abuse_cli import orch

GOOD = {"version": 1, "run": "good-1", "recipe": "good", "user": "u", "phase": "finished", "created": 9.0}
BAD = {"version": 1, "run": "bad-1", "recipe": "bad", "user": "u", "phase": "failed", "created": 5.0}
MANY = 10**400

ODD: dict[str, dict[str, Any]] = {
    "created is text": {"created": "abc"},
    "created is NaN": {"created": float("nan")},
    "created is endless": {"created": float("inf")},
    "created is no float": {"created": MANY},
    "half a character": {"recipe": "\ud800\x1b[31m", "user": {"a": 1}},
    "exit is a list": {"exit": [1, 2]},
    "exit holds anything": {"exit": {"at": "x", "reason": "\x1b]0;title\x07"}},
    "phase is a list": {"phase": ["x"]},
    "runner is text": {"phase": "training", "runner": "y", "trainer": []},
    "pid is text": {"phase": "training", "runner": {"pid": "x"}},
    "launcher is a list": {"phase": "preparing", "launcher": [1]},
    "figures are text": {"step": "\x1b[2J", "tokens_per_second": "x", "started": [], "eval": "x", "heartbeat": {}},
    "figures are huge": {"step": MANY, "tokens_per_second": MANY, "started": MANY, "eval": {"eval": {"headline": 1}}},
}


def write(tmp_path: Path, state: dict[str, Any], **files: str) -> Path:
    run = tmp_path / "root/runs" / state["run"]
    run.mkdir(parents=True)
    (run / "state.json").write_text(json.dumps(state))
    (run / "console.log").write_text("said\n")
    for name, text in files.items():
        (run / name.replace("_", ".")).write_text(text)
    return run


METRICS = [
    '{"step": -5, "loss": NaN, "tokens": 1e400, "time": "x"}',
    '{"step": 1e400, "loss": "\x1b[31m", "time": 1e400}',
    '{"step": 7, "loss": [1], "tokens": {}, "time": 1e30}',
    '{"step": 3, "eval": {"headline": {"tau": "\\ud800"}}}',
    '{"step": 3, "eval": {"headline": {"tau": ' + "9" * 400 + "}}}",
    '{"step": ' + "9" * 5000 + "}",
    "[" * 100_000,
    "\x00\x01",
]


RESULTS = ["garbage", "[1]", "[" * 100_000, '{"a":' * 400 + "1" + "}" * 400, '{"\\ud800": 1}']


def test_odd_records_metrics_and_results_are_shown_as_far_as_they_go(tmp_path):
    write(tmp_path, GOOD)
    names = {"good-1"}
    for number, odd in enumerate(ODD.values()):
        names.add(write(tmp_path, {**BAD, "run": f"record-{number}", **odd}).name)
    for number, line in enumerate(METRICS):
        names.add(write(tmp_path, {**BAD, "run": f"metrics-{number}"}, metrics_jsonl=line + "\n").name)
    for number, text in enumerate(RESULTS):
        names.add(write(tmp_path, {**BAD, "run": f"result-{number}"}, result_json=text).name)
    shown = orch(tmp_path, "status", "--all").stdout
    assert all(name.encode() in shown for name in names)
    assert b"\x1b" not in shown and b"\x07" not in shown
    place = json.loads(orch(tmp_path, "status", "--all", "--json").stdout)["places"][0]
    assert {run["run"]: run["log_tail"] for run in place["runs"]} == {name: ["said"] for name in names}
    errors = {run["run"]: run["error"] for run in place["runs"]}
    assert [bool(errors[f"result-{number}"]) for number in range(len(RESULTS))] == [True, True, True, False, False]
    assert orch(tmp_path, "logs", "record-0").stdout == b"said\n"


def test_a_result_that_is_data_is_not_carried_about(tmp_path):
    write(tmp_path, GOOD, result_json=json.dumps({"weights": "x" * (1 << 20)}))
    place = json.loads(orch(tmp_path, "status", "--all", "--json").stdout)["places"][0]
    assert place["runs"][0]["result"] is None and "larger than" in place["runs"][0]["error"]


def test_a_header_with_half_a_character_travels():
    frame = frames.encode({"a": "\ud800", "b": "\udcff"})
    assert frames.Decoder().feed(frame) == [({"a": "\ud800", "b": "\udcff"}, b"")]


def test_what_a_place_says_cannot_steer_the_terminal():
    (run,) = from_probe({"time": 1.0, "runs": [{"run": "a", "phase": "x\x1b[2J", "why": "\x9b1m\ud800"}]}, b"", "local")
    assert (run.phase, run.why) == ("x�[2J", "�1m�")
    gpu = gpu_of({"index": 0, "name": "H200\x1b[1m", "why": {"power": "\x07"}})
    assert (gpu.name, gpu.error) == ("H200�[1m", "power: �")
    gpu = gpu_of({"index": 0, "why": {"power": "N/A", "utilization": "N/A", "memory_used": "GPU is lost"}})
    assert gpu.error == "power, utilization: N/A; memory_used: GPU is lost"


def test_runs_that_are_gone_are_forgotten(tmp_path, monkeypatch):
    run = write(tmp_path, GOOD)
    write(tmp_path, BAD)
    orch(tmp_path, "status", "--all")
    shutil.rmtree(run)
    orch(tmp_path, "status", "good-1", code=4)
    orch(tmp_path, "status", "--all")
    monkeypatch.setenv("ORCH_STATE_DIR", str(tmp_path / "state"))
    assert [entry.run for entry in history.known("local")] == ["bad-1"]


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    yield Client(tmp_path)
    clean_up(tmp_path)


@pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")
def test_a_run_without_a_readable_record_can_still_be_stopped(client: Client):
    run = client.launch("import time\nprint('up', flush=True)\ntime.sleep(300)")
    state = eventually(lambda: (s := client.look(run)["state"]).get("trainer") and s)
    os.kill(state["runner"]["pid"], signal.SIGKILL)
    Path(client.dir(run).file("state.json")).write_text("{")
    assert client.look(run)["phase"] is None
    answer = client.call("stop", run=run, by="tester", grace=1)
    assert answer["phase"] == "stopped" and gone(state["trainer"]["pid"])
    assert client.look(run)["phase"] == "stopped"


DAEMON = """
import os, sys, time
for turn in range(2):
    if os.fork():
        break
    os.setsid()
else:
    program = "import os, time; print(os.getpid(), flush=True); time.sleep(300)"
    os.execve(sys.executable, [sys.executable, "-c", program], {})
if turn:
    os._exit(0)
time.sleep(300)
"""


@pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")
def test_a_lost_run_that_still_lives_is_not_started_beside_but_ended(client: Client):
    run = client.launch(DAEMON)
    daemon = eventually(lambda: int(Path(client.dir(run).console).read_bytes() or 0))
    state = eventually(lambda: (s := client.look(run)["state"]).get("trainer") and s)
    os.kill(state["runner"]["pid"], signal.SIGKILL)
    lost = client.until(run, "lost")
    assert {process["pid"] for process in lost["alive"]} == {daemon, state["trainer"]["pid"]}
    with pytest.raises(frames.OpError, match="2 of its processes still live") as caught:
        client.claim()
    assert caught.value.code == "refused"
    client.call("stop", run=run, by="tester", grace=1)
    assert gone(daemon) and gone(state["trainer"]["pid"])
    assert client.claim()["how"] == "new"


@pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root, to mount a small disk")
def test_a_run_can_be_stopped_while_the_disk_is_full(tmp_path: Path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], check=False).returncode:
        pytest.skip("no disk can be mounted here")
    try:
        client = Client(disk)
        run = client.launch("import time\nprint('up', flush=True)\ntime.sleep(300)")
        state = eventually(lambda: (s := client.look(run)["state"]).get("trainer") and s)
        eventually(lambda: b"up" in Path(client.dir(run).console).read_bytes())
        with (disk / "fill").open("wb", buffering=0) as fill, contextlib.suppress(OSError):
            while fill.write(bytes(4096)):
                pass
        with pytest.raises(frames.OpError, match=r"every process of .* has ended; its record is written once"):
            client.call("stop", run=run, by="tester", grace=0)
        assert gone(state["trainer"]["pid"]) and not gone(state["runner"]["pid"])
        (disk / "fill").unlink()
        assert client.until(run, "failed", "stopped")["state"]["exit"]["signal"] == signal.SIGTERM
        eventually(lambda: gone(state["runner"]["pid"]))
    finally:
        clean_up(disk)
        subprocess.run(["umount", "--lazy", str(disk)], check=False)


def test_among_hundreds_of_runs_the_oldest_is_still_found(tmp_path):
    for number in range(205):
        write(
            tmp_path, {**BAD, "run": f"many-{number:03}", "recipe": "many", "created": 1.0 + number, "phase": "stopped"}
        )
    assert orch(tmp_path, "logs", "many-000").stdout == b"said\n"
    assert b"and 5 older runs at local" in orch(tmp_path, "status", "--all").stdout
    place = json.loads(orch(tmp_path, "status", "--all", "--json").stdout)["places"][0]
    assert (len(place["runs"]), place["more"]) == (200, 5)


def test_files_that_are_none_are_not_waited_for(tmp_path):
    write(tmp_path, GOOD)
    for number, name in enumerate(("state.json", "result.json", "console.log", "metrics.jsonl")):
        run = write(tmp_path, {**BAD, "run": f"odd-{number}", "phase": "finished"})
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)
    shown = orch(tmp_path, "status", "--all").stdout
    assert shown.count(b"odd-") >= 4 and b"state.json: not a regular file" in shown
    assert orch(tmp_path, "logs", "odd-2").stdout == b""


def test_a_diagnosis_waits_for_no_file_that_is_none(tmp_path):
    names = ("console.log", "metrics.jsonl", "gpu.jsonl", "events.jsonl", "recipe.yaml", "trainer.yaml", "launch.json")
    record = {"code": 1, "signal": None, "at": 1.0, "reason": "exit 1"}
    run = write(tmp_path, {**GOOD, "run": "odd-0", "phase": "failed", "exit": record})
    for name in (*names, "error.json"):
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)
    said = json.loads(orch(tmp_path, "diagnose", "odd-0", "--json").stdout)
    assert said["cause"] == "unknown", said
    assert "the log could not be read: console.log: not a regular file" in said["notes"]
