"""A user's own repository and trainer, launched: at this machine and in a container; and back to what worked."""

from __future__ import annotations

import json
import subprocess

import pytest

# as somebody writes a training script who knows nothing of orch but $ORCH_METRICS
TRAIN = """
import json, os, time
from lib.model import loss

def main():
    with open(os.environ["ORCH_METRICS"], "a") as metrics:
        for step in range(1, 6):
            time.sleep(0.05)
            line = {"step": step, "loss": loss(step), "tokens": 100, "time": time.time()}
            print(json.dumps(line), file=metrics, flush=True)
            print("step", step, "loss", loss(step), flush=True)

main()
"""


def git(folder, *words):
    name = ("-c", "user.name=tester", "-c", "user.email=tester@example.org")
    done = subprocess.run(["git", *name, *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture(params=["local", "pve/200"])
def place(request):
    return request.param


@pytest.fixture
def station(make_workstation, lab, place, tmp_path):
    station = make_workstation("project")
    lab.forget()
    lab.hosts_yaml(station.directory, local_root=tmp_path / "root")
    station.tiny_environment()
    command = ["{python}", "train.py"]
    keys = {"environment": "tiny", "code": ".", "command": command, "health": {"step": 3}, "stop_grace": 1}
    station.recipe("work", place=place, **keys)
    station.write("train.py", TRAIN)
    station.write("lib/model.py", "def loss(step):\n    return 2 / step\n")
    station.write(".gitignore", "/links/\n/.state/\n/.data/\n*.log\n")
    (station.directory / "now.py").symlink_to("lib/model.py")
    git(station.directory, "init", "-q", "-b", "trunk")
    git(station.directory, "add", "-A")
    git(station.directory, "commit", "-q", "-m", "first")
    return station


def provenance(station, lab, place, run):
    if place == "local":
        return json.loads((station.directory.parent / "root/runs" / run / "provenance.json").read_text())
    return json.loads(lab.run("cat", f"/var/lib/orch/runs/{run}/provenance.json", vmid="200").stdout)


def test_own_code_with_changes_and_back_to_what_worked(station, lab, place):
    root = station.directory
    station.write("lib/more.py", "")
    station.write(".env", "HF_TOKEN=hf_abcdefghijklmnop\n")
    plan = station.orch("plan", "work").stdout
    assert f"files of {root} at {git(root, 'rev-parse', 'HEAD')[:10]} with changes to send" in " ".join(plan.split())
    told = station.orch("launch", "work").stdout
    assert "step 5 loss 0.4" in told and "left behind, as names of secrets that git does not track: .env" in told
    (run,) = station.runs(place)
    assert (run["phase"], run["step"]) == ("finished", 5)
    good = provenance(station, lab, place, run["run"])["code"]
    assert (good["commit"], good["branch"], good["dirty"]) == (git(root, "rev-parse", "HEAD"), "trunk", True)
    assert good["untracked"] == ["lib/more.py"] and good["path"] == str(root)

    station.write("lib/model.py", "raise SystemExit('broken')\n")
    station.orch("launch", "work", code=1)
    bad = provenance(station, lab, place, station.runs(place)[0]["run"])["code"]
    assert bad["digest"] != good["digest"] and "+raise SystemExit('broken')" in bad["patch"]

    assert "lib/model.py changed" in station.orch("rollback-env", "work", place, "--yes").stdout
    again = station.orch("launch", "work").stdout
    assert "ignored: code: lib/model.py changed" in again and "step 5 loss 0.4" in again
    assert provenance(station, lab, place, station.runs(place)[0]["run"])["code"] == good

    # what cannot be taken is no hindrance to a pinned launch, and is one to any other
    (root / "data").symlink_to("/srv/data")
    assert "ignored: the working tree's code cannot be used: links in" in station.orch("launch", "work").stdout
    refused = station.orch("launch", "work", "--latest", code=2)
    assert "data → /srv/data" in refused.stderr and len(station.runs(place)) == 4


def test_too_much_code_is_refused_before_anything_is_started(station, place):
    (station.directory / "big.bin").write_bytes(bytes(2_000_000))
    refused = station.orch("launch", "work", "--set", "code.largest=1MB", code=2)
    assert "mostly big.bin (2.0 MB)" in refused.stderr and "--set code.largest=3MB" in refused.stderr
    assert station.runs(place) == []
