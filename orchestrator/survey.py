"""Asking places about their runs: one probe a place, all places at once."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from orchestrator import history
from orchestrator.config import Host, Place, resolve_place
from orchestrator.errors import NotFound, OrchError
from orchestrator.place.session import Session, open_session
from orchestrator.plain import plain
from orchestrator.remote import nvidia_smi
from orchestrator.run import Gpu, RunStatus, from_probe

_MOST_LISTED = 10_000
_MOST_NAMED = 8  # places in a sentence


@dataclass(frozen=True)
class PlaceReport:
    """What one place answered. With `error` set nothing is known of its runs, which is not the same as
    nothing running there. `time` is Unix time by the place's own clock."""

    place: str
    time: float | None
    runs: tuple[RunStatus, ...]
    gpus: tuple[Gpu, ...]
    gpu_error: str | None
    error: OrchError | None
    more: int = 0  # older runs that are there too and were left out

    def to_json(self) -> dict[str, Any]:
        return {
            "place": self.place,
            "reachable": self.error is None,
            "error": self.error.message if self.error else None,
            "time": self.time,
            "gpus": [gpu.__dict__ for gpu in self.gpus],
            "gpu_error": self.gpu_error,
            "runs": [run.to_json() for run in self.runs],
            "more": self.more,
        }


def all_places(hosts: Mapping[str, Host]) -> list[Place]:
    """Every place where runs can be: each container; and each host that has none, or where a run is known."""
    used = {entry.place for entry in history.known()}
    places = []
    for name, host in hosts.items():
        if not host.containers or name in used or host.ssh is None:
            places.append(resolve_place(hosts, name))
        places += [resolve_place(hosts, f"{name}/{container}") for container in host.containers]
    return places


@dataclass
class Sessions:
    """Sessions that are kept open from one survey to the next, by place."""

    open: dict[str, Session] = field(default_factory=dict)

    def close(self) -> None:
        while self.open:
            self.open.popitem()[1].close()


def survey(
    places: Sequence[Place],
    *,
    runs: str | Sequence[str] = "latest",
    tail_lines: int = 5,
    screen: bool = True,
    sessions: Sessions | None = None,
) -> list[PlaceReport]:
    """Probe all places at once; one that fails costs only its own report.

    `runs` is "active", "latest" (the active ones, and else the newest), "all", or ids. With `sessions`
    the connections stay open for the next survey; it is then the caller who closes them.
    """
    if not places:
        return []
    kept = sessions or Sessions()
    try:
        with ThreadPoolExecutor(max_workers=min(16, len(places))) as pool:
            return list(pool.map(lambda place: _report(place, runs, tail_lines, screen, kept), places))
    finally:
        if sessions is None:
            kept.close()


def _report(place: Place, runs: str | Sequence[str], tail_lines: int, screen: bool, kept: Sessions) -> PlaceReport:
    arguments = {
        "runs": runs if isinstance(runs, str) else list(runs),
        "tail_lines": tail_lines,
        "offset": None,
        "screen": screen,
        "gpus": True,
        "wait": 0,
    }
    try:
        if place.name not in kept.open:
            kept.open[place.name] = open_session(place)
        reply = kept.open[place.name].call("probe", arguments, timeout=30.0)
    except OrchError as error:
        broken = kept.open.pop(place.name, None)
        if broken is not None:
            broken.close()
        return PlaceReport(place.name, None, (), (), None, error)
    found = from_probe(reply.data, reply.payload, place.name)
    _remember(found)
    more = int(reply.data.get("more") or 0)
    if runs == "all" and not more:
        history.forget_all_but(place.name, {run.run for run in found})
    gpus, gpu_error = _gpus(reply.data.get("gpus"))
    return PlaceReport(place.name, float(reply.data["time"]), tuple(found), gpus, gpu_error, None, more)


def _gpus(outcome: Mapping[str, Any] | None) -> tuple[tuple[Gpu, ...], str | None]:
    if outcome is None:
        return (), "it was not read"
    rows, _ = nvidia_smi.parse(outcome.get("text") or "")
    return tuple(gpu_of(row) for row in rows), nvidia_smi.explain(dict(outcome))


