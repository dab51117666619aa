"""Claiming a run, starting it, listing runs. Stopping is in `stop`; all four are operations of the server."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from typing import Any, Dict, List, Optional

from . import logs, processes, program, stop, tmux
from .derive import LOST, Standing, once
from .frames import OpError
from .rundir import (
    ACTIVE,
    BEFORE,
    ENDED,
    MEETING,
    RUN_ID,
    RunDir,
    State,
    find,
    fsync_dir,
    list_runs,
    locked,
    read_json,
    runs_dir,
    write_file,
    write_json,
)

CLAIM_PATIENCE = 10.0
START_PATIENCE = 15.0
PANE_KEPT = 24 * 3600.0  # seconds
_HALF = ".claim-"
# what the launcher may not hand over, since others write it
_OURS = {"state.json", MEETING, "secrets.json", "stop.json", "lock", "console.log"}
_OURS |= {"metrics.jsonl", "gpu.jsonl", "events.jsonl", "runner.log"}


def claim(args: Dict[str, Any], call: Any) -> Dict[str, Any]:
    """`{recipe, digest, user, workstation, place, new, places, meeting, run}` -> `{"run", "how", "state", "meeting"}`.

    how: "new" (made, and locked by this server), "continue" (an earlier launch that broke off, locked by
    this server), "busy" (being launched by `state.launcher`), "running" (its runner lives). The same launch
    is the newest active run of the same digest and user.

    A run over several `places` is claimed at the first of them with its `meeting`, which is kept here and given again
    when the launch is continued; at the others it is claimed as `run`, the id that it has at the first.
    """
    recipe = _text(args, "recipe")
    _text(args, "digest")
    if not RUN_ID.match(recipe) or len(recipe) > 40:
        raise OpError("usage", "%r is no name of a recipe" % recipe)
    os.makedirs(runs_dir(call.root), mode=0o755, exist_ok=True)
    launcher = {
        "user": args.get("user"),
        "workstation": args.get("workstation"),
        "pid": os.getpid(),
        "at": time.time(),
    }
    try:
        with locked(os.path.join(runs_dir(call.root), ".claim.lock"), CLAIM_PATIENCE):
            found = None
            if args.get("run") is not None or not args.get("new"):
                found = _same_launch(call, args, launcher)
            if found is None:
                _close_old_panes(call.root)
                found = _new_run(call, args, recipe, launcher)
            return {**found, "meeting": read_json(RunDir.of(call.root, found["run"]).file(MEETING))[0]}
    except TimeoutError:
        raise OpError("failed", "another launch here has held up the claim for %g s" % CLAIM_PATIENCE) from None


def _same_launch(call: Any, args: Dict[str, Any], launcher: Dict[str, Any]) -> Optional[Dict[str, Any]]:
    snapshot = once()
    wanted = args.get("run")
    for run in list_runs(call.root):
        if wanted not in (None, run.run):
            continue
        state, _ = run.state()
        if state is None or (state.get("digest"), state.get("user")) != (
            args.get("digest"),
            args.get("user"),
        ):
            continue
        if state.get("phase") not in ACTIVE:
            continue
        standing = Standing(run, snapshot)
        if standing.phase == LOST and standing.alive:
            raise OpError(
                "refused",
                "%s is lost, but %d of its processes still live: end them first (orch stop %s), or ask for another run "
                "beside it (--new)" % (run.run, len(standing.alive), run.run),
            )
        if standing.phase not in ACTIVE or standing.state is None:
            continue
        if standing.state.get("runner"):
            return {"run": run.run, "how": "running", "state": standing.state}
        if _key(run.run) in call.keep:  # claimed before over this same channel
            return {"run": run.run, "how": "continue", "state": standing.state}
        fd = run.try_lock(0.3)
        if fd is None:
            return {"run": run.run, "how": "busy", "state": run.state()[0] or standing.state}
        state = run.state()[0]
        if state is None or state.get("runner") or state.get("phase") not in BEFORE:
            os.close(fd)  # a runner took it over and was done in between
            continue
        call.keep[_key(run.run)] = fd
        _remove(run.file("secrets.json"))
        state["launcher"] = launcher
        run.write_state(state)
        return {"run": run.run, "how": "continue", "state": state}
    if wanted is not None and os.path.lexists(RunDir.of(call.root, wanted).path):
        raise OpError("refused", "%s has ended here already: stop it, then launch again" % wanted)
    return None


def _close_old_panes(root: str) -> None:
    """A run that has ended keeps its last screen for a while, and with it a tmux server: not for ever."""
    for run in list_runs(root):
        if not os.path.exists(tmux.socket_path(run.run)):
            continue
        state, _ = run.state()
        ended = (state or {}).get("exit") or {}
        if (state or {}).get("phase") in ENDED and time.time() - float(ended.get("at") or 0) > PANE_KEPT:
            tmux.kill(run.run)


def _new_run(call: Any, args: Dict[str, Any], recipe: str, launcher: Dict[str, Any]) -> Dict[str, Any]:
    """Made beside and renamed, so that a claim that is cut off leaves no half of a run; under the claim lock."""
    if args.get("run") is None:
        run = _free_name(call.root, "%s-%s" % (recipe, time.strftime("%Y%m%d-%H%M%S")))
    else:
        run = RunDir.of(call.root, args["run"])
        tmux.reserve(run.run)
    for name in os.listdir(runs_dir(call.root)):
        if name.startswith(_HALF):  # of a claim that was cut off: this one holds the lock
            shutil.rmtree(os.path.join(runs_dir(call.root), name), ignore_errors=True)
    half = RunDir(os.path.join(runs_dir(call.root), _HALF + run.run))
    state: State = {"version": 1, "run": run.run, "recipe": recipe, "phase": "preparing"}
    state.update({key: args.get(key) for key in ("digest", "user", "workstation", "place", "places")})
    state.update(created=time.time(), launcher=launcher)
    for key in ("environment", "code", "runner", "trainer", "started", "heartbeat", "step", "step_at"):
        state[key] = None
    state.update(tokens_per_second=None, exit=None, stop=None)
    fd = None
    try:
        os.mkdir(half.path, 0o700)
        fd = half.try_lock()
        assert fd is not None
        half.write_state(state)
        if args.get("meeting"):
            write_json(half.file(MEETING), args["meeting"])
        os.rename(half.path, run.path)
        fsync_dir(runs_dir(call.root))
    except OSError:
        if fd is not None:
            os.close(fd)
        shutil.rmtree(half.path, ignore_errors=True)
        tmux.kill(run.run)
        raise
    call.keep[_key(run.run)] = fd
    with contextlib.suppress(OSError):
        run.event("claimed", user=args.get("user"), workstation=args.get("workstation"))
    return {"run": run.run, "how": "new", "state": state}


def _free_name(root: str, stem: str) -> RunDir:
    for number in range(1, 10000):
        run = RunDir.of(root, stem if number == 1 else "%s-%d" % (stem, number))
        if not os.path.lexists(run.path) and tmux.reserve(run.run):
            return run
    raise OpError("failed", "%s: no free name for a run" % stem)


def start(args: Dict[str, Any], call: Any) -> Dict[str, Any]:
    """`{run, files: {name: text}, env: id, code: digest}` + payload JSON of secrets -> `{"run", "state",
    "already"}`.

    Returns once the runner has recorded itself. Repeated after it has, it changes nothing and `already` is
    true.
    """
    run = find(call.root, args.get("run"))
    key = _key(run.run)
    if key not in call.keep:
        standing = Standing(run)
        if standing.state is not None and standing.state.get("runner"):
            return {"run": run.run, "state": standing.state, "already": True}
        raise OpError("refused", "%s has not been claimed over this connection" % run.run)
    state = _startable(run, call)
    _write_files(run, args.get("files") or {}, call.payload)
    state.update(phase="starting", environment=args.get("env"), code=args.get("code"))
    run.write_state(state)
    with contextlib.suppress(OSError):
        run.event("phase", phase="starting", before="preparing")
    for attempt in (1, 2):
        _spawn(run)
        os.close(call.keep.pop(key))  # the runner waits for it
        taken = _taken_over(run)
        if taken is not None:
            return {"run": run.run, "state": taken, "already": False}
        fd = run.try_lock(0.3)
        if fd is None:
            break  # somebody keeps the run, and does not say so
        call.keep[key] = fd
        latest, _ = run.state()
        if latest is not None and (latest.get("runner") or latest.get("phase") in ENDED):
            os.close(call.keep.pop(key))
            return {"run": run.run, "state": latest, "already": False}
        if attempt == 1 and tmux.pane(run.run)["session"] is False:
            continue  # a session that was there from before gave up waiting just now
        break
    message = _did_not_start(run)
    if key in call.keep:
        _clear_pane(run)
        _remove(run.file("secrets.json"))
    raise OpError("failed", message)


def _startable(run: RunDir, call: Any) -> State:
    """The state, if this run may be started by the holder of its lock."""
    key = _key(run.run)
    state, why = run.state()
    if state is None:
        raise OpError("failed", "the state of %s cannot be read: %s" % (run.run, why))
    asked = run.stop_request()
    if asked is not None and state.get("phase") in BEFORE:
        stop.mark_stopped(run, state, asked)
    if state.get("phase") not in BEFORE or state.get("runner"):
        os.close(call.keep.pop(key))
        if state.get("phase") == "stopped":
            by = (state.get("stop") or {}).get("by") or "someone"
            raise OpError("refused", "%s was stopped by %s while it was being prepared" % (run.run, by))
        raise OpError("refused", "%s is %s already" % (run.run, state.get("phase")))
    return state


def _write_files(run: RunDir, files: Dict[str, Any], payload: bytes) -> None:
    for name, text in files.items():
        if name != os.path.basename(name) or name.startswith(".") or name in _OURS or not isinstance(text, str):
            raise OpError("usage", "%r is no file that a launch may write" % (name,))
    if "launch.json" not in files and not os.path.exists(run.file("launch.json")):
        raise OpError("usage", "launch.json is missing: there is nothing to start")
    secrets: Any = {}
    if payload:
        try:
            secrets = json.loads(payload.decode("utf-8"))
        except ValueError:
            secrets = None
        if not isinstance(secrets, dict):
            raise OpError("usage", "the secrets are not a JSON object")
    for name, text in files.items():
        write_file(run.file(name), text.encode("utf-8"))
    # made here, so that it is there to be followed from the first moment
    os.close(os.open(run.console, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644))
    _remove(run.file("secrets.json"))
    if secrets:
        write_file(run.file("secrets.json"), json.dumps(secrets).encode("utf-8"), 0o600)


def _spawn(run: RunDir) -> None:
    """A session with a live pane, whether made now or by a launch that broke off after making it."""
    pane = tmux.pane(run.run)
    if pane["session"] and pane["pane_dead"] is False:
        return
    _clear_pane(run)
    # a pane loses the last words of what ends at once, so these go to a file
    command = ["/bin/sh", "-c", 'exec "$@" 2>>"$0"', run.file("runner.log"), *runner_command(run.real)]
    why = tmux.start(run.run, command, run.path)
    if why is not None:
        _remove(run.file("secrets.json"))
        raise OpError("failed", "%s was not started: %s" % (run.run, why))


def _clear_pane(run: RunDir) -> None:
    """Called with the lock held: a runner that waits for it is ended with its server, before it can take
    it."""
    pid = tmux.pane(run.run)["pane_pid"]
    found = processes.stat(pid) if isinstance(pid, int) else None
    tmux.kill(run.run)
    if found is not None:
        processes.kill_each([found], signal.SIGKILL)


def _taken_over(run: RunDir) -> Optional[State]:
    """The state once a runner has recorded itself; None if none did in time, or its pane died."""
    end = time.monotonic() + START_PATIENCE
    looked = time.monotonic()
    while time.monotonic() < end:
        state, _ = run.state()
        if state is not None and (state.get("runner") or state.get("phase") in ENDED):
            return state
        time.sleep(0.03)
        if time.monotonic() - looked > 0.5:
            looked = time.monotonic()
            pane = tmux.pane(run.run)
            if pane["session"] is False or pane["pane_dead"]:
                state, _ = run.state()
                if state is not None and (state.get("runner") or state.get("phase") in ENDED):
                    return state
                return None
    return None


def _did_not_start(run: RunDir) -> str:
    screen, why = tmux.screen(run.run)
    _, tail = logs.read(run.console, tail_lines=20, limit=8192)
    parts = ["the runner of %s did not start" % run.run]
    _, said = logs.read(run.file("runner.log"), tail_lines=20, limit=8192)
    if said.strip():
        parts.append("it said:\n" + said.decode("utf-8", "replace").strip())
    shown = "\n".join((screen or "").splitlines()[-20:]).strip()
    parts.append("its pane shows:\n" + shown if shown else "its pane shows nothing (%s)" % (why or "empty"))
    if tail.strip():
        parts.append("console.log ends:\n" + tail.decode("utf-8", "replace").rstrip())
    return "; ".join(parts)


def runner_command(run_dir: str) -> List[str]:
    """The command of the pane."""
    return program.command("runner", run_dir)


def list_op(args: Dict[str, Any], call: Any) -> Dict[str, Any]:
    """`{limit}` -> `{"runs": [{"run", "state", "phase", "why", "lock", "alive"}, ...], "more": n}`, newest
    first."""
    found = list_runs(call.root)
    limit = args.get("limit")
    limit = len(found) if not isinstance(limit, int) or limit < 0 else limit
    snapshot = once()
    return {"runs": [Standing(run, snapshot).report() for run in found[:limit]], "more": max(0, len(found) - limit)}


def _text(args: Dict[str, Any], key: str) -> str:
    value = args.get(key)
    if not isinstance(value, str) or not value:
        raise OpError("usage", "%s is missing" % key)
    return value


def _key(run: str) -> str:
    return "lock:" + run


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


OPS = {"claim": claim, "start": start, "stop": stop.stop, "list_runs": list_op}
