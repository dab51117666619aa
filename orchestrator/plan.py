"""What a launch would do, in its order, with the bytes it would send. Reads facts; changes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from orchestrator import elastic
from orchestrator.config import EnvironmentSpec, recipe_digest
from orchestrator.environment.build import CHECK_LIMIT, BuiltEnvironment, EnvironmentPlan, request, status
from orchestrator.environment.build import plan as plan_environment
from orchestrator.generations import Pinned
from orchestrator.gpus import step as gpus_step
from orchestrator.launch import STEPS, Launch, connect, left_behind, no_cache, of, planned_cache
from orchestrator.run import BEFORE_TRAINING
from orchestrator.several import in_one_line, reach, reach_all, together
from orchestrator.user import user_name

if TYPE_CHECKING:
    from orchestrator.expect import Expectation


@dataclass(frozen=True)
class PlannedStep:
    """One step of the launch: what it finds in place or would do, and the bytes it would stream.

    `how` is one of `expect`'s ways, or "refused" where the launch would end with this step; "" means streamed where
    there are bytes, and in place where there are none.
    """

    name: str
    what: str
    bytes: int = 0
    how: str = ""
    seconds: float | None = None  # expected, where something alike is known
    why: str = ""  # on what that rests
    more: bool = False  # bytes beyond these, of files that have to be fetched to this machine first


@dataclass(frozen=True)
class LaunchPlan:
    """All steps, and the requests they make over the one channel."""

    recipe: str
    place: str
    steps: tuple[PlannedStep, ...]
    requests: tuple[str, ...]
    environment: str = ""  # its id
    compiling: str | None = None  # what the cache promises; "" where the run has none, None where it is not known
    first_step: Expectation | None = None  # how long after its start the run takes its first step

    @property
    def bytes(self) -> int:
        """Bytes that would be streamed to the place."""
        return sum(step.bytes for step in self.steps)

    @property
    def more(self) -> bool:
        """Whether more than these would be, how many is not known yet."""
        return any(step.more for step in self.steps)

    @property
    def seconds(self) -> float | None:
        """Expected of all steps together; None where that of one is not known."""
        known = [step.seconds for step in self.steps if step.seconds is not None]
        return sum(known) if len(known) == len(self.steps) else None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "bytes": self.bytes, "more": self.more, "seconds": self.seconds}


def plan(all_: Sequence[Launch]) -> LaunchPlan:
    """Of a launch at one place, or at several, which are asked at once; these are connected with each other too."""
    if all_[0].recipe.elastic is not None:
        return _elastic(all_)
    plans = together(plan_launch, all_)
    return plans[0] if len(all_) == 1 else _together(all_, plans, reach(all_))


def _elastic(all_: Sequence[Launch]) -> LaunchPlan:
    """Of those places that would take part, and with what the run would go on from."""
    notes = _Notes()
    present: Sequence[Launch] = elastic.answering(all_, connect, notes)[0]
    present, ways = reach_all(present, notes) if len(present) > 1 else (present, "")
    going_on = elastic.going_on(present)
    plans = together(plan_launch, present)
    plan = _together(present, plans, ways) if len(present) > 1 else plans[0]
    added = {name: f"; {what}" for name, what in notes.said}
    if going_on is not None:
        added["claim"] = f", {elastic.told(going_on)}"
    steps = tuple(replace(step, what=step.what + added.get(step.name, "")) for step in plan.steps)
    return replace(plan, steps=steps, requests=(*plan.requests, "which run does this one go on from?"))


class _Notes:
    """A report that keeps what the user should know."""

    def __init__(self) -> None:
        self.said: list[tuple[str, str]] = []

    def begin(self, step: str) -> None: ...

    def progress(self, step: str, what: str, done: int, total: int | None, unit: str) -> None: ...

    def note(self, step: str, what: str) -> None:
        self.said.append(("connect" if step == "reach" else step, what))  # of one place there is no step `reach`

    def end(self, step: str, what: str) -> None: ...


def _together(all_: Sequence[Launch], plans: Sequence[LaunchPlan], ways: str) -> LaunchPlan:
    steps = [_merged(all_, of) for of in zip(*(plan.steps for plan in plans), strict=True)]
    steps.insert(3, PlannedStep("reach", ways))
    reaching = ("listen for the other places", "connect to each of them, on every port", "end the listening")
    requests = (plans[0].requests[0], *reaching, *plans[0].requests[1:])
    first, names = plans[0], ", ".join(plan.place for plan in plans)
    return LaunchPlan(first.recipe, names, tuple(steps), requests, first.environment, first.compiling)


def _merged(all_: Sequence[Launch], steps: Sequence[PlannedStep]) -> PlannedStep:
    told = [one.what for one in steps]
    if steps[0].name in ("resolve", "claim"):
        told = told[:1]  # which run it is the first place says
    ways = [one.how for one in steps]
    how = next((how for how in ("refused", "built", "streamed") if how in ways), ways[0])
    more = any(one.more for one in steps)
    return PlannedStep(steps[0].name, in_one_line(all_, told), sum(one.bytes for one in steps), how, more=more)


def plan_launch(launch: Launch) -> LaunchPlan:
    """Ask the place what is there already. The session stays open in `launch`.

    Raises:
        OrchError: what would make the launch itself fail before it starts anything.
    """
    steps, requests = [], []
    for name, carry in STEPS[:3]:
        steps.append(PlannedStep(name, carry(launch)))
    requests.append("is the recipe pinned to a generation?")
    what = _claim(launch)
    steps.append(PlannedStep("claim", what))
    requests.append("claim the run, under a lock")
    step, asked = _gpus(launch)
    steps.append(step)
    requests += asked
    if launch.pin is not None:
        return _pinned(launch, launch.pin, steps, requests)
    assert launch.spec is not None and launch.snapshot is not None
    environment = plan_environment(launch.connected, launch.spec)
    step, asked = _environment(environment)
    steps.append(step)
    requests += asked
    snapshot = launch.snapshot
    there = snapshot.path in launch.connected.call("have", {"paths": [snapshot.path]}).data["paths"]
    requests.append("is this code there?")
    left = f"; {left_behind(snapshot)}" if snapshot.left else ""
    if there:
        steps.append(PlannedStep("code", f"{snapshot.digest}, in place{left}"))
    else:
        what = f"{snapshot.digest}, {snapshot.files} files{of(snapshot)} to send{left}"
        steps.append(PlannedStep("code", what, len(snapshot.tar)))
        requests.append(f"put {snapshot.path}")
    step, asked = _cache(launch)
    steps.append(step)
    requests += asked
    steps.append(PlannedStep("start", "the runner in tmux, which starts the trainer"))
    requests.append("start, and wait until the runner has taken over")
    return _whole(launch, steps, requests, environment.id)


def _whole(launch: Launch, steps: Sequence[PlannedStep], requests: Sequence[str], environment: str) -> LaunchPlan:
    compiling = None
    if launch.environment is not None and not launch.warm:
        compiling = "" if launch.cache is None else launch.cache.predicted
    return LaunchPlan(
        launch.recipe.name, launch.place.name, tuple(steps), tuple(requests), environment, compiling=compiling
    )


def _pinned(launch: Launch, pin: Pinned, steps: list[PlannedStep], requests: list[str]) -> LaunchPlan:
    """A launch that takes all of a generation, which is at the place already."""
    found = launch.connected.call("env_status", {"id": pin.environment, "verify": "quick"}, timeout=CHECK_LIMIT).data
    polluted = found["polluted"]
    state = f"polluted, so it would be refused: {polluted['summary']}" if polluted else "in place"
    state = state if found["present"] or polluted else "gone, so the launch would fail"
    of = f"of generation {pin.generation}"
    how = "in place" if state == "in place" else "refused"
    steps.append(PlannedStep("environment", f"{pin.environment_name} {pin.environment} {of}, {state}", how=how))
    there = launch.connected.call("code_tree", {"digest": pin.code_digest}, timeout=120.0).data
    state = "in place" if there["intact"] else "changed, so it would be refused" if there["present"] else "gone"
    how = "in place" if state == "in place" else "refused"
    steps.append(PlannedStep("code", f"{pin.code_digest} {of}, {state}", how=how))
    steps.append(PlannedStep("start", "the runner in tmux, which starts the trainer"))
    requests += [f"is environment {pin.environment} there, and clean?", f"is code/{pin.code_digest} there, and intact?"]
    if found["present"]:
        step, asked = _cache(launch)
        steps.insert(-1, step)
        requests += asked
    else:
        steps.insert(-1, PlannedStep("cache", f"of generation {pin.generation}; not known without its environment"))
    requests.append("start, and wait until the runner has taken over")
    return _whole(launch, steps, requests, pin.environment)


def _environment(plan: EnvironmentPlan) -> tuple[PlannedStep, list[str]]:
    requests = [f"is environment {plan.id} there, and clean?"]
    if plan.polluted:
        what = f"{plan.id} is polluted, so it would be refused: {plan.polluted}"
        return PlannedStep("environment", what, how="refused"), requests
    if plan.refused is not None:
        what = f"{plan.id} is not there, and building it would be refused: {plan.refused.message}"
        what += f"; try: {plan.refused.hint}" if plan.refused.hint else ""
        return PlannedStep("environment", what, how="refused"), requests
    if plan.present:
        return PlannedStep("environment", f"{plan.id}, in place"), requests
    missing = [file for file in plan.files if not file.there]
    what = f"{plan.id}, to build from {len(plan.files)} files"
    if plan.to_fetch:
        what += f"; {plan.to_fetch} of them to fetch to this machine first"
    more = any(file.size is None for file in missing)
    what += ", so the bytes are not known yet" if more else ""
    if missing:
        requests.append("which of its files are there?")
    requests += [f"put {file.name}" for file in missing]
    requests.append("build it, and verify it")
    return PlannedStep("environment", what, sum(file.size or 0 for file in missing), "built", more=more), requests


def _cache(launch: Launch) -> tuple[PlannedStep, list[str]]:
    """What is known of the compile cache, which is only where the environment is there: its files are in the key."""
    from orchestrator.compile_cache.words import expected

    asked = ["which compile cache is there, and which are like it?"]
    ident = launch.pin.environment if launch.pin is not None else request(launch.connected, _spec(launch)).id
    found = status(launch.connected, ident, verify="no")
    if not found["present"]:
        return PlannedStep(
            "cache", "not known before the environment is built: torch's files are part of its key"
        ), asked
    launch.environment = BuiltEnvironment(ident, found["path"], "", found["manifest"], 0, "there")
    planned, send = planned_cache(launch)
    if planned is None:
        return PlannedStep("cache", no_cache(launch.recipe)), []
    launch.cache = planned.prediction
    notes = "".join(f"; {note}" for note in planned.notes)
    if send is None:
        how = "in place" if planned.prediction is not None and planned.prediction.used else ""
        return PlannedStep("cache", expected(planned.prediction, how) + notes), asked
    cost, exact = send.cost
    asked += ["which of its files are there?"] if send.lacking is not None else []
    asked.append(f"stage {send.stored.name} as {send.encoding}")
    how = f"{'' if exact else 'about '}{cost:,} bytes to send as {send.encoding} ({send.why})"
    return PlannedStep("cache", expected(planned.prediction, how) + notes, cost), asked


def _spec(launch: Launch) -> EnvironmentSpec:
    assert launch.spec is not None
    return launch.spec


def _gpus(launch: Launch) -> tuple[PlannedStep, list[str]]:
    planned = gpus_step.plan(launch)
    return PlannedStep("gpus", planned.what, how="refused" if planned.refused else ""), list(planned.requests)


def _claim(launch: Launch) -> str:
    if launch.new:
        return "a new run, as asked"
    digest = recipe_digest(launch.recipe, launch.place)
    states = launch.connected.call("list_runs", {"limit": 100}).data["runs"]
    for item in states:
        state = item.get("state") or {}
        phase = item.get("phase")
        if _is_same(state, phase, digest):
            launch.run = str(state["run"])  # what this run has is not in its own way
            if phase in BEFORE_TRAINING:
                return f"continues {state['run']}, which is {phase}"
            return f"{state['run']} is training already: nothing would be started"
    return "a new run"


def _is_same(state: Mapping[str, Any], phase: str | None, digest: str) -> bool:
    alive = phase in BEFORE_TRAINING or phase == "training"
    return alive and state.get("digest") == digest and state.get("user") == user_name()