def gpu_of(row: Mapping[str, Any]) -> Gpu:
    """A row of `nvidia_smi.parse`, with what could not be read of it."""
    values: dict[str, Any] = {
        key: plain(value) if isinstance(value := row.get(key), str) else value for key in nvidia_smi.KEYS
    }
    keys: dict[str, list[str]] = {}
    for key, text in (row.get("why") or {}).items():
        keys.setdefault(str(text), []).append(str(key))
    error = "; ".join(f"{', '.join(of)}: {text}" for text, of in keys.items())
    return Gpu(**values, error=plain(error) or None)


def _remember(runs: Iterable[RunStatus]) -> None:
    """Also at the other places that a run names."""
    history.remember([entry for run in runs if run.state for entry in _entries(run)])


def _entries(run: RunStatus) -> list[history.Entry]:
    places = run.places if run.place in run.places else (run.place,)
    return [history.Entry(run.run, place, run.recipe, run.created, number) for number, place in enumerate(places)]


def find_run(hosts: Mapping[str, Host], reference: str | None, place: str | None = None) -> tuple[list[Place], str]:
    """Where the run is that `reference` means (see `history.matching`): by the index, else by asking
    every place. The places are all of a run's, in its order, or the one that is named.

    Raises:
        NotFound: no place knows it, or it can mean several runs.
    """
    entries = [entry for entry in history.known(place) if is_place(hosts, entry.place)]
    found = history.matching(reference, entries)
    asked: list[Place] = []
    unreached: list[str] = []
    if not found:
        asked = [resolve_place(hosts, place)] if place else all_places(hosts)
        with ThreadPoolExecutor(max_workers=min(16, len(asked) or 1)) as pool:
            lists = list(pool.map(_listed, asked))
        unreached = [one.name for one, listed in zip(asked, lists, strict=True) if listed is None]
        entries = [entry for listed in lists for entry in listed or () if is_place(hosts, entry.place)]
        entries = [entry for entry in entries if place in (None, entry.place)]
        found = history.matching(reference, entries)
    if len({entry.run for entry in found}) > 1:
        names = ", ".join(entry.run for entry in found[:5])
        raise NotFound(f'"{reference}" can mean {len(found)} runs: {names}', hint="orch status")
    if not found:
        raise NotFound(_unknown(reference, entries, [one.name for one in asked], unreached), hint="orch status")
    ordered = {entry.place: None for entry in sorted(found, key=lambda entry: entry.number)}
    return [resolve_place(hosts, name) for name in ordered], found[0].run


def _listed(place: Place) -> list[history.Entry] | None:
    """Every run at a place, also those that a survey leaves out; None where it does not answer."""
    try:
        with open_session(place) as session:
            reply = session.call("list_runs", {"limit": _MOST_LISTED})
    except OrchError:
        return None
    found = from_probe({"time": 0.0, **reply.data}, b"", place.name)
    _remember(found)
    return [entry for run in found for entry in _entries(run)]


def is_place(hosts: Mapping[str, Host], place: str) -> bool:
    """Whether `place` spells a place of hosts.yaml."""
    host, _, container = place.partition("/")
    return host in hosts and (not container or container in hosts[host].containers)


def _unknown(
    reference: str | None, entries: Iterable[history.Entry], asked: Sequence[str], unreached: Sequence[str]
) -> str:
    text = "there are no runs yet" if reference is None else f'there is no run "{reference}"'
    if reference is not None:
        near = difflib.get_close_matches(reference, [entry.run for entry in entries], n=1)
        if near:
            text += f' (did you mean "{near[0]}"?)'
    answered = [name for name in asked if name not in unreached]
    if answered and len(answered) <= _MOST_NAMED:  # another folder's hosts.yaml may name other places
        text += f" at {', '.join(answered)}"
    if unreached:
        text += f"; {', '.join(unreached)} did not answer and may know more"
    return text
