"""Named spans of a step. On a GPU, work is only queued when its Python line returns, so events mark the device's own
time there; they are read after the step, in one go."""

import contextlib
import time
from collections.abc import Iterator

import torch


class Spans:
    def __init__(self, device: torch.device):
        self.on_gpu = device.type == "cuda"
        self._marks: list[tuple[str, object, object]] = []

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = self._now()
        yield
        self._marks.append((name, began, self._now()))

    def _now(self) -> object:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self) -> dict[str, float]:
        """By name, added up over micro-batches. Waits for the device."""
        if self.on_gpu:
            torch.cuda.synchronize()
        total: dict[str, float] = {}
        for name, began, ended in self._marks:
            took = began.elapsed_time(ended) / 1e3 if self.on_gpu else ended - began
            total[name] = total.get(name, 0.0) + took
        return total
