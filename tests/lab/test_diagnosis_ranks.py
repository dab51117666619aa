"""Two ranks under a real torchrun in a container, one of which dies: that one is named, and not what it pulls down."""

from __future__ import annotations

import pytest

PLACE = "pve/200"
# Both ranks come to a second collective; the other one fails in it, or waits until torchrun ends it.
PROGRAM = """
import os, signal, sys, time
import torch, torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
value = torch.ones(4)
for step in range(1, 4):
    dist.all_reduce(value)
    print(f"step {step} loss {1 / step:.3f}", flush=True)
if rank == 1:
    END
dist.all_reduce(value)
print("both came through", flush=True)
"""
ENDS = {
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "raised": "{'tokens': 1}['anchors']",
}


@pytest.fixture(scope="module")
def box(make_module_lab):
    """The demo's environment is built in it by the first of these tests."""
    lab = make_module_lab("--net", "empty", "--containers", "1", "--pct-delay", "0")
    lab.run("ip", "link", "set", "lo", "up", vmid="200")  # ranks meet there
    return lab


@pytest.fixture
def workstation(make_workstation, box):
    station = make_workstation("first")
    box.hosts_yaml(station.directory)
    return station


def two_ranks(station, box, name):
    (box.share("200") / f"{name}.py").write_text(PROGRAM.replace("END", ENDS[name]))
    torchrun = ["{python}", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    station.recipe(
        name,
        environment="demo",
        command=[*torchrun, f"/lab/{name}.py"],
        env={"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        metrics=False,
        stop_grace=5,
    )
    done = station.orch("launch", name, "--place", PLACE, code=1, timeout=300)
    said = station.json("diagnose", name, "--place", PLACE)
    return said, done.stdout


def test_a_rank_that_is_killed(workstation, box):
    said, shown = two_ranks(workstation, box, "killed")
    assert said["cause"] == "rank-died" and "cause: rank-died" in shown, said
    first = said["evidence"][0]
    assert "(exitcode: -9) local_rank: 1" in first["text"] and first["rank"] == 1
    assert said["traceback"] is None


def test_a_rank_that_raises(workstation, box):
    said, shown = two_ranks(workstation, box, "raised")
    assert said["cause"] == "uncaught-exception" and "KeyError: 'anchors'" in shown, said
    first = said["evidence"][0]
    assert first["text"] == "KeyError: 'anchors'" and first["rank"] == 1
    assert said["traceback"].endswith("KeyError: 'anchors'")
