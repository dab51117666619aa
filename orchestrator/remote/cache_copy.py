"""From a snapshot to the private copy that a run works on, and from that copy to a new snapshot."""

from __future__ import annotations

import hashlib
import os
import stat
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

from . import cache_store as store
from . import cache_sweep
from .cache_files import (
    FILES,
    PIECE,
    Damaged,
    Place,
    Row,
    Writer,
    clone,
    make_manifest,
    read_checked,
    why_not,
    write_all,
)
from .files import Incoming

Tick = Callable[[], Any]
_LONGEST_SHOWN = 120  # characters of a path in a note
_MODES = (0o644, 0o755)  # of a private copy: it is written to


class Gone(Exception):
    """There is no such snapshot, or its manifest cannot be used: one sentence."""


class Copied(NamedTuple):
    """A private copy was made: its rows, and whether it shares blocks with the snapshot."""

    rows: List[Row]
    reflinked: bool


def copy(root: str, key: str, digest: str, target: str, tick: Tick) -> Copied:
    """A snapshot's files in the empty folder `target`, each checked against its digest on the way; `tick` is called
    after each. Never hard links, by which a writer would change the snapshot.

    Raises Gone, Damaged (a file of the snapshot), OSError (the copy cannot be written), and what `tick` raises.
    """
    folder = store.snapshot_dir(root, key, digest)
    held = store.hold(folder, shared=True)  # so that nobody removes it meanwhile
    if held is None:
        raise Gone("the snapshot %s/%s is not there any more" % (key, digest))
    try:
        manifest, why = store.read_manifest(root, key, digest)
        if manifest is None:
            raise Gone("the manifest of %s/%s cannot be used (%s)" % (key, digest, why))
        try:
            files = os.open(os.path.join(folder, FILES), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise Damaged(FILES, "cannot be read (%s)" % error.strerror) from None
        writer = Writer(target)
        sharing = True
        try:
            for row in manifest["files"]:
                sharing = _copy_one(row, files, writer, sharing)
                tick()
        finally:
            writer.close()
            os.close(files)
    finally:
        os.close(held)
    return Copied(manifest["files"], sharing and bool(manifest["files"]))


def _copy_one(row: Row, files: int, writer: Writer, sharing: bool) -> bool:
    """Whether its blocks are shared: where that does not work once, it is not tried again."""
    target = writer.create(Place(row[0], row[3]), _MODES)
    try:
        if sharing and row[1]:
            source = read_checked(row, files, lambda piece: None)
            try:
                if clone(source, target):
                    return True
            finally:
                os.close(source)
            sharing = False
        os.close(read_checked(row, files, lambda piece: write_all(target, piece)))
    finally:
        os.close(target)
    return sharing


def scan(folder: str, tick: Tick) -> Tuple[List[Row], List[str]]:
    """(rows, notes) of a run's private copy as it is now: what can be part of a snapshot, and what was left out and
    why. Raises OSError, and what `tick` raises."""
    rows: List[Row] = []
    notes = []
    for path, info in cache_sweep.files(folder):
        wrong = why_not(path)
        if wrong is None and not stat.S_ISREG(info.st_mode):
            wrong = "is a link" if stat.S_ISLNK(info.st_mode) else "is no file"
        if wrong is not None:
            if "temporary" not in wrong:
                notes.append("%s %s" % (_shown(path), wrong))
            continue
        size, sha256 = _digest(os.path.join(folder, path), tick)
        rows.append([path, size, sha256, bool(info.st_mode & stat.S_IXUSR)])
        tick()
    return rows, notes


def _shown(path: str) -> str:
    """A path that a program has made, as text that any file and any terminal takes."""
    text = path.encode("utf-8", "backslashreplace").decode("utf-8")
    text = "".join(char if char.isprintable() else "?" for char in text)
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 1] + "…"


def _digest(path: str, tick: Tick) -> Tuple[int, str]:
    digest, size = hashlib.sha256(), 0
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        while True:
            piece = os.read(fd, PIECE)
            if not piece:
                return size, digest.hexdigest()
            digest.update(piece)
            size += len(piece)
            tick()
    finally:
        os.close(fd)


