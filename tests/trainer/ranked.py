"""Runs of several ranks as a user starts them, of a drafter so small that they are mostly imports."""

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import yaml
from safetensors.numpy import save_file
from torch.distributed import checkpoint as dcp

from tests.trainer import forked

ROOT = Path(__file__).parents[2]
LIMIT = 120  # seconds that a run may take on a busy machine


def write_config(folder: Path, target: Path, **changes: object) -> Path:
    """A configuration with data and prompts of its own; `changes` are laid over its sections."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(10, 30, 40)
    save_file(
        {
            "tokens": draw.integers(2, 96, lengths.sum()),
            "lengths": lengths,
            "prompt_lengths": lengths // 4,
        },
        folder / "rows.safetensors",
    )
    prompts = [{"tokens": draw.integers(2, 96, 6).tolist(), "domain": "some"} for _ in range(3)]
    (folder / "prompts.json").write_text(json.dumps(prompts))
    settings: dict = {
        "name": "ranked",
        "steps": 30,
        "device": "cpu",
        "threads": 1,
        "attention": "dense",
        "print_every": 10,
        "target": {"path": str(target)},
        "data": {"paths": str(folder / "rows.safetensors"), "row_length": 32, "rows_per_step": 6},
        "drafter": {"mask_token": 1, "target_layers": [1, 2], "layers": 1, "block_size": 4},
        "loss": {"cross_entropy": 0.5, "kl": 0.5, "anchors_per_row": 6},
        "optimizer": {"muon_rate": 1e-3, "adam_rate": 1e-4},
        "checkpoint": {"every": 10, "keep": 9},
        "evaluate": {"prompts": str(folder / "prompts.json"), "new_tokens": 6, "every": 20, "every_prompts": 2},
        "topology": {"timeout": LIMIT},
    }
    for name, change in changes.items():
        settings[name] = {**settings.get(name, {}), **change} if isinstance(change, dict) else change
    path = folder / f"config-{len(list(folder.glob('config-*')))}.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


@dataclass
class Run:
    """One attempt, under way or over."""

    folder: Path  # ORCH_RUN_DIR
    process: subprocess.Popen

    @property
    def said(self) -> str:
        return self.folder.with_suffix(".log").read_text()

    def wait(self) -> int:
        return self.process.wait(LIMIT)

    def ranks(self) -> dict[int, int]:
        """Process ids of the ranks, by rank, of those that torchrun has started by now."""
        found = {}
        for path in Path("/proc").iterdir():
            try:
                if path.name.isdigit() and parent(int(path.name)) == self.process.pid:
                    environment = dict(
                        pair.split("=", 1) for pair in (path / "environ").read_text().split("\0") if "=" in pair
                    )
                    if "-m\0trainer\0" in (path / "cmdline").read_text() and "RANK" in environment:
                        found[int(environment["RANK"])] = int(path.name)
            except OSError:
                continue
        return found

    def processes(self) -> list[int]:
        """Whatever there is of this run: launcher, ranks, companions, guards."""
        mark = f"ORCH_RUN_DIR={self.folder}\0"
        return [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and mark in _text(p / "environ")]

    def until_step(self, step: int) -> None:
        eventually(lambda: max(losses(self.folder), default=0) >= step or self.process.poll() is not None)
        assert self.process.poll() is None, self.said

    def end(self) -> None:
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.process.wait()


def _text(path: Path) -> str:
    """Empty of a process that has ended, a zombie included."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def parent(pid: int) -> int:
    return int((Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[1])


def eventually(holds: Callable[[], bool], limit: float = LIMIT) -> None:
    ends = time.monotonic() + limit
    while not holds():
        assert time.monotonic() < ends, "this has not come about"
        time.sleep(0.05)


def start(config: Path, folder: Path, *overrides: str) -> Run:
    """Under torchrun, where the configuration has several ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [word for text in overrides for word in ("--set", text)]
    inherited = {name: value for name, value in os.environ.items() if name != "ORCH_METRICS"}
    with folder.with_suffix(".log").open("a") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "trainer", "train", str(config), *words],
            cwd=ROOT,
            env={**inherited, "ORCH_RUN_DIR": str(folder), "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    return Run(folder=folder, process=process)


def finish(config: Path, folder: Path, *overrides: str) -> Run:
    """To its end, which must be a good one."""
    run = start(config, folder, *overrides)
    try:
        assert run.wait() == 0, run.said
    finally:
        run.end()
    return run


def alone(config: Path, folder: Path, *overrides: str) -> Path:
    """The same in one process, to its good end; -> its folder."""
    words = [word for text in overrides for word in ("--set", text)]
    log = folder.with_suffix(".log")
    process = forked.start(["train", str(config), *words], run_dir=folder, log=log)
    process.join(LIMIT)
    assert process.exitcode == 0, log.read_text()
    return folder


def split(targets: int, drafters: int) -> tuple[str, ...]:
    return "topology.mode=split", f"topology.targets={targets}", f"topology.drafters={drafters}"


def records(folder: Path, metrics: str = "metrics.jsonl") -> list[dict]:
    """Whole lines only: it may be growing."""
    path = folder / metrics
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def losses(folder: Path, metrics: str = "metrics.jsonl") -> dict[int, float]:
    return {each["step"]: each["loss"] for each in records(folder, metrics) if "loss" in each}


def evaluations(folder: Path, metrics: str = "metrics.jsonl") -> list[dict]:
    return [each["eval"] for each in records(folder, metrics) if "eval" in each]


def last_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All of the newest checkpoint, and its step."""
    path = max((folder / "checkpoints").glob("step-*"))
    return {"step": torch.tensor(int(path.name[5:])), **tensors(path)}


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """All of a checkpoint."""
    entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    found = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(found, checkpoint_id=path, no_dist=True)
    return found


def assert_same_training(ours: Path, theirs: Path, *, tolerance: float = 1e-5) -> None:
    """The same loss at every step, and the same weights and optimizer state at the end."""
    mine, other = losses(ours), losses(theirs)
    assert mine.keys() == other.keys() and mine
    assert max(abs(mine[step] - other[step]) for step in mine) < tolerance
    state, wanted = last_tensors(ours), last_tensors(theirs)
    assert state.keys() == wanted.keys()
    for name, tensor in state.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-3, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")
