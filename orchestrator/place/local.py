"""Commands on this machine."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import threading
import time
from collections.abc import Sequence

from orchestrator.errors import ConnectionLost, Unreachable
from orchestrator.place.connection import CHUNK, SEND_TIMEOUT, OnStderr, Tail, command_line

# Seconds that a command has to end by itself after its stdin was closed.
GRACE = 2.0


class LocalChannel:
    """A child process behind pipes."""

    def __init__(self, child: subprocess.Popen[bytes], on_stderr: OnStderr | None) -> None:
        assert child.stdin and child.stdout and child.stderr
        self._child = child
        self._stdin = child.stdin
        self._stdout = child.stdout
        self._stderr = child.stderr
        self._tail = Tail()
        self._on_stderr = on_stderr
        os.set_blocking(self._stdin.fileno(), False)
        self._drain = threading.Thread(target=self._drain_stderr, daemon=True)
        self._drain.start()

    def _drain_stderr(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while data := os.read(self._stderr.fileno(), CHUNK):
                self._tail.add(data)
                if self._on_stderr:
                    self._on_stderr(data)

    def send(self, data: bytes) -> None:
        view = memoryview(data)
        end = time.monotonic() + SEND_TIMEOUT
        try:
            while view:
                if not select.select([], [self._stdin], [], max(0.0, end - time.monotonic()))[1]:
                    raise ConnectionLost(f"the command takes no input for {SEND_TIMEOUT:.0f} s")
                with contextlib.suppress(BlockingIOError):
                    view = view[os.write(self._stdin.fileno(), view[: 4 * CHUNK]) :]
                    end = time.monotonic() + SEND_TIMEOUT
        except (OSError, ValueError) as error:
            raise ConnectionLost(f"the command reads no more: {error}") from None

    def close_stdin(self) -> None:
        with contextlib.suppress(OSError):
            self._stdin.close()

    def read(self, timeout: float) -> bytes:
        if self._stdout.closed:
            return b""
        if not select.select([self._stdout], [], [], timeout)[0]:
            raise TimeoutError
        return os.read(self._stdout.fileno(), 8 * CHUNK)

    def stderr(self) -> bytes:
        return self._tail.get()

    def stderr_ended(self, timeout: float) -> bool:
        self._drain.join(timeout)
        return not self._drain.is_alive()

    def wait(self, timeout: float) -> int | None:
        try:
            status = self._child.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        self._drain.join(1.0)
        return status if status >= 0 else 128 - status

    def close(self) -> None:
        self.close_stdin()
        try:
            self._child.wait(GRACE)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._drain.join(0.2)
        self._stdout.close()
        if not self._drain.is_alive():
            self._stderr.close()


class LocalConnection:
    """This machine, with the environment that orch was started in."""

    def __init__(self, name: str = "local") -> None:
        self.name = name
        self.channels = 0
        self._open: list[LocalChannel] = []

    def open(self, argv: Sequence[str], on_stderr: OnStderr | None = None) -> LocalChannel:
        command_line(argv)  # the same refusals as everywhere
        try:
            child = subprocess.Popen(
                list(argv),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                # Ctrl-C at the terminal is for orch, which tells the other end in its own way.
                start_new_session=True,
            )
        except OSError as error:
            raise Unreachable(f"{argv[0]} cannot be started on this machine: {error.strerror}") from None
        self.channels += 1
        channel = LocalChannel(child, on_stderr)
        self._open.append(channel)
        return channel

    def close(self) -> None:
        while self._open:
            self._open.pop().close()
