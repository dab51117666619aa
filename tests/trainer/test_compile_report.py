"""What compiling came to is told as it was, by real compilations on the CPU: cold, warm, rebuilt, damaged."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.remote.metrics import Summary
from trainer import warmup
from trainer.compile_report import Graph, Reading, Report, classify, graph

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
import torch
from torch._inductor import cpu_vec_isa
from trainer import compile_report, warmup

cpu_vec_isa.valid_vec_isa_list = lambda: []  # these are trials of the processor, of seconds each
report = compile_report.Report(path=sys.argv[1])
outer = torch.compile(lambda x: x.sin().cumsum(1), fullgraph=True, dynamic=False)


def work():
    leaf = torch.ones(4, 8, requires_grad=True)
    for _ in range(2):  # the second time there is nothing to tell
        with compile_report.graph("wave", "forward"), compile_report.graph("not this", "forward"):
            result = outer(leaf)
        result.sum().backward()


try:
    warmup._run(work, report)
except warmup.TrainerError as error:
    print("error:", error)
print("failed:", report.failed)
report.done()
print(report.line())
"""


class Ran:
    """One process of PROGRAM."""

    def __init__(self, folder: Path, name: str, cache: Path, python: Path | str = sys.executable):
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(cache),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }
        metrics = folder / f"{name}.jsonl"
        done = subprocess.run(
            [python, folder / "program.py", metrics], env=environment, capture_output=True, text=True, timeout=300
        )
        self.said = done.stdout
        assert done.returncode == 0, done.stdout + done.stderr
        self.stderr = done.stderr
        self.lines = metrics.read_text().splitlines() if metrics.exists() else []
        first, *rest = [json.loads(line) for line in self.lines] or [{}]
        assert first.get("phase") in ("compiling", None)
        told = [line["compile"] for line in rest]
        self.graphs = {each["graph"]: (each["kind"], each["hit"], each["rebuilt"]) for each in told if "graph" in each}
        self.done = told[-1] if told else {}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Ran]:
    """Cold, then in a folder elsewhere, then by an environment elsewhere, then with its library cut: one folder."""
    folder = tmp_path_factory.mktemp("compiled")
    (folder / "program.py").write_text(PROGRAM)
    found = {"cold": Ran(folder, "cold", folder / "cold")}
    cache = (folder / "cold").rename(folder / "elsewhere")
    found["moved"] = Ran(folder, "moved", cache)
    if sys.prefix != sys.base_prefix:  # a path to the same environment that is another
        environment = folder / "environment"
        environment.symlink_to(sys.prefix)
        found["another environment"] = Ran(folder, "another", cache, environment / "bin" / Path(sys.executable).name)
    damaged = shutil.copytree(cache, folder / "damaged")
    for library in damaged.glob("*/*.main.so"):
        os.truncate(library, 0)
    found["damaged"] = Ran(folder, "damaged", damaged)
    return found


FORWARD, BACKWARD = "wave forward", "wave backward"


def test_an_empty_cache_misses_forward_and_backward(runs):
    cold = runs["cold"]
    assert cold.graphs == {FORWARD: ("forward", False, False), BACKWARD: ("backward", False, False)}
    assert (cold.done["hits"], cold.done["misses"], cold.done["rebuilt"]) == (0, 2, 0)
    assert cold.done["new_files"] > 4 and cold.done["done"] is True and cold.done["rank"] == 0
    assert "compile cache cold: 0 of 2 hits" in cold.said and "wave backward: miss" in cold.said


def test_a_cache_that_was_moved_is_hit_and_nothing_is_built(runs):
    moved = runs["moved"]
    assert moved.graphs == {FORWARD: ("forward", True, False), BACKWARD: ("backward", True, False)}
    assert (moved.done["hits"], moved.done["misses"], moved.done["rebuilt"], moved.done["new_files"]) == (2, 0, 0, 0)
    assert "compile cache warm: 2 of 2 hits, no new file" in moved.said


