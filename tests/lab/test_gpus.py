"""Launches from two containers of one host, of which one GPU is the same: claims, what refuses them, how they end."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.gpus.survey import look

from .conftest import until

SHOW = ["sh", "-c", 'echo "order=$CUDA_DEVICE_ORDER devices=$CUDA_VISIBLE_DEVICES"; exec sleep 300']
MIB = 12595  # 12.3 GiB

# A launch that stops for good once it has its GPUs.
PREPARING = """
import sys, time
from pathlib import Path
from orchestrator.config import find_project, load_hosts, load_recipe, resolve_place
from orchestrator.launch import Launch, carry_out

class Report:
    def begin(self, step): pass
    def progress(self, *what): pass
    def note(self, step, what): pass
    def end(self, step, what):
        if step == "gpus":
            print(what, flush=True)
            time.sleep(600)

project = find_project(Path.cwd())
recipe = load_recipe(project, sys.argv[1], place_override=sys.argv[2])
carry_out(Launch(project, recipe, resolve_place(load_hosts(project), sys.argv[2]), Report()))
"""


class Scenario:
    """What nvidia-smi says on the host, and in each container."""

    def __init__(self, lab) -> None:
        host = Path(lab.info["knobs"]) / "gpus.json"
        self.files = [host, *map(Path, lab.info["gpus"].values())]
        self.kept = [file.read_text() for file in self.files]

    def say(self, *, inside=None, **world) -> None:
        for number, file in enumerate(self.files):
            self._write(file, json.dumps(world if number == 0 or inside is None else inside))

    def restore(self) -> None:
        for file, text in zip(self.files, self.kept, strict=True):
            self._write(file, text)

    def _write(self, file: Path, text: str) -> None:
        new = file.with_name("gpus.new")
        new.write_text(text)
        new.rename(file)


@pytest.fixture
def scenario(lab):
    it = Scenario(lab)
    yield it
    it.restore()


@pytest.fixture
def desks(make_workstation, lab):
    """Two workstations that know nothing of each other."""
    made = [make_workstation("desk-a"), make_workstation("desk-b")]
    for desk in made:
        lab.hosts_yaml(desk.directory)
        desk.tiny_environment()
    return made


def recipe(desk, name, **keys):
    desk.recipe(name, **{"environment": "tiny", "command": SHOW, "metrics": False, "stop_grace": 1, **keys})


def gpus(lab) -> list[dict]:
    """As `orch gpus` has them, without a program of its own each time."""
    (host,) = [report.to_json() for report in look([lab.place(None)])]
    assert host["reachable"] and host["problem"] is None, host
    return host["gpus"]


def held(lab) -> dict[int, list[dict]]:
    return {gpu["index"]: gpu["held_by"] for gpu in gpus(lab) if gpu["held_by"]}


def file(lab, vmid: str, run: str, name: str) -> str:
    return lab.run("cat", f"/var/lib/orch/runs/{run}/{name}", vmid=vmid).stdout


def devices(lab, vmid: str, run: str) -> str:
    """The CUDA_VISIBLE_DEVICES that the run's program has seen."""
    assert until(lambda: "devices=" in file(lab, vmid, run, "console.log"))
    return re.search(r"order=PCI_BUS_ID devices=(.*)", file(lab, vmid, run, "console.log"))[1]


