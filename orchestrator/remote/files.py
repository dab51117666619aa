"""Files brought to the place and fetched from it: received beside, checked there, then renamed into place."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import stat
import tarfile
import tempfile
import time
from typing import IO, TYPE_CHECKING, Any, Dict, Iterator, List, Optional, Tuple

from .frames import MAX_PAYLOAD, OpError

if TYPE_CHECKING:
    from .serve import Call

# What is being received lies here, under the root; each folder is locked by its writer for as long as it lives.
INCOMING = "tmp"
COPY = 1 << 20


def resolve(root: str, path: str) -> str:
    """`path` under `root`. Raises OpError where it is absolute or leads out, also by a link."""
    if not path or "\0" in path or os.path.isabs(path) or ".." in path.split("/"):
        raise OpError("refused", "the path %r leads out of %s" % (path, root))
    full = os.path.join(root, path)
    real_root = os.path.realpath(root)
    if os.path.commonpath([real_root, os.path.realpath(os.path.dirname(full))]) != real_root:
        raise OpError("refused", "the path %r leads out of %s by a link" % (path, root))
    return full


def have(args: Dict[str, Any], call: Call) -> Dict[str, Any]:
    """Which of `paths` are there, in the order asked."""
    return {"paths": [path for path in args["paths"] if os.path.lexists(resolve(call.root, path))]}


def get(args: Dict[str, Any], call: Call) -> Tuple[Dict[str, Any], bytes]:
    """The bytes of one file: `length` of them at most (all, up to one frame) from `offset`."""
    full = resolve(call.root, args["path"])
    offset = int(args.get("offset") or 0)
    length = int(args.get("length") or MAX_PAYLOAD)
    try:
        fd = os.open(full, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise OpError("not_found", "there is no %s" % full) from None
        if error.errno == errno.ELOOP:
            raise OpError("refused", "%s is a link" % full) from None
        raise
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise OpError("refused", "%s is not a regular file" % full)
        if "length" not in args and info.st_size - offset > MAX_PAYLOAD:
            raise OpError("refused", "%s has %d bytes: too many for one answer" % (full, info.st_size))
        pieces = []
        left = min(length, MAX_PAYLOAD)
        while left > 0:
            piece = os.pread(fd, left, offset)
            if not piece:
                break
            pieces.append(piece)
            offset += len(piece)
            left -= len(piece)
    finally:
        os.close(fd)
    return {"size": info.st_size, "mtime": info.st_mtime}, b"".join(pieces)


def put(args: Dict[str, Any], call: Call) -> Dict[str, Any]:
    """Receives `path` (an upload): `size` bytes with digest `sha256`, `mode` (files only), `unpack` "tar" or null.

    Whatever goes wrong, nothing is visible under `path` and nothing stays behind.
    """
    full = resolve(call.root, args["path"])
    unpack = args.get("unpack")
    if unpack not in (None, "tar"):
        raise OpError("usage", "cannot unpack %r" % (unpack,))
    if os.path.lexists(full):
        return {"path": full, "how": "there"}
    wanted = str(args["sha256"])
    size = int(args["size"])
    try:
        with Incoming(call.root) as folder:
            received = os.path.join(folder, "data")
            _receive(call, received, size, wanted)
            if unpack == "tar":
                tree = os.path.join(folder, "tree")
                os.mkdir(tree, 0o755)
                with tarfile.open(received, "r:") as archive:
                    extract(archive, tree)
                os.unlink(received)
                sync_tree(tree)
                result = tree
            else:
                os.chmod(received, int(args.get("mode") or 0o644) & 0o7777)
                result = received
            os.makedirs(os.path.dirname(full), 0o700, exist_ok=True)
            how = rename_new(result, full)
    except OSError as error:
        raise _named(error, full, size) from None
    except tarfile.TarError as error:
        raise OpError("failed", "the archive for %s cannot be unpacked: %s" % (full, error)) from None
    return {"path": full, "how": how}


def _named(error: OSError, full: str, size: int) -> OpError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return OpError("failed", "the disk is full: no room for %s (%d bytes)" % (full, size))
    if error.errno == errno.EROFS:
        return OpError("failed", "%s cannot be written: the file system there is read-only" % full)
    return OpError("failed", "%s cannot be written: %s" % (full, error.strerror or error))


def _receive(call: Call, path: str, size: int, wanted: str) -> None:
    digest = hashlib.sha256()
    got = 0
    with open(path, "wb") as file:
        for part in call.parts():
            got += len(part)
            if got > size:
                raise OpError("failed", "more than the announced %d bytes came" % size)
            digest.update(part)
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    if got != size or digest.hexdigest() != wanted:
        raise OpError(
            "failed",
            "what arrived is not what was sent: %d of %d bytes, sha256 %s in place of %s"
            % (got, size, digest.hexdigest()[:12], wanted[:12]),
        )


def rename_new(source: str, target: str) -> str:
    """Renames into place unless another was first: "new" or "there". Raises OSError."""
    try:
        if os.path.isdir(source):
            # rename(2) would replace an empty folder; a filled one that came first is ENOTEMPTY.
            os.rename(source, target)
        else:
            os.link(source, target)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR) and os.path.lexists(target):
            return "there"
        if os.path.isdir(source) or error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK):
            raise
        os.rename(source, target)  # a file system without hard links
    fsync_folder(os.path.dirname(target))
    return "new"


class Incoming:
    """A locked folder of its own under `<root>/tmp`, gone at the end; those of dead writers are swept away first."""

    def __init__(self, root: str) -> None:
        self._parent = os.path.join(root, INCOMING)
        self._path = ""
        self._fd = -1

    def __enter__(self) -> str:
        os.makedirs(self._parent, 0o700, exist_ok=True)
        sweep(self._parent)
        self._path = tempfile.mkdtemp(prefix="put-", dir=self._parent)
        self._fd = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        return self._path

    def __exit__(self, *_: object) -> None:
        remove_tree(self._path)
        os.close(self._fd)


def sweep(parent: str) -> None:
    """Removes what writers left behind that were killed: nobody holds the lock of their folder."""
    for entry in os.listdir(parent):
        path = os.path.join(parent, entry)
        try:
            # Younger ones may belong to a writer that has not come to lock it.
            if not entry.startswith("put-") or _age(path) < 60:
                continue
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_tree(path)
        except OSError:
            pass
        finally:
            os.close(fd)


def _age(path: str) -> float:
    return time.time() - os.lstat(path).st_mtime


def remove_tree(path: str) -> None:
    """Removes a folder, read-only folders within included; what cannot be removed stays."""

    def retry(_function: object, name: str, _why: object) -> None:
        try:
            os.chmod(os.path.dirname(name), 0o700)
            os.chmod(name, 0o700)
            if os.path.isdir(name) and not os.path.islink(name):
                shutil.rmtree(name, ignore_errors=True)
            else:
                os.unlink(name)
        except OSError:
            pass

    shutil.rmtree(path, onerror=retry)


def extract(archive: tarfile.TarFile, target: str) -> None:
    """Unpacks an archive into the empty folder `target`; raises OpError on a member that would leave it.

    By hand, since the standard library's filters are missing from older Pythons.
    """
    links: List[tarfile.TarInfo] = []
    for member in archive:
        path = _inside(target, member.name)
        if path == target:
            continue
        os.makedirs(os.path.dirname(path), 0o755, exist_ok=True)
        if member.isdir():
            os.makedirs(path, 0o755, exist_ok=True)
        elif member.isreg():
            source = archive.extractfile(member)
            if source is None:
                raise OpError("failed", "the archive's member %r has no content" % member.name)
            _write(path, source, 0o755 if member.mode & 0o100 else 0o644, member.mtime)
        elif member.issym():
            if os.path.isabs(member.linkname):
                raise OpError("refused", "the archive's link %r is absolute" % member.name)
            _inside(target, os.path.join(os.path.dirname(member.name), member.linkname))
            links.append(member)
        else:
            raise OpError("refused", "the archive's member %r is neither file, folder nor link" % member.name)
    # Links come last: nothing can be written through one.
    for member in links:
        os.symlink(member.linkname, _inside(target, member.name))
    for member in links:
        real = os.path.realpath(_inside(target, member.name))
        if os.path.commonpath([real, os.path.realpath(target)]) != os.path.realpath(target):
            raise OpError("refused", "the archive's link %r leads out of it" % member.name)


def _inside(target: str, name: str) -> str:
    path = os.path.normpath(os.path.join(target, name))
    if os.path.isabs(name) or "\0" in name or (path != target and not path.startswith(target + os.sep)):
        raise OpError("refused", "the archive's member %r leads out of it" % name)
    return path


def _write(path: str, source: IO[bytes], mode: int, mtime: Optional[float]) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "wb") as file:
        shutil.copyfileobj(source, file, COPY)
        os.fchmod(file.fileno(), mode)
    if mtime is not None:
        os.utime(path, (mtime, mtime))


def walk(tree: str) -> Iterator[Tuple[str, bool]]:
    """Every file and folder of a tree, folders last, links left out: (path, is a folder)."""
    for folder, _, names in os.walk(tree, topdown=False):
        for name in names:
            path = os.path.join(folder, name)
            if not os.path.islink(path):
                yield path, False
        yield folder, True


def sync_tree(tree: str) -> None:
    """Makes a tree durable. Raises OSError, a full disk that was noticed late included."""
    for path, is_folder in walk(tree):
        if is_folder:
            fsync_folder(path)
            continue
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def fsync_folder(path: str) -> None:
    """Makes the names in a folder durable, where the file system can."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


OPS = {"have": have, "put": put, "get": get}
