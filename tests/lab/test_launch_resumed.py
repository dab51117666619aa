"""A launch that is killed at any of its steps, and launched again: one trainer, nothing half done, and it says so."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from orchestrator.launch import STEPS

from .conftest import until

# What `orch launch` does, by a process that kills itself at a given point of it.
KILLED = """
import os, signal, sys
from pathlib import Path
from orchestrator.config import find_project, load_hosts, load_recipe, resolve_place
from orchestrator.launch import Launch, carry_out

recipe, place, moment, step = sys.argv[1:]

class Report:
    def at(self, now, name):
        if (now, name) == (moment, step):
            os.kill(os.getpid(), signal.SIGKILL)
    def begin(self, step): self.at("before", step)
    def progress(self, step, what, done, total, unit):
        if what.startswith(("sending", "streaming", "installing", "checking")): self.at("during", step)
    def note(self, step, what): pass
    def end(self, step, what): self.at("after", step)

project = find_project(Path.cwd())
loaded = load_recipe(project, recipe, place_override=place)
carry_out(Launch(project, loaded, resolve_place(load_hosts(project), place), Report()))
"""

# Counts its starts where every run of the test would count them.
TRAINER = 'echo "$ORCH_RUN_ID $$" >>{run_dir}/../../starts-%s; echo started; exec sleep 300'

# The step `gpus` does nothing where none are wanted: cut off there is cut off before or after it.
POINTS = [(moment, name) for name, _ in STEPS for moment in ("before", "after") if name != "gpus"]
POINTS += [("during", "environment"), ("during", "code")]


@pytest.fixture
def workstation(make_workstation, lab, tmp_path):
    station = make_workstation("first")
    lab.hosts_yaml(station.directory, local_root=tmp_path / "root")
    station.tiny_environment()
    return station


def starts(lab, station, place, name):
    if place == "local":
        file = station.directory.parent / "root" / f"starts-{name}"
        return file.read_text().splitlines() if file.exists() else []
    done = lab.run("cat", f"/var/lib/orch/starts-{name}", vmid=place.split("/")[1], check=False)
    return done.stdout.splitlines()


@pytest.mark.parametrize("place", ["local", "pve/200"])
@pytest.mark.parametrize(("moment", "step"), POINTS)
def test_killed_and_launched_again(lab, workstation, place, moment, step):
    name = f"k-{moment}-{step}-{place.split('/')[0]}"
    workstation.recipe(name, environment="tiny", command=["sh", "-c", TRAINER % name], metrics=False, stop_grace=1)
    if moment == "during" or (moment, step) == ("before", "environment"):
        forget(lab, workstation, place)
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, name, place, moment, step],
        cwd=workstation.directory,
        env=workstation.environment,
        capture_output=True,
        timeout=120,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()

    again = workstation.orch("launch", name, "--place", place, "--detach")

    until(lambda: bool(starts(lab, workstation, place, name)), 120)
    time.sleep(0.3)
    assert len(starts(lab, workstation, place, name)) == 1
    mine = [run for run in workstation.runs(place) if run["recipe"] == name]
    assert [run["phase"] for run in mine] == ["training"]
    # Up to the claim the first launch left nothing to go on with; from then on the second takes its run up.
    names = [name for name, _ in STEPS]
    left_a_run = moment == "during" or names.index(step) > names.index("claim") or (moment, step) == ("after", "claim")
    said_so = "continuing a launch that was interrupted" in again.stdout or "already" in again.stdout
    assert said_so == left_a_run, again.stdout
    workstation.orch("stop", mine[0]["run"], "--place", place, "--kill")
    leftovers(lab, workstation, place)


def forget(lab, workstation, place):
    """What comes next is a first contact."""
    if place == "local":
        import shutil

        shutil.rmtree(workstation.directory.parent / "root", ignore_errors=True)
    else:
        lab.forget(place.split("/")[1])


def leftovers(lab, workstation, place):
    """Nothing half done lies about: no temporary environment, no half received file."""
    script = 'cd "$1" && ls -d envs/*.tmp-* tmp/* bin/*.tmp code/*.tmp* 2>/dev/null; true'
    if place == "local":
        root = str(workstation.directory.parent / "root")
        done = subprocess.run(["sh", "-c", script, "sh", root], capture_output=True, text=True)
    else:
        done = lab.run("sh", "-c", script, "sh", "/var/lib/orch", vmid=place.split("/")[1])
    assert done.stdout == ""


def test_two_launches_at_once_from_two_workstations(lab, make_workstation, workstation, tmp_path):
    other = make_workstation("second")
    lab.hosts_yaml(other.directory)
    other.tiny_environment()
    recipe = {
        "environment": "tiny",
        "command": ["sh", "-c", TRAINER % "twice"],
        "metrics": False,
        "stop_grace": 1,
    }
    for station in (workstation, other):
        station.recipe("twice", **recipe)
    both = [station.start("launch", "twice", "--place", "pve/201", "--detach") for station in (workstation, other)]
    outcomes = [(process.communicate(timeout=120), process.returncode) for process in both]
    codes = sorted(code for _, code in outcomes)
    words = "".join((out + err).decode() for (out, err), _ in outcomes)
    assert codes in ([0, 5], [0, 0]), words  # 0, 0: the second came when the first had handed over already
    assert ("is being launched already, by tester" in words) or ("already" in words), words
    assert until(lambda: bool(starts(lab, workstation, "pve/201", "twice")), 120)
    time.sleep(0.3)
    assert len(starts(lab, workstation, "pve/201", "twice")) == 1
    (run,) = [run for run in other.runs("pve/201") if run["recipe"] == "twice"]
    workstation.orch("stop", run["run"], "--place", "pve/201", "--kill")


def test_a_launch_in_the_way_of_another_says_who_it_is(lab, make_workstation, workstation):
    """One launcher is held still in the middle of its work; the other is refused, and told by whom."""
    name = "held"
    workstation.recipe(name, environment="tiny", command=["sleep", "300"], metrics=False, stop_grace=1)
    holder = KILLED.replace("os.kill(os.getpid(), signal.SIGKILL)", "print('here', flush=True); input()")
    first = subprocess.Popen(
        [sys.executable, "-c", holder, name, "pve/201", "after", "claim"],
        cwd=workstation.directory,
        env=workstation.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert first.stdout is not None and first.stdout.readline() == "here\n"
        refused = workstation.orch("launch", name, "--place", "pve/201", "--detach", code=5)
        assert "is being launched already, by tester on" in refused.stderr
        first.communicate("\n", timeout=60)
        assert first.returncode == 0
        (run,) = [run for run in workstation.runs("pve/201") if run["recipe"] == name]
        assert run["phase"] == "training"
        workstation.orch("stop", run["run"], "--kill")
    finally:
        first.kill()
        first.wait()
