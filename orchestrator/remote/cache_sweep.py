"""What a program that was killed may have left half-written in a compile cache.

Inductor and Triton rename their files into place, but the linker writes a `.so` under its final name: one that is cut
off fails every later run that loads it. ld gives the execute bit as its last act, so that a `.so` of Inductor's without
it is unfinished. Triton writes the `.so` of its launchers as any file, whole and without that bit.
"""

from __future__ import annotations

import os
import re
import stat
import struct
from typing import Iterator, List, Optional, Tuple

from .cache_files import never_kept

_SHARED = re.compile(r".*\.so(?:\.[0-9.]+)?\Z")
_COMPILED = re.compile(r".*\.(?:o|gch|pch)\Z")  # g++ writes these under their final names too
_MAGIC = b"\x7fELF"


def files(folder: str) -> Iterator[Tuple[str, os.stat_result]]:
    """(path relative to `folder`, its status) of all that is no folder, links not followed. What cannot be looked at is
    passed over."""
    pending = [""]
    while pending:
        before = pending.pop()
        try:
            with os.scandir(os.path.join(folder, before)) as entries:
                found = sorted(entries, key=lambda entry: entry.name)
        except OSError:
            continue
        for entry in found:
            try:
                info = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            if stat.S_ISDIR(info.st_mode):
                pending.append(before + entry.name + "/")
            else:
                yield before + entry.name, info


def half_written(folder: str, path: str, info: os.stat_result) -> Optional[str]:
    """Why a file of a cache is the rest of a write that was cut off, or None."""
    if never_kept(path):
        return "is temporary"
    if not stat.S_ISREG(info.st_mode):
        return None
    executable = bool(info.st_mode & stat.S_IXUSR)
    shared = _SHARED.match(path) is not None
    if not (shared or executable or _COMPILED.match(path)):
        return None
    if info.st_size == 0:
        return "is empty"
    tritons = "triton" in path.split("/")[:-1]
    if shared and not executable and not tritons:
        return "has no execute bit: it was not linked to its end"
    return elf_fault(os.path.join(folder, path), info.st_size, must=shared)


def elf_fault(path: str, size: int, must: bool) -> Optional[str]:
    """What is wrong with an ELF file by its header: it is cut off where a segment, or a table of the header, would end
    beyond the file. None for a whole one, and, unless `must`, for a file that is no ELF."""
    try:
        with open(path, "rb") as file:
            head = file.read(64)
            if head[:4] != _MAGIC:
                return "has an invalid ELF header" if must else None
            wide, order = head[4:5] == b"\x02", "<" if head[5:6] == b"\x01" else ">"
            if len(head) < (64 if wide else 52):
                return "is cut off: its ELF header is not whole"
            fields = struct.unpack_from(order + ("QQIHHHHH" if wide else "IIIHHHHH"), head, 32 if wide else 28)
            segments_at, sections_at, _, _, segment_size, segments, section_size, sections = fields
            end = max(segments_at + segment_size * segments, sections_at + section_size * sections)
            if end > size:
                return "is cut off: %d bytes of at least %d" % (size, end)
            if not sections_at and not segments_at:
                return "has an ELF header without any table"
            file.seek(segments_at)
            table = file.read(segment_size * segments)
    except OSError:
        return None
    for at in range(0, len(table) - segment_size + 1 if segment_size else 0, segment_size or 1):
        offset, length = (
            struct.unpack_from(order + "Q", table, at + 8) + struct.unpack_from(order + "Q", table, at + 32)
            if wide
            else struct.unpack_from(order + "I", table, at + 4) + struct.unpack_from(order + "I", table, at + 16)
        )
        if offset + length > size:
            return "is cut off: %d bytes of at least %d" % (size, offset + length)
    return None


def sweep(folder: str) -> List[Tuple[str, str]]:
    """Removes what is half-written below a run's private cache: [(path, why)], temporary files not told."""
    told = []
    for path, info in files(folder):
        why = half_written(folder, path, info)
        if why is None:
            continue
        try:
            os.unlink(os.path.join(folder, path))
        except OSError:
            continue
        if why != "is temporary":
            told.append((path, why))
    return told
