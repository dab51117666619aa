"""A recipe that worked, then a bad lock and a dirty edit, then back: in a container and on this machine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time

import pytest

from orchestrator.remote import generations
from tests.tiny_wheels import lock_text, make_wheel

# Trains in a small way, with the environment's package and the staged code: as the recipe says, or else it fails.
TRAINER = """
import json, os, sys, time, tiny, trainer
assert tiny.VERSION == "1.0", tiny.VERSION
with open(os.environ["ORCH_METRICS"], "a") as out:
    for step in range(1, 6):
        print(json.dumps({"step": step, "loss": 1.0, "tokens": 100, "time": time.time()}), file=out, flush=True)
        time.sleep(0.05)
"""


@pytest.fixture(params=["local", "pve/200"])
def place(request):
    return request.param


@pytest.fixture
def workstation(make_workstation, lab, place, tmp_path, monkeypatch):
    station = make_workstation("first")
    lab.forget()
    lab.hosts_yaml(station.directory, local_root=tmp_path / "root")
    station.recipe(
        "work", environment="tiny", place=place, command=["{python}", "-c", TRAINER], health={"step": 3}, stop_grace=1
    )
    lock(station, "1.0")
    return station


def lock(station, version):
    wheel = make_wheel(station.directory / "links", "tiny", version)
    station.write("recipes/envs/tiny/spec.yaml", {"python": ">=3.8", "torch": "2.13.0", "backend": "cpu"})
    station.write("recipes/envs/tiny/requirements.in", f"tiny=={version}\n")
    station.write("recipes/envs/tiny/requirements.lock", lock_text([wheel]))


# The bundled trainer of this process is a copy that may be edited.
EDITED = """
import sys
from pathlib import Path
import orchestrator.provenance, orchestrator.snapshot
code = Path(sys.argv.pop(1))
for module in (orchestrator.provenance, orchestrator.snapshot):
    module.trainer_dir = lambda: code
