"""A launch at several places: the steps of a launch at each of them, all at once, and what they need of each other.

One run has one id everywhere. The first place names it, keeps the ports and the token by which the runners find each
other, and is started last: whatever breaks off before, the same launch goes on from there.
"""

from __future__ import annotations

import copy
import secrets as random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from orchestrator import elastic
from orchestrator.config import Host, Project, Recipe, resolve_place
from orchestrator.errors import ConfigError, OrchError, Refused, UsageError
from orchestrator.gpus import step as gpus_step
from orchestrator.launch import STEPS, Launch, Member, Report
from orchestrator.together import at_once, joined

T = TypeVar("T")

DATA_PORTS = 3  # of each place, beside those that the run will use
_CONNECTING = 30.0  # seconds for all connections of one place; each is bounded there


def launches(
    project: Project, hosts: Mapping[str, Host], recipe: Recipe, report: Report, **more: bool | str
) -> list[Launch]:
    """One launch for each of the recipe's places.

    Raises:
        ConfigError: places that do not exist, or whose address nobody says; all of them at once.
    """
    if recipe.places is None:
        place = resolve_place(hosts, recipe.place, project)
        return [Launch(project=project, recipe=recipe, place=place, report=report, **more)]  # type: ignore[arg-type]
    found, problems = [], []
    for index, one in enumerate(recipe.places):
        try:
            place = resolve_place(hosts, one.place, project)
        except UsageError as error:
            problems.append(f"places[{index}]: {error.message}")
            continue
        if one.address is None and place.address is None:
            problems.append(
                f"places[{index}]: {place.name} has no address at which the others reach it; "
                'add "address: 192.0.2.11" there or in hosts.yaml'
            )
        found.append((place, one.address or place.address or "", one.interface or place.interface))
    if problems:
        raise ConfigError([f"recipe {recipe.name}: {problem}" for problem in problems])
    names, addresses = tuple(place.name for place, _, _ in found), tuple(address for _, address, _ in found)
    ranks = tuple(one.ranks for one in recipe.places if one.ranks is not None)
    lock = threading.Lock()
    return [
        Launch(
            project=project,
            recipe=recipe,
            place=place,
            report=_AtPlace(report, place.name, lock),
            member=Member(number, names, addresses, interface, ranks),
            **more,  # type: ignore[arg-type]
        )
        for number, (place, _, interface) in enumerate(found)
    ]


def carry_out(all_: Sequence[Launch], report: Report) -> Sequence[Launch]:
    """Go through the steps at every place; -> the places that take part. Afterwards the run runs at all of these, and
    the sessions are still open. Only a recipe with `elastic` leaves places out: see there.

    Where it runs everywhere already (`how == "running"`) it is left alone.

    Raises:
        OrchError: a step failed somewhere; what is in place stays, and the same launch again goes on from there.
        Refused: places do not reach each other; nothing has been claimed or started.
    """
    first, *others = all_
    going_on = None
    for name, step in STEPS:
        if name == "claim" and others:
            report.begin("reach")
            all_, ways = reach_all(all_, report)
            first, *others = all_
            report.end("reach", ways)
        if name == "claim" and first.recipe.elastic is not None:
            going_on = elastic.going_on(all_)
        report.begin(name)
        if name == "connect" and first.recipe.elastic is not None:
            all_, told = elastic.answering(all_, step, report)
            first, *others = all_
        elif name == "resolve":
            told = [_resolve(first, others, step)]
        elif name == "claim":
            told = together(step, [first])
            for launch in others:
                launch.run, launch.meeting = first.run, first.meeting
            told += together(step, others)
        elif name == "start":
            started = together(step, _not_running(others))
            told = together(step, _not_running([first])) + started
        else:
            told = _carried(step, _not_running(all_))
        report.end(name, in_one_line(all_, told))
        if name == "generation":
            _same_generation(all_)
        if name == "claim":
            _soundly_claimed(first, others)
            if not _not_running(all_):
                return all_
            if going_on is not None:
                together(partial(elastic.take, of=going_on), all_)
                report.note("claim", elastic.told(going_on))
    return all_


def _carried(step: Callable[[Launch], str], all_: Sequence[Launch]) -> list[str]:
    """The step at all these places; one that is refused for its GPUs anywhere leaves nothing behind anywhere."""
    try:
        return together(step, all_)
    except (Refused, UsageError):
        if step is gpus_step.claim:
            gpus_step.give_up(all_)
        raise


def together(step: Callable[[Launch], T], all_: Sequence[Launch]) -> list[T]:
    """The step at all these places at once. Raises what failed, of all places in one error."""

    def named(launch: Launch) -> T:
        try:
            return step(launch)
        except OrchError as error:
            if launch.member is None or launch.place.name in error.message:
                raise
            told = copy.copy(error)  # the same may be raised at another place
            told.message = f"{launch.place.name}: {error.message}"
            raise told from error

    def give_up() -> None:
        for launch in all_:
            launch.close()

    done, errors = at_once(named, all_, give_up)
    if errors:
        raise joined(errors)
    return [what for _, what in done]


def reach(all_: Sequence[Launch]) -> str:
    """Connect every place with every other one, both ways, on the ports that the run will use and on some others.

    Raises:
        Refused: some do not reach each other; each pair and direction is named, with the address and the ports.
    """
    failed = _try_ways(all_)
    if failed:
        raise _refused(failed)
    return _ways(all_)


