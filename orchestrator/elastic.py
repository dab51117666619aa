"""A run that may go on at fewer places than its recipe lists: which of them take part, and what it goes on from.

A place takes part if it answers, and if it and those before it in the recipe reach each other. A launch goes on from
the newest run of the same recipe and user where that run lost a place; where it ended otherwise, or the launch is
asked for a new one, it begins anew, as every launch does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from orchestrator.config import recipe_digest
from orchestrator.errors import OrchError, Refused, Unreachable
from orchestrator.launch import Launch, Report
from orchestrator.run import BEFORE_TRAINING
from orchestrator.together import at_once, joined
from orchestrator.user import user_name

T = TypeVar("T")
Ways = Sequence[tuple[int, int, str]]  # from the place of this number to that one, and why it is no way


@dataclass(frozen=True)
class Continued:
    """The run that a launch goes on from, and the step of its checkpoint; 0 where it left none."""

    run: str
    step: int
    lost: str  # the places that it lost


def answering(all_: Sequence[Launch], connect: Callable[[Launch], T], report: Report) -> tuple[list[Launch], list[T]]:
    """Connect to every place; -> those that answer, numbered anew, and what each told.

    Raises:
        Unreachable: fewer answer than the recipe allows.
        OrchError: something else is wrong with a place.
    """
    done, errors = at_once(connect, all_, lambda: _close(all_))
    other = [error for error in errors if not isinstance(error, Unreachable)]
    if other:
        raise joined(other)
    present = [launch for launch, _ in done]
    if errors:
        why = "; ".join(dict.fromkeys(error.message for error in errors))
        _check(all_, present, why, errors[0])
        _leave_out(all_, present, f"no answer ({why})", "connect", report)
    return present, [told for _, told in done]


def connected(all_: Sequence[Launch], failed: Ways, refused: Refused, report: Report) -> list[Launch]:
    """Without the places that others, which come before them in the recipe, do not reach or are not reached by.
    Raises `refused` where that leaves fewer than the recipe allows."""
    bad = {(start, end) for start, end, _ in failed}
    kept: list[Launch] = []
    for number, launch in enumerate(all_):
        if not any((number, other) in bad or (other, number) in bad for other in map(all_.index, kept)):
            kept.append(launch)
    elastic = all_[0].recipe.elastic
    if elastic is None or len(kept) < elastic.least:
        raise refused
    _leave_out(all_, kept, "; ".join(dict.fromkeys(why for _, _, why in failed)), "reach", report)
    return kept


def going_on(all_: Sequence[Launch]) -> Continued | None:
    """What the launch goes on from; None where it begins anew.

    Raises:
        Refused: it would go on, but no place that takes part has a checkpoint, and one that does not may have.
    """
    if all_[0].new:
        return None
    found = [_last_run(launch) for launch in all_]
    newest = max((one for one in found if one.get("run")), key=lambda one: float(one.get("created") or 0), default=None)
    if newest is None:
        return None
    run = str(newest["run"])
    here = {launch.place.name: one for launch, one in zip(all_, found, strict=True) if one.get("run") == run}
    phases = {one.get("phase") for one in here.values()}
    if phases & {*BEFORE_TRAINING, "training", "stopped", "finished"}:
        return None
    present = {launch.place.name for launch in all_}
    missing = [name for name in newest.get("places") or [] if name not in present]
    lost = dict.fromkeys([*missing, *(name for name, one in here.items() if one.get("phase") == "lost")])
    lost |= dict.fromkeys(
        str(first.get("place"))
        for first in (one.get("first") or {} for one in here.values())
        if first.get("kind") == "silent" or first.get("gone")
    )
    if not lost:
        return None
    step = max((int(one["checkpoint"]) for one in here.values() if one.get("checkpoint")), default=0)
    if step == 0 and missing:
        raise Refused(
            f"{run} cannot go on: {', '.join(here) or 'no place that answers'} has no checkpoint of it, and "
            f"{', '.join(missing)}, where it may have some, takes no part; bring that back, or begin anew without it",
            hint=f"orch launch {all_[0].recipe.name} --new",
        )
    return Continued(run, step, ", ".join(lost))


def take(launch: Launch, of: Continued) -> None:
    """The claimed run gets the checkpoints that the one before left at this place, and has to begin with one."""
    if of.step and launch.how != "running":
        there = launch.connected.call("last_run", _asked(launch)).data.get("run") == of.run
        if there:
            launch.connected.call("take_checkpoint", {"run": launch.run, "of": of.run}, timeout=120.0)
        launch.from_step = of.step


def told(of: Continued) -> str:
    if of.step == 0:
        return f"from its beginning: {of.run}, which lost {of.lost}, had saved nothing yet"
    return f"from step {of.step} of {of.run}, which lost {of.lost}"


def _asked(launch: Launch) -> dict[str, Any]:
    return {"digest": recipe_digest(launch.recipe, launch.place), "user": user_name()}


def _last_run(launch: Launch) -> Mapping[str, Any]:
    return launch.connected.call("last_run", _asked(launch)).data


def _check(all_: Sequence[Launch], present: Sequence[Launch], why: str, error: OrchError) -> None:
    elastic = all_[0].recipe.elastic
    if elastic is None or len(present) >= elastic.least:
        return
    raise Unreachable(
        f"{len(present)} of {len(all_)} places answer, and {all_[0].recipe.name} goes on at no fewer than "
        f"{elastic.least} (elastic.least): {why}",
        error.hint,
    )


def _leave_out(all_: Sequence[Launch], kept: Sequence[Launch], why: str, step: str, report: Report) -> None:
    """The places that take part are numbered anew; the others' sessions end."""
    names = [launch.place.name for launch in all_ if launch not in kept]
    rest = ", ".join(launch.place.name for launch in kept)
    report.note(step, f"without {', '.join(names)}: {why}; elastic.least lets the run go on at {rest}")
    for launch in all_:
        if launch not in kept:
            launch.close()
    members = [launch.member for launch in kept if launch.member is not None]
    numbers = [member.number for member in members]
    for number, (launch, member) in enumerate(zip(kept, members, strict=True)):
        launch.member = replace(
            member,
            number=number,
            places=tuple(member.places[one] for one in numbers),
            addresses=tuple(member.addresses[one] for one in numbers),
            ranks=tuple(member.ranks[one] for one in numbers) if member.ranks else (),
            wanted=member.wanted or len(member.places),
        )


def _close(all_: Sequence[Launch]) -> None:
    for launch in all_:
        launch.close()
