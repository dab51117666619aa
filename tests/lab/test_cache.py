"""A compile cache from its first compile to other places and back: two real containers, and a program that plays the
trainer. It keeps a file for each graph where torch would, and tells what it found there as any trainer may."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.compile_cache import staging
from orchestrator.compile_cache.key import KeyParts
from orchestrator.compile_cache.store import Store
from orchestrator.place.session import open_session
from orchestrator.remote import cache_files
from tests.conftest import Workstation
from tests.lab.conftest import until
from tests.tiny_wheels import lock_text, make_wheel

ONE, TWO = "pve/200", "pve/201"
CACHES = "/var/lib/orch/caches"
NOISE = 4 << 20  # bytes of each graph's binary

# What the check of a new environment asks of torch.
TORCH = """
class Ones:
    def __matmul__(self, other): return self
    def sum(self): return 512.0
def ones(*shape): return Ones()
class version: cuda = "12.8"
__version__ = "2.13.91+cu128"
"""

TRAINER = """
import json, os, sys, time, triton
from pathlib import Path
folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
other = Path(os.environ["TRITON_CACHE_DIR"])
out = open(os.environ["ORCH_METRICS"], "a")
def tell(**line): print(json.dumps(line), file=out, flush=True)
tell(phase="compiling")
hits = misses = 0
for number, graph in enumerate(("forward", "backward", "mask")):
    # the key of torch's own caches holds triton; one graph has no kernel of it
    name = folder / "aa" / f"c{number}-{triton.VERSION if number == 1 else 0}.bin"
    hit = name.exists()
    hits, misses = hits + hit, misses + (not hit)
    if not hit:
        name.parent.mkdir(parents=True, exist_ok=True)
        name.write_bytes(bytes([number]) * 1000 + os.urandom(NOISE))
        name.with_suffix(".py").write_text("print(1)\\n" * 500)
        (other / "k").mkdir(parents=True, exist_ok=True)
        (other / "k" / f"{number}.cubin").write_bytes(os.urandom(2000))
    tell(compile={"graph": graph, "kind": graph, "hit": hit, "rebuilt": False, "seconds": 1.0, "rank": 0})
waited = time.monotonic() + 60
while os.environ.get("WAIT") and not Path(os.environ["ORCH_RUN_DIR"], "go").exists() and time.monotonic() < waited:
    time.sleep(0.05)
tell(compile={"done": True, "hits": hits, "misses": misses, "rebuilt": 0, "new_files": 3 * misses,
              "seconds": 372.0 if misses else 2.0, "rank": 0})
for step in range(1, 6):
    tell(step=step, loss=1.0, tokens=100, time=time.time())
    time.sleep(0.02)
""".replace("NOISE", str(NOISE))


def lock(station: Workstation, triton: str) -> None:
    links = station.directory / "links"
    wheels = [make_wheel(links, "torch", "2.13.91+cu128", module=TORCH), make_wheel(links, "triton", triton)]
    station.write("recipes/envs/fake/spec.yaml", {"python": ">=3.8", "torch": "2.13.91+cu128", "backend": "cu128"})
    station.write("recipes/envs/fake/requirements.in", f"torch==2.13.91+cu128\ntriton=={triton}\n")
    station.write("recipes/envs/fake/requirements.lock", lock_text(wheels))


def recipe(station: Workstation, place: str, **more) -> None:
    command = ["{python}", "-c", TRAINER]
    health = {"step": 3}
    station.recipe("work", environment="fake", place=place, command=command, health=health, stop_grace=1, **more)


@pytest.fixture(scope="module")
def workstation(lab, tmp_path_factory):
    directory = tmp_path_factory.mktemp("cache")
    shared = os.environ.get("ORCH_TEST_CACHE_DIR")
    station = Workstation(directory, Path(shared) if shared else tmp_path_factory.getbasetemp() / "wheels")
    lab.hosts_yaml(directory)
    for vmid in ("200", "201"):
        lab.forget(vmid)
    lock(station, "3.5.91")
    return station


@pytest.fixture(scope="module")
def store(workstation):
    return Store(workstation.directory / ".data" / "caches")


@pytest.fixture(scope="module")
def first(workstation):
    """The first launch at the first place: everything has to be compiled."""
    recipe(workstation, ONE)
    return workstation.orch("launch", "work").stdout


def newest(station: Workstation, place: str) -> dict:
    return station.runs(place)[0]


def generations(station: Workstation, place: str) -> list[dict]:
    (found,) = station.json("env", "list", place)["places"]
    return [one for each in found["recipes"] if each["recipe"] == "work" for one in each["generations"]]


def lying(lab, vmid: str) -> list[str]:
    """Every snapshot at a place, as its folder's path below the caches."""
    script = f"cd {CACHES} 2>/dev/null && ls -d */snapshots/* tmp/* 2>/dev/null; true"
    return lab.run("sh", "-c", script, vmid=vmid).stdout.split()


