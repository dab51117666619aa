"""What torch itself makes of a compile cache that orch has moved: real compilations, on the CPU of two containers.

There is one environment. It is built once and then linked to where the others are wanted, which is what a build of the
same lock would be there: torch is asked where its files lie, not how they came there.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import Workstation

ONE, TWO, MOVED = "pve/200", "pve/201", "pve/moved"
ROOT, ELSEWHERE = "/lab/orch", "/lab/moved"  # in the containers; a test sees them from outside too
TRUSTED = "TORCHINDUCTOR_VEC_ISA_OK"  # saves trials of the processor, so that this miss is a short one
# The head pass is what is compiled without a GPU. One thread is not what torch would take by itself.
SMALL = {
    "compile": '"on"',
    "threads": "1",
    "steps": "2",
    "data.row_length": "128",
    "data.rows_per_step": "1",
    "loss.anchors_per_row": "16",
    "loss.chunk": "64",
    "evaluate.prompts": "null",
    "evaluate.every": "0",
}
WORDS = ["demo", *(word for name, value in SMALL.items() for word in ("--set", f"settings.{name}={value}"))]
LIMIT = 600  # seconds of one command


@pytest.fixture(scope="module")
def two(make_module_lab):
    return make_module_lab("--net", "empty", "--containers", "2", "--pct-delay", "0")


@pytest.fixture(scope="module")
def station(two, tmp_path_factory):
    directory = tmp_path_factory.mktemp("torch")
    shared = os.environ.get("ORCH_TEST_CACHE_DIR")
    found = Workstation(directory, Path(shared) if shared else tmp_path_factory.getbasetemp() / "wheels")
    hosts = json.loads(two.hosts_yaml(directory).read_text())
    hosts["hosts"]["pve"]["protect"] = False  # an immutable file cannot be linked
    hosts["hosts"]["pve"]["containers"] = {
        "200": {"kind": "pct", "root": ROOT},
        "201": {"kind": "pct", "root": ROOT},
        "moved": {"kind": "pct", "id": 200, "root": ELSEWHERE},
    }
    found.write("hosts.yaml", json.dumps(hosts))
    return found


def outside(lab, vmid: str, path: str) -> Path:
    """A path below /lab of a container, as this machine has it."""
    return lab.share(vmid) / Path(path).relative_to("/lab")


@pytest.fixture(scope="module")
def first(two, station):
    """The first compile, kept here; and its environment at the other place and under the other path."""
    said = station.orch("cache", "warm", *WORDS, "--place", ONE, timeout=LIMIT).stdout
    pulled = station.json("cache", "pull", "demo", ONE)
    two.run("chmod", "-R", "a+rX", ROOT, vmid="200")  # which root has for itself
    made = outside(two, "200", f"{ROOT}/envs")
    for vmid, root in (("201", ROOT), ("200", ELSEWHERE)):
        target = outside(two, vmid, f"{root}/envs")
        shutil.copytree(made, target, symlinks=True, copy_function=os.link, ignore=shutil.ignore_patterns(".locks"))
    (run,) = station.runs(ONE)
    (environment,) = (path for path in made.iterdir() if len(path.name) == 16)
    return SimpleNamespace(said=said, run=run, key=pulled["key"], digest=pulled["digest"], environment=environment.name)


@pytest.fixture(scope="module")
def pushed(station, first):
    """It lies at the other place too."""
    return station.json("cache", "push", first.key, TWO)


def launched(station: Workstation, place: str) -> tuple[str, dict]:
    """What a launch said, and its run."""
    said = station.orch("launch", *WORDS, "--place", place, timeout=LIMIT).stdout
    run = station.runs(place)[0]
    assert run["phase"] == "finished" and run["step"] == 2, said
    return said, run


def figures(compiled: dict) -> tuple[int, int, int]:
    return compiled["hits"], compiled["misses"], compiled["rebuilt"]


def cache_step(station: Workstation, *words: str) -> str:
    """What a plan says of the cache."""
    (step,) = [step for step in station.json("plan", *WORDS, *words)["steps"] if step["name"] == "cache"]
    return step["what"]


def test_a_warm_up_compiles_all_and_is_kept(first):
    assert "cold expected, nothing was compiled for it yet" in first.said
    assert figures(first.run["compile"]) == (0, 2, 0) and first.run["compile"]["new_files"] > 4
    assert f"compile cache kept as {first.key}/{first.digest}" in first.said


def test_pushed_to_another_place_it_hits_all_and_nothing_is_built(station, first, pushed):
    assert pushed["how"] == "new"
    said, run = launched(station, TWO)
    assert f"{first.key}/{first.digest}, in place: warm expected" in said
    assert "compile cache: warm, 2 of 2 hits" in said and run["compiling"] == "warm, 2 of 2 hits"
    assert figures(run["compile"]) == (2, 0, 0) and run["compile"]["new_files"] == 0
    assert run["cache"]["predicted"] == "warm" and run["cache"]["harvest"]["how"] == "nothing new"


def warm_up_as_nobody(lab, station: Workstation, first, name: str, **more: str) -> dict:
    """`trainer warmup` of the first run as a user without privileges, with a copy of its cache; what that came to."""
    here = f"/lab/{name}"
    run, snapshot = f"{ROOT}/runs/{first.run['run']}", f"{ROOT}/caches/{first.key}/snapshots/{first.digest}"
    launch = json.loads(outside(lab, "200", f"{run}/launch.json").read_text())
    script = f"""
        mkdir {here} && cp -r {snapshot}/files {run}/trainer.yaml {here}
        chown -R nobody {here} && chmod -R u+w {here}
    """
    lab.run("sh", "-ec", script, vmid="200")
    own = {"HOME": here, "ORCH_RUN_DIR": f"{here}/run", "ORCH_METRICS": f"{here}/metrics.jsonl"}
    folders = {"TORCHINDUCTOR_CACHE_DIR": f"{here}/files/inductor", "TRITON_CACHE_DIR": f"{here}/files/triton"}
    variables = [f"{key}={value}" for key, value in (launch["env"] | own | folders | more).items()]
    argv = [word.replace(f"{run}/trainer.yaml", f"{here}/trainer.yaml") for word in launch["argv"]]
    user = ["setpriv", "--reuid", "nobody", "--regid", "nogroup", "--clear-groups"]
    line = shlex.join([*user, "env", "-i", "-C", launch["cwd"], *variables, *argv])
    station.orch("exec", ONE, "--", "sh", "-c", f"{line} 2>&1", timeout=LIMIT)
    told = outside(lab, "200", f"{here}/metrics.jsonl").read_text().splitlines()
    (done,) = [line["compile"] for line in map(json.loads, told) if line.get("compile", {}).get("done")]
    return done


def test_another_user_with_a_copy_elsewhere_hits_all_and_nothing_is_built(two, station, first):
    done = warm_up_as_nobody(two, station, first, "other")
    assert figures(done) == (2, 0, 0) and done["new_files"] == 0


def test_a_changed_part_is_predicted_by_name_and_misses(two, station, first):
    """A launch would begin with an empty cache for that; torch misses with the full one too."""
    what = cache_step(station, "--place", ONE, "--set", f'env.{TRUSTED}="1"')
    assert f"cold expected because {TRUSTED} (none) → 1; last cold compile took " in what
    assert cache_step(station, "--place", ONE).endswith(f"{first.key}/{first.digest}, in place: warm expected")
    done = warm_up_as_nobody(two, station, first, "trusted", **{TRUSTED: "1"})
    assert figures(done) == (0, 2, 0) and done["new_files"] > 0


def test_another_path_of_the_environment_is_predicted_by_name_as_a_rebuild(station, first):
    moved = f"environment {ROOT}/envs/{first.environment} → {ELSEWHERE}/envs/{first.environment}"
    said, run = launched(station, MOVED)
    assert f"C++ rebuild expected because {moved}" in said
    assert said.index("C++ rebuild expected") < said.index("start  ")
    assert run["cache"]["predicted"] == "rebuild" and run["cache"]["seed"] == f"{first.key}/{first.digest}"
    assert figures(run["compile"]) == (2, 0, 2) and run["compile"]["new_files"] > 0
    assert run["compiling"] == f"C++ rebuild: {moved}; 2 of 2 hits"
    # and is kept under the key of that path
    assert run["cache"]["key"] != first.key and run["cache"]["harvest"]["how"] == "harvested"


def test_a_library_cut_short_makes_the_next_launch_cold_and_nothing_worse(two, station, first, pushed):
    snapshot = outside(two, "201", f"{ROOT}/caches/{first.key}/snapshots/{first.digest}")
    libraries = sorted((snapshot / "files").rglob("*.main.so"))
    os.truncate(libraries[0], 100)
    said, run = launched(station, TWO)
    assert figures(run["compile"]) == (0, 2, 0)
    aside = run["cache"]["moved_aside"]
    assert (aside["snapshot"], aside["restarted"]) == (f"{first.key}/{first.digest}", False)
    assert libraries[0].name in aside["why"] and not snapshot.exists()
    assert f"compile cache {first.key}/{first.digest} was moved aside: " in said
    kept = run["cache"]["harvest"]
    assert kept["how"] == "harvested" and f"compile cache kept as {first.key}/{kept['digest']}" in said
    assert station.json("cache", "verify", TWO)["sound"] == 1
