"""A snapshot packed as it will travel: a tar of its contents, in zstd frames that can be sent one by one.

Members are named by the sha256 of their bytes, each content once whichever paths have it. A frame holds whole
members, about 4 MiB of them, and is compressed by itself: any choice of frames one after another is again a zstd
stream of a tar. So what a place lacks is mostly copied from the file as it lies there, and is compressed once, when
it comes here, rather than at each launch.
"""

from __future__ import annotations

import hashlib
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn, Protocol

from orchestrator.errors import OrchError
from orchestrator.remote.cache_stream import BLOCK, TAR_END, padding, read_header, tar_header
from orchestrator.remote.frames import OpError

if TYPE_CHECKING:
    import zstandard

FRAME = 4 << 20  # bytes of content, from which on a frame is closed
LEVEL = 3  # of zstd, its own default: level 1 packs a seventh worse, and time is taken once
GZIP_LEVEL = 1  # on the way: a faster wire than this compresses is worth more than a few percent
CHUNK = 1 << 20
_TRIED_AGAIN = 16  # frames, after which gzip has another chance


@dataclass(frozen=True)
class Content:
    """The bytes of one or more files."""

    sha256: str
    size: int


@dataclass(frozen=True)
class Frame:
    """Where a frame lies in the pack, and which contents it holds: `count` of them from number `first` on."""

    offset: int
    length: int
    first: int
    count: int


@dataclass(frozen=True)
class Pack:
    """A pack and what is in it."""

    path: Path
    contents: tuple[Content, ...]
    frames: tuple[Frame, ...]

    def holds(self, frame: Frame) -> Sequence[Content]:
        return self.contents[frame.first : frame.first + frame.count]

    @property
    def bytes(self) -> int:
        """Of the file."""
        return sum(frame.length for frame in self.frames)

    @property
    def raw(self) -> int:
        """Bytes of the contents."""
        return sum(content.size for content in self.contents)

    def to_json(self) -> dict[str, Any]:
        frames = [[frame.offset, frame.length, frame.first, frame.count] for frame in self.frames]
        return {"version": 1, "contents": [[one.sha256, one.size] for one in self.contents], "frames": frames}

    @classmethod
    def read(cls, path: Path, found: dict[str, Any]) -> Pack:
        """From its index. Raises ValueError, KeyError, TypeError for what is none."""
        contents = tuple(Content(str(sha256), int(size)) for sha256, size in found["contents"])
        return cls(path, contents, tuple(Frame(*map(int, frame)) for frame in found["frames"]))


class Writer:
    """Packs contents in the order in which they come."""

    def __init__(self, path: Path) -> None:
        import zstandard

        self._path = path
        self._file = path.open("wb")
        self._compressor = zstandard.ZstdCompressor(level=LEVEL)
        self._frame: zstandard.ZstdCompressionObj | None = None
        self._raw = 0
        self._contents: list[Content] = []
        self._known: set[str] = set()
        self._frames: list[Frame] = []
        self._began = (0, 0)  # offset and number of contents, where the open frame begins

    def __contains__(self, sha256: str) -> bool:
        return sha256 in self._known

    def add(self, sha256: str, size: int, chunks: Iterable[bytes]) -> None:
        """Takes one content in. Raises OrchError where it is not what its name says."""
        digest, got = hashlib.sha256(), 0
        self._write(tar_header(sha256, size))
        for chunk in chunks:
            got += len(chunk)
            digest.update(chunk)
            self._write(chunk)
        if got != size or digest.hexdigest() != sha256:
            raise OrchError(f"what came as {sha256[:12]} is not that: {got:,} of {size:,} bytes, or other ones")
        self._write(padding(size))
        self._known.add(sha256)
        self._contents.append(Content(sha256, size))
        if self._raw >= FRAME:
            self._close_frame()

    def _write(self, data: bytes) -> None:
        if self._frame is None:
            self._frame = self._compressor.compressobj()
        self._raw += len(data)
        self._file.write(self._frame.compress(data))

    def _close_frame(self) -> None:
        if self._frame is None:
            return
        self._file.write(self._frame.flush())
        offset, first = self._began
        end = self._file.tell()
        self._frames.append(Frame(offset, end - offset, first, len(self._contents) - first))
        self._began = (end, len(self._contents))
        self._frame, self._raw = None, 0

    def finish(self) -> Pack:
        self._close_frame()
        self._file.close()
        return Pack(self._path, tuple(self._contents), tuple(self._frames))

    def close(self) -> None:
        self._file.close()


