"""The demo, inside a container over SSH and pct, from a first contact to its end; and its life in between."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .conftest import until

PLACE = "pve/200"
# The steps and the share of the prompts that show the same in a shorter time.
SHORT = ("--set", "settings.steps=30", "--set", "settings.evaluate.every=1000")


@pytest.fixture(scope="module")
def bare_lab(make_module_lab):
    """A container that has Python and tmux, and no way out."""
    return make_module_lab("--net", "empty", "--without", "uv,zstd,rsync", "--containers", "1")


@pytest.fixture
def workstation(make_workstation, bare_lab):
    station = make_workstation("first")
    bare_lab.hosts_yaml(station.directory)
    return station


def console_log(lab, run):
    return lab.run("cat", f"/var/lib/orch/runs/{run}/console.log", vmid="200").stdout


@pytest.mark.timeout(1500)  # it trains for minutes, beside other tests
def test_from_first_contact_to_the_end(bare_lab, workstation):
    """Everything travels: uv, wheels for the container's Python, the trainer with its assets. Then it trains, and
    what it reports is held to what the demo promises."""
    # with one thread: two that wait for each other's parts crawl where others want the cores as well
    done = workstation.orch("launch", "demo", "--place", PLACE, "--set", "settings.threads=1", timeout=1400)
    assert "finished" in done.stdout
    (run,) = workstation.runs(PLACE)
    assert run["phase"] == "finished" and run["exit"]["code"] == 0
    result = run["result"]
    headline = result["headline"]
    assert headline["repeat_8gram_share"] < 0.2
    assert headline["end"] - headline["start"] >= 0.3
    assert headline["end"] > headline["ngram"]
    assert result["end"]["temperature_0"]["tau"] - result["start"]["temperature_0"]["tau"] >= 0.5
    sampled = [result[which]["rejection_temperature_0.7"]["tau"] for which in ("start", "end")]
    assert sampled[1] - sampled[0] >= 0.3
    equal = result["equal_to_plain"]
    assert equal["within_rounding"] and equal["prompts"] > 0
    # a text may leave plain decoding's where that hesitates within rounding, but in float32 hardly one does
    assert min(equal["temperature_0"], equal["temperature_0.7"]) >= equal["prompts"] - 1

    log = workstation.orch("logs", run["run"]).stdout
    assert log == console_log(bare_lab, run["run"])
    assert workstation.orch("logs", "demo", "--tail", "3").stdout == "".join(log.splitlines(keepends=True)[-3:])
    assert run["run"] in workstation.orch("status").stdout

    provenance = json.loads(bare_lab.run("cat", f"/var/lib/orch/runs/{run['run']}/provenance.json", vmid="200").stdout)
    assert provenance["environment"]["id"] == run["environment"]
    assert provenance["code"]["digest"] == run["code"]


def documented(title: str) -> list[str]:
    """The words of the first command under this title of docs/recipes.md, after `orch`."""
    page = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
    block = page.split(f"## {title}\n", 1)[1].split("```\n", 2)[1]
    program, *words = shlex.split(block.replace("\\\n", " "))
    assert program == "orch"
    return words


def test_eight_ranks_in_a_container(bare_lab, workstation):
    """`exp-ddtree-fresh` with the small model that docs/recipes.md gives it: five target ranks and three drafters."""
    bare_lab.run("ip", "link", "set", "lo", "up", vmid="200")  # which no init of the lab's does; ranks need it
    words = [word.replace("place=local", f"place={PLACE}") for word in documented("exp-ddtree-fresh on a CPU")]
    done = workstation.orch(*words, timeout=900)
    assert "finished" in done.stdout
    (run,) = [found for found in workstation.runs(PLACE) if found["run"].startswith("exp-ddtree-fresh")]
    assert run["phase"] == "finished" and run["exit"]["code"] == 0 and run["step"] == 12
    log = console_log(bare_lab, run["run"])
    assert all(f"target {number}: done" in log for number in range(5)) and "step 12/12" in log


def test_stopped_half_way_and_seen_from_a_second_workstation(bare_lab, workstation, make_workstation):
    started = workstation.orch("launch", "demo", "--place", PLACE, "--detach", "--new", timeout=600)
    assert "orch attach" in started.stdout
    second = make_workstation("second")
    bare_lab.hosts_yaml(second.directory)

    def current():
        return next(run for run in second.runs(PLACE) if run["phase"] not in ("finished", "failed", "stopped"))

    run = current()["run"]
    assert until(lambda: (current()["step"] or 0) >= 3, 300), current()
    assert current()["tmux"]["session"] is True
    assert second.orch("logs", run, "--tail", "2").stdout
    assert "step" in second.orch("logs", run, "--pane").stdout
    # The same launch again starts nothing: it says so, and how to look in.
    again = second.orch("launch", "demo", "--place", PLACE)
    assert f"{run} is training already" in again.stdout and f"orch attach {run}" in again.stdout

    stopped = second.orch("stop", run)
    assert f"{run} is stopped" in stopped.stdout
    state = next(found for found in workstation.runs(PLACE) if found["run"] == run)
    assert state["phase"] == "stopped"
    alive = bare_lab.run(
        "sh", "-c", f"cat /proc/[0-9]*/environ 2>/dev/null | grep -c ORCH_RUN_ID={run}; true", vmid="200"
    )
    assert alive.stdout.strip() == "0"
    assert "had ended already: stopped" in second.orch("stop", run).stdout


def test_following_the_log_over_cut_connections_loses_and_repeats_no_byte(bare_lab, workstation, make_relay):
    relay = make_relay(bare_lab)
    hosts = json.loads((workstation.directory / "hosts.yaml").read_text())
    hosts["hosts"]["pve"]["ssh"]["ssh_config"] = str(relay.config)
    workstation.write("hosts.yaml", json.dumps(hosts))
    workstation.tiny_environment()
    talk = 'i=0; while [ $i -lt 4000 ]; do i=$((i+1)); echo "line $i ünïcode"; [ $((i%100)) -ne 0 ] || sleep 0.2; done'
    workstation.recipe("talk", environment="tiny", command=["sh", "-c", talk], metrics=False)
    workstation.orch("launch", "talk", "--place", PLACE, "--detach")
    follower = workstation.start("logs", "talk", "--follow")
    for _ in range(3):
        time.sleep(1.2)
        relay.cut()
    out, err = follower.communicate(timeout=120)
    assert follower.returncode == 0, err.decode()
    assert out.decode() == "".join(f"line {i} ünïcode\n" for i in range(1, 4001))
    assert b"asking again in" in err


def test_after_pip_install_in_a_clean_venv_and_an_empty_directory(tmp_path, make_workstation):
    station = make_workstation("empty")
    source = tmp_path / "source"
    subprocess.run(["git", "clone", "-q", ".", str(source)], check=True, cwd=Path(__file__).parents[2])
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    subprocess.run(
        [str(venv / "bin/python"), "-m", "pip", "install", "-q", "--disable-pip-version-check", str(source)],
        check=True,
        timeout=600,
    )
    env = {key: value for key, value in station.environment.items() if key != "PYTHONPATH"}
    env["HOME"] = str(tmp_path)  # what runs on this machine stays in the test's own directory
    (tmp_path / ".config/orch").mkdir(parents=True)
    (tmp_path / ".config/orch/hosts.yaml").write_text(
        json.dumps({"hosts": {"local": {"root": str(tmp_path / "root")}}})
    )
    done = subprocess.run(
        [str(venv / "bin/orch"), "launch", "demo", *SHORT, "--set", "settings.threads=2"],
        cwd=station.directory,
        env=env,
        capture_output=True,
        text=True,
        timeout=900,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "finished" in done.stdout