def test_a_first_compile_is_kept_and_told(workstation, first):
    assert "cold expected, nothing was compiled for it yet" in first
    assert "compile cache: cold: 3 misses, nothing was compiled for it yet (6 m 12 s, 9 new files)" in first
    assert "compile cache kept as " in first
    run = newest(workstation, ONE)
    assert run["phase"] == "finished" and run["cache"]["predicted"] == "cold"
    assert (run["compile"]["hits"], run["compile"]["misses"], run["compile"]["done"]) == (0, 3, True)
    made = f"{run['cache']['key']}/{run['cache']['harvest']['digest']}"
    assert made in first
    # the generation that made it is the one that names it
    assert [(one["standing"], one["cache"]) for one in generations(workstation, ONE)] == [("good", made)]
    (listed,) = workstation.json("cache", "list", ONE)["places"]
    (cache,) = listed["caches"]
    assert (cache["key"], cache["current"], cache["label"]["recipe"]) == (*made.split("/"), "work")
    assert cache["parts"]["triton"] == "3.5.91" and cache["uses"]["misses"] == 3
    shown = workstation.orch("cache", "list", ONE).stdout
    assert made.split("/")[0] in shown and "generation 1 of work is good" in shown


def test_a_cache_in_place_costs_one_round_trip_and_no_bytes(workstation, lab, first, store):
    plan = workstation.json("plan", "work")
    (step,) = [step for step in plan["steps"] if step["name"] == "cache"]
    assert step["bytes"] == 0 and step["what"].endswith("in place: warm expected")
    assert len([asked for asked in plan["requests"] if "compile cache" in asked]) == 1
    (cache,) = workstation.json("cache", "list", ONE)["places"][0]["caches"]
    with open_session(lab.place("200")) as session:
        trips, sent = session.round_trips, session.bytes_sent
        parts = KeyParts.read(cache["parts"])
        planned = staging.plan(staging.ask(session, parts, None, "work"), store, "work")
        assert planned.prediction.snapshot == cache["current"] and planned.send is None
        assert session.round_trips == trips + 1 and session.bytes_sent - sent < 5000


