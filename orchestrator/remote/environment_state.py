"""Where environments lie, who holds and uses them, and what is known of their being clean.

`envs/<id>/` is one environment, `envs/<id>.polluted-<time>/` one that was set aside, `envs/<id>.tmp-<nonce>` one
that is being made or removed. `envs/.locks/<id>` is held by whoever makes or moves it. `envs/.state/<id>.json`
outlives the folder: it says that the id is polluted until it is built anew, or when all of it was digested last.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import time
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Tuple

from . import processes
from .derive import LOST, Standing, once
from .environment_files import MANIFEST
from .environment_protect import release, set_immutable
from .files import fsync_folder, remove_tree
from .frames import OpError
from .rundir import ACTIVE, list_runs, read_json, write_json

if TYPE_CHECKING:
    from .serve import Call

TELL = 0.5  # seconds between two words of progress
ASIDE = ".polluted-"
_ID = re.compile(r"[0-9a-f]{16}\Z")


def envs_dir(root: str) -> str:
    return os.path.join(root, "envs")


def path_of(root: str, ident: Any) -> str:
    """The folder of an environment by its real path, which programs are started through. Raises OpError for no id."""
    if not isinstance(ident, str) or not _ID.match(ident):
        raise OpError("usage", "%r is not the id of an environment" % (ident,))
    return os.path.join(os.path.realpath(envs_dir(root)), ident)


def read_manifest(path: str) -> Optional[Dict[str, Any]]:
    """The whole manifest, its table of files included; None where there is none."""
    try:
        with open(os.path.join(path, MANIFEST), encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def brief(manifest: Optional[Dict[str, Any]]) -> Optional[Dict[str, Any]]:
    """A manifest without its table, as it travels."""
    return None if manifest is None else {key: value for key, value in manifest.items() if key != "files"}


def entries(root: str) -> List[str]:
    """The names of environments and of those set aside; none where there is no folder yet."""
    try:
        names = os.listdir(envs_dir(root))
    except FileNotFoundError:
        return []
    return sorted(name for name in names if _ID.match(name.partition(ASIDE)[0]) and ".tmp-" not in name)


def aside(root: str, ident: str) -> List[str]:
    """The folders that this id was set aside under, the newest last."""
    return [name for name in entries(root) if name.startswith(ident + ASIDE)]


# --- the lock --------------------------------------------------------------------------------------


def lock(path: str, call: Call) -> Tuple[int, bool]:
    """The id's lock, held, and whether it had to be waited for. Freed by closing, or by the death of all
    holders. Raises OSError."""
    fd = _open_lock(path)
    began = told = time.monotonic()
    while True:
        if _try(fd):
            return fd, told > began
        now = time.monotonic()
        if now - told >= TELL or told == began:
            told = now
            call.event({"step": "waiting for another builder", "seconds": round(now - began, 1)})
        time.sleep(0.1)


def try_lock(path: str) -> Optional[int]:
    """The id's lock, or None while another has it. Raises OSError."""
    fd = _open_lock(path)
    if _try(fd):
        return fd
    os.close(fd)
    return None


