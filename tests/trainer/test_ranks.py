"""Real runs of several ranks under torchrun: whatever the topology, the same training; and whoever ends, all end.

Most of the time goes into imports, so runs are shared between tests.
"""

import json
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.trainer import ranked
from tests.trainer.ranked import alone, evaluations, finish, losses, split

SPLITS = {"1:1": split(1, 1), "2:1": split(2, 1), "1:2": split(1, 2), "3:2": split(3, 2)}
TIMES = ("second", "speedup", "margin", "gap")  # in names of figures that differ from run to run
FEWER = {"1:3 on 3 ranks": (*split(1, 3), "topology.present=3")}  # two drafters take 2 parts and 1
TOPOLOGIES = {"colocated 2": ("topology.ranks=2",), **SPLITS, **FEWER}


@pytest.fixture(scope="module")
def config(small_target, tmp_path_factory) -> Path:
    return ranked.write_config(tmp_path_factory.mktemp("config"), small_target())


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory) -> Path:
    """The run in one process."""
    return alone(config, tmp_path_factory.mktemp("whole") / "run")


def test_every_topology_trains_the_same(config, whole, tmp_path):
    names = list(TOPOLOGIES)
    for pair in (names[:2], names[2:4], names[4:]):  # side by side: two cores, and much waiting
        runs = {name: ranked.start(config, tmp_path / re.sub(r"\W", "-", name), *TOPOLOGIES[name]) for name in pair}
        try:
            for name, run in runs.items():
                assert run.wait() == 0, f"{name}: {run.said}"
                assert run.processes() == []
                ranked.assert_same_training(run.folder, whole)
                _assert_same_evaluation(run.folder, whole)
        finally:
            for run in runs.values():
                run.end()


def timeless(content):
    """What is drafted and accepted, by position and domain; not how fast."""
    if isinstance(content, list):
        return [timeless(each) for each in content]
    if isinstance(content, dict):
        return {k: timeless(v) for k, v in content.items() if not any(word in k for word in TIMES)}
    return content


def _assert_same_evaluation(ours: Path, theirs: Path) -> None:
    assert len(evaluations(ours)) == 3
    assert timeless(evaluations(ours)) == timeless(evaluations(theirs))
    mine, other = (json.loads((folder / "result.json").read_text()) for folder in (ours, theirs))
    assert mine["equal_to_plain"]["smallest_margin"] == pytest.approx(other["equal_to_plain"]["smallest_margin"], 1e-3)
    assert mine["equal_to_plain"]["all"] and other["equal_to_plain"]["all"]


def test_a_batch_that_is_used_several_times_travels_once(config, tmp_path):
    """With fresh anchors, and also after a stop between two draws of one batch."""
    draws = ("data.anchor_draws=3", "evaluate.every=0", "checkpoint.every=11", "evaluate.new_tokens=1")
    whole = alone(config, tmp_path / "whole", *draws)
    run = finish(config, tmp_path / "split", *split(1, 2), *draws)
    ranked.assert_same_training(run.folder, whole)
    resumed = tmp_path / "resumed"
    shutil.copytree(whole, resumed, ignore=lambda _, names: [n for n in names if n > "step-000011" and n[:4] == "step"])
    finish(config, resumed, *split(1, 2), *draws)
    assert "resuming after step 11" in resumed.with_suffix(".log").read_text()
    ranked.assert_same_training(resumed, whole)


@pytest.fixture(scope="module")
def variants(small_target, tmp_path_factory):
    """Configuration of two drafters, and the changes that each makes."""
    changes = {"wide": {"drafter": {"block_size": 6}}, "deep": {"drafter": {"layers": 2}, "loss": {"kl": 0.0}}}
    folder = tmp_path_factory.mktemp("variants")
    listed = [{"name": "wide", "ranks": 2, **changes["wide"]}, {"name": "deep", **changes["deep"]}]
    return ranked.write_config(folder, small_target(), topology={"mode": "split"}, drafters=listed), changes, folder


def test_several_drafters_of_one_stream_are_runs_of_their_own(variants, small_target, tmp_path):
    config, changes, _ = variants
    run = finish(config, tmp_path / "run")
    for name, change in changes.items():
        single = ranked.write_config(tmp_path, small_target(), **change)
        folder = alone(single, tmp_path / name)
        own = run.folder / "drafters" / name
        if name == "wide":  # of the first, the metrics are the run's
            shutil.copy(run.folder / "metrics.jsonl", own / "metrics.jsonl")
        ranked.assert_same_training(own, folder)
        assert (own / "result.json").exists() and len(evaluations(own)) == 3
        assert f"[{name}] after training" in run.said
        assert timeless(evaluations(own)) == timeless(evaluations(folder))


