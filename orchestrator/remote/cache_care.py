"""Looking after the compile caches of a place: what lies there and what it was good for, damage, and removal."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, Optional, Set, Tuple

from . import cache_store as store
from . import cache_sweep
from .cache_files import FILES, Damaged, read_checked
from .derive import LOST, Standing, once
from .files import Incoming, remove_tree, sweep
from .frames import OpError
from .rundir import ENDED, list_runs, read_json

if TYPE_CHECKING:
    from .serve import Call

COPY = "cache"  # of a run: its private copy lies there
_TELL = 0.5  # seconds between two words of progress
_DAY = 86400.0

Inode = Tuple[int, int]


def cache_list(args: Dict[str, Any], call: Call) -> Dict[str, Any]:
    """`{key}` (null: all) -> `{"caches": [{"key", "parts", "label", "made", "current", "bytes", "snapshots", "aside",
    "uses"}], "bytes", "unknown"}`, the newest used first.

    `snapshots`: `[{"digest", "bytes", "files" (a count), "made", "from", "parent", "cold_seconds", "kept_by": [why]}]`,
    the newest first; one whose manifest cannot be read has `"why"` and nulls. `aside`: `[{"name", "bytes", "why",
    "run", "at"}]`. `uses`: `{"runs", "recipes", "warm", "cold", "hits", "misses", "rebuilt", "last_at", "last_run",
    "cold_seconds", "warm_seconds", "saved_seconds"}`: `recipes` by their names; runs that began with all graphs there,
    and with nothing; graphs; what the last cold and the last warm compile took; `saved_seconds`: the sum over warm runs
    of what the cold compile before took longer, null where no cold one is known. `bytes` on the disk, shared files
    counted once. `unknown`: null, or why nobody can say what is kept by whom; each `kept_by` is then null.
    """
    root = call.root
    named, unknown = None, None
    try:
        named = store.named(root)
    except OpError as error:  # no reason to show nothing; to remove something it is
        unknown = error.message
    found, whole = [], {}
    for key in _chosen(root, args.get("key")):
        about = store.about(root, key)
        inodes = _inodes(os.path.join(store.key_dir(root, key), "snapshots"))
        whole.update(inodes)
        one: Dict[str, Any] = {"key": key, "current": store.current(root, key), "bytes": sum(inodes.values())}
        one.update({name: about.get(name) for name in ("parts", "label", "made")})
        one.update(snapshots=_snapshots(root, key, named), aside=_aside(root, key), uses=_uses(store.uses(root, key)))
        found.append(one)
    found.sort(key=lambda one: -(one["uses"]["last_at"] or one["made"] or 0.0))
    return {"caches": found, "bytes": sum(whole.values()), "unknown": unknown}


def _chosen(root: str, key: Any) -> List[str]:
    if key is None:
        return store.keys(root)
    if not os.path.isdir(store.key_dir(root, key)):
        raise OpError("not_found", "there is no compile cache %s here" % key)
    return [str(key)]


def _snapshots(root: str, key: str, named: Optional[Dict[str, List[str]]]) -> List[Dict[str, Any]]:
    found = []
    for digest in store.snapshots(root, key):
        manifest, why = store.read_manifest(root, key, digest)
        names = ("bytes", "made", "from", "parent", "cold_seconds")
        one: Dict[str, Any] = {"digest": digest, "why": why, "files": manifest and len(manifest["files"])}
        one.update({name: (manifest or {}).get(name) for name in names})
        one["kept_by"] = None if named is None else named.get("%s/%s" % (key, digest), [])
        found.append(one)
    return sorted(found, key=lambda one: -(one["made"] or 0.0))


def _aside(root: str, key: str) -> List[Dict[str, Any]]:
    home = os.path.join(store.key_dir(root, key), "aside")
    found = []
    for name in sorted(os.listdir(home)) if os.path.isdir(home) else []:
        said = read_json(os.path.join(home, name, "why.json"))[0] or {}
        one: Dict[str, Any] = {"name": name, "bytes": sum(_inodes(os.path.join(home, name)).values())}
        one.update({field: said.get(field) for field in ("why", "run", "at")})
        found.append(one)
    return found


def _uses(lines: List[Dict[str, Any]]) -> Dict[str, Any]:
    def number(line: Dict[str, Any], name: str) -> float:
        value = line.get(name)
        return value if isinstance(value, (int, float)) and not isinstance(value, bool) else 0

    found: Dict[str, Any] = {"runs": len(lines), "warm": 0, "cold": 0, "last_at": None, "last_run": None}
    found["recipes"] = sorted({str(line["recipe"]) for line in lines if line.get("recipe")})
    found.update({name: sum(int(number(line, name)) for line in lines) for name in ("hits", "misses", "rebuilt")})
    found.update(cold_seconds=None, warm_seconds=None, saved_seconds=None)
    for line in lines:
        found.update(last_at=line["at"], last_run=line.get("run"))
        seconds = line.get("compile_seconds")
        if line.get("cold") is True:
            found["cold"] += 1
            if store.cold_seconds(line) is not None:
                found["cold_seconds"] = seconds
        elif line.get("hits") and line.get("misses") == 0 and not line.get("rebuilt"):
            found["warm"] += 1
            if isinstance(seconds, (int, float)):
                found["warm_seconds"] = seconds
                if found["cold_seconds"] is not None:
                    gain = max(0.0, found["cold_seconds"] - seconds)
                    found["saved_seconds"] = round((found["saved_seconds"] or 0.0) + gain, 1)
    return found


def _inodes(folder: str) -> Dict[Inode, int]:
    """Bytes on the disk of each file below a folder, by what it is and not by its names."""
    if os.path.islink(folder):
        return {}
    return {(info.st_dev, info.st_ino): info.st_blocks * 512 for _, info in cache_sweep.files(folder)}


# --- verifying ---------------------------------------------------------------------------------------


def cache_verify(args: Dict[str, Any], call: Call) -> Dict[str, Any]:
    """`{key}` (null: all) -> `{"snapshots": [{"key", "digest", "files", "bytes", "damaged": [[path, why]], "missing":
    [path], "foreign": [path], "why"}], "sound": n}`. `why`: what is wrong with the manifest, else null. Events:
    `{"step": "verifying", "done", "total"}` in bytes. Nothing is changed."""
    chosen = [
        (key, digest) for key in _chosen(call.root, args.get("key")) for digest in store.snapshots(call.root, key)
    ]
    total = sum((store.read_manifest(call.root, *one)[0] or {}).get("bytes", 0) for one in chosen)
    done, told = 0, time.monotonic()

    def tell(size: int) -> None:
        nonlocal done, told
        done += size
        if time.monotonic() - told >= _TELL:
            told = time.monotonic()
            call.event({"step": "verifying", "done": done, "total": total})

    found = [_verify(call.root, key, digest, tell) for key, digest in chosen]
    faults = ("damaged", "missing", "foreign", "why")
    return {"snapshots": found, "sound": sum(not any(one[fault] for fault in faults) for one in found)}


def _verify(root: str, key: str, digest: str, tell: Any) -> Dict[str, Any]:
    manifest, why = store.read_manifest(root, key, digest)
    one: Dict[str, Any] = {"key": key, "digest": digest, "files": 0, "bytes": 0, "why": why}
    one.update(damaged=[], missing=[], foreign=[])
    if manifest is None:
        return one
    one.update(files=len(manifest["files"]), bytes=manifest["bytes"])
    folder = os.path.join(store.snapshot_dir(root, key, digest), FILES)
    there: Set[str] = {path for path, _ in cache_sweep.files(folder)}
    try:
        files = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        one["why"] = "%s: %s" % (FILES, error.strerror)
        return one
    try:
        for row in manifest["files"]:
            if row[0] not in there:
                one["missing"].append(row[0])
                continue
            try:
                os.close(read_checked(row, files, lambda piece: None))
            except Damaged as error:
                one["damaged"].append([error.path, error.why])
            tell(row[1])
    finally:
        os.close(files)
    one["foreign"] = sorted(there - {row[0] for row in manifest["files"]})
    return one


# --- removing ----------------------------------------------------------------------------------------


def cache_gc(args: Dict[str, Any], call: Call) -> Dict[str, Any]:
    """`{older_days, larger_bytes, dry_run}` -> `{"removed": [{"key", "digest", "bytes", "why"}], "kept": [{"key",
    "digest", "bytes", "last_used", "why": [sentence]}], "freed", "bytes", "dry_run"}`.

    Always removed: what was moved aside, copies of runs that have ended, snapshots that another has superseded and
    nobody names. `older_days`: those too that no run used for so long; `larger_bytes`: the longest unused, until all
    take no more than that. Never one that a good generation, a pin or a live run names. digest is null for what is no
    snapshot, and `"name"` says what it is. `bytes`: what is left.
    """
    root, dry = call.root, bool(args.get("dry_run"))
    older, larger = args.get("older_days"), args.get("larger_bytes")
    named = store.named(root)  # first: where that is unknown nothing is removed
    sweeping = _Sweep(call, dry)
    parent = os.path.join(store.caches_dir(root), "tmp")
    if os.path.isdir(parent) and not dry:
        sweep(parent)
    _leftovers(sweeping)
    last = _last_used(root)
    left = []
    for key in store.keys(root):
        for digest in store.snapshots(root, key):
            folder, name = store.snapshot_dir(root, key, digest), "%s/%s" % (key, digest)
            sweeping.look(folder)
            manifest, _ = store.read_manifest(root, key, digest)
            used = last.get(name) or (manifest or {}).get("made") or os.stat(folder).st_mtime
            item = {"key": key, "digest": digest, "bytes": (manifest or {}).get("bytes")}
            left.append((float(used), folder, name, item, manifest is not None))
    left.sort(key=lambda one: one[:2])
    for used, folder, name, item, sound in left:
        key, digest = str(item["key"]), str(item["digest"])
        days = (time.time() - used) / _DAY
        why: Optional[str] = None
        if not sound:
            why = "its manifest cannot be read"
        elif store.current(root, key) != digest:
            why = "a newer one has taken its place" if store.current(root, key) else "no launch takes it"
        elif older is not None and days > float(older):
            why = "not used for %.3g days" % days
        elif larger is not None and sweeping.bytes > float(larger):
            why = "the longest unused, and all take more than %d bytes" % int(larger)
        reasons = named.get(name, [])
        if why is not None and not reasons:
            with _quiet_lock(root, key) as held:
                if held and sweeping.remove(folder, dict(item, why=why)):
                    if not dry:
                        _forget(root, key, digest)
                    continue
            reasons = ["a run is copying it"]
        kept = dict(item, last_used=used, why=reasons or ["launches take it"])
        sweeping.kept.append(kept)
    answer: Dict[str, Any] = {"removed": sweeping.removed, "kept": sweeping.kept, "bytes": sweeping.bytes}
    answer.update(freed=sum(one["bytes"] for one in sweeping.removed), dry_run=dry)
    return answer


@contextlib.contextmanager
def _quiet_lock(root: str, key: str) -> Iterator[bool]:
    """The key's lock; False where it stays held."""
    try:
        with store.locked(root, key, 5.0):
            yield True
    except TimeoutError:
        yield False


