"""An environment at a place: planned, and made to be there."""

from __future__ import annotations

import hashlib
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from orchestrator.config.models import EnvironmentSpec
from orchestrator.environment.lock import Pin, environment_id, pins
from orchestrator.environment.progress import Progress, silent
from orchestrator.environment.store import CHUNK, Wheel, WheelStore
from orchestrator.environment.target import PythonAtPlace, Target, choose_python, target_of
from orchestrator.environment.torch_cpu import cpu_pins, wants_cpu
from orchestrator.environment.uv_tool import UvProgram, uv_there, uv_to_send
from orchestrator.environment.wheels import fetch, stored
from orchestrator.errors import ConfigError, OrchError
from orchestrator.place.session import Session

BUILD_LIMIT = 3600.0  # seconds for a whole build, waiting for another builder included


@dataclass(frozen=True)
class BuiltEnvironment:
    """An environment that is at the place."""

    id: str
    path: str  # its folder there
    python: str  # its interpreter there
    manifest: Mapping[str, Any]
    bytes_sent: int  # of wheels and uv, for this call
    how: str  # "there" | "built" | "waited" (another builder made it)
    notes: tuple[str, ...] = ()  # what the user should know, each a sentence


@dataclass(frozen=True)
class PlannedFile:
    """A file that a build needs at the place. What is not in the store yet has no size."""

    name: str
    size: int | None  # bytes
    there: bool  # nothing has to be sent


@dataclass(frozen=True)
class EnvironmentPlan:
    """What `ensure` would do, as known without fetching anything."""

    id: str
    target: Target
    path: str
    present: bool
    files: tuple[PlannedFile, ...]  # wheels and the uv program
    to_fetch: int  # files that this machine has to fetch first
    bytes_to_send: int | None  # None while something has to be fetched first

    def __str__(self) -> str:
        if self.present:
            return f"environment {self.id} is there"
        if self.bytes_to_send is None:
            known = sum(file.size or 0 for file in self.files if not file.there)
            count = f"{self.to_fetch} wheel{'s' if self.to_fetch > 1 else ''}"
            return f"environment {self.id}: {count} to fetch first, then those and {known:,} bytes to send"
        return f"environment {self.id}: {self.bytes_to_send:,} bytes to send, then to build"


@dataclass(frozen=True)
class _Request:
    """What an environment is at one place."""

    spec: EnvironmentSpec
    target: Target
    pins: Sequence[Pin]
    id: str
    expect: Mapping[str, str | None]


def request(session: Session, spec: EnvironmentSpec, python: PythonAtPlace | None = None) -> _Request:
    """Works out what the spec means at the place. Nothing is asked there. Raises OrchError, ConfigError."""
    target = target_of(session.hello, python or choose_python(spec, session.hello))
    where = str(spec.directory / "requirements.lock")
    wanted = pins(spec.lock_text, target, where=where)
    torch = next((pin for pin in wanted if pin.name == "torch"), None)
    if torch and not _agrees(spec.torch, torch.version):
        raise ConfigError(
            [f"{where}: torch {torch.version} is locked, and spec.yaml asks for {spec.torch}"],
            hint=f"make the lock anew: python -m orchestrator.environment.lock {spec.directory}",
        )
    if wants_cpu(spec, session.hello):
        wanted = cpu_pins(wanted, target)
        torch = next((pin for pin in wanted if pin.name == "torch"), None)
    expect = {"torch": torch.version, "cuda": _cuda(torch.version)} if torch else {}
    return _Request(spec, target, wanted, environment_id(wanted, target), expect)


def _agrees(asked: str, locked: str) -> bool:
    """Whether a locked version is one that the spec's version or range of versions means."""
    version = Version(locked)
    try:
        exact = Version(asked)
    except InvalidVersion:
        return version in SpecifierSet(asked, prereleases=True)
    return version == exact if exact.local else version.public == exact.public


def _cuda(torch: str) -> str | None:
    """torch.version.cuda of a version such as 2.11.0+cu128: 12.8."""
    local = Version(torch).local or ""
    return f"{local[2:-1]}.{local[-1]}" if local.startswith("cu") and local[2:].isdigit() else None


def on_this_machine(session: Session) -> bool:
    """Whether the place sees the workstation's files under their own paths."""
    return session.place.host.ssh is None and session.place.container_name is None


def wheel_path(wheel: Wheel) -> str:
    """Where a wheel lies at a place, below its root."""
    return f"wheels/{wheel.sha256[:2]}/{wheel.sha256}/{wheel.filename}"


def plan(session: Session, spec: EnvironmentSpec, store: WheelStore | None = None) -> EnvironmentPlan:
    """What `ensure` would do and how many bytes it would send. Nothing is fetched, sent or built."""
    store = store or WheelStore()
    wanted = request(session, spec)
    status = session.call("env_status", {"id": wanted.id}).data
    if status["present"]:
        return EnvironmentPlan(wanted.id, wanted.target, status["path"], True, (), 0, 0)
    wheels, missing = stored(wanted.pins, wanted.target, store)
    program = uv_there(session.hello) or uv_to_send(wanted.target, store, None)
    there = _have(session, wheels, program)
    files = [PlannedFile(wheel.filename, wheel.size, wheel_path(wheel) in there) for wheel in wheels]
    files += [PlannedFile(str(pin), None, False) for pin in missing]
    if program is None:
        files.append(PlannedFile("uv", None, False))
    elif program.local is not None:
        files.append(PlannedFile("uv", program.size, program.remote in there))
    to_fetch = sum(file.size is None for file in files)
    to_send = None if to_fetch else sum(file.size or 0 for file in files if not file.there)
    return EnvironmentPlan(wanted.id, wanted.target, status["path"], False, tuple(files), to_fetch, to_send)


