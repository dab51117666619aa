"""Where a place's build takes its files from: wheels that travel from here, or what the place knows by itself.

`wheels:` in hosts.yaml says it. By itself, wheels travel: any place can be built for in that way. Where many bytes
would have to, and the place reaches an index of its own, it downloads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestrator.environment.lock import Pin
from orchestrator.environment.progress import Progress
from orchestrator.environment.sending import on_this_machine, there, wheel_path
from orchestrator.environment.store import WheelStore
from orchestrator.environment.target import Target
from orchestrator.environment.torch_cpu import build_of
from orchestrator.environment.wheels import stored
from orchestrator.place.session import Session

# Bytes up to which sending what is in the store is no matter, compared with asking the place.
FEW = 256 << 20
_ASKED = 20.0  # seconds for the question whether an index can be reached


def explicit(session: Session, pins: Sequence[Pin]) -> dict[str, Any] | None:
    """The source that hosts.yaml names for the place, as `env_build` takes it; None where wheels travel, or `auto`."""
    said = session.place.wheels
    if said in ("auto", "workstation"):
        return None
    backend = next((build for pin in pins if (build := build_of(pin))), None)
    if said == "place":
        return {"kind": "index", "where": None, "backend": backend}
    kind = "folder" if said.startswith("/") else "mirror"
    return {"kind": kind, "where": said, "backend": None}


def may_download(session: Session, pins: Sequence[Pin], target: Target, store: WheelStore) -> bool:
    """Whether it is worth asking the place for an index of its own: `auto`, not this machine, every file hashed in
    the lock, and something to fetch or many bytes to send."""
    if session.place.wheels != "auto" or on_this_machine(session) or not all(pin.hashes for pin in pins):
        return False
    wheels, missing = stored(pins, target, store)
    if missing:
        return True
    known = there(session, wheels, None)
    return sum(wheel.size for wheel in wheels if wheel_path(wheel) not in known) > FEW


def by_itself(session: Session, uv: str, pins: Sequence[Pin], progress: Progress) -> dict[str, Any] | None:
    """The place's own index as a source, if it reaches one that has the first package."""
    progress("asking whether the place reaches a package index", 0, None, "s")
    plain = next((pin for pin in pins if not build_of(pin)), None)
    if plain is None:
        return None
    reply = session.call("env_reach", {"uv": uv, "requirement": str(plain), "seconds": _ASKED}, timeout=_ASKED + 10)
    if not reply.data["reached"]:
        return None
    return {"kind": "index", "where": None, "backend": next((b for pin in pins if (b := build_of(pin))), None)}


def requirements(pins: Sequence[Pin]) -> str:
    """What a place that downloads is given: every hash of the lock, since it chooses the file."""
    return "".join(" ".join([str(pin), *(f"--hash=sha256:{digest}" for digest in pin.hashes)]) + "\n" for pin in pins)