def test_what_was_pulled_comes_to_another_place_with_the_launch(workstation, lab, first, store, make_relay):
    """Cut off in the middle it leaves nothing there, and the same launch again is whole, and warm."""
    pulled = workstation.json("cache", "pull", "work", ONE)
    assert pulled["received"] > 3 * NOISE and pulled["bytes"] > 3 * NOISE
    assert "here already" in workstation.orch("cache", "pull", pulled["key"][:6], ONE).stdout
    assert workstation.json("cache", "verify", "--here")["sound"] == 1
    relay = make_relay(lab)
    hosts = json.loads((workstation.directory / "hosts.yaml").read_text())
    direct = hosts["hosts"]["pve"]["ssh"]["ssh_config"]
    recipe(workstation, TWO)
    workstation.orch("env", "build", "fake", TWO)
    plan = workstation.json("plan", "work")
    (step,) = [step for step in plan["steps"] if step["name"] == "cache"]
    assert pulled["packed"] <= step["bytes"] <= pulled["packed"] + 100 and "as it is packed" in step["what"]
    hosts["hosts"]["pve"]["ssh"]["ssh_config"] = str(relay.config)
    workstation.write("hosts.yaml", json.dumps(hosts))
    relay.cut_after(2 * NOISE)
    cut = workstation.orch("launch", "work", code=3)
    assert "the connection to pve/201 " in cut.stderr
    hosts["hosts"]["pve"]["ssh"]["ssh_config"] = direct
    workstation.write("hosts.yaml", json.dumps(hosts))
    assert until(lambda: not [path for path in lying(lab, "201") if "/snapshots/" in path or "/put-" in path])
    again = workstation.orch("launch", "work").stdout
    assert "continuing a launch that was interrupted" in again
    assert "bytes sent as zstd (as it is packed): warm expected" in again
    assert "compile cache: warm, 3 of 3 hits (2.0 s, 0 new files)" in again
    assert [path for path in lying(lab, "201") if "/snapshots/" in path] == [
        f"{pulled['key']}/snapshots/{pulled['digest']}"
    ]
    assert generations(workstation, TWO)[-1]["cache"] == f"{pulled['key']}/{pulled['digest']}"
    provenance = lab.run(
        "sh", "-c", "cat /var/lib/orch/runs/*/provenance.json | tail -n +1", vmid="201"
    ).stdout  # of the one run there
    assert json.loads(provenance)["compile_cache"]["snapshot"] == pulled["digest"]


def test_a_changed_part_is_named_before_the_trainer_starts_and_rollback_brings_the_cache_back(workstation, lab, first):
    before = generations(workstation, ONE)[0]["cache"]
    lock(workstation, "3.6.91")
    recipe(workstation, ONE, env={"WAIT": "1"})
    said = workstation.orch("launch", "work", "--detach").stdout
    assert "cold expected because triton 3.5.91 → 3.6.91; last cold compile took 6 m 12 s" in said
    run = newest(workstation, ONE)
    assert until(lambda: (newest(workstation, ONE)["compile"] or {}).get("graphs") == 3)
    status = workstation.orch("status", run["run"], "--place", ONE).stdout
    words = "compiling (cold: 3 misses because triton 3.5.91 → 3.6.91; last cold compile took 6 m 12 s)"
    assert words in " ".join(status.split()), status
    shown = newest(workstation, ONE)
    assert f"compiling ({shown['compiling']})" == words and shown["cache"]["because"] == ["triton 3.5.91 → 3.6.91"]
    assert shown["cache"]["seed"] is None  # another triton's cache is not shared
    lab.run("touch", f"/var/lib/orch/runs/{run['run']}/go", vmid="200")
    assert until(lambda: newest(workstation, ONE)["phase"] == "finished")
    after = generations(workstation, ONE)[-1]["cache"]
    assert after and after.split("/")[0] != before.split("/")[0]

    changed = workstation.json("rollback-env", "work", ONE, "--to", "1", "--yes")["change"]
    assert changed["cache"] == [f"{after} → {before}", "triton 3.6.91 → 3.5.91"]
    recipe(workstation, ONE)
    pinned = workstation.orch("launch", "work").stdout
    assert f"{before}, in place: warm expected" in pinned and "warm, 3 of 3 hits" in pinned
    # the pin holds the very snapshot, also when it is gone there: then it comes from here, or that is said
    lab.run("sh", "-c", f"rm -rf {CACHES}/{before.split('/')[0]}", vmid="200")
    plan = workstation.json("plan", "work")
    (step,) = [step for step in plan["steps"] if step["name"] == "cache"]
    assert before in step["what"] and step["bytes"] > 3 * NOISE, "it is in this workstation's store"
    none = workstation.json("plan", "work", ORCH_DATA_DIR=str(workstation.directory / "empty"))
    (step,) = [step for step in none["steps"] if step["name"] == "cache"]
    assert f"the cache of generation 1, {before} is gone" in step["what"] and "cold expected" in step["what"]
    workstation.orch("env", "use", "work", ONE)