def _have(session: Session, wheels: Sequence[Wheel], program: UvProgram | None) -> set[str]:
    """Which of these files need not be sent, as paths below the root."""
    paths = [wheel_path(wheel) for wheel in wheels]
    if program and program.local:
        paths.append(program.remote)
    if on_this_machine(session):
        return set(paths)
    return set(session.call("have", {"paths": paths}).data["paths"])


def ensure_uv(session: Session, target: Target, store: WheelStore, progress: Progress) -> tuple[str, int]:
    """The path of a uv program at the place, and the bytes sent to have it there. Raises OrchError."""
    program, sent = uv_there(session.hello), 0
    if program is None:
        program = uv_to_send(target, store, progress)
        assert program is not None and program.local is not None
        if on_this_machine(session):
            return str(program.local), 0
        if not _have(session, (), program):
            sent = _send(session, program.remote, program.local, program.sha256, 0o755, progress)
    return program.remote, sent


def ensure(
    session: Session, spec: EnvironmentSpec, *, progress: Progress = silent, store: WheelStore | None = None
) -> BuiltEnvironment:
    """Has the spec's environment at the place: one round trip where it is there, else fetched, sent, built.

    Raises ConfigError for the lock, OrchError for what cannot be fetched or built (nothing of it is left
    then), and ConnectionLost.
    """
    store = store or WheelStore()
    wanted = request(session, spec)
    status = session.call("env_status", {"id": wanted.id}).data
    if status["present"]:
        return _built(wanted, status, 0, "there")
    wheels = fetch(wanted.pins, wanted.target, store, progress)
    paths, sent = _send_wheels(session, wheels, progress)
    program, more = ensure_uv(session, wanted.target, store, progress)
    reply = session.call(
        "env_build",
        {
            "id": wanted.id,
            "uv": program,
            "python": wanted.target.python_path,
            "requirements": "".join(f"{w.name}=={w.version} --hash=sha256:{w.sha256}\n" for w in wheels),
            "wheels": [
                {"path": path, "filename": w.filename, "sha256": w.sha256, "origin": w.origin}
                for w, path in zip(wheels, paths, strict=True)
            ],
            "expect": dict(wanted.expect),
            "about": _about(wanted),
        },
        timeout=BUILD_LIMIT,
        on_event=lambda event: _tell(event, progress),
    ).data
    return _built(wanted, reply, sent + more, str(reply["how"]))


def _about(wanted: _Request) -> dict[str, Any]:
    """What only this end knows of an environment, for its manifest."""
    target = wanted.target
    return {
        "name": wanted.spec.name,
        "backend": wanted.spec.backend,
        "lock": hashlib.sha256(wanted.spec.lock_text.encode()).hexdigest(),
        "platform": {"system": target.system, "machine": target.machine, "libc": list(target.libc or ())},
    }


def _built(wanted: _Request, answer: Mapping[str, Any], sent: int, how: str) -> BuiltEnvironment:
    path, manifest = str(answer["path"]), answer["manifest"]
    trusted = [wheel["filename"] for wheel in manifest.get("wheels", ()) if wheel.get("origin") == "index"]
    notes = tuple(f"{name}: hash from index, not from lock" for name in trusted)
    return BuiltEnvironment(wanted.id, path, posixpath.join(path, "bin/python"), manifest, sent, how, notes)


def _tell(event: Mapping[str, Any], progress: Progress) -> None:
    if "done" in event:
        progress(str(event["step"]), int(event["done"]), int(event["total"]), "packages")
    else:
        progress(str(event["step"]), int(event.get("seconds", 0)), None, "s")


def _send_wheels(session: Session, wheels: Sequence[Wheel], progress: Progress) -> tuple[list[str], int]:
    """Sends the wheels that the place lacks: where each lies there, absolute or below the root, and the bytes."""
    if on_this_machine(session):
        return [str(wheel.path) for wheel in wheels], 0
    there = _have(session, wheels, None)
    missing = [wheel for wheel in wheels if wheel_path(wheel) not in there]
    total, sent = sum(wheel.size for wheel in missing), 0
    for count, wheel in enumerate(missing):
        progress("sending wheels", count, len(missing), "wheels")
        sent += _send(session, wheel_path(wheel), wheel.path, wheel.sha256, 0o644, progress, (sent, total))
    return [wheel_path(wheel) for wheel in wheels], sent


def _send(
    session: Session,
    remote: str,
    local: Path,
    sha256: str,
    mode: int,
    progress: Progress,
    part_of: tuple[int, int] | None = None,  # bytes sent before, and of all
) -> int:
    """Sends one file and answers how many bytes of it went: fewer where somebody else had brought it meanwhile."""
    size = local.stat().st_size
    before, total = part_of or (0, size)
    sent, digest = 0, hashlib.sha256()

    def chunks() -> Iterator[bytes]:
        nonlocal sent
        with local.open("rb") as file:
            while block := file.read(CHUNK):
                yield block
                sent += len(block)
                digest.update(block)
                progress(f"sending {local.name}", before + sent, total, "B")
        if digest.hexdigest() != sha256:
            local.unlink(missing_ok=True)
            raise OrchError(f"{local} is damaged, and is removed: run it again, and it is fetched anew")

    args = {"path": remote, "size": size, "sha256": sha256, "mode": mode, "unpack": None}
    session.upload("put", args, chunks())
    return sent
