"""`orch probe` in a real container: which Python it asks, what it says where there is no torch, and its exit codes."""

from __future__ import annotations

import pytest

PLACE = "pve/200"
STUB = {
    "torch/__init__.py": "__version__ = '2.99.0+stub'\nfrom torch import version\n",
    "torch/version.py": "cuda = '12.8'\nhip = None\n",
}


@pytest.fixture(scope="module")
def box(make_module_lab):
    return make_module_lab("--net", "empty", "--containers", "1", "--dead", "--pct-delay", "0")


@pytest.fixture
def workstation(make_workstation, box):
    box.forget()
    station = make_workstation("desk")
    box.hosts_yaml(station.directory)
    return station


def lay_stub(box) -> str:
    """A Python in the container that has a torch without a compiler."""
    for name, text in STUB.items():
        path = box.share("200") / "stub" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    python = box.share("200") / "python"
    python.write_text('#!/bin/sh\nPYTHONPATH=/lab/stub exec python3 "$@"\n')
    python.chmod(0o755)
    return "/lab/python"


def test_a_python_by_its_path(box, workstation):
    python = lay_stub(box)
    calls = len(box.pct_calls())
    report = workstation.json("probe", PLACE, "--python", python, code=1)
    assert [call.split()[0] for call in box.pct_calls()[calls:]] == ["exec"]
    assert report["version"] == 1 and report["place"] == PLACE and report["python"] == python
    assert report["environment"] is None and not report["good"] and report["failures"] == []
    assert report["torch"]["version"] == "2.99.0+stub" and report["torch"]["cuda"] == "12.8"
    assert report["error"].startswith("torch.compile cannot be imported there (ModuleNotFoundError")
    shown = workstation.orch("probe", PLACE, "--python", python, code=1).stdout
    assert "torch 2.99.0+stub, CUDA 12.8, triton none" in shown and "not tried: torch.compile" in shown
    assert box.run("sh", "-c", "ls /tmp", vmid="200").stdout.count("orch-probe-") == 0


def test_the_environment_and_its_runs_variables(box, workstation):
    missing = workstation.orch("probe", PLACE, code=4).stderr
    assert f"there is no environment at {PLACE} yet" in missing and "orch env build" in missing
    workstation.tiny_environment()
    workstation.recipe(
        "works",
        environment="tiny",
        place=PLACE,
        metrics=False,
        command=["{python}", "-c", "import tiny"],
        env={"TORCH_COMPILE_DISABLE": "1"},
    )
    workstation.orch("launch", "works")
    (run,) = workstation.runs(PLACE)
    report = workstation.json("probe", code=1)  # the place of the latest launch
    assert report["place"] == PLACE
    assert report["environment"] == {"id": run["environment"], "name": "tiny", "polluted": None}
    assert report["error"].startswith("torch cannot be imported there (ModuleNotFoundError")
    (setting,) = [one for one in report["settings"] if one["name"] == "TORCH_COMPILE_DISABLE"]
    assert setting["source"] == f"run {run['run']}" and setting["bad"]
    assert workstation.json("probe", PLACE, "--env", "tiny", code=1)["environment"]["id"] == run["environment"]
    assert "no environment other" in workstation.orch("probe", PLACE, "--env", "other", code=4).stderr


def test_what_it_would_run_and_what_it_cannot(box, workstation):
    told = workstation.orch("probe", PLACE, "--explain").stdout
    assert "1 connection, 1 pct exec, 3 round trips" in told and "which environments are there?" in told
    assert (
        "there is no program /none/python"
        in workstation.orch("probe", PLACE, "--python", "/none/python", code=4).stderr
    )
    workstation.orch("probe", PLACE, "--python", "python3", code=2)
    with box.fault("1 container is locked"):
        workstation.orch("probe", PLACE, code=3)