from orchestrator.cli import main
main()
"""


def edited(station, *words, code=0):
    copy = station.directory / "edit/trainer"
    if not copy.exists():
        copy.mkdir(parents=True)
        (copy / "__init__.py").write_text('"""A trainer."""\n')
    argv = [sys.executable, "-c", EDITED, str(copy), *words]
    done = subprocess.run(
        argv, cwd=station.directory, env=station.environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def provenance(station, lab, place, run):
    if place == "local":
        return json.loads((station.directory.parent / "root/runs" / run / "provenance.json").read_text())
    return json.loads(lab.run("cat", f"/var/lib/orch/runs/{run}/provenance.json", vmid="200").stdout)


def latest(station, place):
    return station.runs(place)[0]["run"]


def listed(station, place):
    (found,) = station.json("env", "list", place)["places"][0]["recipes"]
    return found


@pytest.mark.parametrize("broken", ["runs badly", "cannot be read"])
def test_back_to_what_worked(workstation, lab, place, broken):
    edited(workstation, "launch", "work")
    good = provenance(workstation, lab, place, latest(workstation, place))
    assert [one["standing"] for one in listed(workstation, place)["generations"]] == ["good"]

    (workstation.directory / "edit/trainer/__init__.py").write_text("raise SystemExit('a dirty edit')\n")
    (workstation.directory / "edit/trainer/more.py").write_text("")
    lock(workstation, "2.0")
    # against what launches would take, which nothing was launched with yet
    told = edited(workstation, "rollback-env", "work", place, code=5).stdout
    assert "tiny 2.0 → 1.0" in told and "trainer/more.py removed" in told and "of the working tree" in told
    edited(workstation, "launch", "work", code=1)
    assert [one["standing"] for one in listed(workstation, place)["generations"]] == ["good", "bad"]
    bad = provenance(workstation, lab, place, latest(workstation, place))
    assert bad["environment"]["id"] != good["environment"]["id"] and bad["code"] != good["code"]
    if broken == "cannot be read":
        workstation.write("recipes/envs/tiny/requirements.lock", "tiny>=2\n")

    refused = edited(workstation, "rollback-env", "work", place, code=5)
    assert "tiny 2.0 → 1.0" in refused.stdout and "trainer/__init__.py changed" in refused.stdout
    assert "trainer/more.py removed" in refused.stdout and f"orch rollback-env work {place} --yes" in refused.stderr
    assert listed(workstation, place)["pin"] is None
    done = workstation.json("rollback-env", "work", place, "--yes")
    assert done["pinned"] == 1 and done["change"]["packages"][1:] == ["tiny 2.0 → 1.0"]

    plan = edited(workstation, "launch", "work", "--explain").stdout
    assert "of generation 1, in place" in plan
    again = edited(workstation, "launch", "work").stdout
    assert "pinned to generation 1" in again
    if broken == "runs badly":
        assert "ignored: tiny's lock asks for tiny 1.0 → 2.0" in again
    else:
        assert "ignored: the working tree's environment cannot be used" in again
    assert "ignored: code: trainer/more.py added, trainer/__init__.py changed" in again
    now = provenance(workstation, lab, place, latest(workstation, place))
    assert now["environment"] == good["environment"] and now["code"] == good["code"] and now["pinned_to"] == 1
    found = listed(workstation, place)
    assert [one["standing"] for one in found["generations"]] == ["good", "bad", "good"]
    assert found["pin"]["generation"] == 1

    # The pin holds until it is lifted, and a launch that lifts it takes the working tree.
    edited(workstation, "launch", "work", "--latest", code=1 if broken == "runs badly" else 2)
    assert (listed(workstation, place)["pin"] is None) == (broken == "runs badly")
    assert "pinned" in workstation.orch("env", "use", "work", place).stdout or True
    assert listed(workstation, place)["pin"] is None


def test_what_is_not_there_is_said(workstation, place):
    nothing = workstation.orch("rollback-env", "work", place, "--yes", code=4)
    assert "has not been launched" in nothing.stderr and f"orch launch work --place {place}" in nothing.stderr
    workstation.recipe("work", environment="tiny", place=place, command=["sh", "-c", "exit 3"], metrics=False)
    workstation.orch("launch", "work", code=1)
    none = workstation.orch("rollback-env", "work", place, "--yes", code=4)
    assert "no generation of work" in none.stderr and "is good yet (of 1)" in none.stderr
    assert "has no generation 7" in workstation.orch("rollback-env", "work", place, "--to", "7", "--yes", code=4).stderr
    workstation.orch("env", "mark", "work", "9", "good", place, code=4)
    marked = workstation.orch("env", "mark", "work", "1", "good", place, "--why", "it did what I wanted")
    assert "good" in marked.stdout and "it did what I wanted" in marked.stdout
    workstation.orch("rollback-env", "work", place, "--yes")
    assert listed(workstation, place)["pin"]["generation"] == 1


def test_a_pinned_environment_that_was_polluted(workstation, lab, place):
    """It is refused, and comes back under its id from what its manifest recorded, whatever the lock says by then."""
    edited(workstation, "launch", "work")
    lock(workstation, "2.0")
    workstation.orch("rollback-env", "work", place, "--yes")
    ident = listed(workstation, place)["pin"]["environment"]
    if place == "local":
        (module,) = (workstation.directory.parent / "root/envs" / ident).glob(
            "lib/python*/site-packages/tiny/__init__.py"
        )
        module.write_text("VERSION = '6.6'\n")
    else:
        path = f"/var/lib/orch/envs/{ident}"
        text = f"chattr -R -i {path}; for f in {path}/lib/python*/site-packages/tiny/__init__.py; do echo x >> $f; done"
        lab.run("sh", "-c", text, vmid="200")
    refused = edited(workstation, "launch", "work", code=5)
    assert f"orch env build {ident} {place}" in refused.stderr
    workstation.orch("rollback-env", "work", place, "--yes", code=5)
    assert "built" in workstation.orch("env", "build", ident, place).stdout
    assert "finished" in edited(workstation, "launch", "work").stdout


def test_code_that_was_changed_at_the_place_is_refused(workstation, lab, place):
    edited(workstation, "launch", "work")
    digest = latest_code(workstation, place)
    if place == "local":
        file = workstation.directory.parent / "root/code" / digest / "trainer/__init__.py"
        file.write_text("changed\n")
    else:
        lab.run("sh", "-c", f"echo >> /var/lib/orch/code/{digest}/trainer/__init__.py", vmid="200")
    refused = workstation.orch("rollback-env", "work", place, "--yes", code=5)
    assert "was changed at the place" in refused.stderr


def latest_code(station, place):
    return listed(station, place)["generations"][-1]["code"]["digest"]


@pytest.mark.parametrize("place", ["local"])  # read through the file system of this machine
def test_the_pin_is_never_missing_or_mixed(workstation, place, tmp_path):
    """Somebody reads it all the time while it goes back and forth between two generations."""
    edited(workstation, "launch", "work")
    lock(workstation, "2.0")
    edited(workstation, "launch", "work", code=1)
    workstation.orch("rollback-env", "work", place, "--yes")
    root = str(tmp_path / "root")
    known = {one["generation"]: one for one in generations.read(root, "work")}
    seen, wrong, stop = set(), [], threading.Event()

    def look():
        while not stop.is_set():
            pin = generations.read_pin(root, "work")
            if pin is None or pin["environment"] != known[pin["generation"]]["environment"]:
                wrong.append(pin)
            else:
                seen.add(pin["generation"])

    reader = threading.Thread(target=look)
    reader.start()
    try:
        for number in (2, 1, 2, 1):
            workstation.orch("rollback-env", "work", place, "--to", str(number), "--yes")
            time.sleep(0.02)
    finally:
        stop.set()
        reader.join()
    assert not wrong and seen == {1, 2}


@pytest.mark.parametrize("place", ["pve/200"])
def test_two_launches_at_once_build_once(make_workstation, lab, workstation, place, tmp_path):
    """Two recipes that need the same missing environment: one builds it, the other waits, and both run in it."""
    for name in ("one", "two"):
        command = ["{python}", "-c", "import tiny; print(tiny.__file__)"]
        workstation.recipe(name, environment="tiny", place=place, command=command, metrics=False)
    both = [workstation.start("launch", name) for name in ("one", "two")]
    said = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    words = "".join((out + err).decode() for out, err in said)
    assert len(re.findall(r", built(?:  |\n)", words)) == 1, words
    assert "built by another launch meanwhile" in words or "in place" in words
    assert len({run["environment"] for run in workstation.runs(place)}) == 1
    entries = lab.run("ls", "/var/lib/orch/envs", vmid="200").stdout.split()
    assert len(entries) == 1
