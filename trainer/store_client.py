"""torchrun's store, spoken to without torch, which takes seconds to import and a rank can end in these.

Five of the requests of `torch.distributed.TCPStore`, as its servers understand them since torch 2.2: a byte that says
which, then keys and values, each after its length in eight bytes of this machine's order; answers likewise. Keys are
those of a `PrefixStore`. A server that does not understand us closes the connection, which is told as its silence is.
"""

import contextlib
import socket
import struct

VALIDATE, SET, COMPARE_SET, GET, CHECK, WAIT = 0, 1, 2, 3, 5, 6
MAGIC = 0x3C85F7CE  # after VALIDATE, the first thing that is sent
READY = 0
LOOK = 0.5  # seconds


class StoreClient:
    """One connection. What it raises is an OSError: refused, closed, or silent for `silence` seconds, which are counted
    in looks of our own: a machine that was stopped and goes on has missed nothing."""

    def __init__(self, address: str, port: int, prefix: str, *, silence: float):
        self.prefix, self.silence = prefix, silence
        self.socket = socket.create_connection((address, port), timeout=silence)
        self.socket.settimeout(LOOK)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.sendall(struct.pack("=BI", VALIDATE, MAGIC))

    def set(self, key: str, value: str) -> None:
        self._ask(SET, self._key(key), _sized(value))

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        """`desired` is set where the value is `expected`, or where that is empty and there is none; -> the value."""
        self._ask(COMPARE_SET, self._key(key), _sized(expected), _sized(desired))
        return self._value()

    def get(self, key: str) -> str | None:
        """None where there is none; it is not waited for."""
        self._ask(CHECK, struct.pack("=Q", 1), self._key(key))
        if self._receive(1)[0] != READY:
            return None
        self._ask(GET, self._key(key))
        return self._value()

    def wait_for(self, key: str) -> None:
        """The connection can be read from when `key` is set, or the store gone; nothing else may be asked on it."""
        self._ask(WAIT, struct.pack("=Q", 1), self._key(key))

    def waited(self) -> None:
        """Waits for what `wait_for` asked."""
        self._receive(1)

    def fileno(self) -> int:
        return self.socket.fileno()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.close()

    def _key(self, key: str) -> bytes:
        return _sized(f"/{self.prefix}/{key}")

    def _ask(self, request: int, *parts: bytes) -> None:
        self.socket.sendall(bytes([request]) + b"".join(parts))

    def _value(self) -> str:
        (size,) = struct.unpack("=Q", self._receive(8))
        return self._receive(size).decode(errors="replace")

    def _receive(self, size: int) -> bytes:
        got, looks = b"", 0
        while len(got) < size:
            try:
                part = self.socket.recv(size - len(got))
            except TimeoutError:
                looks += 1
                if looks * LOOK >= self.silence:
                    raise TimeoutError(f"it has been silent for {self.silence:.0f} s") from None
                continue
            if not part:
                raise ConnectionError("it has closed the connection")
            got += part
        return got


def _sized(text: str) -> bytes:
    content = text.encode()
    return struct.pack("=Q", len(content)) + content
