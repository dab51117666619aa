"""Reading a growing file by (inode, byte offset), in bounded pieces. Bytes go up as they are: the reader
decodes."""

from __future__ import annotations

import os
from typing import Any, Dict, Optional, Tuple

from .rundir import open_file

LIMIT = 4 << 20  # bytes of log in one reply
_BLOCK = 64 << 10

Position = Dict[str, Any]


def read(
    path: str,
    inode: Optional[int] = None,
    offset: Optional[int] = None,
    limit: int = LIMIT,
    tail_lines: Optional[int] = None,
) -> Tuple[Position, bytes]:
    """Bytes of `path` from `offset`, or its last `tail_lines` lines where no offset is given, else from its
    start.

    Returns ({"inode", "offset", "next", "size", "rotated", "truncated", "why"}, data): data is [offset,
    next). `rotated`: the file is another one than `inode`; `truncated`: it is shorter than `offset`; in both
    cases reading begins at 0. `why`: a sentence where the file cannot be read (then inode is None), else
    None.
    """
    limit = max(0, min(int(limit), LIMIT))
    where: Position = {"inode": None, "offset": 0, "next": 0, "size": 0}
    where.update({"rotated": False, "truncated": False, "why": None})
    try:
        with open_file(path) as f:
            status = os.fstat(f.fileno())
            size = status.st_size
            where["inode"], where["size"] = status.st_ino, size
            if offset is None:
                start = _tail(f.fileno(), size, tail_lines, limit) if tail_lines is not None else 0
            else:
                where["rotated"] = inode is not None and inode != status.st_ino
                where["truncated"] = not where["rotated"] and offset > size
                start = 0 if where["rotated"] or where["truncated"] else max(0, int(offset))
            data = os.pread(f.fileno(), min(limit, size - start), start) if size > start else b""
    except OSError as e:
        where["why"] = "%s: %s" % (os.path.basename(path), e.strerror)
        return where, b""
    where["offset"], where["next"] = start, start + len(data)
    return where, data


def _tail(fd: int, size: int, lines: int, limit: int) -> int:
    """Where the last `lines` lines begin, not more than `limit` bytes from the end; read backwards, in
    blocks."""
    if lines <= 0:
        return size
    lowest = max(0, size - limit)
    position, wanted = size, lines
    while position > lowest:
        begin = max(lowest, position - _BLOCK)
        block = os.pread(fd, position - begin, begin)
        if position == size and block.endswith(b"\n"):
            wanted += 1  # the newline at the end closes the last line, it does not begin one
        found = block.count(b"\n")
        if found >= wanted:
            at = len(block)
            for _ in range(wanted):
                at = block.rindex(b"\n", 0, at)
            return begin + at + 1
        wanted -= found
        position = begin
    return lowest
