"""The words with which torchrun is started, and what ranks inherit."""

import os
import sys
from types import SimpleNamespace

import pytest

from trainer import cli, launch
from trainer.errors import TrainerError
from trainer.topology import Topology

SPLIT = Topology(mode="split", targets=5, drafters=(3,))


def test_one_machine_starts_all_ranks_alone():
    words = launch.command(SPLIT, ["train", "a.yaml"], {})
    assert words[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert words[3:] == ["--nproc-per-node", "8", "--standalone", "-m", "trainer", "train", "a.yaml"]


def test_several_machines_meet_at_the_first():
    environment = {"ORCH_NODES": "2", "ORCH_NODE_RANK": "1", "ORCH_RENDEZVOUS": "10.0.0.1:29400", "ORCH_RUN_ID": "r1"}
    words = launch.command(SPLIT, ["train", "a.yaml"], environment)
    options = dict(zip(words[3:-4:2], words[4:-4:2], strict=True))
    assert options == {
        "--nproc-per-node": "4", "--nnodes": "2", "--node-rank": "1",
        "--master-addr": "10.0.0.1", "--master-port": "29400", "--rdzv-id": "r1",
    }  # fmt: skip
    assert words[-4:] == ["-m", "trainer", "train", "a.yaml"]


def test_torchrun_understands_every_word():
    from torch.distributed.run import get_args_parser

    environment = {"ORCH_NODES": "2", "ORCH_NODE_RANK": "1", "ORCH_RENDEZVOUS": "10.0.0.1:29400"}
    for each in ({}, environment):
        parsed = get_args_parser().parse_args(launch.command(SPLIT, ["train", "a.yaml"], each)[3:])
        assert parsed.module and parsed.training_script == "trainer"
        assert parsed.training_script_args == ["train", "a.yaml"]


@pytest.mark.parametrize("rendezvous", ["", "10.0.0.1", ":29400", "10.0.0.1:port"])
def test_machines_without_a_meeting_place_are_refused(rendezvous):
    with pytest.raises(TrainerError, match="ADDRESS:PORT"):
        launch.command(SPLIT, [], {"ORCH_NODES": "2", "ORCH_RENDEZVOUS": rendezvous})


def test_shares_of_machines():
    assert launch.own_ranks(8, {"ORCH_NODES": "2", "ORCH_NODE_RANK": "1", "ORCH_RANKS": "5,3"}) == 3
    assert launch.own_ranks(8, {"ORCH_NODES": "4"}) == 2
    with pytest.raises(TrainerError, match="no equal shares"):
        launch.own_ranks(8, {"ORCH_NODES": "3"})
    for shares in ("5,2", "5,2,1"):
        with pytest.raises(TrainerError, match="does not deal 8 ranks out to 2 machines"):
            launch.own_ranks(8, {"ORCH_NODES": "2", "ORCH_RANKS": shares})


def test_ranks_that_are_there_without_machines_that_are_missing():
    assert launch.ranks_present(8, {}) == launch.ranks_present(8, {"ORCH_NODES": "2", "ORCH_RANKS": "5,3"}) == 0
    missing = {"ORCH_NODES": "1", "ORCH_NODES_WANTED": "2"}
    assert launch.ranks_present(8, missing) == 4
    assert launch.ranks_present(8, {**missing, "ORCH_RANKS": "5"}) == 5
    with pytest.raises(TrainerError, match="7 ranks are no equal shares on 2 machines"):
        launch.ranks_present(7, missing)
    with pytest.raises(TrainerError, match="names no share for each of 1 machines"):
        launch.ranks_present(8, {**missing, "ORCH_RANKS": "5,3"})


def test_ranks_share_the_cores_and_what_the_user_says_stands(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(32)))
    monkeypatch.setattr(launch, "memory_free", lambda: 1 << 40)
    inherited = launch.environment_of_ranks(SPLIT, {"PATH": "/bin"})
    assert inherited["PATH"] == "/bin" and inherited["OMP_NUM_THREADS"] == "4"
    assert inherited["TORCHINDUCTOR_COMPILE_THREADS"] == "4"
    assert launch.environment_of_ranks(SPLIT, {"OMP_NUM_THREADS": "7"})["OMP_NUM_THREADS"] == "7"
    # a warm-up, which is one process, has the threads of one of them
    assert launch.threads_of_a_rank(0, SPLIT, {}) == 4 and launch.threads_of_a_rank(3, SPLIT, {}) == 3
    assert launch.threads_of_a_rank(0, SPLIT, {"OMP_NUM_THREADS": "7"}) == 0


@pytest.mark.parametrize(
    ("free", "cores", "processes"), [(None, 8, 8), (None, 99, 32), (0, 8, 1), (5 << 30, 8, 2), (1 << 40, 8, 8)]
)
def test_compiling_takes_no_more_than_half_of_the_memory(monkeypatch, free, cores, processes):
    monkeypatch.setattr(launch, "memory_free", lambda: free)
    assert launch.compile_processes(cores) == processes


def test_ranks_that_compile_at_the_same_time_share_the_memory(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(launch, "memory_free", lambda: 32 << 30)  # 16 compile processes in all
    assert int(launch.environment_of_ranks(SPLIT, {})["TORCHINDUCTOR_COMPILE_THREADS"]) * 8 <= 16


def test_a_containers_limit_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    whole = launch.memory_free()
    assert whole is not None and whole > 100 << 20
    (tmp_path / "memory.max").write_text(f"{100 << 20}\n")
    (tmp_path / "memory.current").write_text(f"{40 << 20}\n")
    assert launch.memory_free() == 60 << 20
    (tmp_path / "memory.current").write_text(f"{140 << 20}\n")
    assert launch.memory_free() == 0


def test_the_command_hands_on_its_own_words(monkeypatch, tmp_path):
    """Not those of the process that called it."""
    became = SimpleNamespace(arguments=None)

    def become(topology, arguments):
        became.arguments = arguments
        raise SystemExit

    monkeypatch.setattr(launch, "become_torchrun", become)
    monkeypatch.setenv("ORCH_RUN_DIR", str(tmp_path))
    words = ["train", "trainer/configs/demo.yaml", "--set", "topology.ranks=2", "--seed", "3"]
    with pytest.raises(SystemExit):
        cli.main(words)
    assert became.arguments == words


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"ORCH_NODES": "x"}, "ORCH_NODES must be a whole number, not `x`"),
        ({"ORCH_NODES": "0"}, "numbered from 0"),
        ({"ORCH_NODES": "2", "ORCH_NODE_RANK": "5", "ORCH_RANKS": "1,1"}, "numbered from 0"),
        ({"ORCH_NODES": "2", "ORCH_RANKS": "a,b"}, "does not deal 2 ranks out"),
        ({"ORCH_NODES": "2", "ORCH_RANKS": "3,-1"}, "does not deal 2 ranks out"),
        ({"ORCH_NODES": "2", "ORCH_RANKS": "2,0"}, "does not deal 2 ranks out"),
    ],
)
def test_what_the_launcher_is_told_wrong_is_one_sentence(environment, said):
    with pytest.raises(TrainerError, match=said):
        launch.own_ranks(2, environment)
