"""`orch probe` against the torch at hand."""

import sys

import pytest

from orchestrator.remote import torch_ways


def test_the_torch_at_hand(make_workstation):
    """A whole probe of this Python, as a user calls it: what torch-compile's own table says of the version."""
    pytest.importorskip("torch")
    station = make_workstation("desk")
    station.write("hosts.yaml", "hosts:\n  local: {}\n")
    report = station.json("probe", "local", "--python", sys.executable, timeout=400)
    assert report["version"] == 1 and report["good"] and report["error"] is None and not report["unknown"]
    minor = int(report["torch"]["version"].split(".")[1])
    ways = {one["name"]: one["cells"] for one in report["ways"] if one["tried"]}
    assert set(ways) == set(torch_ways.WAYS)
    for name, cells in ways.items():
        guarded = {cells["loose+guard"], cells["fullgraph+guard"]}
        assert "unknown" not in cells.values()
        if name.startswith("compiled-"):
            assert set(cells.values()) == {"compiled"}  # no compiled call is stopped
        elif name != "plain-if-compiling" or minor >= 13:
            assert "dense" not in guarded and "compiled" not in guarded
    assert ways["recompile-limit"]["loose"] == ways["suppress-errors"]["loose"] == "dense"
    assert ways["recompile-limit"]["fullgraph"] == ways["suppress-errors"]["fullgraph"] == "error"
    assert ways["plain-call"]["fullgraph"] == ways["flex-debug-flag"]["fullgraph"] == "dense"
    failures = {one["name"]: one["possible"] for one in report["failures"]}
    assert failures == {"fx-error": minor < 14, "patched-module": True, "deadlock": True, "silent-dense": True}
    assert report["condition"]["flag"] == ("process" if minor < 14 else "thread")
    assert report["condition"]["checked"].startswith("torch/_dynamo/eval_frame.py:")
