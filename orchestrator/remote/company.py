"""What ends beside the program itself: its ranks here, and the run's other places. Which end was the first is recorded,
and what follows from it for this place."""

from __future__ import annotations

import signal
import time
from typing import Any, Callable, Dict, Optional

from .peers import End, Peers
from .ranks import RankWatch
from .recorder import Recorder

TOKEN = "ORCH_RUNNERS_TOKEN"  # among the secrets; the program does not get it
OWN_WORDS = 2.0  # seconds that a program has to say by itself what it died of, once a rank of it has failed
FOLLOW = 5.0  # seconds from then on until what is left here is killed


class Company:
    """Of one run at one place. `first`: the end that came first, once it is known."""

    def __init__(
        self, launch: Dict[str, Any], records: Recorder, token: str = "", wake: Callable[[], None] = lambda: None
    ) -> None:
        about = launch.get("peers") or {}
        self.first: Optional[End] = None
        self._place = str(about.get("place") or launch.get("place") or "here")
        self._records = records
        self._wake = wake
        self._ranks: Optional[RankWatch] = None
        self._peers: Optional[Peers] = None
        self._learnt = 0.0
        if about and token:
            self._peers = Peers(
                self._place, list(about["places"]), str(about["address"]), int(about["port"]), token, wake
            )

    @property
    def why(self) -> Optional[str]:
        """What the record of this place's end does not say by itself."""
        if self.first is None:
            return None
        if self.followed:
            return "it only followed: %s" % self.first.get("said")
        return None if self.first.get("rank") is None else "it began with: %s" % self.first.get("said")

    @property
    def followed(self) -> bool:
        """Whether another place's end was the first."""
        return self.first is not None and self.first.get("place") != self._place

    def begin(self, trainer: Optional[int]) -> None:
        """Once the program runs; None where it could not be started, which the others have to know all the same."""
        if trainer is not None:
            self._ranks = RankWatch(trainer, self._wake)
            self._ranks.start()
        if self._peers is not None:
            self._peers.start()

    def grace(self) -> Optional[float]:
        """Seconds that what runs here still has to end, or None while there is no reason to."""
        self._tell_rank()
        if self._peers is None or self._peers.first is None:
            return None  # a rank of a run at one place is its launcher's business
        self._learn(self._peers.first)
        passed = time.monotonic() - self._learnt
        if not self.followed and passed < OWN_WORDS:
            return None
        request = self.request()
        return FOLLOW - passed if request is None else float(request["grace"])

    def share(self, progress: Optional[Dict[str, Any]]) -> Optional[Dict[str, Any]]:
        """Tell the other places how far the run is, and hear it of them."""
        if self._peers is None:
            return None
        self._peers.progress = progress
        return self._peers.heard()

    def request(self) -> Optional[Dict[str, Any]]:
        """The request to stop that another place got, as stop.json would have it."""
        asked = (self.first or {}).get("request")
        return asked if isinstance(asked, dict) and self.followed else None

    def stopping(self, asked: Optional[Dict[str, Any]], grace: float) -> None:
        """This place is asked to stop, and the others with it."""
        if self._peers is None:
            return
        if asked is None:
            said = "the runner at %s was told to end, as when a machine shuts down" % self._place
            self._peers.tell("failed", said, gone=True)
            return
        request = {"by": asked.get("by"), "at": asked.get("at"), "grace": grace, "kill": bool(asked.get("kill"))}
        said = "%s was stopped by %s" % (self._place, asked.get("by") or "someone")
        self._peers.tell("stopped", said, request=request)

    def ended(self, well: bool, what: str, signum: Optional[int] = None) -> None:
        """The program has ended, by itself: told to the others, unless a rank's end was. `what`: its exit record's."""
        if well:
            if self._peers is not None:
                self._peers.finished()
            return
        self._tell_rank()
        if self._peers is not None:
            killed = signum not in (None, signal.SIGTERM, signal.SIGABRT)
            self._peers.tell("failed", "the program at %s ended: %s" % (self._place, what), killed=killed)

    def settle(self) -> None:
        """At the very end: wait for what the others say, and go."""
        if self._peers is not None:
            first = self._peers.verdict()
            if first is not None:
                self._learn(first)
            elif self._peers.trouble is not None:
                self._records.event("runners_apart", why=self._peers.trouble)
            self._peers.close()

    def _tell_rank(self) -> None:
        failed = self._ranks.failed if self._ranks is not None else None
        if failed is None or self._learnt:
            return
        said = "rank %d at %s %s" % (failed["rank"], self._place, failed["what"])
        if self._peers is None:
            end = {"place": self._place, "kind": "failed", "rank": failed["rank"], "said": said}
            self._learn(end)
        else:
            self._peers.tell("failed", said, failed["seen"], rank=failed["rank"], killed=failed["killed"])

    def _learn(self, first: End) -> None:
        if self.first is None:
            self.first = first
            self._learnt = time.monotonic()
            known = {key: first.get(key) for key in ("place", "kind", "rank", "said")}
            if first.get("gone"):  # the place, as far as it could tell
                known["gone"] = True
            self._records.set(first=known)
            self._records.event("first_end", **known)
            self._records.urgent()
