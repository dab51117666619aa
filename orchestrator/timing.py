"""How long the steps of a launch take: measured as they are reported, kept in the workstation's index."""

from __future__ import annotations

import time
from collections.abc import Sequence

from orchestrator import history
from orchestrator.expect import BUILT, FIRST_STEP, Expectation, expected, latest, way
from orchestrator.history import StepTime
from orchestrator.launch import Launch, Report
from orchestrator.run import RunStatus

_CHECKING = ("digesting",)  # what a look at an environment that is there already tells


class Timed:
    """A report that passes all on, and measures: a step is known by its name, so a new one needs nothing here."""

    def __init__(self, report: Report) -> None:
        self.launches: Sequence[Launch] = ()  # to be set before the first step
        self._report = report
        self._before: list[StepTime] | None = None
        self._times: list[StepTime] = []
        self._began = 0.0
        self._bytes: dict[str, int] = {}
        self._how: str | None = None  # as far as the step has shown

    def begin(self, step: str) -> None:
        self._began, self._bytes, self._how = time.monotonic(), {}, None
        self._report.begin(step)

    def progress(self, step: str, what: str, done: int, total: int | None, unit: str) -> None:
        if unit == "B" and total:
            self._bytes[what] = done
        if step == "environment" and not what.endswith(_CHECKING):
            self._how = BUILT
        self._report.progress(step, what, done, total, unit)

    def note(self, step: str, what: str) -> None:
        self._report.note(step, what)

    def end(self, step: str, what: str) -> None:
        seconds = time.monotonic() - self._began
        built = [launch.environment for launch in self.launches if launch.environment is not None]
        sent = sum(self._bytes.values())
        if step == "environment":
            sent = sum(one.bytes_sent for one in built)
        how = way(step, sent, any(one.how != "there" for one in built))
        self._times.append(self._time(step, how, sent, seconds))
        self._report.end(step, what)

    def expected(self, step: str) -> Expectation | None:
        """What the step that goes on will take in all; what it has shown so far counts."""
        if not self.launches:
            return None
        if self._before is None:
            self._before = history.step_times()
        place, recipe, ident = self._place, self._recipe, self._environment
        if self._how is None:
            return latest(self._before, step, place, recipe)
        return expected(self._before, step, place, recipe, ident, self._how, None)

    def expected_first_step(self) -> Expectation | None:
        """How long after its start the run that was started takes its first step."""
        if self._before is None:
            self._before = history.step_times()
        place, recipe, ident = self._place, self._recipe, self._environment
        return expected(self._before, FIRST_STEP, place, recipe, ident, self._compiling, None)

    def first_step(self, before: RunStatus | None, now: RunStatus) -> None:
        """Told each look at the run: keeps how long after its start the first step came, where both were seen."""
        came = before is not None and before.step is None and now.step is not None
        if came and now.started is not None and now.step_at is not None and now.step_at >= now.started:
            self._times.append(self._time(FIRST_STEP, self._compiling, 0, now.step_at - now.started))
            self.keep()

    def keep(self) -> None:
        """Put what was measured into the index."""
        history.add_times(self._times)
        self._times = []

    def _time(self, step: str, how: str, sent: int, seconds: float) -> StepTime:
        return StepTime(time.time(), step, self._place, self._recipe, self._environment, how, sent, seconds)

    @property
    def _place(self) -> str:
        return ", ".join(launch.place.name for launch in self.launches)

    @property
    def _recipe(self) -> str:
        return self.launches[0].recipe.name

    @property
    def _environment(self) -> str:
        found = next((launch.environment for launch in self.launches if launch.environment is not None), None)
        return found.id if found else ""

    @property
    def _compiling(self) -> str:
        """What the run's cache promised, which is what its first step waits for."""
        found = self.launches[0].cache
        return found.predicted if found is not None else ""
