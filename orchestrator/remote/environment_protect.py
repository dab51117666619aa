"""Write protection: the immutable flag, which stops root too, where the file system and the capabilities have it.

Missing write permission would not do: neither root nor a package manager that renames files into place minds it.
"""

from __future__ import annotations

import array
import errno
import fcntl
import os
import stat
import sys
from typing import Any, Dict, Iterator, Optional

_GET, _SET = 0x80086601, 0x40086602  # FS_IOC_GETFLAGS, FS_IOC_SETFLAGS on machines of 64 bits
_IMMUTABLE = 0x10
_UNABLE = {
    errno.EPERM: "CAP_LINUX_IMMUTABLE is missing here",
    errno.EACCES: "CAP_LINUX_IMMUTABLE is missing here",
    errno.ENOTTY: "the file system has no immutable flag",
    errno.EOPNOTSUPP: "the file system has no immutable flag",
    errno.EINVAL: "the file system has no immutable flag",
    errno.ENOSYS: "the system has no immutable flag",
}


def protect(root: str) -> Dict[str, Any]:
    """Makes everything below `root` immutable, not `root` itself: `{"how": "immutable" | "none", "why"}`.

    It is all or nothing: where one file cannot be, the flags that were set are taken back.
    """
    if not sys.platform.startswith("linux") or sys.maxsize <= 1 << 32:
        return {"how": "none", "why": "there is no immutable flag on this system"}
    for path in _below(root):
        why = set_immutable(path, True)
        if why is not None:
            release(root)
            return {"how": "none", "why": why}
    return {"how": "immutable", "why": None}


def release(root: str) -> None:
    """Takes the flag from `root` and everything below, as far as that can be done. Links are not followed."""
    if not sys.platform.startswith("linux") or sys.maxsize <= 1 << 32 or os.path.islink(root):
        return
    set_immutable(root, False)
    if os.path.isdir(root):
        for path in _below(root):
            set_immutable(path, False)


def is_immutable(path: str) -> bool:
    """Whether the flag is set."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return bool(_flags(fd) & _IMMUTABLE)
    except OSError:
        return False
    finally:
        os.close(fd)


def set_immutable(path: str, on: bool) -> Optional[str]:
    """Sets or takes the flag; why it could not be, or None."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            before = _flags(fd)
            wanted = before | _IMMUTABLE if on else before & ~_IMMUTABLE
            if wanted != before:
                fcntl.ioctl(fd, _SET, array.array("l", [wanted]))
        finally:
            os.close(fd)
    except OSError as error:
        return _UNABLE.get(error.errno or 0, error.strerror or str(error))
    return None


def _flags(fd: int) -> int:
    flags = array.array("l", [0])
    fcntl.ioctl(fd, _GET, flags, True)
    return int(flags[0])


def _below(root: str) -> Iterator[str]:
    """Files and folders below, what is in a folder before the folder; links and special files left out."""
    for folder, _, names in os.walk(root, topdown=False):
        for name in names:
            path = os.path.join(folder, name)
            if stat.S_ISREG(os.lstat(path).st_mode):
                yield path
        if folder != root:
            yield folder
