"""Checkpoints: whole or not there, the last complete one is never deleted, and any number of devices reads them."""

import dataclasses
import json
import shutil
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from trainer import checkpoint
from trainer.checkpoint import Saver, State, checkpoints
from trainer.config import OptimizerConfig, load
from trainer.errors import TrainerError
from trainer.optimizer import Optimizer
from trainer.vocabulary import load_vocabulary

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "trainer" / "configs" / "demo.yaml"
CONFIG = OptimizerConfig(ema=0.9)


def trained(steps: int, *, seed: int = 0, config: OptimizerConfig = CONFIG) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(6, 9, bias=False), nn.RMSNorm(9), nn.Linear(9, 4, bias=False))
    optimizer = Optimizer(net, config, 100)
    for number in range(steps):
        net(torch.randn(5, 6, generator=torch.Generator().manual_seed(number))).square().sum().backward()
        optimizer.apply(number, optimizer.gradient_norm(torch.tensor(1.0)))
    return net, optimizer


def state(step: int) -> State:
    return State(step=step, settings={}, seconds=1.5, losses=[1.0, 0.5])


def save(folder: Path, optimizer: Optimizer, step: int, *, keep: int = 2) -> Path:
    saver = Saver(folder, keep=keep)
    path = saver.save(optimizer, state(step))
    saver.wait()
    return path


def test_everything_comes_back_bit_by_bit(tmp_path):
    _, optimizer = trained(4)
    path = save(tmp_path, optimizer, 4)
    _, fresh = trained(0, seed=7)
    checkpoint.load(path, fresh)
    saved, loaded = optimizer.tensors(), fresh.tensors()
    assert saved.keys() == loaded.keys() and {name.split(".")[0] for name in saved} == {
        "model", "average", "momentum", "adam",
    }  # fmt: skip
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    for name, parameter in fresh.parameters.items():
        assert torch.equal(parameter, saved[f"model.{name}"])


def test_a_save_holds_the_moment_it_was_asked_for(tmp_path, monkeypatch):
    """Training goes on while it is written."""
    may_write = threading.Event()
    written = checkpoint.dcp.save
    monkeypatch.setattr(checkpoint.dcp, "save", lambda *a, **k: (may_write.wait(30), written(*a, **k)))
    net, optimizer = trained(2)
    then = nn.utils.parameters_to_vector(net.parameters()).clone()
    saver = Saver(tmp_path, keep=2)
    path = saver.save(optimizer, state(2))
    assert not path.exists()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(1.0)
    may_write.set()
    saver.wait()
    other, fresh = trained(0, seed=7)
    checkpoint.load(path, fresh)
    assert torch.equal(nn.utils.parameters_to_vector(other.parameters()), then)


def test_the_newest_are_kept(tmp_path):
    _, optimizer = trained(1)
    for step in (3, 4, 10):
        save(tmp_path, optimizer, step)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000004", "step-000010"]


def test_older_ones_make_room_but_never_the_last(tmp_path, monkeypatch):
    _, optimizer = trained(1)
    for step in (1, 2):
        save(tmp_path, optimizer, step)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(
        checkpoint.shutil,
        "disk_usage",
        lambda path: usage._replace(free=0 if len(checkpoints(tmp_path)) > 1 else 1 << 40),
    )
    save(tmp_path, optimizer, 3, keep=3)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000002", "step-000003"]
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(TrainerError, match=r"a checkpoint takes 0\.07 GB and 0\.00 GB are free; make room"):
        save(tmp_path, optimizer, 4)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000003"]


def test_a_save_that_fails_leaves_nothing_and_is_said(tmp_path, monkeypatch):
    _, optimizer = trained(1)
    first = save(tmp_path, optimizer, 1)

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.dcp, "save", fail)
        saver = Saver(tmp_path, keep=1)
        saver.save(optimizer, state(2))
        with pytest.raises(TrainerError, match=r"could not be written: .*No space left"):
            saver.wait()
    assert [path.name for path in tmp_path.iterdir()] == [first.name]
    saver.save(optimizer, state(2))  # and the saver is as good as new
    saver.wait()
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000002"]


def test_a_failed_save_is_said_in_one_line(tmp_path, monkeypatch):
    """torch's own text is a traceback in the message."""
    _, optimizer = trained(1)

    def fail(*_, **__):
        raise OSError(27, "File too large")

    monkeypatch.setattr("torch.distributed.checkpoint.filesystem._write_item", fail)
    saver = Saver(tmp_path, keep=1)
    saver.save(optimizer, state(1))
    with pytest.raises(TrainerError) as caught:
        saver.wait()
    assert str(caught.value).endswith("could not be written: OSError: [Errno 27] File too large")


