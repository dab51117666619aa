"""Generations and pins at the place: appended, marked, pinned; and what a runner tells of its own."""

from __future__ import annotations

import json
import os
import threading

import pytest

from orchestrator import generations as workstation
from orchestrator.remote import codetree, generations
from orchestrator.remote.frames import OpError
from orchestrator.snapshot import snapshot

from .remote_runs import Client, clean_up, eventually


@pytest.fixture
def client(tmp_path):
    yield Client(tmp_path)
    clean_up(tmp_path)


class Call:
    def __init__(self, root):
        self.root = str(root)


def entry(run, environment="e" * 16, code="c" * 16):
    return {"run": run, "environment": environment, "environment_name": "demo", "cache": None, "code": {"digest": code}}


def standings(root, recipe="demo"):
    return [one["standing"] for one in generations.read(str(root), recipe)]


def test_each_run_is_one_generation(tmp_path):
    root = str(tmp_path)
    assert [generations.begin(root, "demo", entry(run)) for run in ("a", "b", "a", "c")] == [1, 2, 1, 3]
    assert generations.begin(root, "other", entry("d")) == 1
    assert standings(root) == ["new", "new", "new"]


def test_a_persons_word_goes_before_the_runners(tmp_path):
    root = str(tmp_path)
    generations.begin(root, "demo", entry("a"))
    generations.mark(root, "demo", 1, "good", generations.RUNNER, "reached step 5")
    assert standings(root) == ["good"]
    generations.mark(root, "demo", 1, "bad", "ada", "no use")
    generations.mark(root, "demo", 1, "good", generations.RUNNER, "again")
    assert standings(root) == ["bad"]
    (one,) = generations.read(root, "demo")
    assert (one["marked_by"], one["mark_why"]) == ("ada", "no use")


def test_a_broken_line_costs_itself(tmp_path):
    root = str(tmp_path)
    generations.begin(root, "demo", entry("a"))
    with (tmp_path / "recipes/demo/generations.jsonl").open("ab") as file:
        file.write(b'{"event": "started", "gen')
    assert generations.begin(root, "demo", entry("b")) == 2
    assert standings(root) == ["new", "new"]


def test_many_at_once_get_numbers_of_their_own(tmp_path):
    found = []
    threads = [
        threading.Thread(target=lambda n=n: found.append(generations.begin(str(tmp_path), "demo", entry(f"r{n}"))))
        for n in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(1, 13))


def test_pinned_and_lifted(tmp_path):
    call = Call(tmp_path)
    assert generations.pin({"recipe": "demo"}, call) == {"pin": None}
    assert generations.pin_lift({"recipe": "demo"}, call) == {"before": None}
    generations.begin(call.root, "demo", entry("a"))
    generations.begin(call.root, "demo", entry("b", environment="f" * 16))
    with pytest.raises(OpError, match="no generation 3"):
        generations.pin_set({"recipe": "demo", "generation": 3}, call)
    generations.pin_set({"recipe": "demo", "generation": 1, "by": "ada", "why": "it worked"}, call)
    pin = generations.pin({"recipe": "demo"}, call)["pin"]
    assert pin["generation"] == 1 and pin["environment"] == "e" * 16 and pin["by"] == "ada"
    assert generations.pin_set({"recipe": "demo", "generation": 2}, call)["before"] == pin
    (listed,) = generations.generations({"recipe": None}, call)["recipes"]
    assert listed["pin"]["generation"] == 2 and len(listed["generations"]) == 2
    assert generations.pin_lift({"recipe": "demo"}, call)["before"]["generation"] == 2
    assert generations.pin({"recipe": "demo"}, call) == {"pin": None}
    for name in ("../x", "", None, "A", "x" * 41):
        with pytest.raises(OpError, match="no name of a recipe"):
            generations.pin({"recipe": name}, call)


def test_a_pin_that_cannot_be_read_is_never_passed_over(tmp_path):
    (tmp_path / "recipes/demo").mkdir(parents=True)
    (tmp_path / "recipes/demo/pin").write_text("{")
    with pytest.raises(OpError, match="the pin of demo cannot be read"):
        generations.pin({"recipe": "demo"}, Call(tmp_path))


def test_the_pin_is_never_missing_or_mixed(tmp_path):
    call = Call(tmp_path)
    for number in (1, 2):
        generations.begin(call.root, "demo", entry(f"r{number}", environment=str(number) * 16, code=str(number) * 16))
    generations.pin_set({"recipe": "demo", "generation": 1}, call)
    wrong, seen, stop = [], set(), threading.Event()

    def look():
        while not stop.is_set():
            pin = generations.read_pin(call.root, "demo")
            number = pin and pin["generation"]
            if pin is None or {pin["environment"], pin["code"]["digest"]} != {str(number) * 16}:
                wrong.append(pin)
            seen.add(number)

    reader = threading.Thread(target=look)
    reader.start()
    for number in [2, 1] * 40:
        generations.pin_set({"recipe": "demo", "generation": number}, call)
    stop.set()
    reader.join()
    assert not wrong and seen == {1, 2}


