"""The stream that carries a cache's contents: a tar whose members are named by their sha256, packed or plain."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import subprocess
import threading
import zlib
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterable, List, Optional, Tuple

from . import facts
from .cache_files import PIECE, SHA256, Buffer, Place, Row, Writer, write_all
from .frames import OpError

if TYPE_CHECKING:
    from .serve import Call

ENCODINGS = ("zstd", "gzip", "plain")
BLOCK = 512  # of a tar
TAR_END = bytes(2 * BLOCK)
_SET_PIPE_SIZE = 1031  # F_SETPIPE_SZ, which Python knows from 3.10 on


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


# --- packed or plain ---------------------------------------------------------------------------------


def decoded(call: Call, encoding: str, take: Callable[[Buffer], Any]) -> None:
    """Gives an upload to `take` as it comes, unpacked, no more than a piece at a time.

    Raises OpError where it cannot be unpacked or its end is missing, what `take` raises, and what `call.parts` does.
    """
    if encoding == "plain":
        for part in call.parts():
            take(part)
    elif encoding == "gzip":
        _gunzip(call, take)
    else:
        _unzstd(call, take)


def _gunzip(call: Call, take: Callable[[Buffer], Any]) -> None:
    """Any number of members, one after another."""
    inflater = zlib.decompressobj(31)
    fresh = True
    try:
        for part in call.parts():
            data = part
            while data:
                if inflater.eof:
                    inflater, fresh = zlib.decompressobj(31), True
                # bounded: what was packed well must not fill the memory
                take(inflater.decompress(data, PIECE))
                fresh = False
                data = inflater.unused_data if inflater.eof else inflater.unconsumed_tail
    except zlib.error as error:
        raise OpError("failed", "the stream cannot be unpacked (%s)" % error) from None
    if not (inflater.eof or fresh):
        raise OpError("failed", "the stream ended too early")


def _unzstd(call: Call, take: Callable[[Buffer], Any]) -> None:
    """zstd in a process of its own: this one feeds it, a thread takes what comes out."""
    program = facts.find_tool("zstd", call.root)
    if program is None:
        raise OpError("usage", "there is no zstd here to unpack the stream with")
    child = subprocess.Popen(
        [program, "-d", "-c", "-q"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
    )
    assert child.stdin and child.stdout and child.stderr
    call.children.append(child)
    taker = _Taker(child.stdout.fileno(), take, child)
    try:
        for pipe in (child.stdin, child.stdout):
            with contextlib.suppress(OSError):
                fcntl.fcntl(pipe.fileno(), _SET_PIPE_SIZE, PIECE)
        taker.start()
        with contextlib.suppress(BrokenPipeError):
            for part in call.parts():
                write_all(child.stdin.fileno(), part)
        child.stdin.close()
        taker.join()
        status = child.wait()
    finally:
        # Where the client has gone, what is half there must not be written on.
        if child.poll() is None:
            child.kill()
        if taker.ident is not None:
            taker.join()
        child.wait()
        words = child.stderr.read().decode("utf-8", "replace").strip()
        for pipe in (child.stdin, child.stdout, child.stderr):
            with contextlib.suppress(OSError):
                pipe.close()
        call.children.remove(child)
    if taker.error is not None:
        raise taker.error
    if status:
        raise OpError("failed", "the stream cannot be unpacked (%s)" % (words[-300:] or "zstd ended with %d" % status))


class _Taker(threading.Thread):
    """Reads a pipe to its end. `error`: what kept it from it; the pipe's other end is then killed."""

    def __init__(self, fd: int, take: Callable[[Buffer], Any], child: subprocess.Popen[bytes]) -> None:
        super().__init__(name="cache", daemon=True)
        self.error: Optional[BaseException] = None
        self._fd, self._take, self._child = fd, take, child

    def run(self) -> None:
        try:
            while True:
                block = os.read(self._fd, PIECE)
                if not block:
                    return
                self._take(block)
        except BaseException as error:
            self.error = error
            self._child.kill()
