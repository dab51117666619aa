"""One look at everything: bounded, and no bad part costs another."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.remote import nvidia_smi, tmux
from orchestrator.remote.frames import OpError

from .remote_runs import LAB_SMI, Client, clean_up, eventually

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")

LONG = "import time\nprint('up', flush=True)\ntime.sleep(300)"


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    yield Client(tmp_path)
    clean_up(tmp_path)


def fake_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    bindir = tmp_path / "smi-bin"
    bindir.mkdir(exist_ok=True)
    (bindir / "nvidia-smi").write_text("#!/bin/sh\n" + body)
    (bindir / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{bindir}:{os.environ['PATH']}")


def scenario(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **spec: object) -> None:
    path = tmp_path / "gpus.json"
    path.write_text(json.dumps(spec))
    fake_smi(tmp_path, monkeypatch, f'LAB_GPUS={path} exec {sys.executable} -IS {LAB_SMI} "$@"\n')


def test_everything_of_a_running_run(client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario(tmp_path, monkeypatch, gpus=3)
    run = client.launch(LONG, metrics=False)
    eventually(lambda: Path(client.dir(run).console).read_bytes())
    Path(client.dir(run).file("result.json")).write_text('{"accuracy": 1}')
    answer, payload = client.call("probe", runs="active", tail_lines=10, screen=True, gpus=True)
    assert answer["problems"] == [] and answer["boot_id"] and answer["uptime"] > 0
    assert abs(answer["time"] - time.time()) < 5
    assert [gpu["index"] for gpu in nvidia_smi.parse_gpus(answer["gpus"]["text"])] == [0, 1, 2]
    (one,) = answer["runs"]
    assert (one["run"], one["phase"], one["why"], one["lock"]) == (run, "training", None, "held")
    assert one["result"] == {"accuracy": 1}
    log = one["log"]
    assert payload[log["from"] : log["from"] + log["length"]] == b"up\n"
    assert one["tmux"]["session"] is True and one["tmux"]["pane_dead"] is False
    eventually(lambda: "up" in client.look(run, screen=True)["tmux"]["screen"].splitlines())
    json.dumps(answer)


def test_which_runs(client: Client) -> None:
    first = client.launch("pass", digest="d1")
    client.until(first, "finished")
    second = client.claim("d2")["run"]

    def names(wanted: object) -> list[str]:
        return [one["run"] for one in client.call("probe", runs=wanted)[0]["runs"]]

    assert names("active") == [second]
    assert names("latest") == [second]
    assert names("all") == [second, first]
    client.call("stop", run=second)
    assert names("active") == []
    assert names("latest") == [second]  # nothing is under way: the one that was last
    assert names([first]) == [first]
    with pytest.raises(OpError) as caught:
        names(["demo-0"])
    assert caught.value.code == "not_found"
    with pytest.raises(OpError) as caught:
        names("some")
    assert caught.value.code == "usage"


def test_nothing_there(tmp_path: Path) -> None:
    answer, payload = Client(tmp_path / "none").call("probe", runs="all")
    assert answer["runs"] == [] and payload == b""


def test_a_broken_state_costs_its_run_only(client: Client) -> None:
    good, bad = client.claim("d1")["run"], client.claim("d2")["run"]
    Path(client.dir(bad).file("state.json")).write_text('{"phase": "trai')
    Path(client.dir(bad).file("metrics.jsonl")).mkdir()
    Path(client.dir(bad).file("console.log")).write_text("still here\n")
    answer, payload = client.call("probe", runs="active", tail_lines=5)
    found = {one["run"]: one for one in answer["runs"]}
    assert found[good]["phase"] == "preparing"
    assert found[bad]["phase"] is None and "state.json" in found[bad]["why"]
    assert "directory" in found[bad]["metrics"]["why"]
    log = found[bad]["log"]
    assert payload[log["from"] :][: log["length"]] == b"still here\n"


def test_a_part_that_raises_is_named(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    run = client.claim()["run"]

    def broken(*_: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(tmux, "pane", broken)
    answer, _ = client.call("probe", runs=[run])
    assert answer["runs"][0]["tmux"] is None and answer["runs"][0]["phase"] == "preparing"
    assert answer["problems"] == [{"run": run, "part": "tmux", "why": "RuntimeError: boom"}]
    monkeypatch.undo()


# ---- nvidia-smi ------------------------------------------------------------------------------


def test_a_hanging_nvidia_smi_costs_its_part_only(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario(tmp_path, monkeypatch, fault="hang")
    monkeypatch.setattr(nvidia_smi.Query.__init__, "__defaults__", (0.5,))
    run = client.claim()["run"]
    begin = time.monotonic()
    answer, _ = client.call("probe", runs=[run], gpus=True)
    assert time.monotonic() - begin < 3
    assert answer["gpus"] == {"text": None, "rc": None, "why": "nvidia-smi gave no answer in 0.5 s"}
    assert answer["runs"][0]["phase"] == "preparing"


@pytest.mark.parametrize(
    ("fault", "rc", "word"),
    [("mismatch", 18, "mismatch"), ("unknown", 255, "Unknown Error"), ("no-driver", 9, "driver")],
)
def test_error_texts_go_up(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, rc: int, word: str
) -> None:
    scenario(tmp_path, monkeypatch, fault=fault)
    outcome = client.call("probe", runs=[], gpus=True)[0]["gpus"]
    assert outcome["rc"] == rc and word in outcome["text"]
    why = nvidia_smi.explain(outcome)
    assert why is not None and word in why


def test_no_nvidia_smi(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    assert client.call("probe", runs=[], gpus=True)[0]["gpus"]["why"] == "nvidia-smi is not here"


# ---- waiting ---------------------------------------------------------------------------------


def test_waiting_ends_when_something_comes(client: Client) -> None:
    run = client.claim()["run"]
    console = Path(client.dir(run).console)
    console.write_text("one\n")
    log = client.look(run, tail_lines=5)["log"]
    at = {run: {"inode": log["inode"], "offset": log["next"]}}

    def later() -> None:
        time.sleep(0.4)
        with console.open("a") as f:
            f.write("two\n")

    thread = threading.Thread(target=later)
    thread.start()
    begin, cpu = time.monotonic(), time.process_time()
    answer, payload = client.call("probe", runs=[run], offset=at, wait=10)
    thread.join()
    assert 0.3 < time.monotonic() - begin < 2
    assert time.process_time() - cpu < 0.2
    assert payload == b"two\n" and answer["runs"][0]["log"]["offset"] == 4
    begin = time.monotonic()
    assert client.call("probe", runs=[run], offset=at, wait=10)[1] == b"two\n"  # it is there already
    assert time.monotonic() - begin < 0.3


def test_nothing_is_waited_for_that_has_ended(client: Client) -> None:
    run = client.launch("pass")
    client.until(run, "finished")
    log = client.look(run)["log"]
    begin = time.monotonic()
    client.look(run, offset={run: {"inode": log["inode"], "offset": log["next"]}}, wait=10)
    assert time.monotonic() - begin < 0.5


def test_waiting_ends_on_a_phase_and_at_its_time(client: Client, tmp_path: Path) -> None:
    run = client.claim()["run"]
    begin = time.monotonic()
    client.look(run, wait=0.5)
    assert 0.4 < time.monotonic() - begin < 1.5
    assert client.look(run, wait=10, known={run: "starting"})["phase"] == "preparing"
    thread = threading.Timer(0.3, lambda: Client(tmp_path).call("stop", run=run, by="ada"))
    thread.start()
    begin = time.monotonic()
    assert client.look(run, wait=10, known={run: "preparing"})["phase"] == "stopped"
    assert time.monotonic() - begin < 3
    thread.join()


# ---- logs ------------------------------------------------------------------------------------


def test_following_a_growing_log_with_split_characters(client: Client) -> None:
    run = client.launch("import time\nfor i in range(40): print('zeile äöü €', i, flush=True); time.sleep(0.02)")
    got, inode, offset = b"", None, 0
    while True:
        where, data = client.call("read_log", run=run, inode=inode, offset=offset, limit=7, wait=1)
        assert not where["rotated"] and not where["truncated"] and len(data) <= 7
        got, inode, offset = got + data, where["inode"], where["next"]
        if where["phase"] in ("finished", "failed") and not data:
            break
    assert got.decode().splitlines() == [f"zeile äöü € {i}" for i in range(40)]


def test_the_other_files_of_a_run_and_no_more(client: Client) -> None:
    run = client.claim()["run"]
    where, data = client.call("read_log", run=run, name="events.jsonl")
    assert json.loads(data)["event"] == "claimed" and where["why"] is None
    for name in ("secrets.json", "../x", "state.json"):
        with pytest.raises(OpError):
            client.call("read_log", run=run, name=name)


def test_the_pane_with_its_history(client: Client) -> None:
    run = client.launch("for i in range(500): print('line', i)")
    client.until(run, "finished")
    eventually(lambda: client.look(run)["tmux"]["pane_dead"])
    screen = client.call("pane", run=run)["screen"].splitlines()
    assert [line for line in screen if line.startswith("line ")] == [f"line {i}" for i in range(500)]
    tmux.kill(run)
    gone = client.call("pane", run=run)
    assert gone["screen"] is None and gone["error"] and gone["session"] is False