def _open_lock(path: str) -> int:
    folder = os.path.join(os.path.dirname(path), ".locks")
    os.makedirs(folder, 0o700, exist_ok=True)
    return os.open(os.path.join(folder, os.path.basename(path)), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _try(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            os.close(fd)
            raise
        return False


def sweep(parent: str, mine: str) -> None:
    """Removes what dead builders left: of `mine`, whose lock the caller holds, and of ids whose lock is free."""
    for entry in os.listdir(parent):
        ident, separator, _ = entry.partition(".tmp-")
        if not separator:
            continue
        held = None
        try:
            if ident != mine:
                held = try_lock(os.path.join(parent, ident))
                if held is None:
                    continue  # a live builder's
            remove(os.path.join(parent, entry))
        except OSError:
            pass
        finally:
            if held is not None:
                os.close(held)


def remove(path: str) -> None:
    """Removes an environment's folder, protected or not; what cannot be removed stays."""
    if os.path.lexists(path):
        release(path)
        remove_tree(path)


# --- what is known ---------------------------------------------------------------------------------


def _state_file(root: str, ident: str) -> str:
    return os.path.join(envs_dir(root), ".state", ident + ".json")


def verdict(root: str, ident: str) -> Dict[str, Any]:
    """`{"polluted": report or absent, "deep": time, "boot": id}`; {} where nothing is known."""
    found, _ = read_json(_state_file(root, ident))
    return found or {}


def set_verdict(root: str, ident: str, value: Dict[str, Any]) -> None:
    """Replaces what is known. Raises OSError."""
    path = _state_file(root, ident)
    os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
    write_json(path, value)


def forget(root: str, ident: str) -> None:
    """Nothing is known of this id any more."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(_state_file(root, ident))


def digested(root: str, ident: str) -> None:
    """All of the environment was digested just now and is clean; that cannot be kept where the disk is full."""
    with contextlib.suppress(OSError):
        set_verdict(root, ident, {"deep": time.time(), "boot": processes.boot_id()})


def wants_deep(root: str, ident: str) -> Optional[str]:
    """Why all of it should be digested before it is used again, or None: a run in it failed or was lost, or the
    machine was started anew, after it was digested last."""
    known = verdict(root, ident)
    since = known.get("deep")
    if not isinstance(since, (int, float)):
        return "it has not been digested yet"
    boot = processes.boot_id()
    if boot is not None and known.get("boot") != boot:
        return "the machine was started anew since"
    snapshot = once()
    for run in list_runs(root):
        state, _ = run.state()
        if state is None or state.get("environment") != ident:
            continue
        if state.get("phase") == "failed" and float((state.get("exit") or {}).get("at") or 0.0) > since:
            return "%s failed in it" % run.run
        recent = state.get("phase") in ACTIVE and float(state.get("created") or 0.0) > since
        if recent and Standing(run, snapshot).phase == LOST:
            return "%s was lost in it" % run.run
    return None


def users(root: str, ident: str) -> Dict[str, List[str]]:
    """Who uses the environment now: `runs`, and other `processes`, each as "pid (its command)"."""
    snapshot, runs, mine = once(), [], set()
    for run in list_runs(root):
        state, _ = run.state()
        if state is None or state.get("environment") != ident or state.get("phase") not in ACTIVE:
            continue
        standing = Standing(run, snapshot)
        if standing.phase in ACTIVE or standing.alive:
            runs.append(run.run)
            mine.add(run.run.encode())
    found = []
    inside = os.path.realpath(os.path.join(envs_dir(root), ident)).encode() + b"/"
    for pid in sorted(processes.everything()):
        if pid == os.getpid() or not _uses(pid, inside):
            continue
        if processes.environ(pid).get(b"ORCH_RUN_ID") in mine:
            continue
        words = _read("/proc/%d/cmdline" % pid).replace(b"\0", b" ").decode("utf-8", "replace").strip()
        found.append("%d (%s)" % (pid, words[:120]))
    return {"runs": runs, "processes": found}


def _uses(pid: int, inside: bytes) -> bool:
    first = _read("/proc/%d/cmdline" % pid).split(b"\0", 1)[0]
    return first.startswith(inside) or inside in _read("/proc/%d/maps" % pid)


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


# --- setting aside ---------------------------------------------------------------------------------


def set_aside(path: str) -> str:
    """Renames a polluted environment, whose lock the caller holds, and answers its new path. Raises OSError."""
    stem = path + ASIDE + time.strftime("%Y%m%d-%H%M%S")
    target, number = stem, 1
    while os.path.lexists(target):
        number += 1
        target = "%s-%d" % (stem, number)
    set_immutable(path, False)
    os.rename(path, target)
    fsync_folder(os.path.dirname(path))
    root, ident = os.path.dirname(os.path.dirname(path)), os.path.basename(path)
    known = verdict(root, ident).get("polluted")
    if known is not None:  # for people, also when the id is clean again
        with contextlib.suppress(OSError):
            set_verdict(root, os.path.basename(target), {"polluted": known})
    return target


def found_polluted(root: str, ident: str, report: Dict[str, Any]) -> Dict[str, Any]:
    """Keeps what was found, so that the id is refused until it is built anew, and sets the folder aside unless
    something runs in it: what a running program imports late must stay where it is. Raises OSError."""
    path = path_of(root, ident)
    kept = {key: report[key] for key in ("summary", "findings", "deep")}
    kept["at"] = time.time()
    kept["findings"] = [dict(finding, files=finding["files"][:20]) for finding in kept["findings"]]
    set_verdict(root, ident, {"polluted": kept})
    held = try_lock(path)
    if held is not None:
        try:
            using = users(root, ident)
            if os.path.lexists(path) and not using["runs"] and not using["processes"]:
                set_aside(path)
        finally:
            os.close(held)
    return polluted(root, ident, kept)


def polluted(root: str, ident: str, kept: Dict[str, Any]) -> Dict[str, Any]:
    """What is told of a polluted environment: the finding, where it lies now, who uses it."""
    lies = path_of(root, ident)
    if not os.path.lexists(lies):
        others = aside(root, ident)
        lies = os.path.join(envs_dir(root), others[-1]) if others else ""
    return dict(kept, path=lies, **users(root, ident))
