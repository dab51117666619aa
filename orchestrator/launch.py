"""A launch: an ordered list of steps, each done when its result is in place, so that it can be taken up
again at any point.

Nothing is remembered here. What has been done is asked of the place: the run that was claimed, the
environment and the code that lie there, the runner that holds the run's lock.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from orchestrator import generations, history, secrets
from orchestrator.config import (
    EnvironmentSpec,
    Place,
    Project,
    Recipe,
    dump_recipe,
    dump_yaml,
    fill,
    load_environment,
    recipe_digest,
)
from orchestrator.environment.build import BuiltEnvironment, ensure, existing
from orchestrator.errors import OrchError, Refused, Unreachable, UsageError
from orchestrator.gpus import step as gpus_step
from orchestrator.place.session import Session, open_session
from orchestrator.provenance import provenance
from orchestrator.records import CACHE_FOLDERS, paths, snapshot_arguments, start_record
from orchestrator.remote.company import TOKEN
from orchestrator.snapshot import Snapshot, snapshot_bundled
from orchestrator.user import user_name

if TYPE_CHECKING:
    from orchestrator.compile_cache.key import Prediction
    from orchestrator.compile_cache.staging import CachePlan, Sending
    from orchestrator.compile_cache.store import Store
    from orchestrator.gpus.model import Claimed
    from orchestrator.gpus.read import Asked

_CHUNK = 1 << 20


class Report(Protocol):
    """What is told while a launch goes on."""

    def begin(self, step: str) -> None: ...

    def progress(self, step: str, what: str, done: int, total: int | None, unit: str) -> None:
        """`done` of `total` in `unit` ("B" or a plural such as "files")."""

    def note(self, step: str, what: str) -> None:
        """Something that the user should know."""

    def end(self, step: str, what: str) -> None: ...


@dataclass(frozen=True)
class Member:
    """One of a run's several places: its number among them, and what is known of all, in their order."""

    number: int
    places: tuple[str, ...]
    addresses: tuple[str, ...]  # at which the others reach each
    interface: str | None  # of this place; None until the place has told
    ranks: tuple[int, ...] = ()  # of each place, where the recipe says
    wanted: int = 0  # how many places the recipe has, where some of them take no part


@dataclass
class Launch:
    """One launch at one place on its way. The first ten fields are what is asked for, the rest what the steps
    found. Of a run over several places each place has its own (see `several`)."""

    project: Project
    recipe: Recipe
    place: Place
    report: Report
    new: bool = False
    latest: bool = False  # lift a pin
    why: str = ""  # for the record
    share_gpus: bool = False  # launch also on GPUs that others have
    warm: bool = False  # compile all that the recipe will use, and train nothing: its command is then WARM_UP
    member: Member | None = None  # which of several places this is
    spec: EnvironmentSpec | None = None
    problem: OrchError | None = None  # why the working tree's environment cannot be used
    pin: generations.Pinned | None = None
    snapshot: Snapshot | None = None
    code_problem: OrchError | None = None  # why the working tree's code cannot be used
    secrets: Mapping[str, str] = field(default_factory=dict)
    session: Session | None = None
    run: str = ""
    how: str = ""  # new | continue | running
    state: Mapping[str, Any] = field(default_factory=dict)
    gpus: Claimed | None = None  # None where none are wanted
    claiming: Asked | None = None  # the host's end, which keeps the claim until the runner does
    environment: BuiltEnvironment | None = None
    cache: Prediction | None = None  # what the trainer will find compiled; None where that is not known
    from_step: int = 0  # of the checkpoint of an earlier run that this one has to go on from
    meeting: Mapping[str, Any] | None = None  # ports and token, by which the runners of several places find each other

    @property
    def connected(self) -> Session:
        assert self.session is not None, "the step `connect` comes first"
        return self.session

    @property
    def run_directory(self) -> str:
        return f"{self.connected.root}/runs/{self.run}"

    def close(self) -> None:
        if self.session is not None:
            self.session.close()


# --- the steps -------------------------------------------------------------------------------------


def resolve(launch: Launch) -> str:
    """Everything that can be wrong on this side is found before a connection is made."""
    try:
        launch.spec = load_environment(launch.project, launch.recipe.environment)
    except UsageError as problem:
        launch.problem = problem  # a pinned launch does not need it, and only the place knows of pins
    try:
        launch.snapshot = working_code(launch.recipe)
    except UsageError as problem:
        launch.code_problem = problem  # as above
    launch.secrets = secrets.values(launch.recipe.secrets)
    return f"{launch.recipe.name} at {launch.place.name}"


def working_code(recipe: Recipe) -> Snapshot:
    """The code that a launch takes from here. Raises UsageError."""
    if recipe.code is None:
        return snapshot_bundled()
    from orchestrator.tree import snapshot_tree

    return snapshot_tree(Path(recipe.code.path), recipe.code.largest)


