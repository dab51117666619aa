"""Checkpoints: a directory a step, complete or not there at all.

step-000200/drafter.safetensors   weights, under the names of published DFlash drafters
            optimizer.pt          momenta
            state.json            step, settings that fix the shapes, the evaluation made at the start
"""

import dataclasses
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from trainer.config import Config
from trainer.drafter import Drafter
from trainer.errors import TrainerError
from trainer.optimizer import Optimizer


@dataclass(frozen=True, kw_only=True)
class State:
    step: int  # steps done
    settings: dict[str, Any]
    seconds: float  # spent training, over all attempts
    start: dict[str, Any]  # the evaluation before training


def settings_of(config: Config) -> dict[str, Any]:
    """What a checkpoint must agree on with the configuration that continues or evaluates it."""
    drafter = dataclasses.asdict(config.drafter)
    return json.loads(json.dumps({**drafter, "seed": config.seed, "steps": config.steps}))


def save(folder: Path, drafter: Drafter, optimizer: Optimizer, state: State, *, keep: int) -> Path:
    final = folder / f"step-{state.step:06d}"
    if final.exists():
        return final
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".partial-{state.step:06d}-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    save_file(drafter.state_dict(), partial / "drafter.safetensors")
    torch.save(optimizer.state(), partial / "optimizer.pt")
    (partial / "state.json").write_text(json.dumps(dataclasses.asdict(state), indent=1))
    for path in partial.iterdir():
        _sync(path)
    partial.rename(final)
    _sync(folder)
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checkpoints(folder: Path) -> list[Path]:
    """Complete ones, oldest first."""
    return sorted(folder.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))


def read_state(path: Path, config: Config, *, ignore: tuple[str, ...] = ()) -> State:
    """Raises TrainerError if it is damaged, or was written under settings other than `config`'s."""
    try:
        state = State(**json.loads((path / "state.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise TrainerError(f"{path}: not a readable checkpoint ({error})") from None
    wanted = settings_of(config)
    for name in wanted.keys() - set(ignore):
        if state.settings.get(name) != wanted[name]:
            raise TrainerError(
                f"{path}: was written with {name} = {state.settings.get(name)}, the configuration says {wanted[name]}; "
                "use the same settings, or another run directory"
            )
    return state


def load(path: Path, drafter: Drafter, optimizer: Optimizer | None = None) -> None:
    try:
        drafter.load_state_dict(load_file(path / "drafter.safetensors"))
        if optimizer is not None:
            optimizer.load(torch.load(path / "optimizer.pt", weights_only=True, map_location="cpu"))
    except (OSError, SafetensorError, RuntimeError, KeyError) as error:
        raise TrainerError(f"{path}: cannot be loaded: {error}") from None