# --- reading ---------------------------------------------------------------------------------------


class Readable(Protocol):
    def read(self, size: int = -1, /) -> bytes: ...


def members(stream: Readable) -> Iterator[tuple[str, int, Iterator[bytes]]]:
    """The contents in a tar as they come: sha256, size, and the bytes, of which what was not read is passed over.

    Raises OrchError where it is cut off or is no such tar.
    """
    while True:
        head = stream.read(BLOCK)
        if not head:
            return
        try:
            found = read_header(head) if len(head) == BLOCK else _cut_off()
        except OpError as error:
            raise OrchError(error.message) from None
        if found is None:
            return
        name, size = found
        chunks = _body(stream, size)
        yield name, size, chunks
        for _ in chunks:
            pass


def _body(stream: Readable, size: int) -> Iterator[bytes]:
    left = size
    while left:
        piece = stream.read(min(CHUNK, left))
        left -= len(piece) or _cut_off()
        yield piece
    if len(stream.read(-size % BLOCK)) != -size % BLOCK:
        _cut_off()


def _cut_off() -> NoReturn:
    raise OrchError("the stream of a cache ends in the middle of a file")


class Pulled:
    """A stream to be read, out of the parts of one that come by themselves."""

    def __init__(self, parts: Iterator[bytes]) -> None:
        self._parts = filter(None, parts)  # an empty part is not the end
        self._held = memoryview(b"")
        self.bytes = 0

    def read(self, size: int = -1) -> bytes:
        """`size` bytes, fewer only at the end."""
        pieces: list[memoryview] = []
        wanted = size if size >= 0 else 1 << 62
        while wanted > 0:
            if not self._held:
                self._held = memoryview(next(self._parts, b""))
                self.bytes += len(self._held)
                if not self._held:
                    break
            pieces.append(self._held[:wanted])
            self._held = self._held[wanted:]
            wanted -= len(pieces[-1])
        return b"".join(pieces)


def opened(encoding: str, parts: Iterator[bytes]) -> Readable:
    """The decoded stream of one that came in parts."""
    if encoding == "plain":
        return Pulled(parts)
    if encoding == "gzip":
        return Pulled(_gunzipped(parts))
    import zstandard

    decompressor = zstandard.ZstdDecompressor()
    return decompressor.stream_reader(Pulled(parts), read_across_frames=True)  # type: ignore[arg-type]


def _gunzipped(parts: Iterator[bytes]) -> Iterator[bytes]:
    decoder = zlib.decompressobj(wbits=31)
    for data in parts:
        while data:
            yield decoder.decompress(data, CHUNK)
            data = decoder.unconsumed_tail
            if decoder.eof:
                data = decoder.unused_data
                decoder = zlib.decompressobj(wbits=31)


def unpacked(pack: Pack, frame: Frame, file: IO[bytes]) -> Iterator[tuple[str, int, Iterator[bytes]]]:
    """The members of one frame. Raises OrchError where the pack is damaged."""
    import zstandard

    try:
        yield from members(opened("zstd", _pieces(pack, frame, file)))
    except zstandard.ZstdError as error:
        raise OrchError(f"{pack.path} is damaged: {error}") from None


def _pieces(pack: Pack, frame: Frame, file: IO[bytes]) -> Iterator[bytes]:
    """A frame as it lies in the file. Raises OrchError where the file is shorter."""
    left = frame.length
    while left:
        try:
            file.seek(frame.offset + frame.length - left)
            piece = file.read(min(CHUNK, left))
        except OSError as error:
            raise OrchError(f"{pack.path} cannot be read: {error.strerror or error}") from None
        if not piece:
            raise OrchError(f"{pack.path} is damaged: it ends too early")
        left -= len(piece)
        yield piece


