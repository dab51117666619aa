"""Whether the environment that a run used was changed while it ran: the quick look, bounded, beside other readings."""

from __future__ import annotations

import os
import re
import threading
import time
from typing import Any, Dict, List, Optional, Tuple

from . import environment_state
from .derive import LOST, Standing
from .environment_verify import check

_BOUND = 5.0  # seconds; what takes longer is unknown
_MOST = 8
_PACKAGE = re.compile(r"lib(?:64)?/[^/]+/site-packages/([A-Za-z_]\w*)(?:/|\.|\Z)")


class Look:
    """Begins at once, for a run that ended badly; of all others nothing is asked."""

    def __init__(self, root: str, standing: Optional[Standing]) -> None:
        self._found: Optional[Dict[str, Any]] = None
        self._why: Optional[Exception] = None
        self._end = time.monotonic() + _BOUND
        self._thread: Optional[threading.Thread] = None
        state = standing.state if standing is not None else None
        if standing is None or state is None or standing.phase not in ("failed", LOST) or not state.get("environment"):
            return
        self._thread = threading.Thread(target=self._look, args=(root, state), daemon=True)
        self._thread.start()

    def outcome(self) -> Optional[Dict[str, Any]]:
        """`{"id", "ok", "changes", "names", "later"}`, or None where nothing is known. `changes` are sentences about
        what was changed before the run ended, `names` the packages that they touch; `later`: what was changed since,
        or cannot be dated. Raises what kept it from being read."""
        if self._thread is None:
            return None
        self._thread.join(max(0.0, self._end - time.monotonic()))
        if self._why is not None:
            raise self._why
        if self._found is None and self._thread.is_alive():
            raise TimeoutError("not looked through within %.0f s" % _BOUND)
        return self._found

    def _look(self, root: str, state: Dict[str, Any]) -> None:
        try:
            self._found = self._compare(root, state)
        except Exception as e:  # it is raised again where the outcome is asked for
            self._why = e

    def _compare(self, root: str, state: Dict[str, Any]) -> Optional[Dict[str, Any]]:
        ident = state["environment"]
        ended = (state.get("exit") or {}).get("at") or state.get("heartbeat")
        began = state.get("started") or ended
        if not isinstance(ended, (int, float)) or not isinstance(began, (int, float)):
            return None
        path, manifest = _used(root, ident, began)
        if manifest is None:
            return None
        report = check(path, manifest, False, self._tick)
        before: List[Dict[str, Any]] = []
        later: List[Dict[str, Any]] = []
        for finding in report["findings"]:
            at = _changed_at(path, finding["files"])
            (later if at is None or at > ended else before).append(finding)
        names = {match.group(1) for finding in before for match in map(_PACKAGE.match, finding["files"]) if match}
        return {
            "id": ident,
            "ok": not before,
            "changes": [finding["text"] for finding in before][:_MOST],
            "names": sorted(names)[:500],
            "later": [finding["text"] for finding in later][:_MOST],
        }

    def _tick(self, done: int, total: int) -> None:
        if time.monotonic() > self._end:
            raise TimeoutError("not digested within %.0f s" % _BOUND)


def _used(root: str, ident: str, began: float) -> Tuple[str, Optional[Dict[str, Any]]]:
    """The environment that had the name when the run began: it may have been set aside since, and built anew."""
    best: Tuple[str, Optional[Dict[str, Any]]] = "", None
    latest = float("-inf")
    path = environment_state.path_of(root, ident)
    for folder in [path, *(os.path.join(os.path.dirname(path), name) for name in environment_state.aside(root, ident))]:
        manifest = environment_state.read_manifest(folder)
        built = (manifest or {}).get("built")
        if isinstance(built, (int, float)) and latest < built <= began:
            best, latest = (folder, manifest), built
    return best


def _changed_at(root: str, names: List[str]) -> Optional[float]:
    """When the first of some files was changed, which no program can date back; of one that is gone, when a name in
    its folder was changed last."""
    times = []
    for name in names:
        path = os.path.join(root, name)
        try:
            times.append(os.lstat(path).st_ctime)
            continue
        except OSError:
            folder = os.path.dirname(path)
        while not os.path.isdir(folder) and len(folder) > len(root):
            folder = os.path.dirname(folder)
        try:
            times.append(os.stat(folder).st_mtime)
        except OSError:
            continue
    return min(times, default=None)