def connect(launch: Launch) -> str:
    if launch.session is None:
        launch.session = open_session(launch.place)
    tmux = launch.connected.hello.container.get("tools", {}).get("tmux")
    if not tmux:
        raise OrchError(
            f"there is no tmux in {launch.place.name}, and a run lives in one: install it there",
            hint=f"orch exec {launch.place.name} -- apt-get install -y tmux",
        )
    return str(launch.connected.hello.container.get("hostname", launch.place.name))


def generation(launch: Launch) -> str:
    """Whether the recipe is held to a generation at this place: environment, cache and code are then that one's."""
    pin = generations.pin_of(launch.connected, launch.recipe.name)
    for name in sorted({"PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "PYTHONNOUSERSITE"} & launch.recipe.env.keys()):
        launch.report.note("generation", f"env.{name} of the recipe lets the run see more than its environment")
    if pin is not None and not launch.latest:
        launch.pin = pin
        return f"pinned to generation {pin.generation} ({pin.run}) by {pin.by}"
    for problem in (launch.problem, launch.code_problem):
        if problem is not None:
            raise problem
    if pin is not None:
        return f"of the working tree; the pin to generation {pin.generation} is lifted"
    return "of the working tree"


def claim(launch: Launch) -> str:
    """Which run this launch is: a new one, or the same launch that was interrupted or still runs."""
    member = launch.member
    reply = launch.connected.call(
        "claim",
        {
            "recipe": launch.recipe.name,
            "digest": recipe_digest(launch.recipe, launch.place),
            "user": user_name(),
            "workstation": platform.node(),
            "place": launch.place.name,
            "new": launch.new,
            **({} if member is None else {"places": list(member.places)}),
            **({} if member is None or member.number > 0 else {"meeting": launch.meeting}),
            **({"run": launch.run} if launch.run else {}),
        },
    )
    launch.run, launch.how = str(reply.data["run"]), str(reply.data["how"])
    launch.state = reply.data["state"]
    launch.meeting = reply.data.get("meeting") or launch.meeting
    if launch.how == "busy":
        holder = launch.state.get("launcher") or {}
        raise Refused(
            f"{launch.run} is being launched already, by {holder.get('user', 'somebody')} on "
            f"{holder.get('workstation', 'another workstation')} (process {holder.get('pid', 'unknown')})",
            hint=f"orch status {launch.run}",
        )
    _remember(launch)
    return {
        "new": f"{launch.run}, a new run",
        "continue": f"{launch.run}, continuing a launch that was interrupted",
        "running": f"{launch.run}, which is {launch.state.get('phase')} already",
    }[launch.how]


def environment(launch: Launch) -> str:
    def progress(what: str, done: int, total: int | None, unit: str) -> None:
        launch.report.progress("environment", what, done, total, unit)

    if launch.pin is not None:
        pin = launch.pin
        built = existing(launch.connected, pin.environment, pin.environment_name, progress)
        for what in generations.ignored_packages(launch.connected, launch.spec, launch.problem, built.manifest):
            launch.report.note("environment", f"ignored: {what}")
    else:
        assert launch.spec is not None
        built = ensure(launch.connected, launch.spec, progress=progress)
    launch.environment = built
    for note in built.notes:
        launch.report.note("environment", note)
    how = {"there": "in place", "built": "built", "waited": "built by another launch meanwhile"}[built.how]
    if launch.pin is not None:
        return f"{launch.pin.environment_name} {built.id}, of generation {launch.pin.generation}"
    return f"{launch.recipe.environment} {built.id}, {how}"


def code(launch: Launch) -> str:
    snapshot = launch.snapshot
    if launch.pin is not None:
        for what in generations.ignored_code(launch.connected, launch.pin, snapshot, launch.code_problem):
            launch.report.note("code", f"ignored: {what}")
        launch.snapshot = launch.pin.snapshot
        return f"{launch.snapshot.digest}, of generation {launch.pin.generation}"
    assert snapshot is not None
    if snapshot.left:
        launch.report.note("code", left_behind(snapshot))
    reply = launch.connected.call("have", {"paths": [snapshot.path]})
    if snapshot.path in reply.data["paths"]:
        return f"{snapshot.digest}, in place"

    def chunks() -> Any:
        for start in range(0, len(snapshot.tar), _CHUNK):
            yield snapshot.tar[start : start + _CHUNK]
            sent = min(start + _CHUNK, len(snapshot.tar))
            launch.report.progress("code", "streaming", sent, len(snapshot.tar), "B")

    launch.connected.upload("put", snapshot_arguments(snapshot), chunks())
    return f"{snapshot.digest}, {snapshot.files} files{of(snapshot)} sent"


def left_behind(snapshot: Snapshot) -> str:
    """Which files of the user's own tree do not travel, though nothing says that they should not."""
    more = f" and {len(snapshot.left) - 5} more" if len(snapshot.left) > 5 else ""
    told = ", ".join(snapshot.left[:5])
    return (
        f"left behind, as names of secrets that git does not track: {told}{more} "
        "(secrets: in the recipe hands variables over)"
    )


def of(snapshot: Snapshot) -> str:
    """` of /home/me/project at 1a2b3c4d5e with changes`; nothing of the bundled trainer."""
    if not snapshot.origin:
        return ""
    commit = snapshot.origin.get("commit")
    at = f" at {commit[:10]}" if commit else ""
    return f" of {snapshot.origin['path']}{at}{' with changes' if snapshot.origin.get('dirty') else ''}"


def cache(launch: Launch, store: Store | None = None) -> str:
    """The compile cache that belongs to the launch is at the place, and what the trainer will find there is known."""
    from orchestrator.compile_cache import staging
    from orchestrator.compile_cache.store import Store
    from orchestrator.compile_cache.words import expected

    planned, send = planned_cache(launch, store)
    if planned is None:
        return no_cache(launch.recipe)
    for note in planned.notes:
        launch.report.note("cache", note)
    launch.cache = planned.prediction
    how = "in place" if launch.cache is not None and launch.cache.used else ""
    if send is not None:

        def progress(done: int, total: int) -> None:
            launch.report.progress("cache", f"streaming as {send.encoding}", done, total, "B")

        current = launch.cache is not None and launch.cache.snapshot is not None
        try:
            sent = staging.stage(launch.connected, send, progress, current=current)
        except Unreachable:
            raise
        except OrchError:
            why = staging.damaged(send.stored)
            if why is None:
                raise
            # what else there is decides: a damaged cache costs a compile, and no launch
            launch.report.note("cache", f"the stored cache {send.stored.name} is damaged and not used: {why}")
            store = store or Store()
            store.left_out.add(send.stored.name)
            return cache(launch, store)
        how = f"{sent.bytes:,} bytes sent as {sent.encoding} ({sent.why})"
    return expected(launch.cache, how)


def no_cache(recipe: Recipe) -> str:
    """Why a launch has none of ours."""
    own = next((name for name in CACHE_FOLDERS if name in recipe.env), None)
    return f"none: env.{own} of the recipe names another" if own else "none: there is no torch in the environment"


def planned_cache(launch: Launch, store: Store | None = None) -> tuple[CachePlan | None, Sending | None]:
    """What the launch will find and what has to travel for it. None where the environment has no torch, or the recipe
    has a cache folder of its own."""
    if any(name in launch.recipe.env for name in CACHE_FOLDERS):
        return None, None
    from orchestrator.compile_cache.staging import prepare

    assert launch.environment is not None
    recipe, pin = launch.recipe, launch.pin
    return prepare(
        launch.connected,
        launch.environment.manifest,
        launch.environment.id,
        recipe,
        command=None if launch.warm else recipe.command,
        pinned=(pin.cache, pin.generation) if pin is not None and pin.cache else None,
        store=store,
    )


def start(launch: Launch) -> str:
    """Hand the run over to the runner at the place, which keeps it from here on."""
    assert launch.environment is not None and launch.snapshot is not None
    session = launch.connected
    files = {
        "recipe.yaml": dump_recipe(launch.recipe),
        "trainer.yaml": dump_yaml(fill(launch.recipe.settings, paths(launch))),
        "launch.json": json.dumps(start_record(launch), indent=1),
        "provenance.json": json.dumps(
            provenance(
                launch.recipe,
                launch.place,
                session.hello,
                launch.environment,
                launch.snapshot,
                launch.pin,
                launch.cache,
                None if launch.gpus is None else launch.gpus.to_json(),
            ),
            indent=1,
        ),
    }
    private = dict(launch.secrets)
    if launch.meeting is not None:
        private[TOKEN] = str(launch.meeting["token"])
    payload = json.dumps(private).encode() if private else b""
    if launch.latest:
        generations.lift_pin(session, launch.recipe.name)
    reply = session.call(
        "start",
        {
            "run": launch.run,
            "files": files,
            "env": launch.environment.id,
            "code": launch.snapshot.digest,
        },
        payload=payload,
        timeout=60.0,
    )
    launch.state = reply.data["state"]
    gpus_step.release(launch)
    return f"{launch.run}, runner {(launch.state.get('runner') or {}).get('pid', '?')} in tmux"


Step = tuple[str, Callable[[Launch], str]]

STEPS: tuple[Step, ...] = (
    ("resolve", resolve),
    ("connect", connect),
    ("generation", generation),
    ("claim", claim),
    ("gpus", gpus_step.claim),
    ("environment", environment),
    ("code", code),
    ("cache", cache),
    ("start", start),
)


def carry_out(launch: Launch) -> None:
    """Go through the steps. Afterwards `launch.run` runs, and `launch.session` is still open.

    A run that is already under way (`how == "running"`) is left alone: the steps end with `claim`.

    Raises:
        OrchError: a step failed; what is in place stays, and the same launch again goes on from there.
    """
    for name, step in STEPS:
        launch.report.begin(name)
        launch.report.end(name, step(launch))
        if launch.how == "running":
            return


def _remember(launch: Launch) -> None:
    history.remember(
        [
            history.Entry(
                run=launch.run,
                place=launch.place.name,
                recipe=launch.recipe.name,
                created=float(launch.state.get("created") or 0.0),
                number=0 if launch.member is None else launch.member.number,
            )
        ]
    )