def test_a_runner_tells_again_what_the_disk_did_not_take(tmp_path, monkeypatch):
    about = {"recipe": "demo", **entry("ignored")}
    chronicle = generations.Chronicle(str(tmp_path), "demo-1", about)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(generations, "append_line", full)
        chronicle.step()
        chronicle.mark("good", "reached step 5")
        chronicle.step()
    assert standings(tmp_path) == []
    chronicle._next = 0.0
    chronicle.step()
    (one,) = generations.read(str(tmp_path), "demo")
    assert (one["run"], one["standing"], one["mark_why"]) == ("demo-1", "good", "reached step 5")


@pytest.mark.parametrize(
    ("phase", "mark", "health", "standing"),
    [
        ("finished", None, None, "good"),
        ("finished", {"step": 5}, None, "new"),
        ("failed", {"step": 5}, None, "bad"),
        ("failed", None, None, "bad"),
        ("failed", {"step": 5}, {"step": 6, "fast_enough": None}, "new"),
        ("failed", {"step": 5, "tokens_per_second": 9.0}, {"step": 6, "fast_enough": False}, "bad"),
        ("stopped", {"step": 5}, None, "new"),
    ],
)
def test_how_a_run_ended_is_how_it_stands(tmp_path, phase, mark, health, standing):
    chronicle = generations.Chronicle(str(tmp_path), "demo-1", {"recipe": "demo", **entry("x")})
    chronicle.step()
    chronicle.ended(phase, "exit 1", mark, {"health": health})
    assert standings(tmp_path) == [standing]
    generations.Chronicle(str(tmp_path), "demo-2", {}).ended("failed", "x", None, {})  # launched by an older orch
    assert len(standings(tmp_path)) == 1


def test_a_code_snapshot_is_known_by_its_name(tmp_path):
    source = tmp_path / "source"
    (source / "inner").mkdir(parents=True)
    for name, text in (("a.py", "x"), ("inner/b.py", "y"), ("inner.py", "z"), ("inner-more.py", "")):
        (source / name).write_text(text)
    (source / "a.py").chmod(0o755)
    taken = snapshot(source, "trainer")
    there = tmp_path / "root/code" / taken.digest
    (there / "trainer/inner").mkdir(parents=True)
    for path in source.rglob("*.py"):
        target = there / "trainer" / path.relative_to(source)
        target.write_bytes(path.read_bytes())
        os.chmod(target, path.stat().st_mode)  # noqa: PTH101
    call = Call(tmp_path / "root")
    found = codetree.code_tree({"digest": taken.digest}, call)
    assert found["present"] and found["intact"] and found["files"] == workstation.tree_of(taken)
    (there / "trainer/__pycache__").mkdir()
    (there / "trainer/__pycache__/a.cpython-311.pyc").write_bytes(b"")
    assert codetree.code_tree({"digest": taken.digest}, call)["intact"]
    (there / "trainer/a.py").write_text("changed")
    assert not codetree.code_tree({"digest": taken.digest}, call)["intact"]
    assert codetree.code_tree({"digest": "0" * 16}, call) == {"present": False, "intact": False, "files": {}}


def test_changes_are_told_package_by_package():
    assert workstation.package_changes({"a": "1", "b": "1", "c": "1"}, {"a": "2", "c": "1", "d": "3"}) == [
        "a 1 → 2",
        "b 1 → (none)",
        "d (none) → 3",
    ]
    assert workstation.file_changes({"a": "1", "b": "1"}, {"a": "2", "c": "1"}) == ["b removed", "c added", "a changed"]
    assert json.dumps(workstation.Change((), (), ()).__dict__) == '{"packages": [], "cache": [], "code": []}'


SLOW_THEN_FAST = """
import json, os, time
def put(step, at):
    with open(os.environ['ORCH_METRICS'], 'a') as f:
        f.write(json.dumps({'step': step, 'loss': 1.0, 'tokens': 100, 'time': at}) + '\\n')
for step in range(1, 5): put(step, 1000 + 100 * step)
time.sleep(1)
for step in range(5, 60): put(step, 2000 + step)
time.sleep(300)
"""


def test_the_runner_appends_and_marks_with_no_client(client: Client) -> None:
    """Also when the throughput is only reached later than the step."""
    about = {"recipe": "demo", **entry("ignored"), "who": "ada@desk", "why": "launched"}
    run = client.launch(SLOW_THEN_FAST, health={"step": 3, "tokens_per_second": 50}, generation=about)
    eventually(lambda: standings(client.root) == ["new"])
    eventually(lambda: standings(client.root) == ["good"])
    (one,) = generations.read(client.root, "demo")
    assert one["run"] == run and one["who"] == "ada@desk" and one["marked_by"] == "runner"
    assert "reached step" in one["mark_why"] and "tokens/s" in one["mark_why"]


def test_a_run_that_fails_first_is_bad(client: Client) -> None:
    run = client.launch("import sys; sys.exit(3)", health={"step": 3}, generation={"recipe": "demo", **entry("x")})
    client.until(run, "failed")
    eventually(lambda: standings(client.root) == ["bad"])
