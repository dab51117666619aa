"""The processes that a stream passes at the place: the server hands on, zstd (un)packs, one reads or writes files.

The server itself touches each part once, and holds no more than a few of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import zlib
from typing import IO, TYPE_CHECKING, Any, Callable, Dict, Iterator, List, Optional

from . import facts, program
from .cache_files import PIECE, Row, write_all
from .frames import PART_SIZE, OpError

if TYPE_CHECKING:
    from .serve import Call

_SET_PIPE_SIZE = 1031  # F_SETPIPE_SZ, which Python knows from 3.10 on


class _Pipeline:
    """Children that end together: with the client, with the first that fails, at the latest when this is left."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._all: List[subprocess.Popen[bytes]] = []

    def start(self, argv: List[str], stdin: Any, stdout: Any, stderr: Any) -> subprocess.Popen[bytes]:
        """A child; pipes to and from it are made large."""
        child = subprocess.Popen(argv, stdin=stdin, stdout=stdout, stderr=stderr, bufsize=0)
        self._all.append(child)
        self._call.children.append(child)
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    fcntl.fcntl(pipe.fileno(), _SET_PIPE_SIZE, PIECE)
        return child

    def zstd(self, arguments: List[str], stdin: Any) -> subprocess.Popen[bytes]:
        """Raises OpError where there is none."""
        path = facts.find_tool("zstd", self._call.root)
        if path is None:
            raise OpError("usage", "there is no zstd here")
        return self.start([path, "-c", "-q", *arguments], stdin, subprocess.PIPE, subprocess.PIPE)

    def __enter__(self) -> _Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._all:
            if child.poll() is None:
                child.kill()  # where the client has gone, what is half there must not be written on
            child.wait()
            self._call.children.remove(child)
            for pipe in (child.stdin, child.stdout, child.stderr):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()


def _raise(report: Dict[str, Any]) -> None:
    """What a child has told of its failure. Raises OpError, OSError."""
    if "code" in report:
        raise OpError(str(report["code"]), str(report["message"]))
    if "errno" in report:
        raise OSError(report["errno"], report["message"])


def _words(pipe: Optional[IO[bytes]]) -> str:
    return pipe.read().decode("utf-8", "replace").strip()[-300:] if pipe is not None else ""


# --- receiving ---------------------------------------------------------------------------------------


def receive(call: Call, encoding: str, files: str, rows: str, tell: Callable[[int], Any]) -> Dict[str, Any]:
    """Unpacks an upload below `files`: `{"received", "missing", "whole"}` as `cache_child.unpack`. `rows`: the path of
    the manifest's, as JSON; `tell` hears how many bytes of contents have come.

    Raises OpError, OSError (a full disk), and what `call.parts` does; what was written is the caller's to remove.
    """
    with _Pipeline(call) as pipeline:
        packed = pipeline.zstd(["-d"], subprocess.PIPE) if encoding == "zstd" else None
        writer = pipeline.start(
            program.command("cache_child", "unpack", files, rows),
            subprocess.PIPE if packed is None else packed.stdout,
            subprocess.PIPE,
            subprocess.PIPE,
        )
        if packed is not None and packed.stdout is not None:
            packed.stdout.close()  # or zstd would not notice that its reader has ended
        first = writer if packed is None else packed
        assert first.stdin is not None and writer.stdout is not None
        said = _Said(writer.stdout.fileno(), tell)
        # Whoever reads no more has ended, and says why.
        with contextlib.suppress(BrokenPipeError):
            for part in _plain(call, encoding):
                write_all(first.stdin.fileno(), part)
                said.look()
        first.stdin.close()
        report = said.rest()
        _raise(report)
        if packed is not None and packed.wait():
            raise OpError("failed", "the stream cannot be unpacked (%s)" % (_words(packed.stderr) or "zstd failed"))
        if writer.wait() or "received" not in report:
            raise OpError("failed", "the stream was not unpacked: %s" % (_words(writer.stderr) or "its writer ended"))
        return report


def _plain(call: Call, encoding: str) -> Iterator[bytes]:
    """The parts of an upload, without gzip; zstd's stay as they are. Raises OpError."""
    if encoding != "gzip":
        yield from call.parts()
        return
    inflater = zlib.decompressobj(31)
    fresh = True
    try:
        for part in call.parts():
            data = part
            while data:
                if inflater.eof:  # another member
                    inflater = zlib.decompressobj(31)
                fresh = False
                # bounded: what was packed well must not fill the memory
                yield inflater.decompress(data, PIECE)
                data = inflater.unused_data if inflater.eof else inflater.unconsumed_tail
    except zlib.error as error:
        raise OpError("failed", "the stream cannot be unpacked (%s)" % error) from None
    if not (inflater.eof or fresh):
        raise OpError("failed", "the stream ended too early")


class _Said:
    """The lines of the child that unpacks: numbers as it goes, at last an object."""

    def __init__(self, fd: int, tell: Callable[[int], Any]) -> None:
        self._fd, self._tell = fd, tell
        self._buffer = b""
        os.set_blocking(fd, False)

    def look(self) -> None:
        """What has been said, without waiting."""
        with contextlib.suppress(BlockingIOError):
            self._buffer += os.read(self._fd, 1 << 16)
        *lines, self._buffer = self._buffer.split(b"\n")
        if lines and lines[-1].isdigit():
            self._tell(int(lines[-1]))
        elif lines:
            self._buffer = lines[-1] + b"\n"

    def rest(self) -> Dict[str, Any]:
        """All of it, at its end: the object, {} where none was said."""
        os.set_blocking(self._fd, True)
        pieces = [self._buffer]
        while pieces[-1] or len(pieces) == 1:
            pieces.append(os.read(self._fd, 1 << 16))
        lines = b"".join(pieces).splitlines()
        try:
            found = json.loads(lines[-1].decode("utf-8")) if lines else {}
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}


# --- sending -----------------------------------------------------------------------------------------


def send(call: Call, encoding: str, files: str, rows: List[Row]) -> None:
    """Streams the contents of `rows`, which lie below `files`, as a tar. Raises OpError ("failed" names a file that is
    damaged), OSError, and what `call.part` does."""
    with _Pipeline(call) as pipeline:
        reader = pipeline.start(
            program.command("cache_child", "pack", files), subprocess.PIPE, subprocess.PIPE, subprocess.PIPE
        )
        assert reader.stdin is not None and reader.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            write_all(reader.stdin.fileno(), json.dumps(rows).encode("ascii"))
        reader.stdin.close()
        last = reader
        if encoding == "zstd":
            last = pipeline.zstd(["-3"], reader.stdout)
            reader.stdout.close()
        assert last.stdout is not None
        pending = bytearray()
        packer = zlib.compressobj(1, zlib.DEFLATED, 31) if encoding == "gzip" else None
        while True:
            block = os.read(last.stdout.fileno(), PART_SIZE)
            if not block:
                break
            pending += block if packer is None else packer.compress(block)
            if len(pending) >= PART_SIZE:
                call.part(bytes(pending))
                pending.clear()
        if reader.wait():
            words = _words(reader.stderr)
            with contextlib.suppress(ValueError):
                _raise(json.loads(words.splitlines()[-1]) if words else {})
            raise OpError("failed", "the stream was not packed: %s" % words)
        if last.wait():
            raise OpError("failed", "the stream was not packed: %s" % _words(last.stderr))
        pending += packer.flush() if packer is not None else b""
        if pending:
            call.part(bytes(pending))
