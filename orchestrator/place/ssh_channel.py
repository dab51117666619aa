"""One command over SSH."""

from __future__ import annotations

import contextlib
import threading
import time

import paramiko

from orchestrator.errors import ConnectionLost
from orchestrator.place.connection import CHUNK, SEND_TIMEOUT, OnStderr, Tail

TICK = 0.25


class SshChannel:
    """A paramiko channel whose stderr is drained by a thread: both streams share one window, so that a stderr
    which nobody reads would stop stdout too."""

    def __init__(self, channel: paramiko.Channel, host: str, dead: threading.Event, on_stderr: OnStderr | None) -> None:
        self._channel = channel
        self._host = host
        self._dead = dead
        self._on_stderr = on_stderr
        self._tail = Tail()
        # paramiko has one time limit for reads and sends, which go on at once: a short one, and ours around it.
        channel.settimeout(TICK)
        self._drain = threading.Thread(target=self._drain_stderr, daemon=True)
        self._drain.start()

    def _drain_stderr(self) -> None:
        while True:
            try:
                data = self._channel.recv_stderr(CHUNK)
            except TimeoutError:
                continue
            except OSError:
                return
            if not data:
                return
            self._tail.add(data)
            if self._on_stderr:
                self._on_stderr(data)

    def send(self, data: bytes) -> None:
        view = memoryview(data)
        end = time.monotonic() + SEND_TIMEOUT
        try:
            while view:
                try:
                    view = view[self._channel.send(bytes(view[:CHUNK])) :]
                    end = time.monotonic() + SEND_TIMEOUT
                except TimeoutError:
                    if time.monotonic() > end:
                        raise ConnectionLost(f"{self._host} takes no data for {SEND_TIMEOUT:.0f} s") from None
        except (OSError, paramiko.SSHException, EOFError):
            raise ConnectionLost(self._why()) from None

    def close_stdin(self) -> None:
        with contextlib.suppress(OSError, paramiko.SSHException, EOFError):
            self._channel.shutdown_write()

    def read(self, timeout: float) -> bytes:
        end = time.monotonic() + timeout
        while True:
            if timeout <= 0 and not (self._channel.recv_ready() or self._channel.eof_received or self._channel.closed):
                raise TimeoutError
            try:
                return self._channel.recv(8 * CHUNK)
            except TimeoutError:
                if time.monotonic() >= end:
                    raise TimeoutError from None
            except (OSError, EOFError):
                return b""

    def stderr(self) -> bytes:
        return self._tail.get()

    def stderr_ended(self, timeout: float) -> bool:
        self._drain.join(timeout)
        return not self._drain.is_alive()

    def wait(self, timeout: float) -> int | None:
        end = time.monotonic() + timeout
        if not self._channel.status_event.wait(timeout):
            return None
        self._drain.join(max(0.1, end - time.monotonic()))
        status = self._channel.exit_status
        # -1 stands for "the connection was closed" and for a death by signal alike
        return status if status >= 0 else None

    def close(self) -> None:
        with contextlib.suppress(OSError, paramiko.SSHException, EOFError):
            self._channel.close()

    def _why(self) -> str:
        if self._dead.is_set():
            return f"{self._host} does not answer any more"
        transport = self._channel.get_transport()
        if transport.is_active():
            return f"the command on {self._host} reads no more"
        return f"the connection to {self._host} is lost"
