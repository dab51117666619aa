"""What a compile cache is made of: keys, manifests, contents; how its files are written, and read with a check.

A *snapshot* is a folder `files/` and a `manifest.json` that tells each file: `[path, size, sha256, executable]`. Its
digest is that of the list, so that two snapshots with the same files are one. A *content* is what a file holds,
known by its sha256, whichever paths have it (`cache_stream` carries contents from place to place).

No file of a snapshot is synced to the disk by itself: 5,000 of them would cost seconds, and a sync of the whole file
system would wait for what every other program has written. Only the manifest, the names of folders and `current` are.
A power cut can thus leave a snapshot whose files are short or empty. It is never used: every reader (the copy that a
run works on, the reuse of a content, the sending) holds each file against the manifest's digest, and a snapshot that
fails is moved aside, which costs one cold compile.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Sequence, Set, Tuple, Union

from .frames import OpError

KEY = DIGEST = re.compile(r"[0-9a-f]{16}\Z")
SHA256 = re.compile(r"[0-9a-f]{64}\Z")
TOPS = ("inductor", "triton")  # the folders of a cache
MANIFEST, FILES = "manifest.json", "files"
MOST_FILES = 400_000
MOST_BYTES = 1 << 40
PIECE = 1 << 20  # bytes read or written at once
_LONGEST_PATH, _LONGEST_NAME = 1024, 255
_FICLONE = 0x40049409
_LOCK_OR_TEMPORARY = re.compile(
    r"""(?:.*/)?(?:
        locks/.*                    # Inductor's locks
      | [^/]*\.lock                 # and everyone else's
      | tmp\.pid_[^/]*(?:/.*)?      # Triton's folders before their rename
      | [^/]*\.tmp(?:[.-][^/]*)?    # Inductor writes .<pid>.<thread>.tmp and renames
      | \.tmp[^/]*(?:/.*)?
    )\Z""",
    re.VERBOSE,
)

Row = Sequence[Any]  # [path, size, sha256, executable]
Buffer = Union[bytes, memoryview]


# --- names -------------------------------------------------------------------------------------------


def key_of(parts: Dict[str, Any]) -> str:
    """The name of the cache that these parts share: 16 hex digits."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:16]


def digest_of(files: Iterable[Row]) -> str:
    """The name of the snapshot that has these files, in whatever order they are told: 16 hex digits."""
    digest = hashlib.sha256()
    for path, _, sha256, executable in sorted(files, key=lambda row: os.fsencode(row[0])):
        digest.update(b"%s\0%s\0%d\n" % (os.fsencode(path), sha256.encode("ascii"), bool(executable)))
    return digest.hexdigest()[:16]


def never_kept(path: str) -> bool:
    """Whether a path within a cache is a lock or a half-written file by its name: no part of a snapshot."""
    return _LOCK_OR_TEMPORARY.match(path) is not None


def why_not(path: Any) -> Optional[str]:
    """What is wrong with a path of a manifest, or None: it stays within the folder, and any file system takes it."""
    if not isinstance(path, str) or not path:
        return "is no path"
    names = path.split("/")
    if "\0" in path or any(name in ("", ".", "..") for name in names):
        return "leads out of the cache"
    if names[0] not in TOPS or len(names) < 2:
        return "is in none of the folders %s" % ", ".join(TOPS)
    try:
        long = len(path.encode("utf-8")) > _LONGEST_PATH or any(
            len(name.encode("utf-8")) > _LONGEST_NAME for name in names
        )
    except UnicodeEncodeError:
        return "is not UTF-8"
    if long:
        return "is too long"
    return "is a lock or a temporary file" if never_kept(path) else None


def check_manifest(manifest: Any) -> List[Row]:
    """Its files. Raises OpError ("refused") with the first thing that is wrong: a path that leads out, one that is
    told twice or lies below a file, numbers that are none, a digest that is not the list's."""
    rows = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(rows, list) or manifest.get("version") != 1:
        raise OpError("refused", "this is no manifest of a compile cache")
    if len(rows) > MOST_FILES:
        raise OpError("refused", "the manifest tells of %d files: %d at most" % (len(rows), MOST_FILES))
    paths: Set[str] = set()
    folders: Set[str] = set()
    sizes: Dict[str, int] = {}
    for row in rows:
        if not isinstance(row, (list, tuple)) or len(row) != 4:
            raise OpError("refused", "a row of the manifest is not [path, size, sha256, executable]")
        path, size, sha256, executable = row
        wrong = why_not(path)
        if wrong is not None:
            raise OpError("refused", "the manifest's path %r %s" % (path, wrong))
        if not _is_whole(size) or not isinstance(executable, bool):
            raise OpError("refused", "the manifest's size or mode of %r is none" % path)
        if not isinstance(sha256, str) or not SHA256.match(sha256):
            raise OpError("refused", "the manifest's digest of %r is none" % path)
        if sizes.setdefault(sha256, size) != size or path in paths:
            raise OpError("refused", "the manifest contradicts itself about %r" % path)
        paths.add(path)
        at = path.rfind("/")
        while at > 0 and path[:at] not in folders:
            folders.add(path[:at])
            at = path.rfind("/", 0, at)
    both = paths & folders
    if both:
        raise OpError("refused", "the manifest's path %r is a file and a folder" % min(both))
    total = sum(row[1] for row in rows)
    if total > MOST_BYTES or manifest.get("bytes") != total:
        raise OpError("refused", "the manifest's files have %d bytes, it says %r" % (total, manifest.get("bytes")))
    if manifest.get("digest") != digest_of(rows):
        raise OpError("refused", "the manifest's digest is not that of its files")
    return list(rows)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_BYTES


