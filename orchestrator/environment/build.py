"""An environment at a place: planned, checked, and made to be there."""

from __future__ import annotations

import hashlib
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from orchestrator.config.models import EnvironmentSpec
from orchestrator.environment import source
from orchestrator.environment.lock import Pin, environment_id, missing, pins, unlisted
from orchestrator.environment.progress import Progress, silent
from orchestrator.environment.python_archive import PythonArchive, at_hand, bring
from orchestrator.environment.relock import lock
from orchestrator.environment.sending import ensure_uv, on_this_machine, send_wheels, there, wheel_path
from orchestrator.environment.store import WheelStore
from orchestrator.environment.target import PythonAtPlace, Target, choose_python, target_of
from orchestrator.environment.torch_cpu import build_of, cpu_pins, unhashed, wants_cpu
from orchestrator.environment.uv_tool import uv_there, uv_to_send
from orchestrator.environment.wheels import Trust, fetch, stored
from orchestrator.errors import ConfigError, NotFound, OrchError, Refused, Unreachable
from orchestrator.place.session import Session

__all__ = ["BuiltEnvironment", "EnvironmentPlan", "ensure", "on_this_machine", "plan", "request", "wheel_path"]

BUILD_LIMIT = 3600.0  # seconds for a whole build, waiting for another builder included
CHECK_LIMIT = 900.0  # seconds for a check: all files may have to be digested


@dataclass(frozen=True)
class BuiltEnvironment:
    """An environment that is at the place, and clean."""

    id: str
    path: str  # its folder there
    python: str  # its interpreter there
    manifest: Mapping[str, Any]  # without its table of files
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
    polluted: str = ""  # what is wrong with the one that is there: it would be refused
    source: str = "wheels of this machine"  # where the files come from
    refused: OrchError | None = None  # what `ensure` would raise for what the lock lacks

    def __str__(self) -> str:
        if self.refused:
            return f"environment {self.id} cannot be built: {self.refused.message}"
        if self.polluted:
            return f"environment {self.id} is polluted: {self.polluted}"
        if self.present:
            return f"environment {self.id} is there"
        if not self.source.startswith("wheels of this machine"):
            return f"environment {self.id}: to build from {self.source}"
        if self.bytes_to_send is None:
            known = sum(file.size or 0 for file in self.files if not file.there)
            kind = "file" if any(file.name.startswith("Python ") for file in self.files) else "wheel"
            count = f"{self.to_fetch} {kind}{'s' if self.to_fetch > 1 else ''}"
            first = "to fetch or pack first" if kind == "file" else "to fetch first"
            return f"environment {self.id}: {count} {first}, then those and {known:,} bytes to send"
        return f"environment {self.id}: {self.bytes_to_send:,} bytes to send, then to build"


@dataclass(frozen=True)
class Request:
    """What an environment is at one place."""

    spec: EnvironmentSpec
    target: Target
    pins: Sequence[Pin]
    id: str
    expect: Mapping[str, str | None]
    brought: PythonArchive | None = None  # the Python that has to be brought along


def request(session: Session, spec: EnvironmentSpec, python: PythonAtPlace | None = None) -> Request:
    """Works out what the spec means at the place. Nothing is asked there. Raises OrchError, ConfigError."""
    brought = None
    if python is None:
        try:
            python = choose_python(spec, session.hello)
        except OrchError:
            brought = at_hand(spec, session.hello)
            if brought is None:
                raise
            python = brought.at(session.root)
    target = target_of(session.hello, python)
    where = str(spec.directory / "requirements.lock")
    wanted = pins(spec.lock_text, target, where=where)
    torch = next((pin for pin in wanted if pin.name == "torch"), None)
    if torch and not _agrees(spec.torch, torch.version):
        raise ConfigError(
            [f"{where}: torch {torch.version} is locked, and spec.yaml asks for {spec.torch}"],
            hint=f"make the lock anew: orch env lock {spec.name}",
        )
    if wants_cpu(spec, session.hello):
        wanted = cpu_pins(wanted, target)
        torch = next((pin for pin in wanted if pin.name == "torch"), None)
    expect = {"torch": torch.version, "cuda": _cuda(torch.version)} if torch else {}
    return Request(spec, target, wanted, environment_id(wanted, target), expect, brought)


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