class _Sweep:
    """One collection: what is removed, what is kept, and how many bytes that leaves."""

    def __init__(self, call: Call, dry: bool) -> None:
        self.removed: List[Dict[str, Any]] = []
        self.kept: List[Dict[str, Any]] = []
        self.root, self._dry = call.root, dry
        self._sizes: Dict[Inode, int] = {}
        self._names: Dict[Inode, int] = {}  # how many of the folders looked at have it
        self._folders: Dict[str, Dict[Inode, int]] = {}

    @property
    def bytes(self) -> int:
        return sum(self._sizes.values())

    def look(self, folder: str) -> Dict[Inode, int]:
        """Counts a folder in."""
        found = self._folders[folder] = _inodes(folder)
        self._sizes.update(found)
        for inode in found:
            self._names[inode] = self._names.get(inode, 0) + 1
        return found

    def remove(self, folder: str, item: Dict[str, Any]) -> bool:
        """Out of its place first, in one step, so that nothing half-removed is ever used. False where it is in use."""
        if not self._dry:
            held = None
            if os.path.isdir(folder) and not os.path.islink(folder):
                held = store.hold(folder, shared=False)
                if held is None:
                    return False
            try:
                with Incoming(store.caches_dir(self.root)) as going:
                    try:
                        os.rename(folder, os.path.join(going, "old"))
                    except OSError:
                        remove_tree(folder)  # a run's copy may lie on another file system
            finally:
                if held is not None:
                    os.close(held)
        freed = 0
        for inode in self._folders.pop(folder, {}):
            self._names[inode] -= 1
            if not self._names[inode]:
                freed += self._sizes.pop(inode)
        self.removed.append(dict(item, bytes=freed))
        return True


