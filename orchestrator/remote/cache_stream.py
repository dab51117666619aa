"""The stream that carries a cache's contents: a tar whose members are named by their sha256, packed or plain."""

from __future__ import annotations

import hashlib
import os
from typing import Dict, Iterable, List, Optional, Tuple

from .cache_files import SHA256, Buffer, Place, Row, Writer, write_all
from .frames import OpError

ENCODINGS = ("zstd", "gzip", "plain")
BLOCK = 512  # of a tar
TAR_END = bytes(2 * BLOCK)


def tar_header(sha256: str, size: int) -> bytes:
    """The header of a content as any tar reads it (POSIX.1-1988 ustar; sizes from 8 GiB on in base 256, as GNU's)."""
    octal = b"%011o\0" % size if size < 8 << 30 else b"\x80" + size.to_bytes(11, "big")
    head = bytearray(BLOCK)
    head[0:64] = sha256.encode("ascii")
    head[100:148] = b"0000644\0" + b"0000000\0" * 2 + octal + b"00000000000\0"
    head[148:156] = b" " * 8
    head[156:157] = b"0"
    head[257:265] = b"ustar\x0000"
    head[148:156] = b"%06o\0 " % sum(head)
    return bytes(head)


def padding(size: int) -> bytes:
    """What fills a content's last block."""
    return bytes(-size % BLOCK)


def read_header(head: bytes) -> Optional[Tuple[str, int]]:
    """(sha256, size) of a member, None for the zeros at the end. Raises OpError for anything but a content."""
    if not head.strip(b"\0"):
        return None
    said = head[148:156].strip(b" \0")
    blanked = sum(head) - sum(head[148:156]) + 8 * 32
    name = head[:100].rstrip(b"\0").decode("ascii", "replace")
    if not said.isdigit() or int(said, 8) != blanked:
        raise OpError("failed", "the stream is damaged: a header's check sum is wrong")
    if head[156:157] not in (b"0", b"\0") or not SHA256.match(name):
        raise OpError("refused", "the stream holds %r, which is no content of a cache" % name[:80])
    field = head[124:136]
    if field[0] & 0x80:
        return name, int.from_bytes(field[1:], "big")
    digits = field.strip(b" \0")
    if not digits.isdigit() or b"8" in digits or b"9" in digits:
        raise OpError("failed", "the stream is damaged: a size is no number")
    return name, int(digits, 8)


class Unpacker:
    """Takes the bytes of a tar of contents as they come, and writes each to its paths, digest held against its name.

    Nothing is written twice, no more than a piece is in memory, and a file that came within one piece costs an open,
    a write and a close. Where anything is wrong OpError is raised ("failed", "refused") or OSError: what has been
    written then is the caller's to remove.
    """

    def __init__(self, rows: Iterable[Row], folder: str) -> None:
        """`folder` exists and is empty. What is not in `rows` is refused."""
        self.received = 0  # bytes of contents
        self.missing: Dict[str, Tuple[int, List[Place]]] = {}  # sha256 -> size, paths; what has come is taken out
        for path, size, sha256, executable in rows:
            self.missing.setdefault(sha256, (size, []))[1].append(Place(path, executable))
        self.writer = Writer(folder)
        self._head = bytearray()
        self._left = 0  # bytes of the content under way
        self._pad = 0
        self._name = ""
        self._file = -1
        self._digest = hashlib.sha256()
        self._ended = False

    def feed(self, data: Buffer) -> None:
        """The next bytes, in pieces of any size."""
        view = memoryview(data)
        while len(view):
            if self._left:
                view = self._body(view)
            elif self._pad:
                step = min(self._pad, len(view))
                self._pad -= step
                view = view[step:]
            else:
                step = BLOCK - len(self._head)
                self._head += view[:step]
                view = view[step:]
                if len(self._head) == BLOCK:
                    head, self._head = bytes(self._head), bytearray()
                    self._begin(head)

    def _begin(self, head: bytes) -> None:
        member = read_header(head)
        if member is None:
            self._ended = True
            return
        sha256, size = member
        wanted = self.missing.get(sha256)
        if wanted is None or self._ended or wanted[0] != size:
            raise OpError("refused", "the stream holds %s with %d bytes, which was not asked for" % (sha256[:12], size))
        self._name, self._left, self._pad = sha256, size, -size % BLOCK
        if size == 0:
            self._finish(self.writer.create(wanted[1][0]), hashlib.sha256().hexdigest())

    def _body(self, view: memoryview) -> memoryview:
        piece = view[: self._left]
        if self._file < 0:
            self._file = self.writer.create(self.missing[self._name][1][0])
            self._digest = hashlib.sha256(piece)
        else:
            self._digest.update(piece)
        write_all(self._file, piece)
        self._left -= len(piece)
        self.received += len(piece)
        if not self._left:
            fd, self._file = self._file, -1
            self._finish(fd, self._digest.hexdigest())
        return view[len(piece) :]

    def _finish(self, fd: int, found: str) -> None:
        os.close(fd)  # may tell of a full disk, or of a quota
        if found != self._name:
            raise OpError("failed", "what arrived is not what was sent: a content has %s" % found[:12])
        first, *others = self.missing.pop(self._name)[1]
        for other in others:
            self.writer.again(first, other)

    def whole(self) -> bool:
        """Whether the stream ended between two contents."""
        return not (self._left or self._pad or self._head)

    def close(self) -> None:
        """Gives the descriptors back; to be called whatever happened."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self.writer.close()