def plan(session: Session, spec: EnvironmentSpec, store: WheelStore | None = None) -> EnvironmentPlan:
    """What `ensure` would do and how many bytes it would send. Nothing is fetched, sent, built or set aside."""
    store = store or WheelStore()
    wanted = request(session, spec)
    found = session.call("env_status", {"id": wanted.id, "verify": "quick"}, timeout=CHECK_LIMIT).data
    if found["present"] or found["polluted"]:
        polluted = str(found["polluted"]["summary"]) if found["polluted"] else ""
        return EnvironmentPlan(wanted.id, wanted.target, found["path"], not polluted, (), 0, 0, polluted)
    named = source.explicit(session, wanted.pins)
    wheels, lacking = stored(wanted.pins, wanted.target, store) if named is None else ([], [])
    if refused := _refused(spec, wanted, lacking, named is not None):
        return EnvironmentPlan(wanted.id, wanted.target, found["path"], False, (), 0, 0, refused=refused)
    program = uv_there(session.hello) or uv_to_send(wanted.target, store, None)
    known = there(session, wheels, program)
    files = [PlannedFile(wheel.filename, wheel.size, wheel_path(wheel) in known) for wheel in wheels]
    files += [PlannedFile(str(pin), None, on_this_machine(session)) for pin in lacking]
    if program is None:
        files.append(PlannedFile("uv", None, False))
    if wanted.brought is not None:
        files.append(PlannedFile(f"Python {wanted.brought.version}", None, False))
    if program is not None and program.local is not None:
        files.append(PlannedFile("uv", program.size, program.remote in known))
    to_fetch = sum(file.size is None for file in files)
    to_send = None if to_fetch else sum(file.size or 0 for file in files if not file.there)
    told = "wheels of this machine"
    if named is not None:
        told = {"index": "the place's own index", "folder": str(named["where"]), "mirror": "the mirror in hosts.yaml"}[
            str(named["kind"])
        ]
    elif source.may_download(session, wanted.pins, wanted.target, store):
        told += ", or from the place's own index where it reaches one"
    return EnvironmentPlan(wanted.id, wanted.target, found["path"], False, tuple(files), to_fetch, to_send, source=told)


def ensure(
    session: Session,
    spec: EnvironmentSpec,
    *,
    progress: Progress = silent,
    store: WheelStore | None = None,
    anew: bool = False,
) -> BuiltEnvironment:
    """Has the spec's environment at the place: one round trip where it is there and clean, else fetched, sent, built.

    Raises Refused where it is polluted, unless `anew`: it is then set aside and built again. Raises ConfigError for
    the lock, OrchError for what cannot be fetched or built (nothing of it is left then), and ConnectionLost.
    """
    store = store or WheelStore()
    wanted = request(session, spec)
    found = status(session, wanted.id, progress)
    if found["polluted"] and not anew:
        raise refusal(session, spec.name, wanted.id, found["polluted"])
    if found["present"]:
        return _built(wanted.id, found, 0, "there")
    spec, wanted = _complete(session, spec, wanted)
    program, sent = ensure_uv(session, wanted.target, store, progress)
    if wanted.brought is not None:
        sent += bring(session, wanted.brought, progress)
    args: dict[str, Any] = {"id": wanted.id, "uv": program, "python": wanted.target.python_path}
    args.update(expect=dict(wanted.expect), about=_about(wanted), requirements=source.requirements(wanted.pins))
    named = source.explicit(session, wanted.pins)
    if named is not None:
        if unsure := [str(pin) for pin in wanted.pins if not pin.hashes]:
            raise unhashed(unsure)
        return _build(session, {**args, "wheels": [], "source": named}, sent, progress, anew=anew)
    notes: tuple[str, ...] = ()
    if source.may_download(session, wanted.pins, wanted.target, store):
        own = source.by_itself(session, program, wanted.pins, progress)
        try:
            if own is not None:
                return _build(session, {**args, "wheels": [], "source": own}, sent, progress, anew=anew)
        except Unreachable:
            raise
        except OrchError as error:
            notes = (f"the place could not do it with its own index, so wheels were sent ({error.message})",)
    wheels = fetch(wanted.pins, wanted.target, store, progress, trust=_trust(spec))
    paths, more = send_wheels(session, wheels, progress)
    args["requirements"] = "".join(f"{w.name}=={w.version} --hash=sha256:{w.sha256}\n" for w in wheels)
    args["wheels"] = [
        {"path": path, "filename": w.filename, "sha256": w.sha256, "origin": w.origin}
        for w, path in zip(wheels, paths, strict=True)
    ]
    built = _build(session, args, sent + more, progress, anew=anew)
    return replace(built, notes=(*built.notes, *notes))


def _refused(spec: EnvironmentSpec, wanted: Request, lacking: Sequence[Pin], downloads: bool) -> OrchError | None:
    """Why no build can come of this lock, as far as it is known before anything is fetched."""
    if (names := unlisted(spec.lock_text)) and not spec.allow_unhashed:
        return _incomplete(spec, names)
    if downloads:
        bare = [str(pin) for pin in wanted.pins if not pin.hashes]
    else:  # an index may vouch for a build of torch
        bare = [str(pin) for pin in lacking if not pin.hashes and not build_of(pin) and _trust(spec) != "anyone"]
    return unhashed(bare) if bare else None


def _trust(spec: EnvironmentSpec) -> Trust:
    return "anyone" if spec.allow_unhashed else "index" if spec.index_hashes else "lock"


def _complete(session: Session, spec: EnvironmentSpec, wanted: Request) -> tuple[EnvironmentSpec, Request]:
    """The spec with a lock that names everything. One that does not is completed by what indexes say now, for this
    build alone and only where that is allowed. Raises OrchError."""
    lacking = unlisted(spec.lock_text)
    if not lacking:
        return spec, wanted
    if spec.allow_unhashed:
        text = lock(spec.directory)
        if not unlisted(text):
            whole = spec.model_copy(update={"lock_text": text})
            return whole, request(
                session, whole, PythonAtPlace(wanted.target.python_path, wanted.target.python_version)
            )
    raise _incomplete(spec, lacking)


