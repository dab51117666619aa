"""Which environments something still needs, and removing the others."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Dict, List

from . import environment_state as state
from . import generations
from .environment_protect import set_immutable
from .frames import OpError
from .rundir import ACTIVE, BEFORE, list_runs

if TYPE_CHECKING:
    from .serve import Call


def usage(root: str) -> Dict[str, Dict[str, Any]]:
    """id -> `{"kept_by": [sentence, ...], "last_used": time or null}`: pins, good generations, and runs that are kept.

    Raises OpError where a pin cannot be read: then nothing may be removed.
    """
    found: Dict[str, Dict[str, Any]] = {}

    def of(ident: Any) -> Dict[str, Any]:
        return found.setdefault(str(ident), {"kept_by": [], "last_used": None})

    for recipe in generations.names(root):
        pin = generations.read_pin(root, recipe)
        if pin is not None:
            of(pin.get("environment"))["kept_by"].append("%s is pinned to it" % recipe)
        for one in generations.read(root, recipe):
            used = of(one.get("environment"))
            used["last_used"] = max(used["last_used"] or 0.0, float(one.get("at") or 0.0))
            if one["standing"] == "good":
                used["kept_by"].append("generation %d of %s is good" % (one["generation"], recipe))
    for run in list_runs(root):
        current, why = run.state()
        if current is None:
            raise OpError("failed", "the state of %s cannot be read (%s), so what it needs is unknown" % (run.run, why))
        if current.get("environment"):
            used = of(current["environment"])
            used["last_used"] = max(used["last_used"] or 0.0, float(current.get("created") or 0.0))
            verb = "uses" if current.get("phase") in ACTIVE else "used"
            used["kept_by"].append("%s %s it" % (run.run, verb))
    return found


def env_gc(args: Dict[str, Any], call: Call) -> Dict[str, Any]:
    """`{remove: [entry, …] or null}` -> `{"candidates": [{"entry", "id", "name", "bytes", "why"}], "kept", "removed",
    "free"}`. Without `remove` nothing is removed; what has come into use since is left.
    """
    used = usage(call.root)
    if args.get("remove"):
        _nobody_launches(call.root)
    candidates, kept = [], []
    for entry in state.entries(call.root):
        ident, aside, _ = entry.partition(state.ASIDE)
        path = os.path.join(state.envs_dir(call.root), entry)
        manifest = state.read_manifest(path) or {}
        item: Dict[str, Any] = {"entry": entry, "id": ident, "name": manifest.get("name")}
        item["bytes"] = disk_use(path)
        reasons: List[str] = [] if aside else list((used.get(ident) or {}).get("kept_by") or [])
        living = [] if reasons else _living(call.root, entry)
        if reasons or living:
            kept.append(dict(item, why=(reasons + living)[:5]))
        else:
            candidates.append(dict(item, why="set aside as polluted" if aside else "nothing needs it"))
    removed = []
    for entry in args.get("remove") or []:
        chosen = next((item for item in candidates if item["entry"] == entry), None)
        if chosen is not None and _remove(call, chosen):
            removed.append(chosen)
    answer: Dict[str, Any] = {"candidates": candidates, "kept": kept, "removed": removed}
    return answer


def _nobody_launches(root: str) -> None:
    """A launch that has been told that its environment is here must find it so. Raises OpError."""
    for run in list_runs(root):
        current, _ = run.state()
        early = current is not None and current.get("phase") in BEFORE and not current.get("environment")
        if early and run.lock_held():
            raise OpError("refused", "%s is being launched: remove environments when it runs" % run.run)


def _living(root: str, entry: str) -> List[str]:
    return ["process %s uses it" % process for process in state.users(root, entry)["processes"]]


def _remove(call: Call, item: Dict[str, Any]) -> bool:
    """Renamed first: an environment that is being removed has no name to be launched by."""
    path = os.path.join(state.envs_dir(call.root), item["entry"])
    held = state.try_lock(os.path.join(state.envs_dir(call.root), item["id"]))
    if held is None:
        return False
    try:
        going = "%s.tmp-gc-%d" % (os.path.join(state.envs_dir(call.root), item["id"]), os.getpid())
        call.event({"step": "removing %s" % item["entry"], "seconds": 0})
        set_immutable(path, False)
        os.rename(path, going)
        state.remove(going)
        if item["entry"] != item["id"]:
            state.forget(call.root, item["entry"])
        if not state.aside(call.root, item["id"]) and not os.path.lexists(
            os.path.join(state.envs_dir(call.root), item["id"])
        ):
            state.forget(call.root, item["id"])
        return True
    finally:
        os.close(held)


def disk_use(path: str) -> int:
    """Bytes on the disk below a folder; files that are shared with another folder count here too."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
            except OSError:
                continue
    return total


OPS = {"env_gc": env_gc}