def test_half_written_ones_are_none_and_are_removed(tmp_path):
    _, optimizer = trained(1)
    (tmp_path / ".partial-step-000009-77").mkdir()
    (tmp_path / ".partial-step-000009-77" / "state.json").write_text("{}")
    assert checkpoints(tmp_path) == []
    save(tmp_path, optimizer, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_what_else_lies_in_the_folder_is_left_alone(tmp_path):
    _, optimizer = trained(1)
    (tmp_path / "step-000009-best").mkdir()
    (tmp_path / "step-000008").write_text("a file")
    for step in (1, 2, 3):
        save(tmp_path, optimizer, step, keep=1)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000003"]
    assert (tmp_path / "step-000009-best").exists() and (tmp_path / "step-000008").exists()


def test_damaged_and_foreign_ones_are_refused_in_a_sentence(tmp_path):
    config = load(DEMO)
    _, optimizer = trained(1)
    saver = Saver(tmp_path, keep=2)
    path = saver.save(optimizer, dataclasses.replace(state(5), settings=checkpoint.settings_of(config)))
    saver.wait()
    assert checkpoint.read_state(path, config).step == 5
    with pytest.raises(TrainerError, match="written with seed = 0, the configuration says 6"):
        checkpoint.read_state(path, dataclasses.replace(config, seed=6))
    other = Optimizer(nn.Sequential(nn.Linear(6, 8, bias=False), nn.RMSNorm(8), nn.Linear(8, 4, bias=False)), CONFIG, 9)
    with pytest.raises(TrainerError, match=r"cannot be loaded: .*"):
        checkpoint.load(path, other)
    next(path.glob("*.distcp")).write_bytes(b"cut")
    with pytest.raises(TrainerError, match="cannot be loaded") as error:
        checkpoint.load(path, optimizer)
    assert len(str(error.value)) < 400 and "\n" not in str(error.value)
    for content in ({"step": 1}, {"step": 1, "settings": None, "seconds": 1.0}):
        (path / "state.json").write_text(json.dumps(content))
        with pytest.raises(TrainerError, match="not a readable checkpoint"):
            checkpoint.read_state(path, config)


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_evaluation_takes_the_average_where_there_is_one(tmp_path, ema):
    _, optimizer = trained(5, config=dataclasses.replace(CONFIG, ema=ema))
    path = save(tmp_path, optimizer, 5)
    net, _ = trained(0, seed=7)
    checkpoint.load_drafter(path, net)
    wanted = optimizer.average or optimizer.masters
    assert all(torch.equal(parameter, wanted[name]) for name, parameter in net.named_parameters())


@pytest.mark.parametrize(("written_by", "read_by"), [(1, 2), (2, 1)])
def test_another_number_of_processes_reads_it(tmp_path, written_by, read_by):
    """Under torchrun's own process group; every process gets everything."""
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(f"""
        import importlib.util, os, sys, torch, torch.distributed as dist
        from pathlib import Path
        spec = importlib.util.spec_from_file_location("t", {str(Path(__file__))!r})
        t = importlib.util.module_from_spec(spec); spec.loader.exec_module(t)
        folder, write = Path(sys.argv[1]), sys.argv[2] == "write"
        if "RANK" in os.environ: dist.init_process_group("gloo")
        if write:
            _, optimizer = t.trained(3)
            if not dist.is_initialized() or dist.get_rank() == 0: t.save(folder, optimizer, 3)
        else:
            _, optimizer = t.trained(0, seed=7)
            t.checkpoint.load(t.checkpoints(folder)[-1], optimizer)
            _, wanted = t.trained(3)
            same = [torch.equal(a, b) for a, b in zip(optimizer.tensors().values(), wanted.tensors().values())]
            assert all(same) and len(same) > 6
            print("read", flush=True)
        if dist.is_initialized(): dist.barrier(); dist.destroy_process_group()
        """)
    )
    for count, what in ((written_by, "write"), (read_by, "read")):
        start = [sys.executable]
        if count > 1:
            start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        done = subprocess.run(
            [*start, str(program), str(tmp_path / "c"), what],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.count("read") == (count if what == "read" else 0)


def test_a_checkpoint_knows_its_target_in_any_precision(small_target, tmp_path):
    cpu = torch.device("cpu")
    path = small_target()
    of = {dtype: load_vocabulary(path, dtype=dtype, device=cpu) for dtype in (torch.float32, torch.bfloat16)}
    assert of[torch.float32].fingerprint() == of[torch.bfloat16].fingerprint()
    known = dataclasses.replace(state(3), target=of[torch.float32].fingerprint())
    checkpoint.check_target(tmp_path, known, of[torch.bfloat16])
    other = load_vocabulary(small_target(seed=1), dtype=torch.float32, device=cpu)
    with pytest.raises(TrainerError, match="was trained for another target"):
        checkpoint.check_target(tmp_path, known, other)
    checkpoint.check_target(tmp_path, state(3), other)  # one that does not say
