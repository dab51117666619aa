"""Asking nvidia-smi at intervals, one question at a time, without waiting for it."""

from __future__ import annotations

import time
from typing import Any, Dict, List, Optional

from . import nvidia_smi


class Sampler:
    """`step` is called often; it returns a line for gpu.jsonl whenever an answer, or the lack of one, is
    known."""

    def __init__(self, every: float, timeout: float = nvidia_smi.TIMEOUT) -> None:
        self.every = every
        self._timeout = timeout
        self._query: Optional[nvidia_smi.Query] = None
        self._left_behind: Optional[nvidia_smi.Query] = None
        self._next = 0.0
        self._known: Dict[int, str] = {}

    def step(self) -> Optional[Dict[str, Any]]:
        if self.every <= 0:
            return None
        if self._query is None:
            now = time.monotonic()
            if now < self._next:
                return None
            self._next = now + self.every
            if self._left_behind is not None and self._left_behind.pid is not None:
                return {"at": round(time.time(), 3), "error": "an earlier nvidia-smi still hangs"}
            self._left_behind = None
            if not nvidia_smi.here():
                return None
            self._query = nvidia_smi.Query(self._timeout)
        if not self._query.poll():
            return None
        query, self._query = self._query, None
        if query.pid is not None:
            self._left_behind = query  # a second one would hang likewise: none is started before this one is gone
        return nvidia_smi.sample_line(time.time(), query.outcome(), self._known)

    def pids(self) -> List[int]:
        """Of the nvidia-smi under way or left behind: they are no part of the run."""
        found = [query.pid for query in (self._query, self._left_behind) if query is not None]
        return [pid for pid in found if pid is not None]
