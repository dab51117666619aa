"""The program in a run's pane: starts the trainer, watches it, and records how it ended.

It holds the run's lock for its life, is the only writer of the state, and outlives the client, its terminal,
and a full disk. The trainer writes console.log by itself, so that not even the runner's death costs a line.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from typing import Any, Callable, Dict, List, Optional

from . import processes, spawn
from .alarm import Alarm
from .cache_run import RunCache
from .cgroup import MemoryGroup, machine_oom_kills
from .company import TOKEN, Company
from .echo import Echo
from .generations import Chronicle
from .progress import Progress
from .recorder import Recorder
from .rundir import RunDir, State, no_exit, read_json
from .sampler import Sampler

LOCK_PATIENCE = 30.0
LEFTOVER_GRACE = 5.0
TICK = 0.1


class Runner:
    """One run from the takeover to its record. `main` returns the status to exit with."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.launch: Dict[str, Any] = {}
        self.echo = Echo(run.console)
        self.sampler = Sampler(0.0)
        self.memory = MemoryGroup()
        self.records = Recorder(run, {}, self.echo.say)
        self.progress = Progress(run, self.records, {})
        self.company = Company({}, self.records)
        self.cache = RunCache(run, {}, self.records, self.echo.say)
        self.chronicle: Optional[Chronicle] = None
        self.trainer: Any = None  # Popen
        self.returncode: Optional[int] = None
        self._hidden: Dict[str, str] = {}  # the secrets, for a trainer that is started once more
        self.stopping = False
        self.terminated = False  # SIGTERM came
        self._deadline = 0.0
        self._next_look = 0.0
        self._gpu_error: Optional[str] = None
        self._pane_gone = False
        self._errors: List[str] = []
        self.alarm = Alarm()

    def main(self) -> int:
        """Take the run over, if nobody has; see it to its end."""
        self.alarm.listen(self._on_term)
        processes.become_subreaper()
        spawn.set_oom_score(spawn.RUNNER_OOM_SCORE)
        lock = self.run.try_lock(LOCK_PATIENCE)
        if lock is None:
            self.echo.say("%s is kept by another runner" % self.run.run)
            return 0
        state, why = self.run.state()
        if state is None or state.get("phase") != "starting" or state.get("runner"):
            self.echo.say(
                "%s is not to be started (%s)" % (self.run.run, why or "phase %s" % (state or {}).get("phase"))
            )
            return 0
        if not self._take_over(state):
            return 1
        self._guard(lambda: self.cache.prepare(self.records.step))
        if self.run.stop_request() is not None:
            spawn.take_secrets(self.run, self.records.event)
            return self._end("stopped", no_exit("stopped before it began"))
        if not self._start():
            return 127
        while True:
            self._watch()
            if not self._again():
                return self._finish()
            if not self._spawn():
                return 127

    # ---- beginning --------------------------------------------------------------------------

    def _on_term(self) -> None:
        self.terminated = True
        self._next_look = 0.0

    def _take_over(self, state: State) -> bool:
        """Record who keeps the run now, before anything is started: nobody else will then."""
        state["runner"] = processes.identity(os.getpid())
        self.records = Recorder(self.run, state, self.echo.say)
        end = time.monotonic() + 10
        while not self.records.step(force=True):
            if time.monotonic() >= end:
                self.echo.say("nothing is started: the run's state cannot be written (%s)" % self.records.failing)
                return False
            time.sleep(0.5)
        launch, why = read_json(self.run.file("launch.json"))
        self.launch = launch or {}
        if launch is None:
            self.records.event("launch_unreadable", why=why)
        self.progress = Progress(self.run, self.records, self.launch.get("health") or {})
        self.company = Company(self.launch, self.records)
        self.cache = RunCache(self.run, self.launch, self.records, self.echo.say)
        self.sampler = Sampler(_number(self.launch.get("sample_seconds"), 5.0))
        return True

    def _start(self) -> bool:
        self.kills_before, self.kills_unknown = self.memory.oom_kills()
        self.machine_before = machine_oom_kills()
        self._hidden = spawn.take_secrets(self.run, self.records.event)
        self.company = Company(self.launch, self.records, self._hidden.pop(TOKEN, ""), self.alarm.wake)
        if not self._spawn():
            return False
        about = self.launch.get("generation") or {}
        self.chronicle = Chronicle(os.path.dirname(os.path.dirname(self.run.real)), self.run.run, about)
        self.progress.mark = self.chronicle.mark
        self._guard(self.chronicle.step)
        return True

    def _spawn(self) -> bool:
        self.cache.started()
        try:
            self.trainer = spawn.trainer(self.launch, self.run, self._hidden)
        except (OSError, ValueError) as e:
            where = getattr(e, "filename", None)
            reason = "could not be started: %s%s" % (
                getattr(e, "strerror", None) or e,
                ": %s" % where if where else "",
            )
            self.company.begin(None)
            self.company.ended(False, reason)
            self.company.settle()
            self._end("failed", no_exit(reason))
            return False
        found = processes.stat(self.trainer.pid)
        self.records.set(
            trainer={"pid": self.trainer.pid, "start_ticks": found.start_ticks if found else None},
            started=time.time(),
        )
        self.records.event("started", pid=self.trainer.pid, argv=self.launch.get("argv"))
        if self.launch.get("metrics") is False:
            self.records.phase("training")
        self.records.step(force=True)
        self.company.begin(self.trainer.pid)
        self.echo.say("%s started, pid %d" % (self.run.run, self.trainer.pid))
        return True

    def _again(self) -> bool:
        """Whether the trainer is to start once more: it failed on a bad entry of its compile cache, before its first
        step, and the snapshot has been moved aside. Of several places none starts again by itself."""
        self._guard(self._progress)
        if self.returncode == 0 or self.stopping or self.records.state.get("step") is not None:
            return False
        alone = not self.launch.get("peers")
        if self.cache.broke(restart=alone) is None or not alone:
            return False
        self._end_leftovers()
        self.returncode = None
        self.progress.begin_anew()
        self.company = Company(self.launch, self.records, "", self.alarm.wake)
        self.records.set(first=None)
        return True

    # ---- while it runs ----------------------------------------------------------------------

    def _watch(self) -> None:
        while self.returncode is None and not self.stopping:
            self.alarm.sleep(TICK)
            self._tick()
            if self.returncode is None:
                self._guard(self._look_for_stop)
                self._guard(self._look_around)
        if self.stopping:
            self._say_leftovers(self._end_processes())
        while self.returncode is None:  # in an uninterruptible state: it goes when the kernel lets it
            self.alarm.sleep(TICK)
            self._tick()

    def _tick(self) -> None:
        for step in (self._reap, self._show, self._progress, self._sample, self._record):
            self._guard(step)

    def _guard(self, step: Callable[[], Any]) -> None:
        """A fault of the runner's own must not cost the trainer its record."""
        try:
            step()
        except Exception as e:
            text = "%s: %s: %s" % (getattr(step, "__name__", "step"), type(e).__name__, e)
            if text not in self._errors and len(self._errors) < 20:
                self._errors.append(text)
                self.records.event("runner_error", error=text, trace=traceback.format_exc()[-2000:])

    def _record(self) -> None:
        self.records.step()
        if self.chronicle is not None:
            self.chronicle.step()

    def _reap(self) -> None:
        """Collect the trainer's status, and whatever orphans came to this process."""
        if self.returncode is None and self.trainer is not None:
            self.returncode = self.trainer.poll()
        if not hasattr(os, "waitid"):
            return
        mine = self.sampler.pids()  # asking after their pids collects the ended ones
        while True:
            try:
                info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if info is None or info.si_pid in mine:
                return
            if self.trainer is not None and info.si_pid == self.trainer.pid:
                self.returncode = self.trainer.poll()
            else:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(info.si_pid, os.WNOHANG)

    def _show(self) -> None:
        for _ in range(8):
            if not self.echo.step():
                break
        if self.echo.gone and not self._pane_gone:
            self._pane_gone = True
            self.records.event("pane_lost")

    def _progress(self) -> None:
        self.progress.step(self.stopping)
        heard = self.company.share(self.progress.told())
        if heard is not None and not self.stopping:
            self.progress.adopt(heard)

    def _sample(self) -> None:
        line = self.sampler.step()
        if line is None:
            return
        self.records.append("gpu.jsonl", line)
        error = line.get("error")
        if error != self._gpu_error:
            self._gpu_error = error
            self.records.event("gpu_reading", ok=error is None, why=error)

    # ---- stopping ---------------------------------------------------------------------------

    def _look_for_stop(self) -> None:
        """SIGTERM only makes it quicker: the wish is in stop.json, or a SIGTERM without one means a
        shutdown."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + 1.0
        asked = self.run.stop_request()
        if asked is None and not self.terminated:
            return
        grace = _number((asked or {}).get("grace"), _number(self.launch.get("stop_grace"), 30.0))
        if (asked or {}).get("kill"):
            grace = 0.0
        deadline = now + grace
        if self.stopping:
            # a later wish may only be a more urgent one
            if asked is not None and asked != self.records.state.get("stop"):
                self.records.set(stop=asked)
                self._deadline = min(self._deadline, deadline)
            return
        if asked is not None:
            self.records.set(stop=asked)
        self._stop("stopping, %g s of grace" % grace, grace)
        self.company.stopping(asked, grace)

    def _look_around(self) -> None:
        """Where a rank here, or another place of the run, has ended: this place ends too."""
        grace = self.company.grace()
        if grace is not None and not self.stopping:
            self.records.set(stop=self.company.request())
            self._stop("stopping: %s" % self.company.why, grace)

    def _stop(self, why: str, grace: float) -> None:
        self.stopping, self._deadline = True, time.monotonic() + grace
        self.records.event("stopping", by=(self.records.state.get("stop") or {}).get("by"), grace=grace)
        self.records.urgent()
        self.echo.say(why)

    def _find(self) -> List[processes.Stat]:
        spare = self.sampler.pids() + [int(pid) for pid in (self.records.state.get("stop") or {}).get("spare") or []]
        return processes.of_run(self.run.run, self.run.path, roots=[os.getpid()], spare=spare)

    def _end_processes(self) -> List[processes.Stat]:
        """SIGTERM to all of the run, SIGKILL at the deadline; returns what even that did not end."""

        def tick() -> None:
            self._tick()
            self._guard(self._look_for_stop)

        if not os.path.isdir(processes.PROC):
            self._end_group(tick)
            return []
        return processes.end_all(self._find, lambda: self._deadline, tick=tick)[1]

    def _end_group(self, tick: Callable[[], None]) -> None:
        """Where there is no /proc: the trainer's process group."""
        with contextlib.suppress(OSError):
            os.killpg(self.trainer.pid, signal.SIGTERM)
        while self.returncode is None and time.monotonic() < self._deadline:
            tick()
            self.alarm.sleep(TICK)
        with contextlib.suppress(OSError):
            os.killpg(self.trainer.pid, signal.SIGKILL)

    def _say_leftovers(self, left: List[processes.Stat]) -> None:
        if left:
            self.records.event("leftovers_remain", processes=processes.describe(left))

    # ---- the end ----------------------------------------------------------------------------

    def _finish(self) -> int:
        record = self._exit_record()
        if not self.stopping:
            self._guard(lambda: self.company.ended(self.returncode == 0, record["reason"], record["signal"]))
        # at once: should this process end while it ends leftovers, how the trainer ended is known
        self.records.set(exit=record)
        self.records.step(force=True)
        if not self.stopping:
            self._end_leftovers()
        self._guard(self._reap)
        self._guard(self._progress)
        self._guard(self.company.settle)
        if self.returncode == 0 and not self.stopping:
            return self._end("finished", record)
        record["reason"] += self.cache.advice
        if self.company.why is not None:
            record["reason"] += "; %s" % self.company.why
        elif self.stopping and not self.records.state.get("stop"):
            record["reason"] += "; the runner was told to end without a request to stop, as when a machine shuts down"
        return self._end("stopped" if self.stopping and self.records.state.get("stop") else "failed", record)

    def _end_leftovers(self) -> None:
        """What the trainer left behind when it ended."""
        if not os.path.isdir(processes.PROC):
            return
        self._deadline = time.monotonic() + LEFTOVER_GRACE
        ended, left = processes.end_all(self._find, lambda: self._deadline, tick=self._tick)
        if ended:
            self.records.event("leftovers_ended", processes=processes.describe(ended))
        self._say_leftovers(left)

    def _exit_record(self) -> Dict[str, Any]:
        after, unknown = self.memory.oom_kills()
        kills = _more(self.kills_before, after)
        machine = _more(self.machine_before, machine_oom_kills())
        return spawn.exit_record(self.returncode, time.time(), kills, machine, unknown or self.kills_unknown)

    def _end(self, phase: str, record: Dict[str, Any]) -> int:
        self._guard(lambda: self._end_cache(phase))
        if self.chronicle is not None:
            self.chronicle.ended(phase, str(record.get("reason")), self.launch.get("health"), self.records.state)
        self.records.set(exit=record)
        self.records.phase(phase)
        self.records.event("ended", phase=phase, **{k: v for k, v in record.items() if k != "at"})
        self.records.finish(self._show)
        self.echo.drain()
        self.echo.say("%s: %s" % (phase, record["reason"]))
        self.echo.close()
        if record["signal"] is not None:
            return 128 + int(record["signal"])
        return 1 if record["code"] is None else int(record["code"])

    def _end_cache(self, phase: str) -> None:
        made = self.cache.end(phase, self.records.state, self._tick)
        if made is not None and self.chronicle is not None:
            self.chronicle.made(made)


def _more(before: Optional[int], after: Optional[int]) -> Optional[int]:
    return None if before is None or after is None else max(0, after - before)


def _number(value: Any, otherwise: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return otherwise
    return max(0.0, float(value))


def main(argv: List[str]) -> int:
    """`runner RUN_DIRECTORY`: exits as the trainer did, 128 + n for signal n."""
    if len(argv) != 1 or not os.path.isdir(argv[0]):
        sys.stderr.write("usage: runner RUN_DIRECTORY\n")
        return 2
    return Runner(RunDir(os.path.realpath(argv[0]))).main()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
