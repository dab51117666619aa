"""The runner's side of the compile cache: real runners, and a small program that compiles as torch would tell it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.remote import cache_copy, cache_store, generations
from orchestrator.remote.cache_errors import bad_entry
from orchestrator.remote.cache_files import key_of
from orchestrator.remote.metrics import Compiled
from orchestrator.remote.rundir import RunDir
from orchestrator.remote.runs import runner_command

from .caches import FILES, KEY, LABEL, PARTS, expected, manifest_of, nothing_half, snapshot, stage, tree
from .remote_runs import Client, clean_up, launch_of

LOGS = Path(__file__).parents[1] / "logs"

# Has the graphs that its cache has; fails as torch does on an entry that is broken; else compiles those it lacks.
TRAINER = r"""
import json, os, pathlib, sys, time
inductor = pathlib.Path(os.environ["ORCH_RUN_DIR"], "cache", "inductor")
def tell(**line):
    with open(os.environ["ORCH_METRICS"], "a") as f: f.write(json.dumps(line) + "\n")
tell(phase="compiling")
if any(inductor.glob("bad/*.so")):
    tell(compile={"graph": "before", "kind": "forward", "hit": True, "rebuilt": False, "seconds": 1, "rank": 1})
    print("Traceback (most recent call last):")
    print('  File "/e/lib/python3.11/site-packages/torch/_inductor/codecache.py", line 3663, in _load_library')
    print("torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised:")
    print("ImportError: %s/bad/c1.main.so: invalid ELF header" % inductor)
    sys.exit(1)
graphs = os.environ.get("GRAPHS", "one two").split()
misses = 0
for graph in graphs:
    entry = inductor / "fxgraph" / graph
    hit = entry.exists()
    if not hit:
        misses += 1
        entry.parent.mkdir(parents=True, exist_ok=True)
        entry.write_text(graph)
        entry.chmod(0o755)
    tell(compile={"graph": graph, "kind": "forward", "hit": hit, "rebuilt": False, "seconds": 1.5, "rank": 0})
(inductor / "locks").mkdir(exist_ok=True)
(inductor / "locks" / "x.lock").touch()
(inductor / "half.so").write_bytes(b"")
(inductor / "outside").symlink_to("/etc/passwd")
open(os.fsencode(inductor) + b"/\xff\n\x1b[31m", "w").close()
tell(compile={"done": True, "hits": len(graphs) - misses, "misses": misses, "rebuilt": 0, "new_files": misses,
              "seconds": 1.5 * len(graphs), "rank": 0})
