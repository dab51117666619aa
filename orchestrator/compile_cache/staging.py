"""The right cache at a place before its trainer starts, and caches that go from place to place over this machine.

One question says what is there. Where that is what the launch needs, nothing else happens; else what the place lacks
of a stored snapshot travels in one stream.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.compile_cache import pack as packs
from orchestrator.compile_cache.key import KEY, KeyParts, Prediction, Relative, parts_of, predict, seeds
from orchestrator.compile_cache.key import differences as key_differences
from orchestrator.compile_cache.store import Store, Stored, set_aside, verify
from orchestrator.config import Recipe
from orchestrator.environment.sending import on_this_machine
from orchestrator.errors import NotFound, OrchError, Unreachable, UsageError
from orchestrator.place.session import Session

STAGE_LIMIT = 300.0  # seconds of silence: contents that lie there already are digested meanwhile
_PAYS = 1.2  # how much smaller gzip has to make it, or it is not worth the time

Progress = Callable[[int, int], None]  # bytes sent, of all


def _silent(_done: int, _total: int) -> None: ...


@dataclass(frozen=True)
class Found:
    """What a place says of a key: `cache_find`, read."""

    parts: KeyParts  # completed by what only the place knows
    why: str | None  # a part that could not be read there, and why: nothing is known then
    present: str | None  # the digest that launches of this key take
    wanted: KeyParts | None  # of the snapshot that a pin names, where it is there
    relatives: tuple[Relative, ...]
    last_cold: tuple[float, float] | None  # seconds, and when
    programs: Mapping[str, Any]
    snapshots: int | None  # at the place in all


def ask(session: Session, parts: KeyParts, environment: str | None, recipe: str, want: str | None = None) -> Found:
    """One round trip, all that a launch costs whose cache is in place. Raises OrchError."""
    asked = {"parts": parts.to_json(), "environment": environment, "recipe": recipe, "want": want}
    answer = session.call("cache_find", asked, timeout=60.0).data
    try:
        wanted, present, cold = answer.get("wanted"), answer.get("present"), answer.get("last_cold")
        found = Found(
            parts=KeyParts.read(answer["parts"]),
            why=answer.get("why"),
            present=str(present["digest"]) if present else None,
            wanted=KeyParts.read(wanted["parts"]) if wanted else None,
            relatives=tuple(_relatives(answer["relatives"])),
            last_cold=(float(cold["seconds"]), float(cold["at"])) if cold else None,
            programs=answer.get("programs") or {},
            snapshots=answer.get("snapshots"),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise OrchError(f"what {session.place.name} says of its compile caches cannot be read: {error!r}") from None
    if found.why is None and found.parts.digest != answer.get("key"):
        raise OrchError(
            f"{session.place.name} names the cache {answer.get('key')}, its parts make {found.parts.digest}"
        )
    return found


def _relatives(told: Sequence[Mapping[str, Any]]) -> Iterator[Relative]:
    for one in told:
        with contextlib.suppress(ValueError):  # a key.json that somebody has written to is no relative
            parts = KeyParts.read(one["parts"])
            if parts.digest == one["key"]:
                yield Relative(parts, str(one["digest"]), bool(one.get("same_recipe")))


@dataclass(frozen=True)
class CachePlan:
    """What a launch will find, and what has to travel for it."""

    prediction: Prediction | None  # None where the place could not tell which key it is
    send: Stored | None = None
    notes: tuple[str, ...] = ()


def plan(found: Found, store: Store, recipe: str, want: str | None = None, generation: int | None = None) -> CachePlan:
    """Which snapshot the run begins with. `want`: the one that a pin names, "<key>/<digest>". Nothing is asked."""
    if found.why is not None:
        return CachePlan(None, None, (f"which compile cache belongs to the run is unknown: {found.why}",))
    notes: tuple[str, ...] = ()
    parts = found.parts
    if want is not None:
        pinned, notes = _pinned(found, store, want, f"the cache of generation {generation}, {want}")
        if pinned is not None:
            return pinned
    if found.present is not None:
        return CachePlan(predict(parts, found.present, (), last_cold=found.last_cold), None, notes)
    stored, broken = _whole(store.find(parts.digest))
    notes += broken
    if stored is not None:
        return CachePlan(predict(parts, stored.digest, (), last_cold=found.last_cold), stored, notes)
    known = {one.name: one for one in store.current() if one.trouble() is None}
    theirs = [Relative(one.parts, one.digest, one.label.get("recipe") == recipe, here=False) for one in known.values()]
    prediction = predict(parts, None, (*found.relatives, *theirs), last_cold=found.last_cold)
    here = {one.name for one in found.relatives}
    send = known.get(prediction.seed or "") if prediction.seed not in here else None
    return CachePlan(prediction, send, notes)


def _whole(stored: Stored | None) -> tuple[Stored | None, tuple[str, ...]]:
    """A stored snapshot that can travel, or a note why it cannot: a damaged cache costs a compile, and no launch."""
    trouble = None if stored is None else stored.trouble()
    if stored is None or trouble is None:
        return stored, ()
    return None, (f"{trouble}: it is not used ({stored.again})",)


def prepare(
    session: Session,
    manifest: Mapping[str, Any],
    environment: str,
    recipe: Recipe,
    *,
    command: Sequence[str] | None,
    pinned: tuple[str, int] | None = None,
    store: Store | None = None,
) -> tuple[CachePlan | None, Sending | None]:
    """What a launch will find, and what has to travel for it; None where the environment has no torch.

    One round trip where the cache is in place, two where something of it has to travel. `command`: the recipe's own,
    None for the bundled trainer. `pinned`: the snapshot that a pin names, "<key>/<digest>", and its generation.

    Raises OrchError.
    """
    if not (manifest.get("torch") or {}).get("version"):
        return None, None
    cpus = session.hello.container.get("cpus")
    parts = parts_of(manifest, variables=recipe.env, settings=recipe.settings, command=command, cpus=cpus)
    want, generation = pinned or (None, None)
    found = ask(session, parts, environment, recipe.name, want)
    planned = plan(found, store or Store(), recipe.name, want, generation)
    if planned.send is None:
        return planned, None
    return planned, sending(session, planned.send, found.programs, found.snapshots)


def _pinned(found: Found, store: Store, want: str, name: str) -> tuple[CachePlan | None, tuple[str, ...]]:
    key, _, digest = want.partition("/")
    parts, send = found.wanted, None
    if parts is None:
        send, broken = _whole(store.find(key, digest))
        if send is None:
            return None, (*broken, f"{name} is gone, here and there: going on with what is there")
        parts = send.parts
    if parts.digest != key:
        return None, (f"{name} is not used: it is not of the key that its folder says",)
    if key == found.parts.digest:
        return CachePlan(predict(found.parts, digest, (), last_cold=found.last_cold), send), ()
    changed = ", ".join(key_differences(parts, found.parts))
    if not seeds(parts, found.parts):
        return None, (f"{name} is not used: {changed}",)
    near = Relative(parts, digest, same_recipe=True, here=True)
    prediction = predict(found.parts, None, (near,), last_cold=found.last_cold)
    # by its own name: a snapshot keeps the key that it was made under
    return CachePlan(replace(prediction, seed=want), send), ()


# --- on the way ------------------------------------------------------------------------------------


def encoding(programs: Mapping[str, Any], *, local: bool, raw: int, packed: int) -> tuple[str, str]:
    """How a snapshot travels, and why: as it is packed where zstd is there, else by what pays."""
    if programs.get("zstd"):
        return "zstd", "as it is packed"
    if local:
        return "plain", "no zstd here, and no wire to save bytes on"
    if raw < _PAYS * packed:
        return "plain", "no zstd there, and it hardly gets smaller"
    return "gzip", "no zstd there"


@dataclass(frozen=True)
class Sending:
    """What is going to travel of a snapshot."""

    stored: Stored
    pack: packs.Pack
    lacking: frozenset[str] | None  # None: all of it
    encoding: str
    why: str

    @property
    def cost(self) -> tuple[int, bool]:
        """Bytes on the way, and whether they are exact."""
        return packs.cost(self.pack, self.lacking, self.encoding)


def sending(session: Session, stored: Stored, programs: Mapping[str, Any], snapshots: int | None) -> Sending:
    """Asks which contents the place lacks, unless it has no snapshot at all. Raises OrchError."""
    pack = stored.pack()
    how, why = encoding(programs, local=on_this_machine(session), raw=pack.raw, packed=pack.bytes)
    lacking = None
    if snapshots != 0:
        asked = b"".join(bytes.fromhex(one.sha256) for one in pack.contents)
        answer = session.call("cache_lacking", {"key": stored.key}, payload=asked, timeout=STAGE_LIMIT).payload
        if len(answer) != len(pack.contents):
            raise OrchError(f"{session.place.name} was asked for {len(pack.contents)} contents, and told {len(answer)}")
        lacking = frozenset(one.sha256 for one, flag in zip(pack.contents, answer, strict=True) if flag)
    return Sending(stored, pack, lacking, how, why)


@dataclass(frozen=True)
class Sent:
    """What came of it."""

    bytes: int  # on the way
    contents: int  # that travelled
    how: str  # "new" | "there"
    encoding: str
    why: str


def stage(session: Session, what: Sending, progress: Progress = _silent, *, current: bool = True) -> Sent:
    """Sends it in one stream; the place has the snapshot afterwards, whole, or nothing of it.

    Raises OrchError (a full disk there, a damaged pack here), ConnectionLost.
    """
    total, sent = what.cost[0], 0

    def chunks() -> Iterator[bytes]:
        nonlocal sent
        for chunk in packs.stream(what.pack, what.lacking, what.encoding):
            yield chunk
            sent += len(chunk)
            progress(sent, max(total, sent))

    stored = what.stored
    args: dict[str, Any] = {"key": stored.key, "parts": stored.parts.to_json(), "label": dict(stored.label)}
    args |= {"encoding": what.encoding, "current": current}
    manifest = json.dumps(stored.manifest(), separators=(",", ":")).encode()
    reply = session.upload("cache_stage", args, chunks(), timeout=STAGE_LIMIT, payload=manifest)
    count = len(what.pack.contents) if what.lacking is None else len(what.lacking)
    return Sent(sent, count, str(reply.data.get("how")), what.encoding, what.why)


def damaged(stored: Stored) -> str | None:
    """After a stored snapshot did not come through: what is wrong with it here, by a look at every byte; it is then
    set aside in the store. None where it is whole, and the reason has to be looked for elsewhere."""
    checked = verify(stored)
    if checked.sound:
        return None
    with contextlib.suppress(OSError):  # a store that cannot be written to is told of all the same
        set_aside(stored)
    faults = [*checked.why, *(f"{path} is damaged or missing" for path in checked.paths)]
    return faults[0] if faults else "it holds contents that its manifest does not name"


def push(session: Session, stored: Stored, progress: Progress = _silent) -> Sent:
    """Brings a stored snapshot to a place, where launches of its key then take it. Raises OrchError."""
    found = ask(session, stored.parts, None, str(stored.label.get("recipe") or ""), stored.name)
    try:
        return stage(session, sending(session, stored, found.programs, found.snapshots), progress)
    except Unreachable:
        raise
    except OrchError:
        why = damaged(stored)
        if why is None:
            raise
        raise OrchError(
            f"the stored cache {stored.name} is damaged ({why}): nothing of it is at {session.place.name}",
            hint=stored.again,
        ) from None


def pull(
    session: Session, key: str, digest: str | None, store: Store, progress: Progress = _silent
) -> tuple[Stored, int]:
    """Takes a place's snapshot (the current one of the key unless named) into the store: it, and the bytes received.

    Every content is held against its digest as it comes. Raises NotFound, OrchError, ConnectionLost.
    """
    from orchestrator.remote import cache_files
    from orchestrator.remote.frames import OpError

    head = session.call("cache_manifest", {"key": key, "digest": digest}, timeout=60.0).data
    manifest, place = head["manifest"], session.place.name
    try:
        cache_files.check_manifest(manifest)
        parts = KeyParts.read(head["parts"])
    except OpError as error:
        raise OrchError(f"{place} tells a snapshot of {key} that is none: {error.message}") from None
    except ValueError as error:
        raise OrchError(f"{place} tells a key {key} that is none: {error}") from None
    if parts.digest != key or not KEY.match(str(manifest["digest"])):
        raise OrchError(f"the cache {key} at {place} is not of the key that its folder says")
    there = store.find(key, str(manifest["digest"]))
    if there is not None and verify(there).sound:
        return there, 0
    wanted = {str(sha256): int(size) for _, size, sha256, _ in manifest["files"]}
    total = sum(wanted.values())
    with store.adding(key, parts) as adding:
        args = {"key": key, "digest": manifest["digest"], "encoding": _pulled_as(session)}
        with contextlib.closing(session.download("cache_send", args, timeout=STAGE_LIMIT)) as arriving:
            received = packs.Pulled(arriving)
            done = 0
            for name, size, chunks in _members(str(args["encoding"]), received, place):
                if wanted.get(name) != size or name in adding.writer:
                    raise OrchError(f"{place} sends {name[:12]}, which the manifest of {key} does not name so")
                adding.writer.add(name, size, chunks)
                done += size
                progress(done, total)
            for _ in _read(received):  # what fills the tar up; after it comes the answer
                pass
        label = {**(head.get("label") or {}), "recipes": head.get("recipes") or []}
        return adding.keep(manifest, label, place), received.bytes


def _members(encoding: str, stream: packs.Pulled, place: str) -> Iterator[tuple[str, int, Iterator[bytes]]]:
    import zlib

    import zstandard

    try:
        yield from packs.members(packs.opened(encoding, _read(stream)))
    except (zstandard.ZstdError, zlib.error) as error:
        raise OrchError(f"what {place} sends cannot be unpacked: {error}") from None


def _read(stream: packs.Pulled) -> Iterator[bytes]:
    while piece := stream.read(packs.CHUNK):
        yield piece


def _pulled_as(session: Session) -> str:
    """How a place packs for the way here: with zstd where it has it and there is a way at all."""
    if on_this_machine(session):
        return "plain"
    return "zstd" if session.hello.container.get("tools", {}).get("zstd") else "gzip"


def meant(
    reference: str, known: Sequence[tuple[str, str, Collection[str]]], where: str, listed: str
) -> tuple[str, str | None]:
    """The key, and the digest where one was named, that is meant by a key, "<key>/<digest>", a beginning of either, or
    a recipe, which means its newest. `known`: (key, digest, recipes that used it), the newest first. `listed`: the
    command that shows them.

    Raises NotFound where nothing is meant, UsageError where more than one key is.
    """
    key, slash, digest = reference.partition("/")
    by_recipe = [one for one in known if reference and reference in one[2]]
    found = [one for one in known if key and one[0].startswith(key) and one[1].startswith(digest)]
    keys = list(dict.fromkeys(one[0] for one in found))
    if len(keys) == 1 and (not by_recipe or key == keys[0] or slash):
        digests = list(dict.fromkeys(one[1] for one in found))
        if not digest:
            return keys[0], None
        if len(digests) == 1:
            return keys[0], digests[0]
        raise _several(reference, [f"{keys[0]}/{one}" for one in digests], where, listed)
    if by_recipe:
        return by_recipe[0][0], None
    if keys:
        raise _several(reference, keys, where, listed)
    raise NotFound(f"there is no compile cache {reference or repr('')} {where}", hint=listed)


def _several(reference: str, found: Sequence[str], where: str, listed: str) -> UsageError:
    more = f" and {len(found) - 4} more" if len(found) > 4 else ""
    return UsageError(f"{reference} is the beginning of several {where}: {', '.join(found[:4])}{more}", hint=listed)


def named(store: Store, reference: str) -> Stored:
    """The stored snapshot that is meant by a reference (see `meant`). Raises NotFound, UsageError."""
    known = [(one.key, one.digest, one.recipes) for one in store.all()]
    key, digest = meant(reference, known, "here", "orch cache list --here")
    found = store.find(key, digest)
    if found is None:
        raise NotFound(f"there is no compile cache {reference} here", hint="orch cache list --here")
    return found
