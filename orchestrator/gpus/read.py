"""Asking a host for its GPUs, over one more channel of a connection: a POSIX shell there is all that it takes."""

from __future__ import annotations

import functools
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from orchestrator.errors import ConnectionLost, OrchError
from orchestrator.gpus.model import Claim, Process, Reading
from orchestrator.place import greeting
from orchestrator.place.connection import Channel, Connection
from orchestrator.plain import plain
from orchestrator.remote import nvidia_smi
from orchestrator.run import Gpu
from orchestrator.survey import gpu_of

if TYPE_CHECKING:
    from orchestrator.config.models import Place
    from orchestrator.place.session import Session

SILENCE = 20.0  # seconds, above all bounds of the script
_TIMED_OUT = ("124", "137")
APPS = re.compile(r"\s*(GPU-[0-9A-Za-z-]+)\s*,\s*([0-9]{1,10})\s*,\s*(\S.*)")
_PID = re.compile("[0-9]{1,10}")
# nvidia-smi says this behind a whole answer, with a status of its own
_WARNING = "WARNING: infoROM is corrupted"
_ANSWERED = ("0", "14")


@functools.lru_cache(maxsize=1)
def script() -> str:
    """gpus.sh behind host.sh's function that tells whose a process is."""
    found = re.search(r"^owner_of\(\) \{\n.*?^\}\n", greeting.script("host"), re.M | re.S)
    assert found is not None
    return found.group() + greeting.script("gpus")


def command(place: Place, nonce: str, mode: str, run: str = "none") -> list[str]:
    """The argv for the host; `mode` is "read" or "claim"."""
    container = place.container
    kind, ident = (container.kind, container.id) if container is not None else ("none", "none")
    sudo = "sudo" if place.host.sudo else "-"
    fields = ",".join(nvidia_smi.FIELDS)
    return ["sh", "-c", script(), "orch-gpus", nonce, mode, kind, ident, sudo, run, fields]


class Asked:
    """The script on the host, which has told all it knows. In mode "claim" it holds the lock until it is told what is
    decided, and what was claimed until `close`."""

    def __init__(self, place: Place, channel: Channel, nonce: str) -> None:
        self.place = place
        self._channel = channel
        self._greet = greeting.Greeting(nonce)
        self._until("gpus.done")
        self.reading = reading(self._greet.facts, whole="gpus.done" in self._greet.facts)

    def take(self, lines: Mapping[str, str]) -> str:
        """Writes a claim down and frees the lock; -> "" or why it could not be written. Raises ConnectionLost."""
        text = "".join(f"{key} {_value(key, value)}\n" for key, value in lines.items())
        self._channel.send(f"take\n{text}end\n".encode("utf-8", "replace"))
        self._until("gpus.free")
        if "gpus.taken" in self._greet.facts:
            return ""
        why = _unread(self._greet.facts).get("claim", "")
        return why or f"{self.place.host.name} did not say that the claim is written"

    def leave(self) -> None:
        """Frees the lock; nothing is claimed."""
        self.close()

    def close(self) -> None:
        """Ends the script. A claim then lives with its run alone."""
        self._channel.close_stdin()
        self._channel.close()

    def _until(self, key: str) -> None:
        while key not in self._greet.facts:
            try:
                data = self._channel.read(SILENCE)
            except TimeoutError:
                return  # what came is told, the rest is unknown
            if not data:
                return
            self._greet.feed(data)


def ask(place: Place, connection: Connection, mode: str = "read", run: str = "none") -> Asked:
    """Ask the place's host. Raises Unreachable. What it does not tell is a problem in the reading."""
    nonce = secrets.token_hex(8)
    return Asked(place, connection.open(command(place, nonce, mode, run)), nonce)


def of_place(session: Session) -> tuple[tuple[Gpu, ...], str]:
    """The GPUs that the place itself shows, or why they are not known. Raises Unreachable."""
    arguments = {"runs": [], "tail_lines": 0, "offset": None, "screen": False, "gpus": True, "wait": 0}
    try:
        outcome = session.call("probe", arguments, timeout=30.0).data.get("gpus")
    except ConnectionLost:
        raise
    except OrchError as error:
        return (), error.message
    return _gpus(dict(outcome or {"why": "it was not read"}))


def with_place(reading: Reading, place: Sequence[Gpu], problem: str) -> Reading:
    """The reading where the host's own nvidia-smi does not tell: what the place's says counts. Who else is on a GPU is
    then unknown, but for claims."""
    if not reading.problem or problem or not place:
        return reading
    unseen = f"the host does not tell which processes are on its GPUs ({reading.problem})"
    return replace(reading, gpus=tuple(place), problem="", apps_problem=unseen)