def _incomplete(spec: EnvironmentSpec, lacking: Sequence[str]) -> OrchError:
    return OrchError(
        f"requirements.lock of {spec.name} does not list {', '.join(lacking)}: no index that has it could be reached "
        f"{'from here' if spec.allow_unhashed else 'where it was made'}",
        hint=f"orch env lock {spec.name}, where one can be reached",
    )


def status(session: Session, ident: str, progress: Progress = silent, verify: str = "auto") -> dict[str, Any]:
    """What the place says of an environment after checking it; a polluted one is set aside there."""
    return session.call(
        "env_status",
        {"id": ident, "verify": verify, "record": True},
        timeout=CHECK_LIMIT,
        on_event=lambda event: _tell(event, progress),
    ).data


def existing(session: Session, ident: str, name: str, progress: Progress = silent) -> BuiltEnvironment:
    """The environment of that id, which has to be at the place already.

    Raises Refused where it is polluted, NotFound where it is gone.
    """
    found = status(session, ident, progress)
    if found["polluted"]:
        raise refusal(session, ident, ident, found["polluted"])
    if not found["present"]:
        raise NotFound(
            f"environment {ident} ({name}) is not at {session.place.name} any more",
            hint=f"orch env list {session.place.name}",
        )
    return _built(ident, found, 0, "there")


def again(session: Session, ident: str, progress: Progress = silent) -> BuiltEnvironment:
    """Builds an environment that was at the place once more, from what its manifest recorded.

    Raises NotFound where nothing of it is left there, OrchError where its wheels are gone or cannot be installed.
    """
    found = status(session, ident, progress)
    if found["present"]:
        return _built(ident, found, 0, "there")
    manifest = found["manifest"] or {}
    python = PythonAtPlace(*(str((manifest.get("python") or {}).get(key) or "3.8") for key in ("path", "version")))
    program, sent = ensure_uv(session, target_of(session.hello, python), WheelStore(), progress)
    args: dict[str, Any] = {"id": ident, "uv": program, "again": True}
    if "://" in session.place.wheels:  # an address is not in manifests, since it may hold credentials
        args["source"] = {"kind": "mirror", "where": session.place.wheels, "backend": None}
    return _build(session, args, sent, progress, anew=True)


def _build(session: Session, args: Mapping[str, Any], sent: int, progress: Progress, *, anew: bool) -> BuiltEnvironment:
    reply = session.call(
        "env_build",
        {**args, "anew": anew, "protect": session.place.protect},
        timeout=BUILD_LIMIT,
        on_event=lambda event: _tell(event, progress),
    ).data
    return _built(str(args["id"]), reply, sent, str(reply["how"]))


def refusal(session: Session, name: str, ident: str, polluted: Mapping[str, Any]) -> Refused:
    """Why a polluted environment is not used, who still uses it, and what to type. `name` is what to build."""
    words = [f"environment {name} ({ident})" if name != ident else f"environment {ident}"]
    words[0] += f" at {session.place.name} is polluted: {polluted['summary']}"
    if polluted["runs"]:
        words.append(f"it is still used by {', '.join(polluted['runs'])}")
    if polluted["processes"]:
        words.append(f"it is still used by process {', '.join(polluted['processes'])}")
    elif not polluted["runs"] and ".polluted-" in str(polluted["path"]):
        words.append(f"it was set aside as {polluted['path']}")
    return Refused("; ".join(words), hint=f"orch env build {name} {session.place.name}")


def _about(wanted: Request) -> dict[str, Any]:
    """What only this end knows of an environment, for its manifest."""
    target = wanted.target
    return {
        "name": wanted.spec.name,
        "backend": wanted.spec.backend,
        "lock": hashlib.sha256(wanted.spec.lock_text.encode()).hexdigest(),
        "lock_missing": missing(wanted.spec.lock_text),
        "allow_unhashed": wanted.spec.allow_unhashed,
        "platform": {"system": target.system, "machine": target.machine, "libc": list(target.libc or ())},
    }


def _built(ident: str, answer: Mapping[str, Any], sent: int, how: str) -> BuiltEnvironment:
    path, manifest = str(answer["path"]), answer["manifest"]
    wheels = manifest.get("wheels", ())
    notes = [f"{w['filename']}: hash from index, not from lock" for w in wheels if w.get("origin") == "index"]
    notes += [f"{w['filename']}: no hash vouches for it" for w in wheels if w.get("origin") == "nobody"]
    python = posixpath.join(path, "bin/python")
    return BuiltEnvironment(ident, path, python, manifest, sent, how, (*notes, *answer.get("notes", ())))


def _tell(event: Mapping[str, Any], progress: Progress) -> None:
    if "done" in event:
        progress(str(event["step"]), int(event["done"]), int(event["total"]), str(event.get("unit", "packages")))
    else:
        progress(str(event["step"]), int(event.get("seconds", 0)), None, "s")
