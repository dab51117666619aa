"""Where compile caches lie at a place: the folder of a key, its snapshots, which one launches take, who uses them.

`<root>/caches/<key>/` holds `key.json`, `snapshots/<digest>/`, `current` (replaced by rename), `uses.jsonl` and
`aside/`. What is under way lies in `<root>/caches/tmp/`, so that one rename within one file system makes it visible.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from typing import Any, Dict, Iterator, List, Optional, Tuple

from . import cache_files, generations
from .cache_files import DIGEST, FILES, KEY, MANIFEST, Row
from .derive import Standing, once
from .files import fsync_folder, rename_new
from .frames import OpError
from .rundir import ACTIVE, append_line, list_runs, lock_file, read_json, write_file, write_json

PATIENCE = 30.0  # seconds that another's change of the same key may take
_LARGEST = 256 << 20  # bytes of a manifest
_USES = 4 << 20  # bytes of uses.jsonl that are read: the end of it


def caches_dir(root: str) -> str:
    return os.path.join(root, "caches")


def key_dir(root: str, key: Any) -> str:
    """The folder of a key. Raises OpError for what is none."""
    if not isinstance(key, str) or not KEY.match(key):
        raise OpError("usage", "%r is no key of a compile cache" % (key,))
    return os.path.join(caches_dir(root), key)


def snapshot_dir(root: str, key: Any, digest: Any) -> str:
    """The folder of a snapshot. Raises OpError for what is none."""
    if not isinstance(digest, str) or not DIGEST.match(digest):
        raise OpError("usage", "%r is no digest of a snapshot" % (digest,))
    return os.path.join(key_dir(root, key), "snapshots", digest)


def split_name(name: Any) -> Tuple[str, str]:
    """(key, digest) of "<key>/<digest>". Raises OpError for what is none."""
    key, _, digest = name.partition("/") if isinstance(name, str) else ("", "", "")
    if not KEY.match(key) or not DIGEST.match(digest):
        raise OpError("usage", "%r is no snapshot of a compile cache: <key>/<digest>" % (name,))
    return key, digest


def keys(root: str) -> List[str]:
    """Every key that has a folder here."""
    return _names(caches_dir(root), KEY)


def snapshots(root: str, key: str) -> List[str]:
    """The digests of a key's snapshots."""
    return _names(os.path.join(key_dir(root, key), "snapshots"), DIGEST)


