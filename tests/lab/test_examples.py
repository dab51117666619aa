"""The bundled examples of each way of working, launched at this machine in the demo's environment."""

from __future__ import annotations

import json

import pytest


@pytest.fixture
def station(make_workstation, tmp_path):
    station = make_workstation("anywhere")
    station.write("hosts.yaml", json.dumps({"hosts": {"local": {"root": str(tmp_path / "root")}}}))
    return station


def test_each_example_trains(station, tmp_path):
    said = {
        "example-script": ("step 40 loss", 40),
        "example-torchrun": ("rank 1 of 2: done", 20),
        "example-shell": ("step 20 loss", 20),
    }
    for name, (line, steps) in said.items():
        assert line in station.orch("launch", name, timeout=600).stdout
        run = station.runs("local")[0]
        assert (run["phase"], run["step"]) == ("finished", steps), run
        record = json.loads((tmp_path / "root/runs" / run["run"] / "provenance.json").read_text())["code"]
        assert record["path"].endswith(f"recipes/examples/{name.removeprefix('example-')}")
    runs = {run["run"].rsplit("-", 2)[0]: run["run"] for run in station.runs("local")}
    assert len(runs) == 3
    assert list((tmp_path / "root/runs").glob("*/model.pt")) and list((tmp_path / "root/runs").glob("*/loss.txt"))