def _leftovers(sweeping: _Sweep) -> None:
    """What no launch takes any more, whatever its age."""
    root = sweeping.root
    for key in store.keys(root):
        home = os.path.join(store.key_dir(root, key), "aside")
        for name in sorted(os.listdir(home)) if os.path.isdir(home) else []:
            sweeping.look(os.path.join(home, name))
            item = {"key": key, "digest": None, "name": name, "why": "moved aside, since it broke a run"}
            sweeping.remove(os.path.join(home, name), item)
    snapshot = once()
    for run in list_runs(root):
        copy = run.file(COPY)
        if not os.path.isdir(copy):
            continue
        standing = Standing(run, snapshot)
        if standing.phase in ENDED or (standing.phase == LOST and not standing.alive):
            sweeping.look(copy)
            why = "the copy of %s, which is %s" % (run.run, standing.phase)
            sweeping.remove(copy, {"key": None, "digest": None, "name": "runs/%s/%s" % (run.run, COPY), "why": why})


def _last_used(root: str) -> Dict[str, float]:
    """ "<key>/<digest>" -> when a run began with it or made it."""
    found: Dict[str, float] = {}
    for key in store.keys(root):
        for line in store.uses(root, key):
            for digest in (line.get("snapshot"), line.get("made")):
                name = "%s/%s" % (key, digest)
                found[name] = max(found.get(name, 0.0), float(line["at"]))
            if line.get("seed"):
                found[str(line["seed"])] = max(found.get(str(line["seed"]), 0.0), float(line["at"]))
    return found


def _forget(root: str, key: str, digest: str) -> None:
    """`current` names nothing that is gone."""
    path = os.path.join(store.key_dir(root, key), "current")
    with contextlib.suppress(OSError), open(path, encoding="ascii") as file:
        if file.read().strip() == digest:
            os.unlink(path)


OPS = {"cache_list": cache_list, "cache_verify": cache_verify, "cache_gc": cache_gc}
