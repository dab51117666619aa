"""The runners of a run over several places: an end that one of them sees, all know within a second.

They form a star around the first place's runner, without the workstation. Each says all that it knows four times a
second, so that a lost word or a new connection changes nothing. The middle decides which end was the first, once for
all.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

from .lines import Lines, Refused

BEAT = 0.25  # seconds between two words
SETTLE = 0.5  # seconds that the middle waits for other places' ends before it says which was the first
GONE = 4.0  # seconds that a runner whose connection closed has to come back
SILENCE = 20.0  # seconds of silence over a connection that stays open: a network may pause, and the run goes on
JOIN = 300.0  # seconds that the runners have to find each other in the beginning
PATIENCE = 3.0  # seconds for a connection, its greeting, and an answer of the middle
KILL_FIRST = 1.0  # seconds: an error that was seen so little before a kill came of it, since a kill follows nothing

End = Dict[str, Any]


class Peers(threading.Thread):
    """This place's part in the star: the middle where `own` is the first of `places`.

    `first` becomes the end that came first: `{"place", "kind", "rank", "said", "killed"}` and what else was told with
    it. `kind`: "failed"; "stopped" (by request); "silent", where a place is not heard of: what became of it is unknown.
    """

    def __init__(
        self, own: str, places: List[str], address: str, port: int, token: str, wake: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(name="peers", daemon=True)
        self.first: Optional[End] = None
        self.progress: Optional[Dict[str, Any]] = None  # what this place's program tells of the run
        self.trouble: Optional[str] = None  # why the middle could not listen, or was not reached the last time
        self._own = own
        self._middle = places[0]
        # whom this one hears: all others in the middle, else the middle alone
        self._others = [place for place in places if place != own] if own == places[0] else places[:1]
        self._at = (address, port)
        self._token = token
        self._wake = wake
        self._lock = threading.Lock()
        self._ends: Dict[str, Tuple[float, End]] = {}  # of each place: when, on this clock, and what
        self._progress: Dict[str, Dict[str, Any]] = {}  # the same, as it was heard of the others
        self._done: Set[str] = set()  # places whose program ended well
        self._joined: Set[str] = set()
        self._due = {place: time.monotonic() + JOIN for place in self._others}  # until when a word must have come
        self._closing = False

    # ---- for the runner ------------------------------------------------------------------------

    def tell(self, kind: str, said: str, seen: Optional[float] = None, **more: Any) -> None:
        """This place ends, or has to; what was told before stays. `seen`: when that was, on the monotonic clock."""
        end: End = {"place": self._own, "kind": kind, "rank": None, "said": said, "killed": False, **more}
        self._ended(self._own, time.monotonic() if seen is None else seen, end)

    def heard(self) -> Optional[Dict[str, Any]]:
        """How far the run is, as the place that is the farthest tells."""
        told = list(self._progress.values())
        return max(told, key=lambda one: one.get("step") or 0) if told else None

    def finished(self) -> None:
        """This place's program has ended well: its silence from now on means nothing."""
        self._done.add(self._own)

    def verdict(self) -> Optional[End]:
        """Which end was the first, after this place told of its own: where the middle does not say, that one."""
        patience = time.monotonic() + PATIENCE
        while self.first is None and self._own in self._ends and time.monotonic() < patience:
            time.sleep(0.02)
        if self.first is None and self._own in self._ends:
            self._decide(self._ends[self._own][1])
        return self.first

    def close(self) -> None:
        """After a last word to those who listen."""
        if self.is_alive():
            time.sleep(2 * BEAT)
        self._closing = True

    # ---- the threads ---------------------------------------------------------------------------

    def run(self) -> None:
        if self._own == self._middle:
            self._listen()
        else:
            self._call()

    def _listen(self) -> None:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(self._at)
                listener.listen(64)
            except OSError as e:
                self.trouble = "%s:%d: %s" % (*self._at, e.strerror)
                return
            listener.settimeout(BEAT / 2)
            while not self._closing:
                with contextlib.suppress(OSError):
                    sock, _ = listener.accept()
                    threading.Thread(target=self._guest, args=(sock,), daemon=True).start()
                self._look()
                self._choose()

    def _guest(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError, Refused, ValueError):
            lines = Lines(sock, self._token, first=True, patience=PATIENCE)
            place = next((str(hello.get("place")) for hello in lines.receive(PATIENCE)), "")
            if place in self._others:
                self._talk(lines, place)

    def _call(self) -> None:
        while not self._closing and self.first is None and self._middle not in self._done:
            try:
                with socket.create_connection(self._at, PATIENCE) as sock:
                    lines = Lines(sock, self._token, first=False, patience=PATIENCE)
                    lines.send({"place": self._own})
                    self._talk(lines, self._middle)
            except (OSError, Refused, ValueError) as e:
                self.trouble = str(e)
                if isinstance(e, ConnectionError):
                    self._closed(self._middle)
            self._look()
            if self._middle in self._ends:  # and it did not live to say which end was the first
                self._decide(self._ends[self._middle][1])
            time.sleep(BEAT)

    def _talk(self, lines: Lines, place: str) -> None:
        """Say and hear, until the connection breaks or has been silent for too long."""
        self._joined.add(place)
        self._due[place] = time.monotonic() + SILENCE
        try:
            while not self._closing and time.monotonic() < self._due[place]:
                lines.send(self._word())
                pause = time.monotonic() + BEAT
                while time.monotonic() < pause:
                    for word in lines.receive(pause - time.monotonic()):
                        self._due[place] = time.monotonic() + SILENCE
                        self._take(place, word)
        except ConnectionError:
            self._closed(place)

    def _closed(self, place: str) -> None:
        if place in self._joined:
            self._due[place] = min(self._due[place], time.monotonic() + GONE)

    def _word(self) -> Dict[str, Any]:
        seen, end = self._ends.get(self._own, (0.0, None))
        return {
            "end": end,
            "ago": None if end is None else time.monotonic() - seen,
            "first": self.first,
            "done": self._own in self._done,
            "progress": self.progress or (self.heard() if self._own == self._middle else None),
        }

    def _take(self, place: str, word: Dict[str, Any]) -> None:
        if word.get("done"):
            self._done.add(place)
        if isinstance(word.get("progress"), dict):
            self._progress[place] = word["progress"]
        if isinstance(word.get("end"), dict):
            self._ended(place, time.monotonic() - float(word.get("ago") or 0.0), word["end"])
        if place == self._middle and isinstance(word.get("first"), dict):
            self._decide(word["first"])

    # ---- what it amounts to --------------------------------------------------------------------

    def _look(self) -> None:
        """Who has been silent for too long."""
        now = time.monotonic()
        for place, due in self._due.items():
            if now < due or place in self._done:
                continue
            said = "nothing is heard of %s any more, seen from %s: what became of it is unknown"
            if place not in self._joined:
                said = "nothing was heard of %%s for the first %d s, seen from %%s" % JOIN
            end = {"place": place, "kind": "silent", "rank": None, "said": said % (place, self._own), "killed": False}
            self._ended(place, now, end)

    def _choose(self) -> None:
        """In the middle: which end was the first, once there was time to hear of all that came before it."""
        with self._lock:
            ends = list(self._ends.values())
        if ends and time.monotonic() - min(seen for seen, _ in ends) >= SETTLE:
            self._decide(min(ends, key=lambda one: one[0] - KILL_FIRST * bool(one[1].get("killed")))[1])

    def _ended(self, place: str, seen: float, end: End) -> None:
        with self._lock:
            self._ends.setdefault(place, (seen, end))

    def _decide(self, end: End) -> None:
        if self.first is None:
            self.first = end
            self._wake()
