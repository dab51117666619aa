"""Generations as the workstation sees them: going back to one that worked, and what a pinned launch leaves out."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestrator import history
from orchestrator.config import EnvironmentSpec
from orchestrator.environment.build import existing, request, status
from orchestrator.environment.progress import Progress, silent
from orchestrator.errors import NotFound, OrchError, Refused
from orchestrator.place.session import Session
from orchestrator.snapshot import Snapshot
from orchestrator.user import who

_SHOWN = 12  # names in a list for people


@dataclass(frozen=True)
class Pinned:
    """A pin as the place has it: launches take environment, cache and code from this generation."""

    generation: int
    run: str  # that was this generation's
    environment: str  # id
    environment_name: str
    code_digest: str
    by: str
    at: float  # Unix seconds by the place's clock
    why: str
    cache: str | None = None  # "<key>/<digest>" of a compile cache
    code: Mapping[str, Any] = field(default_factory=dict)  # what that run's provenance says of its code, digest aside

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> Pinned:
        code = found.get("code") or {}
        return cls(
            generation=int(found["generation"]),
            run=str(found.get("run") or ""),
            environment=str(found["environment"]),
            environment_name=str(found.get("environment_name") or ""),
            code_digest=str(code.get("digest") or ""),
            by=str(found.get("by") or "somebody"),
            at=float(found.get("at") or 0.0),
            why=str(found.get("why") or ""),
            cache=_snapshot(found.get("cache")),
            code={key: value for key, value in code.items() if key != "digest"},
        )

    @property
    def snapshot(self) -> Snapshot:
        """The code, which lies at the place and need not travel."""
        return Snapshot(self.code_digest, b"", 0)


def _snapshot(cache: Any) -> str | None:
    """The name of a snapshot, which others have written; None for anything else."""
    return cache if isinstance(cache, str) and re.fullmatch(r"[0-9a-f]{16}/[0-9a-f]{16}", cache) else None


@dataclass(frozen=True)
class Change:
    """What going from one generation to another changes: each a list of lines for people."""

    packages: tuple[str, ...]
    cache: tuple[str, ...]
    code: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.packages or self.cache or self.code)


def pin_of(session: Session, recipe: str) -> Pinned | None:
    """The recipe's pin at the place, with what is recorded of its code."""
    found = session.call("pin", {"recipe": recipe}).data["pin"]
    if found is None:
        return None
    pin = Pinned.read(found)
    return Pinned(**{**pin.__dict__, "code": _recorded_code(session, pin)})


def _recorded_code(session: Session, pin: Pinned) -> Mapping[str, Any]:
    """Commit and patch, from the provenance of the run whose generation this was; else what the pin says."""
    try:
        text = session.call("get", {"path": f"runs/{pin.run}/provenance.json"}).payload
        code = json.loads(text)["code"]
        if code["digest"] == pin.code_digest:
            return {key: value for key, value in code.items() if key != "digest"}
    except (OrchError, ValueError, KeyError, TypeError):
        pass
    return pin.code


def generations(session: Session, recipe: str | None) -> list[dict[str, Any]]:
    """Each recipe's generations at the place, the oldest first, and its pin."""
    found = list(session.call("generations", {"recipe": recipe}).data["recipes"])
    place = session.place.name
    names = [_seen(place, str(one["recipe"]), each) for one in found for each in one["generations"]]
    history.see("generation", place, recipe, names)
    return found


def _seen(place: str, recipe: str, generation: Mapping[str, Any]) -> history.Seen:
    """For whoever types its number next."""
    words = " ".join(str(generation.get(key) or "") for key in ("standing", "run"))
    return history.Seen("generation", place, recipe, str(generation.get("generation")), words.strip())


def choose(session: Session, recipe: str, to: int | None) -> tuple[dict[str, Any], dict[str, Any] | None, bool]:
    """The generation to go back to (the last good one unless `to`), the one that is pinned or else the latest, and
    whether it is pinned: launches take the working tree where none is. Raises NotFound."""
    (found,) = generations(session, recipe)
    known: Sequence[dict[str, Any]] = found["generations"]
    pin = found["pin"]
    now = known[-1] if known else None
    if pin is not None:
        now = next((one for one in known if one["generation"] == pin["generation"]), now)
    if not known:
        raise NotFound(
            f"{recipe} has not been launched at {session.place.name}: there is nothing to go back to",
            hint=f"orch launch {recipe} --place {session.place.name}",
        )
    if to is not None:
        chosen = next((one for one in known if one["generation"] == to), None)
        if chosen is None:
            numbers = f"1 to {known[-1]['generation']}" if len(known) > 1 else str(known[-1]["generation"])
            raise NotFound(
                f"{recipe} has no generation {to} at {session.place.name}: there are {numbers}",
                hint=f"orch env list {session.place.name}",
            )
        return chosen, now, pin is not None
    good = [one for one in known if one["standing"] == "good"]
    if not good:
        raise NotFound(
            f"no generation of {recipe} at {session.place.name} is good yet (of {len(known)})",
            hint=f"orch rollback-env {recipe} {session.place.name} --to {known[-1]['generation']}, "
            f"or orch env mark {recipe} GENERATION good {session.place.name}",
        )
    return good[-1], now, pin is not None


