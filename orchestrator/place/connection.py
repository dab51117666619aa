"""What a way to a machine offers, whatever carries it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from typing import Protocol

from orchestrator.errors import Unreachable

# Bytes handed on at a time: one huge write to an SSH channel is quadratic.
CHUNK = 32 << 10
# Bytes of stderr that are remembered for messages.
STDERR_KEPT = 64 << 10
# Seconds that the other end may take nothing of what is sent before it counts as dead.
SEND_TIMEOUT = 60.0

OnStderr = Callable[[bytes], None]


class ChannelRefused(Unreachable):
    """The host opens no further channel on this connection."""


class Channel(Protocol):
    """One command, running. Its stderr is drained all the while."""

    def send(self, data: bytes) -> None:
        """Sends all of it, in pieces. Raises ConnectionLost where the other end is gone or takes nothing."""

    def close_stdin(self) -> None:
        """Ends the command's stdin; doing so twice is no error."""

    def read(self, timeout: float) -> bytes:
        """Some of stdout, b"" at its end. Raises TimeoutError after `timeout` seconds of silence."""

    def stderr(self) -> bytes:
        """What came so far, the last 64 KiB of it."""

    def stderr_ended(self, timeout: float) -> bool:
        """Whether stderr has come to its end, and been handed on, within `timeout` seconds."""

    def wait(self, timeout: float) -> int | None:
        """The exit status, 128 + n for signal n; None where it is not known: lost, or `timeout` seconds passed."""

    def close(self) -> None:
        """Gives the channel up; doing so twice is no error."""


class Connection(Protocol):
    """A machine that commands can be run on."""

    name: str
    # Opened so far: what a command costs is kept in bounds by tests.
    channels: int

    def open(self, argv: Sequence[str], on_stderr: OnStderr | None = None) -> Channel:
        """Starts a command without a terminal. `on_stderr` gets stderr as it comes, from another thread, and holds
        the command back while it does not return. Raises Unreachable."""

    def close(self) -> None:
        """Ends the connection and what runs over it."""


class Tail:
    """The last bytes of a stream."""

    def __init__(self, limit: int = STDERR_KEPT) -> None:
        self._limit = limit
        self._data = bytearray()

    def add(self, data: bytes) -> None:
        self._data += data
        if len(self._data) > 2 * self._limit:
            del self._data[: -self._limit]

    def get(self) -> bytes:
        return bytes(self._data[-self._limit :])


def command_line(argv: Sequence[str]) -> str:
    """The one line that a login shell parses, once. Raises ValueError on what does not survive the way: pct
    destroys arguments that are not ASCII."""
    for argument in argv:
        if not argument.isascii() or "\0" in argument:
            raise ValueError(f"an argument that is not plain ASCII: {argument!r}")
    return shlex.join(argv)