def test_asked_to_end_all_drafters_save_one_step_and_go_on_from_it(variants, tmp_path):
    config, _, _ = variants
    many = ("steps=300", "checkpoint.every=1000", "evaluate.every=0", "evaluate.new_tokens=1")
    run = ranked.start(config, tmp_path / "run", *many)
    try:
        run.until_step(3)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() != 0
        assert run.processes() == []
    finally:
        run.end()
    saved = [sorted(p.name for p in (run.folder / "drafters" / n / "checkpoints").iterdir()) for n in ("wide", "deep")]
    assert len(saved[0]) == 1 and saved[0] == saved[1], run.said
    assert run.said.count("stopped by signal 15") == 2
    step = int(saved[0][0][5:])
    again = ranked.start(config, run.folder, *many)
    try:
        again.until_step(step + 5)
        assert again.said.count(f"resuming after step {step}") == 2
        again.process.kill()  # ranks without their launcher end too
        again.process.wait()
        ranked.eventually(lambda: again.processes() == [], 30)
        assert "is gone" in again.said or "no longer answers" in again.said
    finally:
        again.end()


def test_a_drafter_that_diverges_ends_alone(variants, small_target, tmp_path):
    listed = [
        {"name": "wild", "optimizer": {"muon_rate": 1e30, "adam_rate": 1e30}},
        {"name": "good"},
    ]
    config = ranked.write_config(tmp_path, small_target(), topology={"mode": "split"}, drafters=listed)
    run = ranked.start(config, tmp_path / "run", "evaluate.new_tokens=1", "steps=12")
    try:
        assert run.wait() == 1
        assert run.processes() == []
    finally:
        run.end()
    assert "[wild] error: the loss" in run.said and "the other drafters go on" in run.said
    assert max(losses(run.folder / "drafters" / "good")) == 12 and "[good] after training" in run.said
    assert (run.folder / "drafters" / "good" / "result.json").exists()
    assert not (run.folder / "drafters" / "wild" / "result.json").exists()


def test_ranks_of_one_drafter_that_diverges_leave_when_it_has_been_saved(config, tmp_path):
    run = ranked.start(config, tmp_path / "run", *split(1, 2), "optimizer.muon_rate=1e30", "optimizer.adam_rate=1e30")
    try:
        assert run.wait() == 1
    finally:
        run.end()
    assert "stopped before the update, and saved the state of step" in run.said
    assert list((run.folder / "checkpoints").glob("step-*"))


def test_a_run_goes_on_under_another_topology(config, whole, tmp_path):
    """Stopped as 1:2; then in one process, and as 2:1."""
    run = ranked.start(config, tmp_path / "run", *split(1, 2))
    try:
        run.until_step(2)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() != 0
        assert run.processes() == []
    finally:
        run.end()
    assert "stopped by signal 15" in run.said
    last = max(losses(run.folder))
    assert last < 30
    shutil.copytree(run.folder, tmp_path / "single")
    assert f"resuming after step {last}" in run_log(alone(config, tmp_path / "single"))
    ranked.assert_same_training(tmp_path / "single", whole)
    finish(config, run.folder, *split(2, 1))
    ranked.assert_same_training(run.folder, whole)


def run_log(folder: Path) -> str:
    return folder.with_suffix(".log").read_text()


@pytest.mark.parametrize("when", ["as it starts", "as it trains"])
def test_a_killed_rank_is_named_and_all_end(config, tmp_path, when, record_property):
    seed = int.from_bytes(os.urandom(2), "big")
    draw = random.Random(seed)
    rank = draw.randrange(4)  # two targets, the drafters' leader, a drafter
    print(f"seed {seed}: rank {rank}")
    run = ranked.start(config, tmp_path / "run", *split(2, 2), "steps=3000", "evaluate.new_tokens=1")
    try:
        ranked.eventually(lambda: len(run.ranks()) == 4)
        if when == "as it trains":
            run.until_step(1)
        time.sleep(draw.uniform(0, 3))
        os.kill(run.ranks()[rank], signal.SIGKILL)
        began = time.monotonic()
        ranked.eventually(lambda: run.process.poll() is not None and run.processes() == [], 30)
        took = time.monotonic() - began
    finally:
        run.end()
    print(f"all ended {took:.1f} s after")
    record_property("seconds", took)
    assert run.process.returncode != 0
    named = [line for line in run.said.splitlines() if line.startswith("error: rank ")]
    assert all(line.startswith(f"error: rank {rank} at ") for line in named), run.said
    if when == "as it trains":
        assert len(named) >= 3  # by all the others
    elif not named:  # before it had run a line of ours; then all die of torchrun's SIGTERM, and torchrun tells
        assert re.search(rf"Root Cause.*rank +: {rank} .*exitcode +: -9 ", run.said, re.DOTALL), run.said


def test_a_run_of_killed_ranks_goes_on(config, whole, tmp_path):
    run = ranked.start(config, tmp_path / "run", *split(1, 2))
    try:
        ranked.eventually(lambda: list((run.folder / "checkpoints").glob("step-*")) or run.process.poll() is not None)
        os.kill(run.ranks()[1], signal.SIGKILL)
        assert run.wait() != 0
    finally:
        run.end()
    alone(config, run.folder)
    ranked.assert_same_training(run.folder, whole)