def _names(folder: str, pattern: Any) -> List[str]:
    """Of the folders in one, by their names: nothing that somebody has put there besides."""
    try:
        with os.scandir(folder) as entries:
            return sorted(e.name for e in entries if pattern.match(e.name) and e.is_dir(follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError):
        return []


def read_manifest(root: str, key: str, digest: str) -> Tuple[Optional[Dict[str, Any]], Optional[str]]:
    """(manifest, None), or (None, why it cannot be used): what is in it is sound, and it is that snapshot's."""
    manifest, why = read_json(os.path.join(snapshot_dir(root, key, digest), MANIFEST), _LARGEST)
    if manifest is None:
        return None, why
    try:
        cache_files.check_manifest(manifest)
    except OpError as error:
        return None, error.message
    if manifest["digest"] != digest:
        return None, "it is the manifest of %s" % manifest["digest"]
    return manifest, None


def current(root: str, key: str) -> Optional[str]:
    """The digest that launches take; None where the key has none, or it is gone."""
    try:
        with open(os.path.join(key_dir(root, key), "current"), encoding="ascii", errors="replace") as file:
            digest = file.read(64).strip()
    except OSError:
        return None
    if not DIGEST.match(digest) or not os.path.exists(os.path.join(snapshot_dir(root, key, digest), MANIFEST)):
        return None
    return digest


def set_current(root: str, key: str, digest: str) -> None:
    """From now on launches take this one. To be called with the key's lock held. Raises OSError."""
    write_file(os.path.join(key_dir(root, key), "current"), digest.encode("ascii") + b"\n", 0o644)


def about(root: str, key: str) -> Dict[str, Any]:
    """key.json: `{"version", "parts", "label", "made"}`; {} where it cannot be read."""
    return read_json(os.path.join(key_dir(root, key), "key.json"))[0] or {}


def make_key(root: str, key: str, parts: Any, label: Any) -> str:
    """The key's folder, made where it is missing. Raises OSError."""
    home = key_dir(root, key)
    os.makedirs(os.path.join(home, "snapshots"), 0o755, exist_ok=True)
    if not os.path.exists(os.path.join(home, "key.json")):
        write_json(
            os.path.join(home, "key.json"),
            {"version": 1, "parts": parts, "label": label, "made": round(time.time(), 3)},
        )
    return home


@contextlib.contextmanager
def locked(root: str, key: str, patience: float = PATIENCE) -> Iterator[None]:
    """Holds the key's lock. Raises TimeoutError where it stays held, OSError."""
    fd = lock_file(os.path.join(key_dir(root, key), ".lock"), patience)
    if fd is None:
        raise TimeoutError("another program has been changing the compile cache %s for %g s" % (key, patience))
    try:
        yield
    finally:
        os.close(fd)


def add(root: str, key: str, folder: str, manifest: Dict[str, Any], make_current: bool) -> str:
    """`publish`, with the key's lock taken for it. Raises TimeoutError too."""
    with locked(root, key):
        return publish(root, key, folder, manifest, make_current)


def publish(root: str, key: str, folder: str, manifest: Dict[str, Any], make_current: bool) -> str:
    """Makes what lies in `folder` (its `files/`, complete) a snapshot: "new", or "there" where it was. The caller holds
    the key's lock. Visible only when all is there; until then nothing is in the key's folder. Raises OSError."""
    digest = manifest["digest"]
    text = json.dumps(manifest, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    write_file(os.path.join(folder, MANIFEST), text, 0o444)
    target = snapshot_dir(root, key, digest)
    how = rename_new(folder, target)
    if how == "there" and read_manifest(root, key, digest)[0] is None:  # it lies there by name alone
        os.rename(target, folder + ".old")
        how = rename_new(folder, target)
    if make_current or current(root, key) is None:
        set_current(root, key, digest)
    return how


def move_aside(root: str, key: str, digest: str, why: str, run: str) -> Optional[str]:
    """Takes a snapshot out of use: its new name, None where it is gone already. Raises OSError, TimeoutError."""
    source = snapshot_dir(root, key, digest)
    home = key_dir(root, key)
    with locked(root, key):
        os.makedirs(os.path.join(home, "aside"), 0o755, exist_ok=True)
        was_current = current(root, key) == digest
        stem = "%s-%s" % (digest, time.strftime("%Y%m%d-%H%M%S"))
        name, number = stem, 1
        while os.path.lexists(os.path.join(home, "aside", name)):
            number += 1
            name = "%s-%d" % (stem, number)
        try:
            os.rename(source, os.path.join(home, "aside", name))
        except FileNotFoundError:
            return None
        fsync_folder(os.path.join(home, "snapshots"))
        if was_current:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(home, "current"))
        with contextlib.suppress(OSError):
            write_json(os.path.join(home, "aside", name, "why.json"), {"why": why, "run": run, "at": time.time()})
    return name


def hold(path: str, shared: bool) -> Optional[int]:
    """The lock of a snapshot, as long as the descriptor is open: readers share it, who removes it has it alone. None
    where another's stands against it, or there is no such folder."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


# --- contents that lie here --------------------------------------------------------------------------


class Known:
    """Which contents the snapshots here have, and where. Those of `first` (a key) are looked at before others."""

    def __init__(self, root: str, first: str) -> None:
        self.snapshots = 0
        self._found: Dict[str, Tuple[str, Row]] = {}
        for key in sorted(keys(root), key=lambda key: key != first):
            for digest in snapshots(root, key):
                manifest, _ = read_manifest(root, key, digest)
                if manifest is None:
                    continue
                self.snapshots += 1
                folder = os.path.join(snapshot_dir(root, key, digest), FILES)
                for row in manifest["files"]:
                    self._found.setdefault(row[2], (folder, row))

    def __contains__(self, sha256: str) -> bool:
        return sha256 in self._found

    def where(self, sha256: str) -> Tuple[str, Row]:
        """(the folder `files/`, the row) of a content. Raises KeyError."""
        return self._found[sha256]


# --- uses --------------------------------------------------------------------------------------------


def uses(root: str, key: str) -> List[Dict[str, Any]]:
    """What runs told of this key, the oldest first; a broken line costs itself."""
    path = os.path.join(key_dir(root, key), "uses.jsonl")
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - _USES))
            data = file.read(_USES)
    except OSError:
        return []
    found = []
    for raw in data.split(b"\n"):
        with contextlib.suppress(ValueError):
            line = json.loads(raw.decode("utf-8"))
            if isinstance(line, dict) and isinstance(line.get("at"), (int, float)):
                found.append(line)
    return found


def used(root: str, key: str, line: Dict[str, Any]) -> None:
    """Appends what a run tells. Raises OSError."""
    append_line(os.path.join(key_dir(root, key), "uses.jsonl"), json.dumps(line, ensure_ascii=False))


def cold_seconds(line: Dict[str, Any]) -> Optional[float]:
    """What a cold compile took, where the line tells of one."""
    seconds = line.get("compile_seconds")
    return float(seconds) if line.get("cold") is True and isinstance(seconds, (int, float)) else None


def named(root: str) -> Dict[str, List[str]]:
    """ "<key>/<digest>" -> why it is kept: good generations, pins, and runs that have not ended.

    Raises OpError where a pin or a run's state cannot be read: what they need is then unknown.
    """
    found: Dict[str, List[str]] = {}

    def keep(name: Any, why: str) -> None:
        if isinstance(name, str) and why not in found.setdefault(name, []):
            found[name].append(why)

    for recipe in generations.names(root):
        pin = generations.read_pin(root, recipe)
        if pin is not None:
            keep(pin.get("cache"), "%s is pinned to it" % recipe)
        for one in generations.read(root, recipe):
            if one["standing"] == "good":
                keep(one.get("cache"), "generation %d of %s is good" % (one["generation"], recipe))
    snapshot = once()
    for run in list_runs(root):
        state, why = run.state()
        if state is None:
            raise OpError("failed", "the state of %s cannot be read (%s), so what it needs is unknown" % (run.run, why))
        if state.get("phase") not in ACTIVE:
            continue
        standing = Standing(run, snapshot)  # nobody has written the end of one whose runner was killed
        if standing.phase not in ACTIVE and not standing.alive:
            continue
        record = state.get("cache") or (read_json(run.file("launch.json"))[0] or {}).get("cache") or {}
        if record.get("key") and record.get("snapshot"):
            keep("%s/%s" % (record["key"], record["snapshot"]), "%s uses it" % run.run)
        keep(record.get("seed"), "%s uses it" % run.run)
    return found
