"""A launch's step `gpus`: what it wants is decided while the host's lock is held, and claimed."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.errors import ConnectionLost, OrchError, Refused, UsageError
from orchestrator.gpus import read, words
from orchestrator.gpus.decide import NotThere, claimable, decide, wanted_by
from orchestrator.gpus.model import Chosen, Claimed, Conflict, Reading, Wanted
from orchestrator.run import Gpu
from orchestrator.user import user_name, who

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.launch import Launch


def wanted(launch: Launch) -> Wanted:
    """What the launch wants at its place; asks nobody."""
    recipe, spec = launch.recipe, launch.spec
    shown = (launch.connected.hello.container.get("tools") or {}).get("nvidia-smi")
    own = recipe.command is not None and not launch.warm
    return wanted_by(
        recipe.gpus,
        recipe.env,
        None if own else recipe.settings,
        cpu=not shown or (spec is not None and spec.backend == "cpu"),
        share=lambda ranks: _share(launch, ranks),
    )


def _share(launch: Launch, ranks: int) -> int:
    member = launch.member
    if member is None:
        return ranks
    if member.ranks:
        return member.ranks[member.number]
    return ranks // (member.wanted or len(member.places))


def claim(launch: Launch) -> str:
    """The step itself.

    Raises:
        Refused: others have GPUs that the launch needs, or another launch holds the host's lock.
        UsageError: the place has not the GPUs that the recipe names.
    """
    want = wanted(launch)
    if want.none:
        return "none wanted"
    place, problem = _of_place(launch)
    asked = read.ask(launch.place, launch.connected.connection, "claim", launch.run)
    launch.claiming = asked
    try:
        return _claim(launch, want, asked, place, problem)
    except BaseException:
        asked.leave()
        launch.claiming = None
        raise


def _claim(launch: Launch, want: Wanted, asked: read.Asked, place: Sequence[Gpu] | None, problem: str) -> str:
    reading = _whole(asked.reading, place, problem)
    by_env = "CUDA_VISIBLE_DEVICES" in launch.recipe.env
    if asked.reading.busy and not launch.share_gpus:
        raise Refused(
            f"another launch at {launch.place.host.name} has held the lock of its GPUs for 10 s; try again, or launch "
            "all the same with --share-gpus",
            hint=f"orch gpus {launch.place.name}",
        )
    unknown = _unknown(launch, want, reading, place, problem)
    if unknown:
        return _unclaimed(launch, asked, Claimed(by_env=by_env, unknown=unknown))
    chosen = _decided(launch, want, reading, place)
    if isinstance(chosen, Conflict):
        raise Refused(words.conflict(launch.place.name, chosen, not launch.warm), hint=f"orch gpus {launch.place.name}")
    claimed = Claimed(chosen.gpus, chosen.all, by_env, bool(chosen.held))
    not_locked = reading.lock_problem or ("another launch holds the lock" if asked.reading.busy else "")
    if not_locked:
        # nothing is known of who comes at the same time; what was seen is free, so the run gets it
        claimed = Claimed(chosen.gpus, chosen.all, by_env, bool(chosen.held), not_locked)
        return _unclaimed(launch, asked, claimed)
    if chosen.held:
        launch.report.note("gpus", f"shared, as asked: {words.held(chosen.held)}")
    if reading.apps_problem:
        launch.report.note("gpus", f"who else uses them is unknown: {reading.apps_problem}")
    why = asked.take(_record(launch, chosen, reading))
    if why:
        return _unclaimed(launch, asked, Claimed(chosen.gpus, chosen.all, by_env, bool(chosen.held), why))
    launch.gpus = claimed
    return told(chosen)


def _unclaimed(launch: Launch, asked: read.Asked, what: Claimed) -> str:
    asked.leave()
    launch.claiming = None
    launch.gpus = what
    launch.report.note("gpus", f"not claimed, so nothing keeps others from them: {what.unknown}")
    return "not claimed"


def _of_place(launch: Launch) -> tuple[Sequence[Gpu] | None, str]:
    """What a container shows; None where the place is the host itself."""
    return (None, "") if launch.place.container is None else read.of_place(launch.connected)


def _whole(reading: Reading, place: Sequence[Gpu] | None, problem: str) -> Reading:
    return reading if place is None else read.with_place(reading, place, problem)


def _unknown(launch: Launch, want: Wanted, reading: Reading, place: Sequence[Gpu] | None, problem: str) -> str:
    """Why it cannot be known which GPUs the launch will use; "" where it can."""
    if any(word.startswith("MIG-") for word in want.named):
        return "the recipe names a part of a GPU (MIG), and only whole ones are claimed"
    # indices and UUIDs of the host say nothing of which the place has
    why = reading.problem or (f"{launch.place.name}: {problem}" if problem else "")
    if not why and not claimable(reading.gpus, place):
        too = "" if place is None else " that its host shows too"
        why = f"no GPU that {launch.place.name} shows has a UUID{too}"
    return why


def _decided(launch: Launch, want: Wanted, reading: Reading, place: Sequence[Gpu] | None) -> Chosen | Conflict:
    try:
        return decide(want, reading, launch.run, place or None, share=launch.share_gpus)
    except NotThere as problem:
        raise UsageError(
            f"{launch.place.name} has not the GPUs that recipe {launch.recipe.name} wants: {problem}",
            hint=f"orch gpus {launch.place.name}",
        ) from None


def _record(launch: Launch, chosen: Chosen, reading: Reading) -> dict[str, str]:
    return {
        "version": "1",
        "run": launch.run,
        "place": launch.place.name,
        "root": launch.connected.root,
        "user": user_name(),
        "workstation": platform.node(),
        "since": "" if reading.time is None else f"{reading.time:.0f}",
        "uuids": " ".join(str(gpu.uuid) for gpu in chosen.gpus),
    }


def told(chosen: Chosen) -> str:
    """`GPUs 0-1, NVIDIA H200`."""
    names = " and ".join(dict.fromkeys(str(gpu.name) for gpu in chosen.gpus if gpu.name))
    return f"{words.numbers(chosen.gpus)}, {names}" if names else words.numbers(chosen.gpus)


def release(launch: Launch) -> None:
    """The claim is its runner's from now on."""
    if launch.claiming is not None:
        launch.claiming.close()
        launch.claiming = None


