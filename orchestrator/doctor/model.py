"""The facts of a place as `orch doctor` reads them, and what it finds. No part of this asks anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orchestrator.place.container import typed

if TYPE_CHECKING:
    from orchestrator.config.models import Host

OK, WARNING, FAULT, UNKNOWN = "ok", "warning", "fault", "unknown"
_OF_GPUS = frozenset({"gpus", "driver", "uvm"})  # checks whose fault a program without GPUs does not meet


@dataclass(frozen=True)
class Refusal:
    """Why no program could be started at the place. `lacks`: "python", "root" (a folder to write in) or "way"."""

    lacks: str
    message: str
    hint: str = ""


@dataclass(frozen=True)
class Clock:
    """How far a clock is ahead of this machine's, in seconds, and how uncertain that is."""

    ahead: float
    uncertain: float


@dataclass(frozen=True)
class Facts:
    """All that was read. `kind` is a container's, or "none"; `host` is `Greeting.host_facts`.

    `machine`: the host as hosts.yaml has it; `state`: the container's, STOPPED, FROZEN, RUNNING or another word of the
    host's tool, None unknown; `files`: lines of the host's backup files, by name; `unread`: what -> why; `nodes`:
    device nodes of the host; `toolkit`: whether NVIDIA's container toolkit is there; `hello`: the container's facts or
    None; `here`: the answer of `remote.doctor` or None.
    """

    place: str
    machine: Host
    kind: str
    ident: str
    wheels: str
    host: Mapping[str, Any]
    state: str | None = None
    pve: bool = False
    nodes: Sequence[str] = ()
    toolkit: bool = False
    files: Mapping[str, Sequence[str]] = field(default_factory=dict)
    unread: Mapping[str, str] = field(default_factory=dict)
    refusal: Refusal | None = None
    hello: Mapping[str, Any] | None = None
    here: Mapping[str, Any] | None = None
    host_clock: Clock | None = None
    place_clock: Clock | None = None

    def on_host(self, command: str, *, root: bool = True) -> str:
        """What is typed here to have a command run on the host; `{id}` in it is the container's."""
        return typed(self.machine, command, self.ident, root=root)


class Unread(Exception):
    """A fact that was not read; the message says why."""


@dataclass(frozen=True)
class Verdict:
    """What one check says. `remedy`: commands to type, or sentences where there is none."""

    status: str
    text: str
    remedy: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finding:
    """One row of the table."""

    check: str
    title: str
    status: str
    text: str
    remedy: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """All rows of a place."""

    place: str
    findings: tuple[Finding, ...]

    @property
    def good(self) -> bool:
        """Whether a launch is expected to work: no row is a fault. Warnings and what is unknown do not count."""
        return all(one.status != FAULT for one in self.findings)

    @property
    def only_without_gpus(self) -> bool:
        """Whether what needs no GPU is expected to work, and what needs one is not."""
        faults = {one.check for one in self.findings if one.status == FAULT}
        return bool(faults) and faults <= _OF_GPUS

    def to_json(self) -> dict[str, Any]:
        rows = [{**one.__dict__, "remedy": list(one.remedy)} for one in self.findings]
        return {"place": self.place, "good": self.good, "findings": rows}


def ok(text: str) -> Verdict:
    return Verdict(OK, text)


def warning(text: str, *remedy: str) -> Verdict:
    return Verdict(WARNING, text, remedy)


def fault(text: str, *remedy: str) -> Verdict:
    return Verdict(FAULT, text, remedy)


def unknown(text: str, *remedy: str) -> Verdict:
    return Verdict(UNKNOWN, text, remedy)


def hello(facts: Facts) -> Mapping[str, Any]:
    """What the place said at its start. Raises Unread."""
    if facts.hello is None:
        raise Unread(_why_closed(facts))
    return facts.hello


def reading(facts: Facts, name: str) -> Any:
    """One value of `remote.doctor`. Raises Unread."""
    if facts.here is None:
        raise Unread(_why_closed(facts))
    found = facts.here.get(name) or {"why": "it was not read"}
    if "value" not in found:
        raise Unread(str(found.get("why")))
    return found["value"]


def _why_closed(facts: Facts) -> str:
    lacks = facts.refusal.lacks if facts.refusal else "way"
    return {"python": "no Python there to ask with", "root": "no program can be put there to ask"}.get(
        lacks, "the container cannot be entered" if facts.kind != "none" else "no program could be started there"
    )