time.sleep(float(os.environ.get("SECONDS", 0)))
tell(step=1, loss=1.0, tokens=1, time=time.time())
sys.exit(int(os.environ.get("CODE", 0)))
"""


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    yield Client(tmp_path)
    clean_up(tmp_path)


class Ran:
    """A run that has ended, by what it left."""

    def __init__(self, run: RunDir, said: str) -> None:
        self.said = said
        self.state = run.state()[0] or {}
        self.cache = self.state.get("cache") or {}
        self.events = [json.loads(line) for line in Path(run.file("events.jsonl")).read_text().splitlines()]
        self.folder = Path(run.file("cache"))
        assert not self.folder.exists()
        assert not [event for event in self.events if event["event"] == "runner_error"]

    def of(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == name]


def begin(client: Client, digest: str = "d1", program: str = TRAINER, **launch: Any) -> tuple[RunDir, Any]:
    """A runner without tmux, as a process of its own."""
    run = client.dir(client.claim(digest)["run"])
    record = {"key": KEY, "parts": PARTS, "label": LABEL, "predicted": "cold", "because": [], "snapshot": None}
    cache = {**record, "seed": None, **launch.pop("cache", {})}
    Path(run.file("launch.json")).write_text(json.dumps(launch_of(program, cache=cache, **launch)))
    state = run.state()[0]
    assert state is not None
    state["phase"] = "starting"
    run.write_state(state)
    client.die()
    command = runner_command(run.real)
    out = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return run, out


def ended(run: RunDir, process: Any) -> Ran:
    said, _ = process.communicate(timeout=30)
    return Ran(run, said.decode())


def ran(client: Client, digest: str = "d1", program: str = TRAINER, **launch: Any) -> Ran:
    return ended(*begin(client, digest, program, **launch))


def uses(client: Client) -> list[dict[str, Any]]:
    return cache_store.uses(client.root, KEY)


def test_a_cold_run_that_ends_well_leaves_a_cache_and_the_next_one_begins_with_it(
    client: Client, tmp_path: Path
) -> None:
    cold = ran(client, generation={"recipe": "demo", "cache": None, "environment": "e"})
    digest = cache_store.current(client.root, KEY)
    assert cold.cache["harvest"]["how"] == "harvested" and cold.cache["harvest"]["digest"] == digest
    assert cold.cache["key"] == KEY and "parts" not in cold.cache and cold.cache["copied"] is None
    assert cold.state["compile"] == {
        "hits": 0, "misses": 2, "rebuilt": 0, "graphs": 2, "new_files": 2, "seconds": 3.0, "done": True, "ranks": 1,
        "rank": 0, "missed": ["one", "two"],
    }  # fmt: skip
    assert "outside is a link" in cold.cache["harvest"]["why"]
    # a name that is no text is told as some, in files that are UTF-8 (they were read as that) and on a terminal
    assert r"\udcff??[31m is not UTF-8" in cold.cache["harvest"]["why"] and cold.of("cache_swept")[0]["count"] == 1
    kept = {"inductor/fxgraph/one": b"one", "inductor/fxgraph/two": b"two"}
    assert tree(snapshot(tmp_path, str(digest)) / "files") == expected(kept, kept)
    about = cache_store.about(client.root, KEY)
    assert (about["parts"], about["label"]) == (PARTS, LABEL)
    manifest = cache_store.read_manifest(client.root, KEY, str(digest))[0]
    assert manifest is not None and manifest["cold_seconds"] == 3.0 and manifest["parent"] is None
    (one,) = generations.read(client.root, "demo")
    assert (one["cache"], one["standing"]) == (f"{KEY}/{digest}", "good")

    warm = ran(client, "d2", cache={"snapshot": digest, "predicted": "warm"})
    assert warm.cache["copied"]["files"] == 2 and warm.cache["harvest"]["how"] == "nothing new"
    assert (warm.state["compile"]["hits"], warm.state["compile"]["misses"]) == (2, 0)
    more = ran(client, "d3", cache={"snapshot": digest, "predicted": "warm"}, env={"GRAPHS": "one three"})
    newer = cache_store.current(client.root, KEY)
    assert newer == more.cache["harvest"]["digest"] != digest and more.cache["harvest"]["files"] == 1
    assert set(tree(snapshot(tmp_path, str(newer)) / "files")) == {*kept, "inductor/fxgraph/three"}
    same = snapshot(tmp_path, str(newer)) / "files/inductor/fxgraph/one"
    assert same.stat().st_ino == (snapshot(tmp_path, str(digest)) / "files/inductor/fxgraph/one").stat().st_ino
    assert [(line["cold"], line["hits"], line["misses"], line["how"], line["snapshot"]) for line in uses(client)] == [
        (True, 0, 2, "harvested", None),
        (False, 2, 0, "nothing new", digest),
        (False, 1, 1, "harvested", digest),
    ]
    assert nothing_half(tmp_path)


def test_a_run_that_does_not_become_healthy_leaves_nothing(client: Client, tmp_path: Path) -> None:
    failed = ran(client, env={"CODE": "3"}, health={"step": 5, "tokens_per_second": None})
    assert failed.cache["harvest"]["how"] == "not healthy"
    assert cache_store.snapshots(client.root, KEY) == [] and uses(client)[0]["how"] == "not healthy"
    healthy = ran(client, "d2", env={"CODE": "3"}, health={"step": 1, "tokens_per_second": None})
    assert healthy.state["phase"] == "failed" and healthy.cache["harvest"]["how"] == "harvested"


BAD = {**FILES, "inductor/bad/c1.main.so": b"\x7fELF"}


def test_a_bad_entry_costs_one_restart(client: Client, tmp_path: Path) -> None:
    digest = stage(tmp_path, BAD)["digest"]
    program = "import os\nprint(os.environ.get('TOKEN'), flush=True)\n" + TRAINER
    own = {"recipe": "demo", "cache": f"{KEY}/{digest}", "environment": "e"}
    run, process = begin(
        client, program=program, cache={"snapshot": digest, "predicted": "warm"}, env={"TOKEN": "t"}, generation=own
    )
    found = ended(run, process)
    assert found.state["phase"] == "finished" and process.returncode == 0
    (moved,) = found.of("cache_moved_aside")
    assert (moved["key"], moved["snapshot"], moved["restarted"]) == (KEY, digest, True)
    assert moved["why"].startswith("ImportError: ") and moved["why"].endswith("invalid ELF header")
    assert found.cache["moved_aside"] == {"snapshot": f"{KEY}/{digest}", "why": moved["why"], "restarted": True}
    assert "moved aside" in found.said and len(found.of("started")) == 2
    assert Path(run.console).read_text().count("t\n") == 2
    assert not snapshot(tmp_path, digest).exists() and len(list((tmp_path / "caches" / KEY / "aside").iterdir())) == 1
    # of the second start alone
    assert [found.state["compile"][name] for name in ("hits", "misses", "graphs", "ranks")] == [0, 2, 2, 1]
    assert found.cache["harvest"]["how"] == "harvested" and uses(client)[0]["cold"] is True
    assert cache_store.current(client.root, KEY) == found.cache["harvest"]["digest"] != digest
    # whoever goes back to this run gets what it ran with, not what broke it
    (one,) = generations.read(client.root, "demo")
    assert one["cache"] == f"{KEY}/{found.cache['harvest']['digest']}"


def test_nothing_is_started_a_third_time_nor_for_another_reason(client: Client, tmp_path: Path) -> None:
    digest = stage(tmp_path, BAD)["digest"]
    always = TRAINER.replace('any(inductor.glob("bad/*.so"))', "True")
    found = ran(client, program=always, cache={"snapshot": digest})
    assert (
        found.state["phase"] == "failed" and len(found.of("started")) == 2 and len(found.of("cache_moved_aside")) == 1
    )
    second = stage(tmp_path, BAD)["digest"]
    for number, program in enumerate(
        (
            "raise ImportError('/x/libfoo.so: invalid ELF header')",
            "import json; json.loads('{')",
            "import os\nopen(os.environ['ORCH_METRICS'], 'a').write('{\"step\": 1}\\n')\n" + always,
        )
    ):
        found = ran(client, f"e{number}", program, cache={"snapshot": second})
        assert found.state["phase"] == "failed" and len(found.of("started")) == 1
        assert found.cache["moved_aside"] is None and snapshot(tmp_path, second).exists()
    found = ran(client, "p", cache={"snapshot": second}, peers={"place": "a", "places": ["a", "b"]})
    assert found.state["phase"] == "failed" and len(found.of("started")) == 1
    assert "launch again" in found.state["exit"]["reason"] and not snapshot(tmp_path, second).exists()


def test_a_snapshot_that_is_damaged_on_the_disk_is_never_run_with(client: Client, tmp_path: Path) -> None:
    digest = stage(tmp_path)["digest"]
    path = snapshot(tmp_path, digest) / "files/inductor/fxgraph/x/y/entry"
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(2_000_000)
        file.write(b"!")
    found = ran(client, cache={"snapshot": digest, "predicted": "warm"}, program=TRAINER + "\nprint('never')")
    assert found.state["phase"] == "finished" and len(found.of("started")) == 1
    assert "another content" in found.cache["moved_aside"]["why"] and found.cache["copied"] is None
    assert not snapshot(tmp_path, digest).exists() and found.state["compile"]["misses"] == 2
    gone = ran(client, "d2", cache={"snapshot": digest, "predicted": "warm"})
    assert gone.state["phase"] == "finished" and "not there any more" in gone.of("cache_not_copied")[0]["why"]


def test_a_private_copy_is_the_runs_own(client: Client, tmp_path: Path) -> None:
    digest = stage(tmp_path, {**FILES, "inductor/cd/tool": b"#!/bin/sh\nexit 0\n"})["digest"]
    vandal = """
