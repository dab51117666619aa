"""How far the trainer is, by the metrics that it appends: phase, step, throughput, and the recipe's health mark."""

from __future__ import annotations

import time
from typing import Any, Callable, Dict, Optional

from .metrics import Follower
from .recorder import Recorder
from .rundir import RunDir

_ORDER = {"starting": 0, "compiling": 1, "training": 2}


class Progress:
    """Reads on at each step, and records. `mark` is told of a generation that proved good."""

    def __init__(self, run: RunDir, records: Recorder, health: Dict[str, Any]) -> None:
        self.mark: Callable[[str, str], Any] = lambda standing, why: None
        self._metrics = Follower(run.file("metrics.jsonl"))
        self._records = records
        self._health = health

    def step(self, stopping: bool) -> None:
        """One piece of what was appended. While the run is stopping its phase stays."""
        if not self._metrics.step():
            return
        summary, records = self._metrics.summary, self._records
        rate = summary.tokens_per_second()
        fields: Dict[str, Any] = {"tokens_per_second": None if rate is None else round(rate, 1)}
        if summary.step is not None and summary.step != records.state.get("step"):
            fields.update(step=summary.step, step_at=time.time())
        if summary.eval is not None:
            fields["eval"] = summary.eval
        records.set(**fields)
        phase = "training" if summary.step is not None else summary.phase
        if not stopping and phase in _ORDER and _ORDER[phase] > _ORDER.get(records.state["phase"], 9):
            records.phase(phase)
        self._look_at_health(summary.step, rate)

    def _look_at_health(self, step: Optional[int], rate: Optional[float]) -> None:
        wanted_step, wanted_rate = self._health.get("step"), self._health.get("tokens_per_second")
        before = self._records.state.get("health")
        if (before and before.get("fast_enough") is not False) or (wanted_step is None and wanted_rate is None):
            return
        if wanted_step is not None and (step is None or step < wanted_step):
            return
        if wanted_rate is not None and rate is None:
            return
        fast = None if wanted_rate is None or rate is None else rate >= wanted_rate
        if (wanted_step is None or before) and not fast:
            return
        reached = {"at": time.time(), "step": step, "tokens_per_second": rate, "fast_enough": fast}
        self._records.set(health=reached)
        self._records.event("health_mark", **{k: v for k, v in reached.items() if k != "at"})
        self._records.urgent()
        if fast is not False:
            at = "" if fast is None else " at %.0f tokens/s" % (rate or 0.0)
            self.mark("good", "reached step %s%s" % (step, at))
