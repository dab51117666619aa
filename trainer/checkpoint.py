"""Checkpoints: a directory a step, complete or not there at all.

step-000200/__0_0.distcp, .metadata   all tensors, as torch.distributed.checkpoint lays them out: `model.*` (float32
                                      masters), `average.*`, `momentum.*`, `adam.*`; any number of devices reads them
            state.json                step, settings that fix the shapes, recent losses, the evaluation at the start

There is no random state to keep: the order of the data, the anchors and the sampling noise are functions of the seed
and the step alone, so the step is the whole position, and resuming reads from the right place at once.

A save copies the tensors off the device and returns; a thread writes them. One save is under way at a time. Tensors
are whole: of a sharded drafter they are gathered at its leader, which alone writes and reads, so that any number of
ranks resumes from the same files.
"""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException

from trainer.config import Config
from trainer.drafter import Drafter
from trainer.errors import TrainerError
from trainer.optimizer import Optimizer
from trainer.vocabulary import Vocabulary

MARGIN = 64 << 20  # bytes that stay free beside a checkpoint


@dataclass(frozen=True, kw_only=True)
class State:
    step: int  # steps done
    settings: dict[str, Any]
    seconds: float  # spent training, over all attempts
    start: dict[str, Any] = field(default_factory=dict)  # the evaluation before training
    losses: list[float] = field(default_factory=list)  # of the last steps, against which a spike is seen
    target: str = ""  # fingerprint of the target that it was trained for


def settings_of(config: Config) -> dict[str, Any]:
    """What a checkpoint must agree on with the configuration that continues or evaluates it."""
    drafter = {name: value for name, value in dataclasses.asdict(config.drafter).items() if name != "initial"}
    optimizer = {"optimizer": config.optimizer.kind, "ema": config.optimizer.ema > 0}
    return json.loads(json.dumps({**drafter, **optimizer, "seed": config.seed, "steps": config.steps}))


def checkpoints(folder: Path) -> list[Path]:
    """Complete ones, oldest first. What else may lie there, such as a copy under another name, is none of ours."""
    ours = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{6,}", path.name) and path.is_dir()]
    return sorted(ours, key=lambda path: int(path.name.removeprefix("step-")))