def reading(facts: Mapping[str, Sequence[str]], whole: bool = True) -> Reading:
    """What the script's lines say; pure."""
    unread = _unread(facts)
    gpus: tuple[Gpu, ...] = ()
    problem = unread.get("nvidia-smi", "")
    if problem:
        problem = "there is no nvidia-smi on the host"
    elif "gpus.status" not in facts:
        problem = "nvidia-smi gave no answer"
    else:
        status = facts["gpus.status"][0]
        why = "nvidia-smi gave no answer in 5 s" if status in _TIMED_OUT else None
        gpus, problem = _gpus({"text": "\n".join(facts.get("gpus.gpu", ())), "rc": status, "why": why})
    processes, apps_problem = _processes(facts) if not problem else ((), "")
    if not whole and not problem:
        problem = "the host's answer was cut off"
    own = (facts.get("gpus.own") or ["?"])[0]
    return Reading(
        gpus=gpus,
        processes=processes,
        claims=_claims(facts.get("gpus.claim", ())),
        own=own,
        time=_number((facts.get("gpus.time") or [""])[0]),
        problem=problem,
        apps_problem=apps_problem,
        lock_problem=unread.get("lock", ""),
        busy="gpus.busy" in facts,
    )


def _gpus(outcome: dict[str, Any]) -> tuple[tuple[Gpu, ...], str]:
    problem = nvidia_smi.explain(outcome)
    if problem:
        return (), plain(problem)
    rows, problems = nvidia_smi.parse(outcome.get("text") or "")
    problems = [line for line in problems if not line.startswith(_WARNING)]
    if problems:
        return (), plain(f"nvidia-smi also said: {' '.join(problems)[:200]}")
    return tuple(gpu_of(row) for row in rows), ""


def _processes(facts: Mapping[str, Sequence[str]]) -> tuple[tuple[Process, ...], str]:
    status = (facts.get("gpus.apps") or ["?"])[0]
    if status not in _ANSWERED:
        said = plain(" ".join(facts.get("gpus.app", ())))[:200]
        return (), f"nvidia-smi did not say which processes are on them: {said or f'status {status}'}"
    known: dict[int, tuple[str | None, str | None, str | None, str]] = {}
    for text in facts.get("gpus.process", ()):
        words = text.split(" ", 4)
        if len(words) < 4 or not _PID.fullmatch(words[0]):
            continue
        owner, user, run = (None if word == "?" else plain(word) for word in words[1:4])
        known[int(words[0])] = (owner, user, run, plain(words[4]).strip() if len(words) > 4 else "")
    found, problem = [], ""
    for line in facts.get("gpus.app", ()):
        if not line.strip() or line.startswith(_WARNING):
            continue
        row = APPS.fullmatch(line)
        if row is None:
            problem = f"nvidia-smi said of processes: {plain(line)[:200]}"
            continue
        pid = int(row[2])
        owner, user, run, words_ = known.get(pid, (None, None, None, ""))
        found.append(Process(pid, row[1], _number(row[3].split(" ")[0]), owner, user, run, words_))
    return tuple(found), problem


def _claims(lines: Sequence[str]) -> tuple[Claim, ...]:
    """Each line of each claim comes behind its number; what is no claim of ours is none."""
    rows: dict[str, dict[str, str]] = {}
    for line in lines:
        number, _, rest = line.partition(" ")
        key, _, value = rest.partition(" ")
        rows.setdefault(number, {})[key] = plain(value)
    return tuple(
        Claim(
            run=row["run"],
            place=row.get("place", "?"),
            owner=row.get("owner", "?"),
            user=row.get("user", "somebody"),
            workstation=row.get("workstation", ""),
            since=_number(row.get("since", "")),
            uuids=tuple(row["uuids"].split()),
            alive=row.get("alive", "unknown"),
        )
        for row in rows.values()
        if row.get("run") and row.get("uuids")
    )


def _unread(facts: Mapping[str, Sequence[str]]) -> dict[str, str]:
    told = [text.partition(" ") for text in facts.get("gpus.unread", ())]
    return {what: plain(why) for what, _, why in told}


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 <= number < 1e12 else None


def _value(key: str, text: str) -> str:
    """On one line; what somebody chose is cut, since only the first 8192 bytes of a claim are read."""
    line = plain(text).replace("\n", " ").replace("\t", " ")
    return line if key == "uuids" else line[:200]