def make_manifest(rows: Iterable[Row], **about: Any) -> Dict[str, Any]:
    """The manifest of these files. `about`: from, parent, made, cold_seconds."""
    files = sorted((list(row) for row in rows), key=lambda row: os.fsencode(row[0]))
    manifest: Dict[str, Any] = {"version": 1, "digest": digest_of(files), "bytes": sum(row[1] for row in files)}
    manifest.update(about)
    manifest["files"] = files
    return manifest


def contents(rows: Iterable[Row]) -> List[Tuple[str, int]]:
    """(sha256, size) of every content, once, by first appearance."""
    found: Dict[str, int] = {}
    for _, size, sha256, _ in rows:
        found.setdefault(sha256, size)
    return list(found.items())


# --- writing ----------------------------------------------------------------------------------------


class Place(NamedTuple):
    """Where a content belongs within a cache's folder."""

    path: str
    executable: bool


class Writer:
    """Makes files below one folder. Paths are taken from its descriptor, so that each is looked up from there."""

    def __init__(self, folder: str) -> None:
        self._fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._made: Set[str] = {""}

    def create(self, place: Place, modes: Tuple[int, int] = (0o444, 0o555)) -> int:
        """A new file's descriptor. `modes`: of one that is not executable, and of one that is. Raises OSError."""
        self.folder_of(place.path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(place.path, flags, modes[place.executable], dir_fd=self._fd)

    def again(self, first: Place, other: Place) -> None:
        """`other` with the content of `first`, which was written here. Raises OSError."""
        self.folder_of(other.path)
        if first.executable == other.executable and self.link(first.path, other.path, self._fd):
            return
        source = os.open(first.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._fd)
        try:
            target = self.create(other)
            try:
                for piece in iter(lambda: os.read(source, PIECE), b""):
                    write_all(target, piece)
            finally:
                os.close(target)
        finally:
            os.close(source)

    def link(self, source: str, path: str, source_fd: Optional[int] = None) -> bool:
        """A second name for a file that nobody writes to any more; False where the file system has none left, or
        the source lies on another one. Raises OSError."""
        self.folder_of(path)
        try:
            os.link(source, path, src_dir_fd=source_fd, dst_dir_fd=self._fd, follow_symlinks=False)
        except OSError as error:
            if error.errno in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
                return False
            raise
        return True

    def folder_of(self, path: str) -> None:
        """Makes the folder that `path` lies in. Raises OSError."""
        folder = path.rpartition("/")[0]
        if folder in self._made:
            return
        self.folder_of(folder)
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o755, dir_fd=self._fd)
        self._made.add(folder)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def write_all(fd: int, data: Buffer) -> None:
    """Raises OSError, a full disk included."""
    view = memoryview(data)
    while len(view):
        view = view[os.write(fd, view) :]


# --- reading, checked --------------------------------------------------------------------------------


class Damaged(Exception):
    """A file of a snapshot is not what its manifest says: `path`, and why."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__("%s %s" % (path, why))
        self.path, self.why = path, why


def read_checked(row: Row, folder_fd: int, take: Callable[[bytes], Any]) -> int:
    """Gives the content to `take`, in pieces, and answers its descriptor, which is the caller's to close. A file of
    one piece is checked before it is given. Raises Damaged (one that is not there too), and what `take` raises."""
    path, size = row[0], row[1]
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder_fd)
    except OSError as error:
        raise Damaged(path, "cannot be read (%s)" % error.strerror) from None
    try:
        data = _read(fd, size + 1 if size <= PIECE else PIECE, path)
        digest = hashlib.sha256(data)
        got = len(data)
        if size <= PIECE:
            _compare(row, got, digest.hexdigest())
            take(data)
            return fd
        while data:
            take(data)
            data = _read(fd, PIECE, path)
            digest.update(data)
            got += len(data)
            if got > size:
                break
        _compare(row, got, digest.hexdigest())
        return fd
    except BaseException:
        os.close(fd)
        raise


def _read(fd: int, most: int, path: str) -> bytes:
    try:
        return os.read(fd, most)
    except OSError as error:
        raise Damaged(path, "cannot be read (%s)" % error.strerror) from None


def _compare(row: Row, got: int, digest: str) -> None:
    if got < row[1]:
        raise Damaged(row[0], "is cut off: %d of %d bytes" % (got, row[1]))
    if got > row[1] or digest != row[2]:
        raise Damaged(row[0], "has another content than its manifest says")


def clone(source_fd: int, target_fd: int) -> bool:
    """Lets a new file share the blocks of another until one of them is written to; False where that cannot be."""
    try:
        fcntl.ioctl(target_fd, _FICLONE, source_fd)
        return True
    except OSError:
        return False


def named(error: OSError, where: str, size: int) -> OpError:
    """What kept a cache of `size` bytes from being written, in one sentence."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return OpError("failed", "the disk is full: no room for the compile cache at %s (%d bytes)" % (where, size))
    if error.errno == errno.EROFS:
        return OpError("failed", "%s cannot be written: the file system there is read-only" % where)
    return OpError("failed", "the compile cache at %s cannot be written: %s" % (where, error.strerror or error))
