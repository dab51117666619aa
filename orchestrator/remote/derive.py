"""What phase a run really is in: what its record says, held against the lock, the process, and the boot."""

from __future__ import annotations

import time
from typing import Any, Callable, Dict, List, Optional, Tuple

from . import processes
from .rundir import BEFORE, ENDED, RunDir, State

LOST = "lost"


class Standing:
    """A run at one moment. `state` is None where it cannot be read; `why` is a sentence where `phase` needs
    one.

    `lock`: "free", "held", or None if unknown. `alive`: for a lost run, its processes that still live, as
    `snapshot` has them (taken only if it is needed; `once` shares one among many runs).
    """

    def __init__(self, run: RunDir, snapshot: Callable[[], processes.Snapshot] = processes.Snapshot) -> None:
        self.run = run
        self._snapshot = snapshot
        self.state: Optional[State] = None
        self.lock: Optional[str] = None
        self.alive: List[Dict[str, Any]] = []
        self.phase, self.why = self._look()

    def _look(self) -> Tuple[Optional[str], Optional[str]]:
        for attempt in range(5):
            self.state, why = self.run.state()
            if self.state is None:
                return None, why
            phase = str(self.state.get("phase"))
            if phase in ENDED:
                return phase, None
            held = self.run.lock_held()
            self.lock = None if held is None else "held" if held else "free"
            if held:
                return self._before(phase) if not self.state.get("runner") else (phase, None)
            if held is None:
                return phase, "whether anyone keeps this run could not be told"
            if not self.state.get("runner"):
                return self._before(phase)
            # between reading the state and trying the lock the runner may have written its last and gone
            if attempt < 4 and (self.run.state()[0] != self.state or processes.is_alive(self.state["runner"])):
                time.sleep(0.05)
                continue
            break
        assert self.state is not None
        return self._gone(self.state)

    def _before(self, phase: str) -> Tuple[str, Optional[str]]:
        """Nothing runs yet: a launcher is at work, or was."""
        asked = self.run.stop_request()
        if asked is not None:
            return "stopped", "stopped by %s before it began" % (asked.get("by") or "someone")
        if self.lock == "free" and phase in BEFORE:
            return phase, "its launcher is gone; launching again goes on with it"
        return phase, None

    def _gone(self, state: State) -> Tuple[str, str]:
        """The record names a runner, and none holds the lock."""
        ended = state.get("exit")
        if ended:
            why = "its runner ended right after recording: %s" % ended.get("reason")
            if self.run.stop_request() is not None:
                return "stopped", why
            return ("finished" if ended.get("code") == 0 else "failed"), why
        runner = state["runner"]
        who = "its runner (pid %s)" % runner.get("pid")
        now = processes.identity(1)
        if runner.get("boot_id") and now["boot_id"] and runner["boot_id"] != now["boot_id"]:
            return LOST, "%s was restarted (another boot id), %s went with it" % (_restarted(state), who)
        if runner.get("init_ticks") and now["start_ticks"] and runner["init_ticks"] != now["start_ticks"]:
            return LOST, "the container was restarted, %s went with it" % who
        self.alive = processes.describe(processes.of_run(self.run.run, self.run.real, snapshot=self._snapshot()))
        left = len(self.alive)
        rest = ", and so is all of the run" if not left else "; %d of the run's processes still live" % left
        return LOST, "%s is gone without an exit record%s" % (who, rest)

    def report(self) -> Dict[str, Any]:
        """`{"run", "state", "phase", "why", "lock", "alive"}`."""
        return {
            "run": self.run.run,
            "state": self.state,
            "phase": self.phase,
            "why": self.why,
            "lock": self.lock,
            "alive": self.alive,
        }


def _restarted(state: State) -> str:
    """What has another boot id than the run: LXC gives a container one at each of its starts, so that only when the
    kernel itself began tells the two apart."""
    began, kernel = state.get("started") or state.get("created"), processes.kernel_began()
    if kernel is None or not isinstance(began, (int, float)):
        return "the container or its machine"
    return "the machine" if kernel > began else "the container"


def once() -> Callable[[], processes.Snapshot]:
    """A snapshot that is taken when it is first asked for, and then kept."""
    kept: List[processes.Snapshot] = []

    def take() -> processes.Snapshot:
        if not kept:
            kept.append(processes.Snapshot())
        return kept[0]

    return take
