"""Where step records go: metrics.jsonl always; TensorBoard and Weights & Biases when the configuration asks.

Both of the latter are optional packages of the environment. They get the numbers of a record under its own names,
nested ones joined by `/`.
"""

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer.config import Config
from trainer.errors import TrainerError
from trainer.metrics import MetricsFile


class Trackers:
    def __init__(self, config: Config, *, run_dir: Path, metrics_path: Path):
        self.file = MetricsFile(metrics_path)
        self.board = self.wandb = None
        if config.report.tensorboard:
            _need("tensorboard", "report.tensorboard: true")
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(run_dir / "tensorboard"))
        if config.report.wandb != "off":
            wandb = _need("wandb", f"report.wandb: {config.report.wandb}")
            self.wandb = wandb.init(
                project=config.report.wandb_project,
                name=config.name,
                dir=str(run_dir),
                id=run_dir.resolve().name,
                resume="allow",
                mode=config.report.wandb,
                settings=wandb.Settings(console="off"),
            )

    def append(self, record: Mapping[str, Any]) -> None:
        self.file.append(record)
        step = record["step"]
        numbers = dict(_numbers(record))
        if self.board is not None:
            for name, value in numbers.items():
                self.board.add_scalar(name, value, step)
        if self.wandb is not None:
            self.wandb.log(numbers, step=step)

    def close(self) -> None:
        self.file.close()
        if self.board is not None:
            self.board.close()
        if self.wandb is not None:
            self.wandb.finish()
            importlib.import_module("wandb").teardown()  # else its writer, a process of its own, may outlive the run


class NoTrackers:
    """Of ranks that do not lead."""

    def append(self, record: Mapping[str, Any]) -> None:
        """The leader writes what all did."""

    def close(self) -> None:
        """Nothing is open."""


def _need(package: str, setting: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError:
        raise TrainerError(
            f"{setting} needs the package {package}, which this environment lacks; "
            "add it to the environment's requirements and lock it again, or leave the setting out"
        ) from None


def _numbers(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and name not in ("step", "time"):
            yield f"{prefix}{name}", float(value)