def reach_all(all_: Sequence[Launch], report: Report) -> tuple[Sequence[Launch], str]:
    """The same; where the recipe allows it, without those that do not reach each other. -> who takes part, and how
    many ways there are."""
    while failed := _try_ways(all_):
        all_ = elastic.connected(all_, failed, _refused(failed), report)
        if len(all_) == 1:
            all_[0].meeting = None
            return all_, f"{all_[0].place.name} alone"
    return all_, _ways(all_)


def _ways(all_: Sequence[Launch]) -> str:
    return f"{len(all_) * (len(all_) - 1)} ways between {len(all_)} places, {2 + DATA_PORTS} ports"


def _refused(failed: elastic.Ways) -> Refused:
    return Refused(
        "\n".join(why for _, _, why in failed)
        + "\nevery place has to reach every other one directly, on any port, at the address that it has itself: "
        "look at addresses, routes and firewalls (a forwarded port, or NAT without a route, is not enough)"
    )


def _try_ways(all_: Sequence[Launch]) -> elastic.Ways:
    """The ways that are none. Where all are, every launch knows the ports and the token."""
    word = random.token_hex(8)

    def listen(launch: Launch) -> dict[str, list[int]]:
        member = _member(launch)
        asked: dict[str, Any] = {
            "address": member.addresses[member.number],
            "interface": member.interface,
            "word": word,
        }
        asked |= {"fixed": 2 if member.number == 0 else 0, "data": DATA_PORTS}
        answer = launch.connected.call("reach_listen", asked).data
        launch.member = replace(member, interface=str(answer["interface"]))
        return {"fixed": answer["fixed"], "data": answer["data"]}

    ports = together(listen, all_)
    meeting = {"rendezvous": ports[0]["fixed"][0], "runners": ports[0]["fixed"][1], "token": random.token_urlsafe(24)}

    def connect(launch: Launch) -> list[tuple[int, int, str]]:
        member = _member(launch)
        targets: list[dict[str, Any]] = [
            {"number": number, "address": member.addresses[number], "port": port, "word": word}
            for number, of in enumerate(ports)
            if number != member.number
            for port in (*of["fixed"], *of["data"])
        ]
        why = launch.connected.call("reach_connect", {"targets": targets}, timeout=_CONNECTING).data["why"]
        return _failures(member, [(t["number"], t["port"], reason) for t, reason in zip(targets, why, strict=True)])

    failed = [way for found in together(connect, all_) for way in found]
    together(lambda launch: launch.connected.call("reach_close", {}), all_)
    if not failed:
        for launch in all_:
            launch.meeting = meeting
    return failed


def _failures(member: Member, tried: Sequence[tuple[int, int, str | None]]) -> list[tuple[int, int, str]]:
    """A sentence for each place that this one does not reach."""
    problems = []
    for number, place in enumerate(member.places):
        failed = [(port, why) for to, port, why in tried if to == number and why is not None]
        if not failed:
            continue
        here, (port, why) = member.places[member.number], failed[0]
        more = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
        said = f"{here} does not reach {place} at {member.addresses[number]}, port {port}{more}: {why}"
        problems.append((member.number, number, said))
    return problems


def _member(launch: Launch) -> Member:
    assert launch.member is not None, "only of several places"
    return launch.member


def _resolve(first: Launch, others: Sequence[Launch], step: Callable[[Launch], str]) -> str:
    """Once, for all: the same code goes everywhere."""
    told = step(first)
    for launch in others:
        launch.spec, launch.problem = first.spec, first.problem
        launch.snapshot, launch.code_problem, launch.secrets = first.snapshot, first.code_problem, first.secrets
    return told if not others else f"{first.recipe.name} at {', '.join(_member(first).places)}"


def _not_running(all_: Sequence[Launch]) -> list[Launch]:
    return [launch for launch in all_ if launch.how != "running"]


def _same_generation(all_: Sequence[Launch]) -> None:
    """All places run the same code."""
    pins = {(launch.pin.environment_name, launch.pin.code_digest) if launch.pin else None for launch in all_}
    if len(pins) > 1:
        held = "; ".join(f"{launch.place.name} to {launch.pin.generation if launch.pin else 'none'}" for launch in all_)
        raise Refused(
            f"{all_[0].recipe.name} is pinned to different generations ({held}), and runs the same one everywhere",
            hint=f"orch launch {all_[0].recipe.name} --latest",
        )


def _soundly_claimed(first: Launch, others: Sequence[Launch]) -> None:
    missing = [launch.place.name for launch in _not_running(others)]
    if first.how == "running" and missing:
        raise Refused(
            f"{first.run} runs at {first.place.name}, but was never started at {', '.join(missing)}: stop it",
            hint=f"orch stop {first.run}",
        )


def in_one_line(all_: Sequence[Launch], told: Sequence[str]) -> str:
    """What was told at each of the places, or at all alike."""
    if len(set(told)) == 1:
        return told[0]
    if len(told) < len(all_):
        return "; ".join(told)
    return "; ".join(f"{launch.place.name}: {what}" for launch, what in zip(all_, told, strict=True))


class _AtPlace:
    """The report of one place among several, which all show in the same lines."""

    def __init__(self, report: Report, place: str, lock: threading.Lock) -> None:
        self._report = report
        self._place = place
        self._lock = lock

    def begin(self, step: str) -> None: ...

    def progress(self, step: str, what: str, done: int, total: int | None, unit: str) -> None:
        with self._lock:
            self._report.progress(step, f"{self._place}: {what}", done, total, unit)

    def note(self, step: str, what: str) -> None:
        with self._lock:
            self._report.note(step, f"{self._place}: {what}")

    def end(self, step: str, what: str) -> None: ...