def check(session: Session, recipe: str, one: Mapping[str, Any], progress: Progress = silent) -> Mapping[str, Any]:
    """Holds that all of a generation is at the place and unchanged, and gives its environment's manifest.

    Raises Refused, NotFound.
    """
    name = f"generation {one['generation']} of {recipe}"
    built = existing(session, str(one["environment"]), str(one.get("environment_name") or ""), progress)
    check_code(session, str((one.get("code") or {}).get("digest")), name)
    return built.manifest


def check_code(session: Session, digest: str, name: str) -> dict[str, str]:
    """The files of a code snapshot at the place, sha256 by path. Raises NotFound, Refused."""
    tree = session.call("code_tree", {"digest": digest}, timeout=120.0).data
    if not tree["present"]:
        raise NotFound(f"the code of {name}, code/{digest}, is not at {session.place.name} any more")
    if not tree["intact"]:
        raise Refused(
            f"the code of {name} was changed at the place: {session.root}/code/{digest} is not what its name says",
            hint=f"orch env list {session.place.name}",
        )
    return dict(tree["files"])


@dataclass(frozen=True)
class WorkingTree:
    """What a launch without a pin would take from here; None for what cannot be read."""

    spec: EnvironmentSpec | None = None
    code: Snapshot | None = None


def change(
    session: Session,
    now: Mapping[str, Any] | None,
    to: Mapping[str, Any],
    manifest: Mapping[str, Any],
    tree: WorkingTree | None = None,
) -> Change:
    """What going back to `to`, whose environment's manifest is given, changes against what launches take now: what
    `tree` has, else the generation `now`."""
    tree = tree or WorkingTree()
    if now is None:
        return Change((), (), ())
    packages = _package_change(session, now, to, manifest, tree.spec)
    cache: tuple[str, ...] = ()
    if now.get("cache") != to.get("cache"):
        cache = _cache_change(session, now, to)
    elif packages and now["environment"] == to["environment"]:  # the working tree's lock is another one already
        cache = (f"what the working tree's own key has → {_snapshot(to.get('cache')) or 'none'}",)
    return Change(packages, cache, _code_change(session, now, to, tree))


def _package_change(
    session: Session,
    now: Mapping[str, Any],
    to: Mapping[str, Any],
    manifest: Mapping[str, Any],
    spec: EnvironmentSpec | None,
) -> tuple[str, ...]:
    old, new = str(now["environment"]), str(to["environment"])
    versions: Mapping[str, str] | None = None
    if spec is not None:
        with contextlib.suppress(OrchError):  # a lock that cannot be used: no launch would take it
            wanted = request(session, spec)
            old, versions = wanted.id, {pin.name: pin.version for pin in wanted.pins}
    if old == new:
        return ()
    if versions is None:
        before = status(session, old, verify="no")["manifest"]
        versions = _versions(before) if before else None
    lines = ["(what it was is not known)"] if versions is None else package_changes(versions, _versions(manifest))
    return (f"environment {old} → {new}", *lines)


def _code_change(session: Session, now: Mapping[str, Any], to: Mapping[str, Any], tree: WorkingTree) -> tuple[str, ...]:
    old, new = (str((one.get("code") or {}).get("digest")) for one in (now, to))
    if tree.code is not None:
        old = tree.code.digest
    if old == new:
        return ()

    def there(digest: str) -> dict[str, str]:
        return dict(session.call("code_tree", {"digest": digest}, timeout=120.0).data["files"])

    before = there(old) if tree.code is None else tree_of(tree.code)
    whose = "" if tree.code is None else ", of the working tree,"
    return (f"code {old}{whose} → {new}", *file_changes(before, there(new)))


def _cache_change(session: Session, now: Mapping[str, Any], to: Mapping[str, Any]) -> tuple[str, ...]:
    """`<key>/<digest> → <key>/<digest>`, and what differs between their keys, where the place still has both."""
    from orchestrator.compile_cache.key import KeyParts, differences

    old, new = _snapshot(now.get("cache")), _snapshot(to.get("cache"))
    head = f"{old or 'none'} → {new or 'none'}"
    if new is None:
        return (head, "the generation names no compile cache: its launch takes what its key has")
    parts: list[KeyParts] = []
    for one in (old, new):
        if one is None:
            continue
        key, _, digest = one.partition("/")
        try:
            told = session.call("cache_manifest", {"key": key, "digest": digest}, timeout=60.0).data["parts"]
            parts.append(KeyParts.read(told))
        except NotFound:
            if one == new:
                return (head, f"{new} is gone at {session.place.name}: a launch takes what its key has")
        except (OrchError, ValueError, KeyError, TypeError):
            continue
    return (head, *(differences(*parts) if len(parts) == 2 else ()))