class Harvest(NamedTuple):
    """What a run's copy became: `how` is "harvested" or "nothing new", `digest` the new snapshot."""

    how: str
    digest: Optional[str]
    files: int
    bytes: int
    notes: List[str]


def harvest(
    root: str,
    key: str,
    folder: str,
    begun: Optional[Tuple[str, str, List[Row]]],
    about: Dict[str, Any],
    only_new: bool,
    tick: Tick,
) -> Harvest:
    """Makes a new snapshot of what a run's private copy has beyond the one that it began with.

    `begun`: (key, digest, rows) of that one; `about`: the manifest's from, cold_seconds; `only_new`: changed files
    alone are no reason. Another run may have harvested meanwhile: then the new snapshot has the files of both, and
    where both have the same path, the other's. Files are linked, not copied: from snapshots, which nobody writes to,
    and from the private copy, which nobody will work on any more. Raises OSError, TimeoutError, and what `tick` raises.
    """
    rows, notes = scan(folder, tick)
    before = {row[0]: row for row in begun[2]} if begun is not None else {}
    fresh = [row for row in rows if row[0] not in before]
    changed = [row for row in rows if row[0] in before and list(row[2:]) != list(before[row[0]][2:])]
    nothing = Harvest("nothing new", None, 0, 0, notes)
    of_this_key = begun is not None and begun[0] == key
    if not rows or (of_this_key and not fresh and (only_new or not changed)):
        return nothing
    with Incoming(store.caches_dir(root)) as incoming, store.locked(root, key):
        now = store.current(root, key)
        sources: List[Tuple[str, str, List[Row]]] = [begun] if begun is not None else []
        merged = {row[0]: row for row in rows}
        if now is not None and not (of_this_key and begun is not None and begun[1] == now):
            manifest, _ = store.read_manifest(root, key, now)
            if manifest is not None:
                sources.insert(0, (key, now, manifest["files"]))
                merged = _union(merged, manifest["files"])
        made = make_manifest(
            merged.values(), **about, parent=begun[1] if begun and of_this_key else None, made=round(time.time(), 3)
        )
        if made["digest"] == now:
            return nothing
        new = os.path.join(incoming, "new")
        os.makedirs(os.path.join(new, FILES), 0o755)
        _build(root, os.path.join(new, FILES), made["files"], sources, folder, tick)
        store.publish(root, key, new, made, make_current=True)
    return Harvest("harvested", made["digest"], len(fresh) + len(changed), made["bytes"], notes)


def _union(own: Dict[str, Row], theirs: List[Row]) -> Dict[str, Row]:
    """The other's files, and of this run's those that they leave room for: no path twice, none below a file."""
    merged = {row[0]: row for row in theirs}
    folders = {path[:at] for path in merged for at in range(len(path)) if path[at] == "/"}
    for path, row in own.items():
        above = (path[:at] for at in range(len(path)) if path[at] == "/")
        if path not in merged and path not in folders and not any(folder in merged for folder in above):
            merged[path] = row
    return merged


def _build(
    root: str,
    target: str,
    rows: List[Row],
    sources: List[Tuple[str, str, List[Row]]],
    private: str,
    tick: Tick,
) -> None:
    """Links every file into `target`: from a snapshot that has it, else from the run's copy."""
    lie: Dict[Tuple[str, bool], str] = {}
    for key, digest, theirs in sources:
        folder = os.path.join(store.snapshot_dir(root, key, digest), FILES)
        for row in theirs:
            lie.setdefault((row[2], row[3]), os.path.join(folder, row[0]))
    writer = Writer(target)
    files = os.open(private, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for row in rows:
            tick()
            known = lie.get((row[2], row[3]))
            try:
                if known is not None and writer.link(known, row[0]):
                    continue
            except FileNotFoundError:
                pass  # moved aside or removed since
            os.chmod(row[0], 0o555 if row[3] else 0o444, dir_fd=files)
            if writer.link(row[0], row[0], files):
                continue
            fd = writer.create(Place(row[0], row[3]))
            try:
                os.close(read_checked(row, files, lambda piece, to=fd: write_all(to, piece)))  # type: ignore[misc]
            except Damaged as error:
                raise OSError("%s changed while it was kept" % error.path) from None
            finally:
                os.close(fd)
    finally:
        writer.close()
        os.close(files)
