"""Showing console.log in the runner's own pane. The file is the record; the pane may miss some and may
vanish."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time

_PIECE = 64 << 10
_BEHIND = 512 << 10  # farther behind than this, the pane skips ahead


class Echo:
    """Copies what is appended to a file to a descriptor, without ever waiting for its reader."""

    def __init__(self, path: str, fd: int = 1) -> None:
        self.path = path
        self.fd = fd
        self.gone = False
        self._offset = 0
        self._pending = b""
        self._at_line_start = True
        try:
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_NONBLOCK)
        except OSError:
            self.gone = True

    def say(self, text: str) -> None:
        """The runner's own words, on a line of their own; never in console.log."""
        start = b"" if self._at_line_start else b"\n"
        self._pending += start + b"[orch] " + text.encode("utf-8", "replace") + b"\n"
        self._at_line_start = True
        self._write()

    def step(self) -> bool:
        """Copy a piece; whether there may be more at once."""
        if self.gone:
            return False
        if self._pending:
            self._write()
            if self._pending:
                return False
        try:
            with open(self.path, "rb") as f:
                size = os.fstat(f.fileno()).st_size
                if size < self._offset:
                    self._offset = 0
                if size - self._offset > _BEHIND:
                    skipped = size - _PIECE - self._offset
                    self._offset += skipped
                    self.say("%d bytes not shown here, see console.log" % skipped)
                f.seek(self._offset)
                data = f.read(_PIECE)
        except OSError:
            return False
        if not data:
            return False
        self._offset += len(data)
        self._pending += data
        self._at_line_start = data.endswith((b"\n", b"\r"))
        self._write()
        return True

    def drain(self, patience: float = 2.0) -> None:
        """Show what is left, within `patience` seconds."""
        end = time.monotonic() + patience
        while time.monotonic() < end and not self.gone:
            if not self.step():
                if not self._pending:
                    return
                time.sleep(0.01)

    def close(self) -> None:
        """Let the terminal take in the last lines: one that closes right after a write loses them."""
        self.drain()
        if not self.gone and os.isatty(self.fd):
            time.sleep(0.25)

    def _write(self) -> None:
        if self.gone:
            self._pending = b""
            return
        with contextlib.suppress(BlockingIOError):
            try:
                while self._pending:
                    self._pending = self._pending[os.write(self.fd, self._pending[:4096]) :]
            except BlockingIOError:
                raise
            except OSError:  # EIO: the terminal's other end is gone, and so it stays
                self.gone, self._pending = True, b""