def _versions(manifest: Mapping[str, Any]) -> dict[str, str]:
    return {str(one["name"]).lower().replace("_", "-"): str(one["version"]) for one in manifest["distributions"]}


def package_changes(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """`torch 2.10.0 → 2.11.0`, one line for each package that differs."""
    lines = []
    for name in sorted({*old, *new}):
        if name not in new:
            lines.append(f"{name} {old[name]} → (none)")
        elif name not in old:
            lines.append(f"{name} (none) → {new[name]}")
        elif old[name] != new[name]:
            lines.append(f"{name} {old[name]} → {new[name]}")
    return lines


def file_changes(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """`trainer/loop.py changed`, one line for each file that differs."""
    lines = [f"{name} removed" for name in sorted(old.keys() - new.keys())]
    lines += [f"{name} added" for name in sorted(new.keys() - old.keys())]
    lines += [f"{name} changed" for name in sorted(old.keys() & new.keys()) if old[name] != new[name]]
    return lines


def tree_of(snapshot: Snapshot) -> dict[str, str]:
    """The files of a snapshot that was taken here, sha256 by path."""
    found = {}
    with tarfile.open(fileobj=io.BytesIO(snapshot.tar)) as tar:
        for member in tar:
            source = None if member.issym() else tar.extractfile(member)
            if member.issym():
                found[member.name] = hashlib.sha256(b"link\0" + os.fsencode(member.linkname)).hexdigest()
            elif source is not None:
                found[member.name] = hashlib.sha256(source.read()).hexdigest()
    return found


def set_pin(session: Session, recipe: str, generation: int, why: str) -> None:
    """Holds the recipe to a generation, from its next launch on."""
    session.call("pin_set", {"recipe": recipe, "generation": generation, "by": who(), "why": why})


def lift_pin(session: Session, recipe: str) -> Mapping[str, Any] | None:
    """Has launches take the working tree again; what the pin was, or None."""
    before: Mapping[str, Any] | None = session.call("pin_lift", {"recipe": recipe, "by": who()}).data["before"]
    return before


def mark(session: Session, recipe: str, generation: int, standing: str, why: str) -> Mapping[str, Any]:
    """A person's word on how a generation stands."""
    args = {"recipe": recipe, "generation": generation, "standing": standing, "by": who(), "why": why}
    found: Mapping[str, Any] = session.call("generation_mark", args).data["generation"]
    return found


def ignored_packages(session: Session, spec: Any, problem: OrchError | None, manifest: Mapping[str, Any]) -> list[str]:
    """What a pinned launch leaves out of the working tree's environment. Raises nothing: that tree may be broken."""
    if problem is None and spec is not None:
        try:
            wanted = request(session, spec)
        except OrchError as error:
            problem = error
        else:
            if wanted.id == manifest.get("id"):
                return []
            lines = package_changes(_versions(manifest), {pin.name: pin.version for pin in wanted.pins})
            return [f"{spec.name}'s lock asks for {_short(lines) or 'the same packages, other files'}"]
    return [f"the working tree's environment cannot be used: {(problem.message if problem else '').splitlines()[0]}"]


def ignored_code(session: Session, pin: Pinned, local: Snapshot | None, problem: OrchError | None = None) -> list[str]:
    """What a pinned launch leaves out of the working tree's code, holding the pinned code to be intact. Where the
    working tree's cannot be taken (None), `problem` says why.

    Raises NotFound, Refused.
    """
    there = check_code(session, pin.code_digest, f"generation {pin.generation}")
    if local is None:
        return [f"the working tree's code cannot be used: {(problem.message if problem else '').splitlines()[0]}"]
    if local.digest == pin.code_digest:
        return []
    return [f"code: {_short(file_changes(there, tree_of(local)))}"]


def _short(lines: Sequence[str]) -> str:
    more = f", and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return ", ".join(lines[:_SHOWN]) + more


Confirm = Callable[[Mapping[str, Any], Change], bool]


def rollback(
    session: Session,
    recipe: str,
    to: int | None,
    confirm: Confirm,
    tree: WorkingTree | None = None,
    progress: Progress = silent,
) -> tuple[Mapping[str, Any], bool]:
    """Pins the recipe at the place to a generation that worked, if `confirm` agrees: it, and whether it was done.
    `tree`: what launches take now where there is no pin.

    Nothing is removed, and no run is touched. Raises NotFound, Refused.
    """
    chosen, now, pinned = choose(session, recipe, to)
    manifest = check(session, recipe, chosen, progress)
    if not confirm(chosen, change(session, now, chosen, manifest, None if pinned else tree)):
        return chosen, False
    set_pin(session, recipe, int(chosen["generation"]), "rollback-env")
    return chosen, True