import os, pathlib
for path in pathlib.Path(os.environ["ORCH_RUN_DIR"], "cache").rglob("*"):
    if path.is_file(): open(path, "ab").write(b"changed")
"""
    found = ran(client, program=vandal, cache={"snapshot": digest})
    assert found.cache["copied"]["files"] == len(FILES) and found.cache["copied"]["how"] in ("copied", "reflinked")
    assert tree(snapshot(tmp_path, digest) / "files") == expected()
    assert found.cache["harvest"]["how"] == "harvested"  # nothing was told of hits, so that changes count


def test_changed_files_alone_are_no_reason_where_all_was_hit(client: Client, tmp_path: Path) -> None:
    digest = stage(tmp_path, {"inductor/fxgraph/one": b"one", "triton/K/__grp__.json": b"/old/path"})["digest"]
    program = TRAINER + "\n"
    program = program.replace(
        "graphs =", 'open(inductor.parent / "triton/K/__grp__.json", "w").write("/new")\ngraphs ='
    )
    found = ran(client, program=program, cache={"snapshot": digest}, env={"GRAPHS": "one"})
    assert found.state["compile"]["hits"] == 1 and found.cache["harvest"]["how"] == "nothing new"
    assert cache_store.current(client.root, KEY) == digest


def test_a_seed_of_another_key_becomes_a_cache_of_this_one(client: Client, tmp_path: Path) -> None:
    other = {**PARTS, "shapes": {"digest": "s2", "settings": {}}}
    files = {"inductor/fxgraph/one": b"one"}
    seed = stage(tmp_path, files, key=key_of(other), parts=other, manifest=manifest_of(files, ()))["digest"]
    name = f"{key_of(other)}/{seed}"
    found = ran(client, cache={"seed": name, "predicted": "cold"}, env={"GRAPHS": "one"})
    assert found.cache["copied"]["files"] == 1 and found.state["compile"]["misses"] == 0
    assert found.cache["harvest"]["how"] == "harvested"  # the same files, but its own key had none
    assert (uses(client)[0]["seed"], uses(client)[0]["snapshot"], uses(client)[0]["cold"]) == (name, None, False)
    assert (tmp_path / "caches" / key_of(other) / "current").read_text().strip() == seed


def test_two_runs_that_end_at_once_lose_nothing(client: Client, tmp_path: Path) -> None:
    digest = stage(tmp_path, {"inductor/fxgraph/one": b"one"})["digest"]
    both = [
        begin(client, f"d{graph}", cache={"snapshot": digest}, env={"GRAPHS": f"one {graph}", "SECONDS": "0.5"})
        for graph in ("two", "three")
    ]
    found = [ended(*one) for one in both]
    assert [one.cache["harvest"]["how"] for one in found] == ["harvested", "harvested"]
    last = cache_store.current(client.root, KEY)
    assert set(tree(snapshot(tmp_path, str(last)) / "files")) == {
        "inductor/fxgraph/one", "inductor/fxgraph/two", "inductor/fxgraph/three"
    }  # fmt: skip
    for one in found:
        assert snapshot(tmp_path, one.cache["harvest"]["digest"]).exists()
    assert nothing_half(tmp_path)


def test_where_both_have_a_path_the_others_stays(tmp_path: Path) -> None:
    root = str(tmp_path)
    begun = stage(tmp_path, {"inductor/a": b"a"})["digest"]
    rows = (cache_store.read_manifest(root, KEY, begun)[0] or {})["files"]
    theirs = {"inductor/a": b"a", "inductor/b": b"theirs", "inductor/c/d": b"d", "inductor/e": b"e"}
    stage(tmp_path, theirs)
    own = tmp_path / "own"
    for path, data in {"inductor/b": b"own", "inductor/c": b"c", "inductor/e/f": b"f", "inductor/g": b"g"}.items():
        (own / path).parent.mkdir(parents=True, exist_ok=True)
        (own / path).write_bytes(data)
    done = cache_copy.harvest(root, KEY, str(own), (KEY, begun, rows), {"from": "r", "cold_seconds": None}, False, int)
    assert done.how == "harvested" and done.digest == cache_store.current(root, KEY)
    assert tree(snapshot(tmp_path, str(done.digest)) / "files") == expected({**theirs, "inductor/g": b"g"})
    again = cache_copy.harvest(root, KEY, str(own), (KEY, begun, rows), {"from": "r", "cold_seconds": None}, False, int)
    assert again.how == "nothing new" and nothing_half(tmp_path)


# ---- torch's words --------------------------------------------------------------------------


def test_torchs_words_for_a_broken_entry_and_no_others() -> None:
    """In all logs that there are: the ones of a broken cache, and none of the rest."""
    index = yaml.safe_load((LOGS / "index.yaml").read_text())
    entries = index if isinstance(index, list) else index["logs"]
    said = {str(one.get("log") or one.get("file")): str(one.get("expect")) for one in entries}
    found = {name: bad_entry((LOGS / name).read_text(errors="replace")) for name in said}
    assert {name for name, line in found.items() if line} >= {
        n for n, e in said.items() if e == "compile-cache-corrupt"
    }
    others = {said[name] for name, line in found.items() if line} - {"compile-cache-corrupt", "compile-cache-unusable"}
    assert not others


@pytest.mark.parametrize(
    ("text", "bad"),
    [
        ("[rank3]: OSError: /c/triton/K/launcher.so: file too short", True),
        ("torch._inductor.exc.InductorError: ImportError: /r/cache/inductor/x/c.main.so: undefined symbol: f", True),
        ("ImportError: /usr/lib/libfoo.so: file too short", False),
        ("/r/cache/inductor/7g/c7.main.cpp:14:37: error: 'at::vec' has not been declared", True),
        ("/home/me/op.cpp:14:37: error: 'at::vec' has not been declared", False),
        ("PermissionError: [Errno 13] Permission denied: '/r/cache/inductor/locks/c.lock'", True),
        ("PermissionError: [Errno 13] Permission denied: '/data/rows.jsonl'", False),
        (
            "Traceback (most recent call last):\n"
            '  File "/e/torch/_inductor/runtime/autotune_cache.py", line 612, in _put\n'
            "PermissionError: [Errno 13] Permission denied: '/var/lib/orch'",
            True,
        ),
        (
            "Traceback (most recent call last):\n"
            '  File "/e/torch/_inductor/runtime/static_triton_launcher.py", line 144, in load_kernel\n'
            "RuntimeError: CUDA driver error: device kernel image is invalid",
            True,
        ),
        ("skipped a row: json.decoder.JSONDecodeError: Expecting value", False),
        ("RuntimeError: Failed to import /r/cache/inductor/y3/cy3.py", True),
        ("RuntimeError: Failed to import /r/plugins/mine.py", False),
        ("error: the compile cache in /r/cache has a damaged entry: JSONDecodeError: Extra data; move it", True),
        ("ImportError: /r/cache/inductor/43/c4.main.so: cannot read file data", True),
        (
            "W1130 23:31:02.1 7 torch/_inductor/codecache.py:1716] [0/0] Traceback (most recent call last):\n"
            'W1130 23:31:02.1 7 torch/_inductor/codecache.py:1716] [0/0]   File "/e/torch/_inductor/a.py", line 1\n'
            "W1130 23:31:02.1 7 torch/_inductor/codecache.py:1716] [0/0] EOFError: Ran out of input",
            False,
        ),
    ],
)
def test_words_one_by_one(text: str, bad: bool) -> None:
    assert (bad_entry(f"before\n{text}\nafter\n") is not None) == bad


# ---- what the trainer tells -----------------------------------------------------------------


def test_figures_of_the_rank_that_fared_worst() -> None:
    told = Compiled()
    assert told.summary() is None
    told.feed("nonsense")
    told.feed({"graph": "f", "hit": True, "seconds": 1, "rank": 0})
    told.feed({"graph": "f", "hit": False, "seconds": 8, "rank": 1})
    told.feed({"graph": "b", "hit": True, "rebuilt": True, "seconds": 1, "rank": 1})
    found = told.summary()
    assert found is not None
    assert (found["hits"], found["misses"], found["rebuilt"], found["graphs"], found["rank"]) == (1, 1, 1, 2, 1)
    assert (found["missed"], found["seconds"], found["ranks"], found["done"]) == (["f"], 9, 2, False)
    told.feed({"done": True, "hits": 1, "misses": 1, "rebuilt": 1, "new_files": 4, "seconds": 10, "rank": 1})
    told.feed({"done": True, "hits": 1, "misses": 0, "rebuilt": 0, "new_files": 0, "seconds": 2, "rank": 0})
    found = told.summary()
    assert found is not None and (found["misses"], found["seconds"], found["new_files"], found["done"]) == (
        1,
        10,
        4,
        True,
    )
    # another kind of GPU after the first
    told.feed({"graph": "f", "hit": False, "seconds": 5, "rank": 1})
    found = told.summary()
    assert found is not None and (found["misses"], found["graphs"], found["done"]) == (2, 3, False)
    assert json.loads(json.dumps(found)) == found