def program(desk, text, *words):
    """A Python program of this test, as if it were orch at that workstation."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "stdin": subprocess.DEVNULL}
    return subprocess.Popen([sys.executable, "-c", text, *words], cwd=desk.directory, env=desk.environment, **streams)


def test_of_two_launches_at_once_one_is_refused_and_names_the_other(lab, desks):
    places = ("pve/200", "pve/201")
    for desk in desks:
        recipe(desk, "whole", gpus="all")
    both = [
        desk.start("launch", "whole", "--place", place, "--detach", env={"ORCH_USER": desk.directory.name})
        for desk, place in zip(desks, places, strict=True)
    ]
    ends = [(child.communicate(timeout=120), child.returncode) for child in both]
    assert sorted(code for _, code in ends) == [0, 5], ends
    won, lost = (0, 1) if ends[0][1] == 0 else (1, 0)
    winner, loser = desks[won], desks[lost]
    run = re.search(r"(whole-[0-9-]+) runs at", ends[won][0][0].decode())[1]
    said = ends[lost][0][1].decode()
    assert f"GPUs 0-7 are held by {run} ({places[won]}, {winner.directory.name}@" in said, said
    assert f"try: orch gpus {places[lost]}" in said and "--share-gpus" in said
    # nothing of the refused launch stays as if it were going on
    vmid, other = places[lost].split("/")[1], places[won].split("/")[1]
    tried = re.search(r"(whole-[0-9-]+), a new run", ends[lost][0][0].decode())[1]
    refused = json.loads(file(lab, vmid, tried, "state.json"))
    assert refused["phase"] == "stopped" and "GPUs" in refused["exit"]["reason"], refused

    # all of the place's GPUs are left as they are, and anybody on the host sees whose they are
    assert devices(lab, other, run) == ""
    shown = loser.orch("gpus", places[lost], COLUMNS="80").stdout
    assert run in shown and max(map(len, shown.splitlines())) <= 80
    plan = loser.json("plan", "whole", "--place", places[lost])
    step = next(step for step in plan["steps"] if step["name"] == "gpus")
    assert step["how"] == "refused" and run in step["what"]
    # told to, it launches beside the other; both are then known
    done = loser.orch("launch", "whole", "--place", places[lost], "--detach", "--share-gpus")
    assert "shared, as asked" in done.stdout
    assert len(held(lab)[7]) == 2
    loser.orch("stop", "whole", "--kill", "--place", places[lost])

    # a runner that was killed holds nothing
    pid = re.search(r"runner (\d+)", ends[won][0][0].decode())[1]
    lab.run("kill", "-9", pid, vmid=other)
    assert until(lambda: not held(lab))
    winner.orch("stop", "whole", "--kill", "--place", places[won])


def test_a_number_takes_free_ones_and_a_launch_that_is_cut_off_frees_them(lab, desks):
    one, two = desks
    recipe(one, "first", gpus=[1])
    recipe(two, "pair", gpus=2)
    preparing = program(one, PREPARING, "first", "pve/200")
    try:
        assert preparing.stdout.readline().decode().startswith("GPU 1")
        (claim,) = held(lab)[1]
        assert claim["alive"] == "held" and claim["place"] == "pve/200" and claim["container"] == "200"
        two.orch("launch", "pair", "--place", "pve/201", "--detach")
        known = [gpu["uuid"] for gpu in gpus(lab)]
        run = held(lab)[0][0]["run"]
        assert devices(lab, "201", run) == f"{known[0]},{known[2]}"
        record = json.loads(file(lab, "201", run, "launch.json"))
        assert record["gpus"]["indices"] == [0, 2] and record["gpus"]["uuids"] == [known[0], known[2]]
    finally:
        preparing.kill()
        preparing.wait()
    assert until(lambda: set(held(lab)) == {0, 2})
    two.orch("stop", "pair", "--kill")
    assert held(lab) == {}


def test_processes_and_ghosts_refuse_and_what_is_not_known_does_not(lab, desks, scenario):
    desk, _ = desks
    pid = int(lab.run("lxc-info", "-n", "201", "-p", "-H").stdout)
    apps = [{"gpu": 4, "pid": pid, "name": "python3", "memory": 1000}]
    scenario.say(gpus=[{"memory.used": MIB} if number == 3 else {} for number in range(8)], apps=apps)
    recipe(desk, "named", gpus=[3, 4])
    said = desk.orch("launch", "named", "--place", "pve/200", "--detach", code=5).stderr
    assert "GPU 3 has 12.3 GiB in use by an unknown holder" in said
    assert re.search(rf"GPU 4 is held by process {pid} \(.*\) in container 201", said)
    shown = desk.orch("gpus", "pve", COLUMNS="80").stdout
    assert "12.3 GiB held by no visible process" in shown and f"pid {pid}" in shown
    assert "8 GPUs, 6 free" in shown and max(map(len, shown.splitlines())) <= 80

    # a host without a working nvidia-smi, whose container has one: a claim is made, and the rest told as unknown
    world = {"gpus": 8, "timeline": [{"at": 0, "fault": "no-driver"}]}
    scenario.say(inside={"gpus": 8}, **world)
    told = desk.orch("launch", "named", "--place", "pve/200", "--detach").stdout
    assert "who else uses them is unknown" in told and "GPUs 3-4" in told
    desk.orch("stop", "named", "--kill")
    scenario.say(**world)
    told = desk.orch("launch", "named", "--place", "pve/200", "--detach").stdout
    assert "not claimed, so nothing keeps others from them" in told and "NVIDIA driver" in told
    desk.orch("stop", "named", "--kill")


def test_every_host_is_asked_and_one_that_is_not_there_costs_only_itself(lab, desks):
    desk, _ = desks
    hosts = json.loads((desk.directory / "hosts.yaml").read_text())
    hosts["hosts"]["gone"] = {"ssh": {"host": "127.0.0.1", "port": 1}}
    desk.write("hosts.yaml", json.dumps(hosts))
    calls = len(lab.pct_calls())
    done = desk.json("gpus")
    found = {host["host"]: host for host in done["hosts"]}
    assert not found["gone"]["reachable"] and len(found["pve"]["gpus"]) == 8
    assert "1 connection, 1 command, 1 round trip" in desk.orch("gpus", "pve", "--explain").stdout
    desk.orch("gpus", "gone", code=3)
    assert len(lab.pct_calls()) == calls