def test_an_environment_elsewhere_is_a_hit_that_builds_again(runs):
    if "another environment" not in runs:
        pytest.skip("these tests do not run in a virtual environment")
    rebuilt = runs["another environment"]
    assert rebuilt.graphs == {FORWARD: ("forward", True, True), BACKWARD: ("backward", True, True)}
    assert rebuilt.done["rebuilt"] == 2 and rebuilt.done["misses"] == 0 and rebuilt.done["new_files"] > 0
    assert "compile cache rebuilt: 2 of 2 hits" in rebuilt.said


def test_a_library_that_was_cut_is_told_with_torchs_own_words(runs):
    damaged = runs["damaged"]
    assert "error: the compile cache in" in damaged.said and "has a damaged entry: " in damaged.said
    assert "file too short" in damaged.said and "move that folder aside" in damaged.said
    assert "ImportError: " in damaged.stderr and "torch/_inductor" in damaged.stderr  # what the runner looks for
    assert "failed: ['wave forward']" in damaged.said
    assert len(damaged.lines) == 1 and damaged.done == {}  # that it began to compile, and no graph


def test_the_runner_reads_what_is_told(runs):
    for name, figures in (("cold", (0, 2, 0)), ("moved", (2, 0, 0))):
        summary = Summary()
        for line in runs[name].lines:
            summary.feed(line.encode())
        assert summary.broken == 0 and summary.step is None
        read = summary.compiled.summary()
        assert (read["hits"], read["misses"], read["rebuilt"]) == figures and read["done"]


counts = st.integers(0, 3)


@settings(deadline=None, max_examples=60)
@given(counts, counts, counts, counts, counts, counts)
def test_only_a_hit_of_every_layer_is_one(fx_hits, fx_misses, fx_bypasses, aot_hits, aot_misses, built):
    hit, rebuilt = classify(
        Reading(
            fx_hits=fx_hits,
            fx_misses=fx_misses,
            fx_bypasses=fx_bypasses,
            aot_hits=aot_hits,
            aot_misses=aot_misses,
            built=built,
        )
    )
    missed, found = fx_misses + fx_bypasses + aot_misses, fx_hits + aot_hits
    assert hit is (False if missed else True if found else None)
    assert rebuilt == (hit is True and built > 0)


def test_what_cannot_be_read_or_written_is_not_told_and_no_error(tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.compile_report._handler", lambda: None)  # a torch that tells nothing
    report = Report(path=tmp_path / "no such folder" / "metrics.jsonl")
    with report.watch(), graph("x", "forward"):
        pass
    report.done()
    assert report.line() == "compile cache: nothing to compile" and not list(tmp_path.iterdir())
    report._tell("x", "forward", None, False, 1.0)
    report.done()
    assert report.line() == "compile cache unknown: 0 of 1 hits, no new file, 0.0 s (x forward: unknown, 1.0 s)"


def test_a_damaged_file_is_told_from_other_errors():
    class BackendCompilerFailed(RuntimeError):
        """As torch's."""

    cut = BackendCompilerFailed("backend='inductor' raised:\nImportError: /c/x.main.so: invalid ELF header\n\nSet …")
    assert warmup.damaged(cut)
    assert warmup.reason_of(cut) == (
        "BackendCompilerFailed: backend='inductor' raised: ImportError: /c/x.main.so: invalid ELF header"
    )
    assert not warmup.damaged(BackendCompilerFailed("backend='inductor' raised:\nNotImplementedError: no such thing"))
    assert not warmup.damaged(ImportError("libcuda.so.1: file too short"))  # not of the cache
    assert warmup.damaged(json.JSONDecodeError("Expecting value", "", 0))
    assert warmup.reason_of(ValueError()) == "ValueError: "
    assert str(Graph(name="a b", kind="b", hit=True, rebuilt=True, seconds=1)) == "a b: hit, but rebuilt, 1.0 s"