class Saver:
    """Writes checkpoints into one folder, in the background, and keeps the newest `keep` complete ones."""

    def __init__(self, folder: Path, *, keep: int):
        self.folder, self.keep = folder, keep
        self._staged: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def save(self, optimizer: Optimizer, state: State) -> Path:
        """Begins to write; `wait` says how it went. Of a sharded drafter all ranks call it, and the leader writes.
        Raises TrainerError when the disk has no room."""
        final = self.folder / f"step-{state.step:06d}"
        if optimizer.shards:  # before anything that may fail at the leader alone: the others would wait for it
            self._join()
            self._stage(optimizer)
            if not optimizer.shards.leads:
                return final
        self.wait()
        if final.exists():
            return final
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob(".partial-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        whole = self._staged if optimizer.shards else optimizer.tensors()
        self._make_room(sum(tensor.nbytes for tensor in whole.values()) + MARGIN)
        if not optimizer.shards:
            self._stage(optimizer)
        self._thread = threading.Thread(target=self._write, args=(final, state), name="checkpoint")
        self._thread.start()
        return final

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def wait(self) -> None:
        """Until nothing is being written. Raises TrainerError if the last save failed."""
        self._join()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise TrainerError(f"{self.folder}: the checkpoint could not be written: {_reason(failure)}") from failure

    def _make_room(self, needed: int) -> None:
        """Older checkpoints may go for a new one, but never the last complete one."""
        while (free := shutil.disk_usage(self.folder).free) < needed:
            old = checkpoints(self.folder)[:-1]
            if not old:
                raise TrainerError(
                    f"{self.folder}: a checkpoint takes {needed / 1e9:.2f} GB and {free / 1e9:.2f} GB are free; "
                    "make room there, or lower checkpoint.keep"
                )
            shutil.rmtree(old[0])

    def _stage(self, optimizer: Optimizer) -> None:
        """Into memory that is allocated once; pinned, so that the copies of one device run together."""
        device = None
        for name, tensor in optimizer.gathered():
            if tensor is None:  # at a rank that holds rows only
                continue
            if name not in self._staged:
                pinned = tensor.device.type == "cuda"
                self._staged[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            self._staged[name].copy_(tensor, non_blocking=True)
            device = tensor.device if tensor.is_cuda else device
        if device is not None:
            torch.cuda.synchronize(device)

    def _write(self, final: Path, state: State) -> None:
        partial = self.folder / f".partial-{final.name}-{os.getpid()}"
        try:
            partial.mkdir()
            with _alone():
                dcp.save(self._staged, checkpoint_id=partial, no_dist=True)
            (partial / "state.json").write_text(json.dumps(dataclasses.asdict(state), indent=1))
            for path in partial.iterdir():
                _sync(path)
            partial.rename(final)
            _sync(self.folder)
            for old in checkpoints(self.folder)[: -self.keep]:
                shutil.rmtree(old)
        except BaseException as failure:
            self._failure = failure
            shutil.rmtree(partial, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_state(path: Path, config: Config, *, ignore: tuple[str, ...] = ()) -> State:
    """Raises TrainerError if it is damaged, or was written under settings other than `config`'s."""
    try:
        state = State(**json.loads((path / "state.json").read_text()))
        if not isinstance(state.settings, dict):
            raise ValueError("state.json has no settings")
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


def check_target(path: Path, state: State, vocabulary: Vocabulary) -> None:
    """Raises TrainerError if the checkpoint was trained for another target, which it would draft for badly."""
    if state.target and state.target != vocabulary.fingerprint():
        raise TrainerError(
            f"{path}: was trained for another target than the one of target.path, though of the same shape; "
            "use that one, or another run directory"
        )


def variant_of(path: Path, config: Config) -> Config:
    """Of several drafters, the configuration of the one whose checkpoint this is: its folder has the name."""
    names = {variant.name: variant.config for variant in config.variants}
    found = next((names[part.name] for part in path.resolve().parents if part.name in names), None)
    if names and found is None:
        raise TrainerError(
            f"{path}: which of the drafters {', '.join(names)} is this of? Checkpoints lie in drafters/NAME/checkpoints"
        )
    return found or config


def load(path: Path, optimizer: Optimizer) -> None:
    """Weights and all optimizer state, into what is there. Of a sharded drafter all ranks call it, and only the leader
    needs the files."""
    if optimizer.shards is None:
        _read(path, optimizer.tensors())
        optimizer.loaded()
        return
    whole = optimizer.blank() if optimizer.shards.leads else None
    if whole:
        _read(path, whole)
    optimizer.scatter(whole)


def load_drafter(path: Path, drafter: Drafter) -> None:
    """Only the weights, for evaluation and export: the moving average where there is one."""
    try:
        names = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    except (Exception, CheckpointException) as error:
        raise TrainerError(f"{path}: not a readable checkpoint ({error})") from None
    prefix = "average." if any(name.startswith("average.") for name in names) else "model."
    parameters = dict(drafter.named_parameters())
    tensors = {f"{prefix}{name}": torch.empty(p.shape, dtype=torch.float32) for name, p in parameters.items()}
    if any(p.dtype == torch.float64 for p in parameters.values()):
        tensors = {name: tensor.double() for name, tensor in tensors.items()}
    _read(path, tensors)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[f"{prefix}{name}"])


def _read(path: Path, tensors: dict[str, Tensor]) -> None:
    try:
        with _alone():
            dcp.load(tensors, checkpoint_id=path, no_dist=True)  # each process reads for itself
    except (Exception, CheckpointException) as error:
        raise TrainerError(f"{path}: cannot be loaded: {_reason(error)}") from None


def _reason(error: BaseException) -> str:
    """One line: what torch raises is of many kinds, and wrapped, with whole tracebacks in the text."""
    failures = getattr(error, "failures", None)
    inner = next(iter(failures.values()))[0] if failures else error
    return f"{type(inner).__name__}: {(str(inner).strip().splitlines() or [''])[0]}"


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """One process is what we have; torch warns of it every time."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
