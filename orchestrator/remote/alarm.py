"""How the runner sleeps: until a signal comes, a child ends, another thread calls, or the time is over."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from typing import Callable


class Alarm:
    """One pipe that signals and threads write to."""

    def __init__(self) -> None:
        self._wake, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        os.set_blocking(self._wake, False)

    def listen(self, on_term: Callable[[], None]) -> None:
        """Signals wake from now on; a pane that is closed, or keys pressed in it by who only looks, end nothing."""
        for name in ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTSTP", "SIGTTOU", "SIGTTIN", "SIGPIPE"):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: on_term())

    def wake(self) -> None:
        """From any thread."""
        with contextlib.suppress(OSError):
            os.write(self._waker, b"!")

    def sleep(self, seconds: float) -> None:
        select.select([self._wake], [], [], seconds)
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake, 512):
                pass
