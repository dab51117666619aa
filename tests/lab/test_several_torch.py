"""Ranks under the real torchrun in two containers, over gloo: they train together, one that is killed ends all, and
without one of the containers they go on."""

from __future__ import annotations

import json

import pytest

from .conftest import until

PROGRAM = """
import os, time
import torch, torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
value = torch.ones(4)
step = 0
while True:
    step += 1
    dist.all_reduce(value)
    value /= dist.get_world_size()
    if dist.get_rank() == 0:
        print(f"step {step} loss {float(value.sum()):.1f} over {dist.get_world_size()}", flush=True)
    time.sleep(0.1)
"""
TORCHRUN = [
    *["{python}", "-m", "torch.distributed.run", "--nnodes", "{nodes}", "--node-rank", "{node_rank}"],
    *["--nproc-per-node", "2", "--rdzv-endpoint", "{rendezvous}", "/lab/train.py"],
]


@pytest.fixture(scope="module")
def two(make_module_lab):
    lab = make_module_lab("--net", "bridge", "--containers", "2", "--pct-delay", "0")
    for vmid in lab.vmids:
        (lab.share(vmid) / "train.py").write_text(PROGRAM)
    return lab


def ranks(lab, vmid, run):
    """The processes of the run in a container, by rank; those without one are torchrun and its helpers."""
    script = 'for p in /proc/[0-9]*; do tr "\\0" " " <$p/environ; echo " ${p#/proc/}"; done'
    lines = lab.run("sh", "-c", f"({script}) 2>/dev/null", vmid=vmid).stdout.splitlines()
    mine = [line for line in lines if f"ORCH_RUN_ID={run} " in line]
    return {line.partition(" RANK=")[2].split()[0] if " RANK=" in line else "": line.split()[-1] for line in mine}


def test_a_killed_rank_of_a_real_torchrun(make_workstation, two):
    station = make_workstation("first")
    two.hosts_yaml(station.directory)
    station.recipe(
        "pair",
        places=two.members(),
        environment="demo",
        command=TORCHRUN,
        env={"OMP_NUM_THREADS": "1"},
        metrics=False,
        stop_grace=30,
    )
    run = station.json("launch", "pair", "--detach", timeout=600)["run"]
    assert until(lambda: "over 4" in station.orch("logs", run).stdout, 300), station.orch("logs", run).stdout
    two.run("kill", "-9", ranks(two, "201", run)["3"], vmid="201")
    assert until(lambda: not ranks(two, "200", run) and not ranks(two, "201", run), 120)
    said = "rank 3 at pve/201 was killed by signal 9 (SIGKILL)"
    assert until(lambda: all(r["exit"] for p in station.json("status", run)["places"] for r in p["runs"]), 120)
    for report in station.json("status", run)["places"]:
        assert (report["runs"][0]["phase"], report["runs"][0]["first"]["said"]) == ("failed", said)
    found = station.json("diagnose", run)
    assert (found["place"], found["cause"]) == ("pve/201", "rank-died"), found
    assert 3 in [item["rank"] for item in found["evidence"]], found
    # its launcher had the time to tell the same in its own words
    assert "exitcode: -9" in station.orch("logs", run, "--place", "pve/201").stdout.replace("exitcode  :", "exitcode:")


# The bundled trainer with the demo's target, in steps of a moment.
SETTINGS = {
    "name": "elastic",
    "steps": 40,
    "device": "cpu",
    "threads": 1,
    "attention": "dense",
    "target": {"path": "{code}/trainer/assets/demo/target"},
    "data": {"paths": "{code}/trainer/assets/demo/rows.safetensors", "row_length": 128, "rows_per_step": 2},
    "drafter": {"target_layers": [1, 3], "mask_token": 1, "layers": 1, "block_size": 3},
    "loss": {"anchors_per_row": 8},
    "optimizer": {"muon_rate": 1e-3, "adam_rate": 1e-4},
    "checkpoint": {"every": 10},
    "topology": {"ranks": 2},
}


def losses(lab, run):
    lines = lab.run("cat", f"/var/lib/orch/runs/{run}/metrics.jsonl", vmid="200").stdout.splitlines()
    return {one["step"]: one["loss"] for one in map(json.loads, lines) if "loss" in one}


def test_the_trainer_goes_on_at_the_place_that_is_left_as_if_nothing_had_happened(make_workstation, two):
    station = make_workstation("second")
    two.hosts_yaml(station.directory)
    station.recipe(
        "elastic",
        places=two.members(),
        elastic={"least": 1},
        environment="demo",
        settings=SETTINGS,
    )
    alone = ["--place", "pve/200", "--set", "settings.topology.ranks=1", "--set", "settings.data.micro_batches=2"]
    undisturbed = station.json("launch", "elastic", *alone, "--detach", timeout=600)["run"]
    first = station.json("launch", "elastic", "--detach", timeout=600)["run"]
    saved = f"/var/lib/orch/runs/{first}/checkpoints/step-000010"
    assert until(lambda: two.run("test", "-d", saved, vmid="200", check=False).returncode == 0, 300)
    two.run("lxc-stop", "-k", "-n", "201")
    assert until(lambda: not ranks(two, "200", first), 120)

    said = station.orch("launch", "elastic", timeout=300).stdout
    assert f"of {first}, which lost pve/201" in said, said
    second = max(run["run"] for run in station.runs("pve/200") if run["recipe"] == "elastic")
    log = station.orch("logs", second).stdout
    assert "on 1 of 2 ranks, which take the 2 parts of each step" in log and "resuming after step" in log, log

    assert until(lambda: max(losses(two, undisturbed)) == 40, 300)
    whole, before, after = losses(two, undisturbed), losses(two, first), losses(two, second)
    assert min(after) > 10 and set(before) | set(after) == set(whole) == set(range(1, 41))
    for part in (before, after):
        assert max(abs(part[step] - whole[step]) for step in part) < 1e-5
