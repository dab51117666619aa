"""Metrics stay (numerator, denominator) pairs until they are printed, so that sums over steps and ranks are right."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.loss import HeadResult

Metrics = dict[str, tuple[float, float]]


def add(first: Metrics, second: Metrics) -> Metrics:
    names = dict.fromkeys([*first, *second])
    zero = (0.0, 0.0)
    return {
        name: (
            first.get(name, zero)[0] + second.get(name, zero)[0],
            first.get(name, zero)[1] + second.get(name, zero)[1],
        )
        for name in names
    }


def ratio(pair: tuple[float, float]) -> float:
    """NaN when nothing was counted: a ratio of nothing is unknown, not zero."""
    return pair[0] / pair[1] if pair[1] else float("nan")


RECALL = (1, 4, 16, 64)
OVERALL = (
    "loss",  # per unit of weight
    "nll",  # per slot, unweighted
    "accepted_in_training",  # per block: greedy drafts right before the first wrong one, and the bonus token
    "first_slot_accuracy",  # of the first prediction of a block
    *(f"recall_{k}" for k in RECALL),  # per slot: the label is among the k likeliest tokens
)


@dataclass(frozen=True, kw_only=True)
class TrainingMetrics:
    """Measures of the training batches on their device. Those of micro-batches, steps and ranks add up: sum `pairs`."""

    pairs: Tensor  # float64 [len(OVERALL) + P, 2]: OVERALL in its order, then the accuracy of prediction 0 … P-1

    def __add__(self, other: "TrainingMetrics") -> "TrainingMetrics":
        return TrainingMetrics(pairs=self.pairs + other.pairs)

    def read(self) -> tuple[Metrics, list[tuple[float, float]]]:
        """What OVERALL names, and the accuracy by position in the block; waits for the device, once."""
        pairs = [(numerator, denominator) for numerator, denominator in self.pairs.tolist()]
        return dict(zip(OVERALL, pairs, strict=False)), pairs[len(OVERALL) :]


def training_metrics(
    result: HeadResult, *, weight: Tensor, block: Tensor, position: Tensor, blocks: int, positions: int
) -> TrainingMetrics:
    """Measure a micro-batch, without waiting for the device.

    weight, block, position [M] as given to the head pass: an entry of weight 0 is padding; block numbers are below
    `blocks` (R * N), positions below `positions` (P: the predictions of a block). The accepted length is taken over the
    blocks whose first prediction is supervised; a prediction that is not supervised ends the run of right ones.
    """
    counted = weight > 0
    hit = (result.rank == 0) & counted
    place = block * positions + position  # padding may name a place that is taken, and adds 0 to it

    def table(what: Tensor) -> Tensor:
        empty = torch.zeros(blocks * positions, dtype=torch.int32, device=what.device)
        return empty.scatter_add_(0, place, what.int()).view(blocks, positions)

    supervised, right = table(counted), table(hit)
    opened = supervised[:, 0]
    leading = right.cumprod(1).sum(1)
    slots = counted.sum()
    overall = [
        (result.total.detach(), result.weight),
        (result.nll.where(counted, 0.0).sum(dtype=torch.float64), slots),
        ((leading + opened).sum(), opened.sum()),
        (right[:, 0].sum(), opened.sum()),
        *(((counted & (result.rank < k)).sum(), slots) for k in RECALL),
    ]
    flat = torch.stack([each.double() for pair in overall for each in pair])
    by_position = torch.stack([right.sum(0), supervised.sum(0)], 1)
    return TrainingMetrics(pairs=torch.cat([flat.view(-1, 2), by_position.double()]))


def finite(value: Any) -> Any:
    """JSON has no NaN: what is not a number is written as null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return value


class MetricsFile:
    """Appends one JSON object a line, each flushed, so that a reader never waits and a kill loses nothing."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("a", encoding="utf-8")

    def append(self, record: Mapping[str, Any]) -> None:
        self.file.write(json.dumps(finite(record)) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()