def give_up(launches: Sequence[Launch]) -> None:
    """Runs that were made for a launch which is refused would be shown as being prepared for ever: they are stopped."""
    arguments = {"by": who(), "grace": 0.0, "kill": True, "why": "refused: the GPUs that it wants are not to be had"}
    for launch in launches:
        if launch.how == "new" and launch.session is not None:
            try:
                launch.session.call("stop", {"run": launch.run, **arguments}, timeout=30.0)
            except OrchError:
                continue  # what refused it is what the user has to know


@dataclass(frozen=True)
class Planned:
    """What the step would do."""

    what: str
    refused: bool = False
    requests: tuple[str, ...] = ()


def plan(launch: Launch) -> Planned:
    """The same without a lock or a claim."""
    want = wanted(launch)
    if want.none:
        return Planned("none wanted")
    requests = ["which GPUs does the place show?"] if launch.place.container is not None else []
    requests.append("on the host, over a channel of its own: lock, GPUs, processes and claims; claim")
    place, problem = _of_place(launch)
    try:
        asked = read.ask(launch.place, launch.connected.connection)
    except ConnectionLost as error:
        return Planned(f"not known: {error.message}", requests=tuple(requests))
    asked.close()
    reading = _whole(asked.reading, place, problem)
    unknown = _unknown(launch, want, reading, place, problem)
    if unknown:
        return Planned(f"would not be claimed: {unknown}", requests=tuple(requests))
    chosen = _decided(launch, want, reading, place)
    if isinstance(chosen, Conflict):
        return Planned(
            f"would be refused: {words.conflict(launch.place.name, chosen, not launch.warm)}", True, tuple(requests)
        )
    shared = f"; shared: {words.held(chosen.held)}" if chosen.held else ""
    return Planned(f"to claim {told(chosen)}{shared}", requests=tuple(requests))
