"""The runner's records: the state and the events, kept in memory until the disk takes them.

A full disk costs neither the trainer nor the record: what could not be written is tried again, and once it
can be the events say from when to when it could not.
"""

from __future__ import annotations

import collections
import json
import time
from typing import Any, Callable, Deque, Dict, Optional

from .rundir import RunDir, State, append_line, event_line

EVERY = 2.0  # seconds between two heartbeats, and between two attempts on a full disk
_KEPT = 2000  # events held back at most


class Recorder:
    """Writes `state.json` and appends to events.jsonl and gpu.jsonl for the one holder of the run's lock."""

    def __init__(self, run: RunDir, state: State, say: Callable[[str], None]) -> None:
        self.run = run
        self.state = state
        self.failing: Optional[str] = None
        self._say = say
        self._since = 0.0
        self._events: Deque[str] = collections.deque(maxlen=_KEPT)
        self._urgent = False
        self._next = 0.0

    def set(self, **fields: Any) -> None:
        """Change the state; it is on the disk at the next heartbeat."""
        self.state.update(fields)

    def phase(self, phase: str) -> None:
        """Change the phase, and say so in the events."""
        if self.state.get("phase") != phase:
            before = self.state.get("phase")
            self.state["phase"] = phase
            self.event("phase", phase=phase, before=before)
            self._urgent = True

    def event(self, event: str, **fields: Any) -> None:
        self._events.append(event_line(event, **fields))

    def urgent(self) -> None:
        """Write at the next step, do not wait for the heartbeat."""
        self._urgent = True

    def step(self, force: bool = False) -> bool:
        """Write what is due; whether all is on the disk."""
        now = time.monotonic()
        if not force and now < self._next and (self.failing or not self._urgent):
            return False
        self._next = now + EVERY
        try:
            self.state["heartbeat"] = time.time()
            self.run.write_state(self.state)
            while self._events:
                append_line(self.run.file("events.jsonl"), self._events[0])
                self._events.popleft()
        except OSError as e:
            self._fail(e)
            return False
        self._urgent = False
        if self.failing is not None:
            why, self.failing = self.failing, None
            self._say("records are written again")
            self.event("records_failed", why=why, since=round(self._since, 3), until=round(time.time(), 3))
            return self.step(force=True)
        return True

    def append(self, name: str, line: Dict[str, Any]) -> None:
        """Append to another of the run's files; a line that the disk does not take is lost."""
        try:
            append_line(self.run.file(name), json.dumps(line, ensure_ascii=False))
        except OSError as e:
            self._fail(e)

    def _fail(self, error: OSError) -> None:
        why = error.strerror or str(error)
        if self.failing is None:
            self._since = time.time()
            self._say("records cannot be written (%s); trying again" % why)
        self.failing = why

    def finish(self, tick: Callable[[], None]) -> None:
        """Until all is on the disk, however long that takes: the run's end must not be lost."""
        while not self.step(force=True):
            end = time.monotonic() + EVERY
            while time.monotonic() < end:
                tick()
                time.sleep(0.1)
