"""Metrics stay (numerator, denominator) pairs until they are printed, so that sums over steps and ranks are right."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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


def _finite(value: Any) -> Any:
    """JSON has no NaN: what is not a number is written as null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    return value


class MetricsFile:
    """Appends one JSON object a line, each flushed, so that a reader never waits and a kill loses nothing."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("a", encoding="utf-8")

    def append(self, record: Mapping[str, Any]) -> None:
        self.file.write(json.dumps(_finite(record)) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()
