"""What a step of a launch will take, from what steps alike took before: pure functions.

A step is done in one of three ways: what it needs is "in place", it is "streamed" to the place, or (an environment)
"built" there. `history` keeps what was measured, `timing` measures it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from orchestrator.history import StepTime

if TYPE_CHECKING:
    from orchestrator.plan import LaunchPlan

IN_PLACE, STREAMED, BUILT = "in place", "streamed", "built"
FIRST_STEP = "first step"  # from the runner's start to the trainer's first step, kept beside the steps of launches

_MOST_ALIKE = 5  # of which the median is taken
_BULK = 1 << 20  # bytes below which a transfer tells of round trips, not of the line


@dataclass(frozen=True)
class Expectation:
    """About how long something will take, and on what that rests: completes "about 28 s, …"."""

    seconds: float
    why: str


def way(step: str, bytes_: int, built: bool) -> str:
    """How a step was done, or would be."""
    if step == "environment" and built:
        return BUILT
    return STREAMED if bytes_ else IN_PLACE


def expected(
    times: Iterable[StepTime], step: str, place: str, recipe: str, environment: str, how: str, size: int | None
) -> Expectation | None:
    """What the step will take: as the same recipe's did there; else as another recipe's did that was the same work;
    else, for what is streamed, by the bytes a second of all that went there. None: nothing alike is known.

    `times` are the newest first. `size` is how many bytes would be streamed, None where that is not known.
    """
    there = [time for time in times if time.place == place]
    alike = [time for time in there if (time.step, time.how) == (step, how) and _comparable(how, time.bytes, size)]
    own = [time for time in alike if time.recipe == recipe]
    if own:
        count = len(own[:_MOST_ALIKE])
        return _median(own, "as last time" if count == 1 else f"as the last {count} times")
    others = [time for time in alike if _same_work(time, step, environment)]
    if others:
        return _median(others, f"as {others[0].recipe} there")
    sent = [time for time in there if time.how == STREAMED and time.bytes >= _BULK][:_MOST_ALIKE]
    if how == STREAMED and size is not None and sent:
        rate = sum(time.bytes for time in sent) / max(1e-9, sum(time.seconds for time in sent))
        return Expectation(size / rate, f"at {rate / 1e6:.1f} MB/s as before")
    return None


def latest(times: Sequence[StepTime], step: str, place: str, recipe: str) -> Expectation | None:
    """The same before it is known how the step will be done: as it was done last time."""
    last = next((time for time in times if (time.step, time.place, time.recipe) == (step, place, recipe)), None)
    return expected(times, step, place, recipe, last.environment, last.how, None) if last else None


def _median(times: Sequence[StepTime], why: str) -> Expectation:
    return Expectation(statistics.median(time.seconds for time in times[:_MOST_ALIKE]), why)


def _comparable(how: str, bytes_: int, size: int | None) -> bool:
    """Whether so many bytes are about as many. A build's are 0 where the place downloads, or they are unknown."""
    if size is None or how == IN_PLACE or (how == BUILT and not (bytes_ and size)):
        return True
    return bytes_ <= 2 * size and size <= 2 * bytes_


def _same_work(time: StepTime, step: str, environment: str) -> bool:
    """Whether another recipe's step says something of this one's."""
    if step == FIRST_STEP:
        return False
    return step != "environment" or (environment != "" and time.environment == environment)


def with_times(plan: LaunchPlan, times: Sequence[StepTime]) -> LaunchPlan:
    """The plan with what each step will take, and how long after the start the first step of training will come.
    Nothing is expected of steps from that on at which the launch would be refused."""
    steps, refused = [], False
    for step in plan.steps:
        refused = refused or step.how == "refused"
        how = step.how or way(step.name, step.bytes, False)
        size = None if step.more or (how == BUILT and not step.bytes) else step.bytes
        found = None if refused else expected(times, step.name, plan.place, plan.recipe, plan.environment, how, size)
        steps.append(step if found is None else replace(step, seconds=found.seconds, why=found.why))
    first = None
    if plan.compiling is not None and not refused:
        ident = plan.environment
        first = expected(times, FIRST_STEP, plan.place, plan.recipe, ident, plan.compiling, None)
    return replace(plan, steps=tuple(steps), first_step=first)
