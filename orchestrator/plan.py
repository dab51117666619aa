"""What a launch would do, in its order, with the bytes it would send. Reads facts; changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from orchestrator.config import recipe_digest
from orchestrator.environment.build import plan as plan_environment
from orchestrator.launch import STEPS, Launch, user_name
from orchestrator.run import BEFORE_TRAINING


@dataclass(frozen=True)
class PlannedStep:
    """One step of the launch: what it finds in place or would do, and the bytes it would stream."""

    name: str
    what: str
    bytes: int = 0


@dataclass(frozen=True)
class LaunchPlan:
    """All steps, and the requests they make over the one channel."""

    recipe: str
    place: str
    steps: tuple[PlannedStep, ...]
    requests: tuple[str, ...]

    @property
    def bytes(self) -> int:
        """Bytes that would be streamed to the place."""
        return sum(step.bytes for step in self.steps)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "bytes": self.bytes}


def plan_launch(launch: Launch) -> LaunchPlan:
    """Ask the place what is there already. The session stays open in `launch`.

    Raises:
        OrchError: what would make the launch itself fail before it starts anything.
    """
    steps, requests = [], []
    for name, step in STEPS[:2]:
        steps.append(PlannedStep(name, step(launch)))
    what = _claim(launch)
    steps.append(PlannedStep("claim", what))
    requests.append("claim the run, under a lock")
    assert launch.spec is not None and launch.snapshot is not None
    environment = plan_environment(launch.connected, launch.spec)
    steps.append(PlannedStep("environment", environment.what, environment.bytes))
    requests += list(environment.requests)
    snapshot = launch.snapshot
    there = snapshot.path in launch.connected.call("have", {"paths": [snapshot.path]}).data["have"]
    requests.append("is this code there?")
    if there:
        steps.append(PlannedStep("code", f"{snapshot.digest}, in place"))
    else:
        steps.append(PlannedStep("code", f"{snapshot.digest}, {snapshot.files} files to send", len(snapshot.tar)))
        requests.append(f"put {snapshot.path}")
    steps.append(PlannedStep("start", "the runner in tmux, which starts the trainer"))
    requests.append("start, and wait until the runner has taken over")
    return LaunchPlan(launch.recipe.name, launch.place.name, tuple(steps), tuple(requests))


def _claim(launch: Launch) -> str:
    if launch.new:
        return "a new run, as asked"
    digest = recipe_digest(launch.recipe, launch.place)
    states = launch.connected.call("list_runs", {"limit": 100}).data["runs"]
    for state in states:
        if _is_same(state, digest):
            phase = state.get("phase")
            if phase in BEFORE_TRAINING:
                return f"continues {state['run']}, which is {phase}"
            return f"{state['run']} is training already: nothing would be started"
    return "a new run"


def _is_same(state: Mapping[str, Any], digest: str) -> bool:
    alive = state.get("phase") in BEFORE_TRAINING or state.get("phase") == "training"
    return alive and state.get("digest") == digest and state.get("user") == user_name()
