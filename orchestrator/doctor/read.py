"""Reading the facts of a place for `orch doctor`: one connection, a script on the host, then one request inside."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from orchestrator.doctor.model import Clock, Facts, Refusal
from orchestrator.errors import ConnectionLost, OrchError, UsageError
from orchestrator.place import greeting
from orchestrator.place.connection import Connection
from orchestrator.place.session import Connect, Session, connect, open_session
from orchestrator.plain import plain

if TYPE_CHECKING:
    from orchestrator.config.models import Place

HOST = 20.0  # seconds of silence of the host's script
INDEX = 8.0  # seconds that a package index has to answer
CLOSED = ("STOPPED", "FROZEN", "FREEZING")
# The words of docker and podman for what lxc-info and incus call otherwise.
STATES = {
    **dict.fromkeys(("created", "configured", "initialized", "exited", "stopped", "dead", "removing"), "STOPPED"),
    "paused": "FROZEN",
    "running": "RUNNING",
}


def command(place: Place, nonce: str) -> list[str]:
    """The argv for the host: host.sh, which becomes doctor.sh."""
    container = place.container
    kind, ident = (container.kind, container.id) if container is not None else ("none", "none")
    sudo = "sudo" if place.host.sudo else "-"
    return greeting.on_host(
        place, nonce, ["sh", "-c", greeting.script("doctor"), "orch-doctor", nonce, kind, ident, sudo]
    )


def read(place: Place, connect: Connect = connect) -> Facts:
    """All facts, over one connection. A container that cannot be entered is a fact, not an error.

    Raises:
        Unreachable, Refused, UsageError: the host cannot be reached, the connection was lost, or there is no such
            container.
    """
    connection = connect(place)
    try:
        greet, host_clock = _ask_host(place, connection)
        facts = _host(place, greet, host_clock)
        if facts["state"] in CLOSED:
            return Facts(**facts)
        try:
            session = open_session(place, lambda _: connection)
        except (UsageError, ConnectionLost):
            raise
        except greeting.CannotServe as error:
            return Facts(**facts, refusal=Refusal(error.lacks, plain(error.message), plain(error.hint)))
        except OrchError as error:
            return Facts(**facts, refusal=Refusal("way", plain(error.message), plain(error.hint)))
        here, clock = _ask_place(session)
        return Facts(**facts, hello=_plain(session.hello.container), here=here, place_clock=clock)
    finally:
        connection.close()


def _ask_host(place: Place, connection: Connection) -> tuple[greeting.Greeting, Clock | None]:
    nonce = secrets.token_hex(8)
    greet = greeting.Greeting(nonce)
    begun = time.time()
    told: float | None = None
    channel = connection.open(command(place, nonce))
    while "doctor.done" not in greet.facts:
        try:
            data = channel.read(HOST)
        except TimeoutError:
            if greet.lines:
                break  # what came is told, the rest is unknown
            raise greeting.silent(place, greet, HOST) from None
        if not data:
            if not greet.lines:
                status, stderr = channel.wait(2.0), channel.stderr().decode("utf-8", "replace")
                raise greeting.ended(place, greet, status, stderr)
            break
        greet.feed(data)
        if told is None and "host.time" in greet.facts:
            told = time.time()
    channel.close()
    at = greet.host_facts()["time"]
    return greet, _clock(begun, told, at) if told is not None and at is not None else None


def _ask_place(session: Session) -> tuple[dict[str, Any], Clock | None]:
    """The answer of `remote.doctor`, and the clock that it told first."""
    marks: list[tuple[float, float]] = []
    asked = time.time()

    def on_event(event: dict[str, Any]) -> None:
        if "time" in event:
            marks.append((float(event["time"]), time.time()))

    answer = session.call("doctor", {"seconds": INDEX}, timeout=INDEX + 40.0, on_event=on_event).data
    return _plain(answer), _clock(asked, marks[0][1], marks[0][0]) if marks else None


def _clock(asked: float, answered: float, said: float) -> Clock:
    """The clock there was read at some time between the two: the middle, with half of the span as uncertainty."""
    half = (answered - asked) / 2
    return Clock(said - (asked + half), abs(half))


def _host(place: Place, greet: greeting.Greeting, clock: Clock | None) -> dict[str, Any]:
    container = place.container
    unread: dict[str, str] = {}
    for text in greet.facts.get("doctor.unread", []):
        what, _, why = text.partition(" ")
        unread.setdefault(what, plain(why))
    if container is not None and container.kind not in ("pct", "lxc") and "host.state" not in greet.facts:
        unread["state"] = f"{container.kind} did not say"
    if "doctor.done" not in greet.facts:
        unread.setdefault("state", "the host's answer was cut off")
        unread.setdefault("backups", "the host's answer was cut off")
    names = ("jobs.cfg", "vzdump.cron", "vzdump.conf")
    state = plain(greet.first("doctor.state") or greet.first("host.state") or "").strip()
    return {
        "place": place.name,
        "machine": place.host,
        "kind": container.kind if container is not None else "none",
        "ident": container.id if container is not None else "",
        "wheels": place.wheels,
        "host": _plain(greet.host_facts()),
        "state": STATES.get(state, state) or None,
        "pve": "doctor.pve" in greet.facts,
        "toolkit": "doctor.toolkit" in greet.facts,
        "nodes": tuple(_plain(greet.facts.get("doctor.device", []))),
        "files": {name: _plain(found) for name in names if (found := greet.facts.get(f"doctor.{name}"))},
        "unread": unread,
        "host_clock": clock,
    }


def _plain(value: Any) -> Any:
    """The same without control characters; what is told comes from a place that may be anything."""
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, Mapping):
        return {plain(str(key)): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def explanation(place: Place) -> str:
    """What `read` would run, without running it."""
    from orchestrator.explain import explanation as of_session

    requests = ["GPUs, driver, device nodes, /dev/shm, compiler, headers, clock; does a package index answer?"]
    first = f"{place.host.name}: over the same connection, first: sh -c $HOST_SH, which becomes sh -c $DOCTOR_SH"
    return f"{of_session(place, requests)}\n{first}"
