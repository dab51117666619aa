"""The framing that both ends of a kept-open channel speak.

A frame is two big-endian 32-bit lengths, then a JSON header in UTF-8, then a payload of raw bytes.
"""

from __future__ import annotations

import json
import struct
from typing import Any, Dict, Iterator, List, Tuple

Header = Dict[str, Any]
Frame = Tuple[Header, bytes]

PREFIX = struct.Struct(">II")
# Bounds that no honest peer reaches: what is beyond them is noise taken for a frame.
MAX_HEADER = 32 << 20
MAX_PAYLOAD = 256 << 20
# Parts of an upload: big enough that framing costs nothing, small enough to notice an early answer.
PART_SIZE = 512 << 10

# Error codes that an operation may answer with, and that the other end turns into its own errors.
CODES = ("failed", "usage", "not_found", "refused")


class FrameError(Exception):
    """The bytes are not a frame: something else is writing on the channel."""


class OpError(Exception):
    """A failure that the user is to read: `code` is one of CODES, `message` one clear sentence."""

    def __init__(self, code: str, message: str) -> None:
        if code not in CODES:
            raise ValueError("unknown error code %r" % (code,))
        super().__init__(message)
        self.code = code
        self.message = message


def encode(header: Header, payload: bytes = b"") -> bytes:
    """One frame as bytes. Raises FrameError where it is past the bounds."""
    try:
        head = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # half a character, as JSON that somebody wrote by hand may hold
        head = json.dumps(header, separators=(",", ":")).encode("ascii")
    if len(head) > MAX_HEADER or len(payload) > MAX_PAYLOAD:
        raise FrameError("a message of %d + %d bytes is too large for one frame" % (len(head), len(payload)))
    return PREFIX.pack(len(head), len(payload)) + head + payload


class Decoder:
    """Bytes in as they come, whole frames out."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._wanted = PREFIX.size

    def feed(self, data: bytes) -> List[Frame]:
        """The frames that are complete now. Raises FrameError on bytes that can be no frame."""
        self._buffer += data
        frames: List[Frame] = []
        # _wanted spares a big payload from being looked at again for each piece of it that comes.
        while len(self._buffer) >= self._wanted:
            head, body = PREFIX.unpack_from(self._buffer)
            if head > MAX_HEADER or body > MAX_PAYLOAD:
                raise FrameError("a frame of %d + %d bytes is announced" % (head, body))
            end = PREFIX.size + head + body
            if len(self._buffer) < end:
                self._wanted = end
                break
            frames.append(self._take(head, end))
            self._wanted = PREFIX.size
        return frames

    def _take(self, head: int, end: int) -> Frame:
        start = PREFIX.size
        text = bytes(self._buffer[start : start + head])
        payload = bytes(self._buffer[start + head : end])
        del self._buffer[:end]
        try:
            header = json.loads(text.decode("utf-8", "surrogateescape"))
        except ValueError as error:
            raise FrameError("a frame's header is not JSON: %s" % error) from None
        if not isinstance(header, dict):
            raise FrameError("a frame's header is not an object")
        return header, payload

    @property
    def pending(self) -> int:
        """Bytes of a frame that is not complete yet."""
        return len(self._buffer)


def split(data: bytes, size: int = PART_SIZE) -> Iterator[bytes]:
    """`data` in pieces of at most `size` bytes."""
    for start in range(0, len(data), size):
        yield data[start : start + size]
