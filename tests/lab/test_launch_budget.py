"""What commands cost, counted where it is spent: connections at sshd, calls of pct, bytes on the wire."""

from __future__ import annotations

import json

import pytest

PLACE = "pve/200"


@pytest.fixture
def workstation(make_workstation, lab, relay):
    """One whose way to the lab leads through the relay."""
    station = make_workstation("first")
    lab.hosts_yaml(station.directory)
    hosts = json.loads((station.directory / "hosts.yaml").read_text())
    hosts["hosts"]["pve"]["ssh"]["ssh_config"] = str(relay.config)
    station.write("hosts.yaml", json.dumps(hosts))
    station.tiny_environment()
    return station


@pytest.fixture
def counted(lab, relay):
    """Runs something and returns (connections, pct calls, bytes up) that it made."""

    def count(action):
        connections, calls, up = relay.connections, len(lab.pct_calls()), relay.up
        action()
        return relay.connections - connections, len(lab.pct_calls()) - calls, relay.up - up

    return count


def test_status_and_a_warm_launch_are_one_connection_and_one_pct_exec(workstation, counted):
    workstation.recipe("idle", environment="tiny", command=["sleep", "300"], metrics=False, stop_grace=1)
    launch = ("launch", "idle", "--place", PLACE, "--detach")
    workstation.orch(*launch)
    workstation.orch("stop", "idle", "--kill")
    assert counted(lambda: workstation.orch(*launch))[:2] == (1, 1)
    assert counted(lambda: workstation.orch("status", "--place", PLACE))[:2] == (1, 1)
    assert counted(lambda: workstation.orch("status", "idle"))[:2] == (1, 1)
    assert counted(lambda: workstation.orch("logs", "idle"))[:2] == (1, 1)
    assert counted(lambda: workstation.orch("stop", "idle", "--kill"))[:2] == (1, 1)


def test_explain_runs_nothing_at_the_place_and_counts_right(workstation, counted):
    workstation.recipe("idle2", environment="tiny", command=["sleep", "300"], metrics=False, stop_grace=1)
    workstation.orch("launch", "idle2", "--place", PLACE, "--detach")
    for command in (("status", "idle2"), ("logs", "idle2"), ("stop", "idle2"), ("attach", "idle2")):
        explained = []
        cost = counted(lambda words=command, out=explained: out.append(workstation.orch(*words, "--explain").stdout))
        assert cost == (0, 0, 0)
        assert "pct exec 200" in explained[0]
        if command[0] != "attach":
            assert "1 connection, 1 pct exec, 2 round trips" in explained[0]
    workstation.orch("stop", "idle2", "--kill")


def test_the_bytes_that_explain_tells_are_those_on_the_wire(lab, workstation, counted):
    """A first contact: orch's own program, uv where the container has none, the wheel, the code."""
    workstation.recipe("bytes", environment="tiny", command=["sleep", "300"], metrics=False, stop_grace=1)
    launch = ("launch", "bytes", "--place", PLACE)
    workstation.orch("plan", "bytes", "--place", PLACE)
    lab.forget("200")
    workstation.orch(*launch, "--detach")  # the wheel is in this workstation's store from now on
    workstation.orch("stop", "bytes", "--kill")
    lab.forget("200")
    plan = workstation.json("plan", "bytes", "--place", PLACE)
    assert plan["bytes"] > 5_000_000
    # a launch like it was made before; this one would be the second whose time is known
    assert plan["seconds"] and all(step["seconds"] is not None for step in plan["steps"])
    assert {step["name"]: step["why"] for step in plan["steps"]}["environment"] == "as last time"
    assert f"stream {plan['bytes']:,} bytes" in workstation.orch(*launch, "--explain").stdout
    _, _, sent = counted(lambda: workstation.orch(*launch, "--detach"))
    workstation.orch("stop", "bytes", "--kill")
    # SSH adds its own: keys, packet headers and padding.
    assert plan["bytes"] <= sent <= 1.01 * plan["bytes"] + 200_000


def test_without_an_index_and_an_empty_store_a_launch_says_so(lab, workstation):
    workstation.recipe("offline", environment="demo", place=PLACE)
    nowhere = {
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_FIND_LINKS": "",
        "ORCH_CACHE_DIR": str(workstation.directory / "empty"),
        "UV_OFFLINE": "1",
    }
    failed = workstation.orch("launch", "offline", "--detach", code=1, **nowhere)
    problem = [line for line in failed.stderr.splitlines() if line]
    assert problem[0].startswith("orch: the package index cannot be reached")
    assert len(problem) <= 2, failed.stderr
    assert not [run for run in workstation.runs(PLACE) if run["recipe"] == "offline" and run["phase"] != "preparing"]