def test_pull_and_push_between_places_verify_and_gc(workstation, lab, first):
    known = {one["key"]: one for one in workstation.json("cache", "list", "--here")["here"]}
    assert "bytes to send" not in workstation.orch("cache", "push", next(iter(known)), TWO, "--explain").stdout
    (newest_cache,) = [one for one in workstation.json("cache", "list", ONE)["places"][0]["caches"] if one["current"]]
    key = newest_cache["key"]
    pulled = workstation.json("cache", "pull", key, ONE)
    pushed = workstation.json("cache", "push", key, TWO)
    assert (pushed["how"], pushed["encoding"], pushed["digest"]) == ("new", "zstd", pulled["digest"])
    assert workstation.json("cache", "push", key, TWO)["how"] == "there"
    assert workstation.orch("cache", "verify", TWO).stdout.count("sound") == 2

    folder = f"{CACHES}/{key}/snapshots/{pulled['digest']}/files"
    script = f"cd {folder} && truncate -s 100 inductor/aa/c0-0.bin && echo x >inductor/aa/alien.bin"
    lab.run("sh", "-c", script, vmid="201")
    wrong = workstation.orch("cache", "verify", TWO, code=1).stdout
    assert "inductor/aa/c0-0.bin" in wrong and "alien.bin is foreign" in wrong and "c1-" not in wrong

    kept = workstation.json("cache", "gc", TWO, "--older-than", "0")
    good = generations(workstation, TWO)[-1]["cache"]
    assert [f"{one['key']}/{one['digest']}" for one in kept["removed"]] == [f"{key}/{pulled['digest']}"]
    assert good in {f"{one['key']}/{one['digest']}" for one in kept["kept"]} and kept["dry_run"]
    workstation.orch("cache", "gc", TWO, "--older-than", "0", code=5)  # nobody to ask
    assert "removed 1" in workstation.orch("cache", "gc", TWO, "--older-than", "0", "--yes").stdout
    assert [f"{path}" for path in lying(lab, "201") if "/snapshots/" in path] == [good.replace("/", "/snapshots/")]
    workstation.orch("cache", "gc", "--here", "--larger-than", "0", "--yes")
    assert workstation.json("cache", "list", "--here")["here"] == []


# Its own peak, by the kernel.
PUSH = """
import sys
from pathlib import Path
from orchestrator.cli import main
def peak():
    return int(next(l.split()[1] for l in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in l)) << 10
try:
    main()
finally:
    print(peak(), file=sys.stderr)
"""


def test_memory_does_not_grow_with_the_cache(workstation, lab, store):
    """Far more than may be held goes through, in each encoding that a place may need."""
    size = 160 << 20
    parts = KeyParts.read({"torch": "1", "torch_files": "", "triton_files": "", "gpu": [], "environment_path": "/x"})
    parts = KeyParts.read({**parts.to_json(), "instruction_set": []})
    rows = []
    with store.adding(parts.digest, parts) as adding:
        for number in range(20):
            data = bytes([number]) + os.urandom(size // 20 - 1)
            digest = hashlib.sha256(data).hexdigest()
            adding.writer.add(digest, len(data), [data])
            rows.append([f"inductor/{number}.so", len(data), digest, True])
        about = {"from": "test", "parent": None, "made": 1.0, "cold_seconds": None}
        one = adding.keep(cache_files.make_manifest(rows, **about), {"recipe": "big"}, "test")
    argv = [sys.executable, "-c", PUSH, "cache", "push", one.key, TWO, "--json"]
    env = workstation.environment
    done = subprocess.run(argv, cwd=workstation.directory, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["bytes"] > size
    assert int(done.stderr.split()[-1]) < 120 << 20
    lab.run("rm", "-rf", f"{CACHES}/{one.key}", vmid="201")
    store.remove(one.folder)
