"""SIGTERM and SIGINT: finish the step, save, and leave with 128 + the signal's number."""

import contextlib
import signal
from collections.abc import Iterator


class Stopped(Exception):
    pass


class Stop:
    """`requested` is the signal that came, or 0. Work that changes nothing may be cut short: see `interruptible`."""

    def __init__(self) -> None:
        self.requested = 0
        self._interrupt = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def _handle(self, number: int, _frame: object) -> None:
        self.requested = number
        if self._interrupt:
            self._interrupt = False
            raise Stopped

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        if self.requested:
            raise Stopped
        self._interrupt = True
        try:
            yield
        finally:
            self._interrupt = False