def _open(pack: Pack) -> IO[bytes]:
    try:
        return pack.path.open("rb")
    except OSError as error:
        raise OrchError(f"{pack.path} cannot be read: {error.strerror or error}") from None


# --- sending ---------------------------------------------------------------------------------------


class _Encoder(Protocol):
    def compress(self, data: bytes) -> bytes: ...

    def flush(self) -> bytes: ...


class _Plain:
    def compress(self, data: bytes) -> bytes:
        return data

    def flush(self) -> bytes:
        return b""


def _encoder(encoding: str) -> Callable[[], _Encoder]:
    if encoding == "gzip":
        return lambda: zlib.compressobj(GZIP_LEVEL, wbits=31)
    if encoding == "plain":
        return _Plain
    import zstandard

    return lambda: zstandard.ZstdCompressor(level=1).compressobj()


def stream(pack: Pack, lacking: frozenset[str] | None, encoding: str) -> Iterator[bytes]:
    """The contents that are lacking (None: all), encoded as "zstd", "gzip" or "plain", and the tar's end.

    Whole frames are taken as they are. Raises OrchError where the pack is damaged.
    """
    encoder, paying = _encoder(encoding), Paying()
    with _open(pack) as file:
        for frame in pack.frames:
            wanted = [one for one in pack.holds(frame) if lacking is None or one.sha256 in lacking]
            if wanted and encoding == "zstd" and len(wanted) == frame.count:
                yield from _pieces(pack, frame, file)
            elif wanted:
                coder = zlib.compressobj(paying.level, wbits=31) if encoding == "gzip" else encoder()
                names, raw = {one.sha256 for one in wanted}, sum(one.size for one in wanted)
                yield from paying.timed(raw, _encoded(coder, unpacked(pack, frame, file), names))
    end = encoder()
    yield end.compress(TAR_END) + end.flush()


class Paying:
    """Whether gzip pays: as long as the wire is slower than packing. Looked at with each frame, by the clock."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.level = GZIP_LEVEL  # of the next frame; 0 only wraps
        self._clock = clock
        self._frames = 0
        self._sent, self._waited = 0, 0.0  # in all: bytes, and seconds until the wire had taken them

    def timed(self, raw: int, chunks: Iterator[bytes]) -> Iterator[bytes]:
        """One frame of `raw` bytes of content, handed on."""
        began, waited, sent = self._clock(), self._waited, self._sent
        for chunk in chunks:
            before = self._clock()
            yield chunk
            self._waited += self._clock() - before
            self._sent += len(chunk)
        self._frames += 1
        if self.level:
            packing = self._clock() - began - (self._waited - waited)
            saved = (raw - (self._sent - sent)) * self._waited / max(1, self._sent)
            self.level = GZIP_LEVEL if saved > packing else 0
        elif self._frames % _TRIED_AGAIN == 0:
            self.level = GZIP_LEVEL


def _encoded(coder: _Encoder, found: Iterator[tuple[str, int, Iterator[bytes]]], wanted: set[str]) -> Iterator[bytes]:
    """Some members of a frame, as a frame (or a gzip member) of their own."""
    for name, size, chunks in found:
        if name not in wanted:
            continue
        for data in chain((tar_header(name, size),), chunks, (padding(size),)):
            made = coder.compress(data)
            if made:
                yield made
    if rest := coder.flush():
        yield rest


def cost(pack: Pack, lacking: frozenset[str] | None, encoding: str) -> tuple[int, bool]:
    """The bytes that `stream` will give, and whether that is exact: it is not where something is compressed anew."""
    total, exact = 0, True
    for frame in pack.frames:
        held = pack.holds(frame)
        wanted = [one for one in held if lacking is None or one.sha256 in lacking]
        raw = sum(one.size for one in wanted)
        if encoding == "plain":
            total += sum(BLOCK + one.size + -one.size % BLOCK for one in wanted)
        elif wanted and encoding == "zstd" and len(wanted) == frame.count:
            total += frame.length
        elif wanted:
            exact = False
            total += frame.length * raw // max(1, sum(one.size for one in held))
    return total, exact
