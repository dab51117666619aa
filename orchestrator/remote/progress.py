"""How far the trainer is, by the metrics that it appends: phase, step, throughput, and the recipe's health mark."""

from __future__ import annotations

import time
from typing import Any, Callable, Dict, Optional

from .metrics import Compiled, Follower
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

    def told(self) -> Optional[Dict[str, Any]]:
        """`{"phase", "step", "tokens_per_second"}` by what the program here has told, None while it has not."""
        summary = self._metrics.summary
        if summary.step is None and summary.phase not in _ORDER:
            return None
        return {
            "phase": "training" if summary.step is not None else summary.phase,
            "step": summary.step,
            "tokens_per_second": self._records.state.get("tokens_per_second"),
        }

    def adopt(self, told: Dict[str, Any]) -> None:
        """What another place's program tells of the run, where the one here tells nothing."""
        if self.told() is not None:
            return
        if told.get("step") is not None and told["step"] != self._records.state.get("step"):
            rate = told.get("tokens_per_second")
            self._records.set(step=told["step"], step_at=time.time(), tokens_per_second=rate)
        self._advance(str(told.get("phase")))

    def begin_anew(self) -> None:
        """The program is started once more: what the first one told of its compiling is not the second one's."""
        self.step(stopping=True)
        self._metrics.summary.compiled = Compiled()
        self._records.set(compile=None)

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
        fields["compile"] = summary.compiled.summary()
        records.set(**fields)
        if not stopping:
            self._advance("training" if summary.step is not None else str(summary.phase))
        self._look_at_health(summary.step, rate)

    def _advance(self, phase: str) -> None:
        if phase in _ORDER and _ORDER[phase] > _ORDER.get(self._records.state["phase"], 9):
            self._records.phase(phase)

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
