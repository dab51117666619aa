"""The last checkpoint of a run that lost a place, for the run that goes on from it.

A run keeps its checkpoints in `checkpoints/step-NNNNNN`, and where it trains several drafters in
`drafters/NAME/checkpoints/step-NNNNNN`; a folder of that name is complete. The new run gets them as links to the same
files, so that it takes no room and the old run stays as it was.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from typing import Any, Dict, List, Optional, Set

from .derive import Standing, once
from .frames import OpError
from .rundir import BEFORE, RunDir, find, list_runs

_STEP = re.compile(r"step-(\d{6,})\Z")


def last_run(args: Dict[str, Any], call: Any) -> Dict[str, Any]:
    """`{digest, user}` -> `{"run", "created", "phase", "places", "first", "step", "checkpoint"}` of the newest run of
    that digest and user that began, or `{"run": None}`. `checkpoint`: the step of its newest one here, or None."""
    snapshot = once()
    for run in list_runs(call.root):
        state, _ = run.state()
        if state is None or (state.get("digest"), state.get("user")) != (args.get("digest"), args.get("user")):
            continue
        standing = Standing(run, snapshot)
        if standing.state is None or (standing.phase in BEFORE and not standing.state.get("runner")):
            continue  # a launch that broke off: it is continued, and not what it would go on from
        steps = _steps(run)
        return {
            "run": run.run,
            "phase": standing.phase,
            **{key: standing.state.get(key) for key in ("created", "places", "first", "step")},
            "checkpoint": max(steps) if steps else None,
        }
    return {"run": None}


def take_checkpoint(args: Dict[str, Any], call: Any) -> Dict[str, Any]:
    """`{run, of}` -> `{"step", "checkpoints"}`: the run, which was claimed over this connection, gets what `of` has;
    what it has already stays. `step` is None where there is nothing."""
    run, of = find(call.root, args.get("run")), find(call.root, args.get("of"))
    if "lock:" + run.run not in call.keep:
        raise OpError("refused", "%s has not been claimed over this connection" % run.run)
    count = 0
    for folder in _folders(of):
        own = os.path.join(run.path, os.path.relpath(folder, of.path))
        os.makedirs(own, mode=0o755, exist_ok=True)
        for name in os.listdir(folder):
            if not _STEP.match(name) or os.path.exists(os.path.join(own, name)):
                continue
            half = os.path.join(own, ".partial-taken-%s" % name)
            shutil.rmtree(half, ignore_errors=True)
            shutil.copytree(os.path.join(folder, name), half, copy_function=_link)
            os.rename(half, os.path.join(own, name))
            count += 1
    steps = _steps(run)
    with contextlib.suppress(OSError):
        run.event("continues", of=of.run, step=max(steps) if steps else None)
    return {"step": max(steps) if steps else None, "checkpoints": count}


def _folders(run: RunDir) -> List[str]:
    """Where it has checkpoints: of each of its drafters."""
    drafters = run.file("drafters")
    names = sorted(os.listdir(drafters)) if os.path.isdir(drafters) else []
    found = [run.file("checkpoints"), *(os.path.join(drafters, name, "checkpoints") for name in names)]
    return [folder for folder in found if os.path.isdir(folder)]


def _steps(run: RunDir) -> Set[int]:
    """Of which steps all of its drafters have a checkpoint here."""
    common: Optional[Set[int]] = None
    for folder in _folders(run):
        here = {int(found.group(1)) for found in map(_STEP.match, os.listdir(folder)) if found}
        common = here if common is None else common & here
    return common or set()


def _link(source: str, to: str) -> None:
    """Checkpoints are never written to again; where the file system has no links, a copy."""
    try:
        os.link(source, to)
    except OSError:
        shutil.copy2(source, to)


OPS = {"last_run": last_run, "take_checkpoint": take_checkpoint}
