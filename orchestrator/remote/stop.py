"""Stopping a run: by its runner while that lives, else by this very process; and runs that have not begun."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Any, Dict, List, Optional

from . import processes, tmux
from .derive import Standing
from .frames import OpError
from .rundir import ACTIVE, BEFORE, ENDED, RunDir, State, find, list_runs, no_exit, read_json, write_json

GRACE = 30.0
BEYOND = 10.0  # seconds that a runner gets on top of the grace


def stop(args: Dict[str, Any], call: Any) -> Dict[str, Any]:
    """`{run, by, grace, kill, why, recipe}` -> `{"run", "state", "phase", "already", "left"}`; events `{"stopping":
    sentence}`.

    `grace`: seconds between SIGTERM and SIGKILL, by default the recipe's; `kill`: at once; `why`: what the record says
    of a run that has not begun. `recipe`: the run was meant as the latest of that recipe, which is refused where
    another one of it is under way. `already`: it had ended before. `left`: processes that could not be ended. OpError:
    not_found, refused, or failed where something still lives.
    """
    run = find(call.root, args.get("run"))
    _refuse_a_guess(run, args.get("recipe"), call.root)
    standing = Standing(run)
    if standing.state is None:
        _mend(run, str(standing.why), _ask(run, args, call), call)
        return _answer(run, already=False, left=[])
    if standing.state.get("exit"):
        _settle(run, standing)
    if standing.state.get("phase") in ENDED:
        left = _end_processes(run, standing.state, 0.0, call)
        tmux.kill(run.run)
        return _answer(run, already=True, left=left)
    asked = _ask(run, args, call)
    grace = asked["grace"]
    fd = call.keep.pop("lock:" + run.run, None)  # claimed over this very channel
    if fd is None:
        # patience only where a look at the lock could be taken for a launcher
        fd = run.try_lock(0.0 if standing.lock == "held" and standing.state.get("runner") else 0.3)
    if fd is not None:
        try:
            return _without_runner(run, asked, call)
        finally:
            os.close(fd)
    state = run.state()[0] or standing.state
    if not state.get("runner"):
        # a launcher holds the lock: `start` will find the request and refuse, and so will the runner that records
        # itself from now on, since it looks for a request after that and before it starts anything
        return {"run": run.run, "state": state, "phase": "stopped", "already": False, "left": []}
    if _by_runner(run, state, grace, call):
        tmux.kill(run.run)
        return _answer(run, already=False, left=[])
    return _over_the_runner(run, state, asked, call)


def _refuse_a_guess(run: RunDir, recipe: Optional[str], root: str) -> None:
    """Two people's projects, or two of one's own, may have a recipe of the same name. Raises OpError."""
    if recipe is None:
        return
    under_way = []
    for other in list_runs(root):
        state, _ = other.state()
        if state is None or state.get("recipe") != recipe or state.get("phase") not in ACTIVE:
            continue
        if Standing(other).phase in ACTIVE:
            under_way.append("%s (%s@%s)" % (other.run, state.get("user") or "?", state.get("workstation") or "?"))
    if any(not text.startswith(run.run + " ") for text in under_way):
        raise OpError(
            "refused",
            "the latest run of %s is %s, and not the only one that can be meant, so nothing was stopped; under way: %s"
            % (recipe, run.run, ", ".join(under_way)),
        )


def _settle(run: RunDir, standing: Standing) -> None:
    """A runner that recorded its trainer's end and then died before the run's: finish its record."""
    if standing.phase not in ENDED or standing.state is None or standing.lock != "free":
        return
    fd = run.try_lock(0.3)
    if fd is None:
        return
    try:
        standing.state["phase"] = standing.phase
        run.write_state(standing.state)
    finally:
        os.close(fd)


def _mend(run: RunDir, why: str, asked: Dict[str, Any], call: Any) -> None:
    """A run whose state cannot be read: end what is left of it, and give it a record again."""
    call.event({"stopping": "the state of %s cannot be read (%s); ending its processes" % (run.run, why)})
    # a living runner finds the request, and writes the state anew
    fd = run.try_lock(asked["grace"] + BEYOND)
    if fd is None:
        raise OpError("failed", "the state of %s cannot be read (%s), and its runner does not end" % (run.run, why))
    try:
        left = _end_processes(run, {}, asked["grace"], call)
        if left:
            raise OpError("failed", "%s: could not be ended: %s" % (run.run, _named(left)))
        state, _ = run.state()
        if state is None:
            recipe = run.run.rsplit("-", 2)[0]
            state = {"run": run.run, "recipe": recipe, "created": os.stat(run.path).st_mtime}
            mark_stopped(run, state, asked, "its state could not be read (%s); its processes were ended" % why)
        tmux.kill(run.run)
    finally:
        os.close(fd)


def mark_stopped(run: RunDir, state: State, asked: Dict[str, Any], reason: str = "stopped before it began") -> None:
    """Record the end of a run that nobody keeps; with its lock held."""
    state["phase"] = "stopped"
    state["stop"] = asked
    if not state.get("exit"):
        state["exit"] = no_exit(reason)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(run.file("secrets.json"))
    run.write_state(state)
    with contextlib.suppress(OSError):
        run.event("ended", phase="stopped", **{k: v for k, v in state["exit"].items() if k != "at"})


def _ask(run: RunDir, args: Dict[str, Any], call: Any) -> Dict[str, Any]:
    """Write the request: the runner, a launcher, or a later `start` finds it. Where the disk does not take it, the
    runner is still asked by a signal."""
    grace = args.get("grace")
    if not isinstance(grace, (int, float)) or isinstance(grace, bool) or grace < 0:
        launch, _ = read_json(run.file("launch.json"))
        grace = (launch or {}).get("stop_grace")
        grace = float(grace) if isinstance(grace, (int, float)) else GRACE
    kill = bool(args.get("kill"))
    state = run.state()[0] or {}
    ends = [who["pid"] for who in (state.get("runner"), state.get("trainer")) if who]
    # this program may itself have been called from within the run: it and what called it are not to be ended
    spare = [os.getpid(), *processes.ancestors(os.getpid(), until=ends)] if _within(run) else []
    asked = {"by": args.get("by"), "at": time.time(), "grace": 0.0 if kill else float(grace), "kill": kill}
    asked["spare"] = spare
    if args.get("why"):
        asked["why"] = str(args["why"])
    try:
        write_json(run.file("stop.json"), asked)
    except OSError as e:
        if not state.get("runner"):
            raise
        call.event({"stopping": "the request cannot be written (%s): the runner is only told to end" % e.strerror})
    with contextlib.suppress(OSError):
        run.event("stop_requested", by=asked["by"], grace=asked["grace"], kill=kill)
    return asked


def _within(run: RunDir) -> bool:
    return os.environ.get("ORCH_RUN_ID") == run.run


def _by_runner(run: RunDir, state: State, grace: float, call: Any) -> bool:
    """Have the living runner do it; whether it did within the grace and BEYOND."""
    runner = state["runner"]
    processes.send(runner, signal.SIGTERM)
    processes.send(runner, signal.SIGCONT)
    begin = time.monotonic()
    told = 0.0
    call.event({"stopping": "asked %s to end, %g s of grace" % (run.run, grace)})
    while time.monotonic() < begin + grace + BEYOND:
        time.sleep(0.05)
        latest, _ = run.state()
        if latest is not None and latest.get("phase") in ENDED:
            _wait_gone(runner, 2.0)
            return True
        if processes.is_alive(runner) is False:
            return False
        if time.monotonic() - begin > told + 5:
            told = time.monotonic() - begin
            call.event({"stopping": "still ending, %d s" % told})
    return False


def _over_the_runner(run: RunDir, state: State, asked: Dict[str, Any], call: Any) -> Dict[str, Any]:
    """The runner did not manage: end it, then do its work."""
    runner = state["runner"]
    if processes.is_alive(runner):
        _only_the_record_is_missing(run, state, asked)
        call.event({"stopping": "the runner of %s does not answer and is ended" % run.run})
        processes.send(runner, signal.SIGKILL)
        _wait_gone(runner, 3.0)
    fd = run.try_lock(3.0)
    if fd is None:
        raise OpError("failed", "%s: its runner (pid %s) cannot be ended" % (run.run, runner.get("pid")))
    try:
        return _without_runner(run, dict(asked, grace=min(asked["grace"], 2.0)), call)
    finally:
        os.close(fd)


def _only_the_record_is_missing(run: RunDir, state: State, asked: Dict[str, Any]) -> None:
    """A runner that has ended everything and waits for the disk to take the record is left to it: OpError says so."""
    trainer = state.get("trainer")
    if trainer and processes.is_alive(dict(trainer, boot_id=state["runner"].get("boot_id"))) is not False:
        return
    if processes.of_run(run.run, run.real, roots=[state["runner"]["pid"]], spare=[*asked["spare"]]):
        return
    try:
        write_json(run.file("stop.json"), asked)
    except OSError as e:
        message = "every process of %s has ended; its record is written once the disk takes it (%s)"
        raise OpError("failed", message % (run.run, e.strerror)) from None


def _without_runner(run: RunDir, asked: Dict[str, Any], call: Any) -> Dict[str, Any]:
    """With the lock held: nobody else keeps this run."""
    state, why = run.state()
    if state is None:
        raise OpError("failed", "the state of %s cannot be read: %s" % (run.run, why))
    if state.get("phase") in ENDED:  # its runner recorded the end just before
        tmux.kill(run.run)
        return _answer(run, already=True, left=[])
    begun = bool(state.get("runner"))
    if begun:
        call.event({"stopping": "%s has no runner; ending its processes" % run.run})
    else:
        _end_waiting_runner(run)
    left = _end_processes(run, state, asked["grace"], call)
    if left:
        raise OpError("failed", "%s: could not be ended: %s" % (run.run, _named(left)))
    reason = "its runner was gone; its processes were ended" if begun or state.get("phase") not in BEFORE else None
    mark_stopped(run, state, asked, reason or asked.get("why") or "stopped before it began")
    tmux.kill(run.run)
    return _answer(run, already=False, left=[])


def _end_waiting_runner(run: RunDir) -> None:
    """One that a broken-off launch left waiting for the lock, which is held here."""
    pid = tmux.pane(run.run)["pane_pid"]
    found = processes.stat(pid) if isinstance(pid, int) else None
    tmux.kill(run.run)
    if found is not None:
        processes.kill_each([found], signal.SIGKILL)


def _end_processes(run: RunDir, state: State, grace: float, call: Any) -> List[Dict[str, Any]]:
    """End what is left of the run; returns what could not be ended."""
    trainer: Optional[Dict[str, Any]] = state.get("trainer")
    runner = state.get("runner") or {}
    if trainer is not None:
        trainer = dict(trainer, boot_id=runner.get("boot_id"))
    spare = [os.getpid()]
    if _within(run):
        spare += processes.ancestors(os.getpid(), until=[trainer["pid"]] if trainer else [])

    def find() -> List[processes.Stat]:
        roots = [trainer["pid"]] if trainer is not None and processes.is_alive(trainer) else []
        found = processes.of_run(run.run, run.real, roots=roots, spare=spare)
        for pid in roots:
            one = processes.stat(pid)
            if one is not None:
                found.append(one)
        return found

    deadline = time.monotonic() + grace
    ended, left = processes.end_all(find, lambda: deadline)
    if ended:
        with contextlib.suppress(OSError):
            run.event("leftovers_ended", processes=processes.describe(ended))
    return processes.describe(left)


def _named(left: List[Dict[str, Any]]) -> str:
    return ", ".join("%s (pid %s, state %s)" % (p["name"], p["pid"], p["state"]) for p in left)


def _wait_gone(who: Dict[str, Any], patience: float) -> None:
    end = time.monotonic() + patience
    while processes.is_alive(who) and time.monotonic() < end:
        time.sleep(0.02)


def _answer(run: RunDir, already: bool, left: List[Dict[str, Any]]) -> Dict[str, Any]:
    state = run.state()[0] or {}
    return {"run": run.run, "state": state, "phase": state.get("phase"), "already": already, "left": left}
