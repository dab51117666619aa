"""The directory of a run: its files, its lock, its state and its events.

`<root>/runs/<run>/` holds `state.json` (replaced by rename, one writer: whoever holds `lock`), `launch.json`,
`secrets.json` (only between `start` and the runner's first step), `stop.json` (a request to stop, written by
anyone), `console.log`, and the append-only `metrics.jsonl`, `gpu.jsonl`, `events.jsonl`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import stat
import time
from typing import Any, BinaryIO, Dict, Iterator, List, Optional, Tuple

from .frames import OpError

State = Dict[str, Any]

VERSION = 1
BEFORE = ("preparing", "starting")
ACTIVE = ("preparing", "starting", "compiling", "training")
ENDED = ("finished", "failed", "stopped")
MEETING = "meeting.json"  # how runners of several places find each other; holds their token, and goes with the start
RUN_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,79}\Z")

# what a state holds where it is not None
KINDS: Dict[str, Tuple[type, ...]] = {
    "phase": (str,),
    "created": (int, float),
    "runner": (dict,),
    "trainer": (dict,),
    "launcher": (dict,),
    "exit": (dict,),
    "stop": (dict,),
    "places": (list,),
    "first": (dict,),
    "cache": (dict,),
    "compile": (dict,),
}

_SMALL = 4 << 20  # no record of ours is larger; a file that is, isn't one


class RunDir:
    """The paths of one run, and what is done with them. Nothing is read or made by making one."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.run = os.path.basename(path.rstrip("/"))

    @classmethod
    def of(cls, root: str, run: object) -> RunDir:
        """The directory of the run of that name under `root`; ValueError if it is no name of a run."""
        if not isinstance(run, str) or not RUN_ID.match(run):
            raise ValueError("%r is not a run id" % (run,))
        return cls(os.path.join(runs_dir(root), run))

    def file(self, name: str) -> str:
        return os.path.join(self.path, name)

    @property
    def console(self) -> str:
        return self.file("console.log")

    @property
    def real(self) -> str:
        """The path that the run's processes carry in their environment, links resolved."""
        return os.path.realpath(self.path)

    def exists(self) -> bool:
        return os.path.isdir(self.path)

    def state(self) -> Tuple[Optional[State], Optional[str]]:
        """(state, None), or (None, why it cannot be read). What it holds is of the kinds in KINDS."""
        state, why = read_json(self.file("state.json"))
        if state is not None:
            why = _unsound(state)
        return (state, None) if why is None else (None, why)

    def write_state(self, state: State) -> None:
        """Replace the state; only the holder of the lock may. OSError if the disk does not take it."""
        state["version"] = VERSION
        state["updated"] = time.time()
        write_json(self.file("state.json"), state)

    def stop_request(self) -> Optional[Dict[str, Any]]:
        """Who asked to stop this run, when, and with which grace; None if nobody did."""
        path = self.file("stop.json")
        asked, _ = read_json(path)
        if asked is None and os.path.exists(path):
            return {"by": None, "at": None, "grace": None}  # a half-written wish is still a wish
        return asked

    def event(self, event: str, **fields: Any) -> None:
        """Append to events.jsonl. OSError if the disk does not take it."""
        append_line(self.file("events.jsonl"), event_line(event, **fields))

    def try_lock(self, patience: float = 0.0) -> Optional[int]:
        """A descriptor that holds the run's lock until it is closed, or None if another holds it.

        A look at whether the lock is held takes it for some microseconds, so a caller that acts on "held"
        gives a little patience (seconds).
        """
        return lock_file(self.file("lock"), patience)

    def lock_held(self) -> Optional[bool]:
        """Whether somebody holds the lock, also this process; None if that cannot be told."""
        try:
            fd = os.open(self.file("lock"), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        except OSError:
            return None
        try:
            # shared: two that look at once do not see each other
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as e:
            return True if e.errno in (errno.EAGAIN, errno.EACCES) else None
        finally:
            os.close(fd)
        return False


def runs_dir(root: str) -> str:
    return os.path.join(root, "runs")


def event_line(event: str, **fields: Any) -> str:
    """One line of events.jsonl: `{"at", "event", ...}`."""
    record: Dict[str, Any] = {"at": round(time.time(), 3), "event": event}
    record.update(fields)
    return json.dumps(record, ensure_ascii=False)


def find(root: str, name: object) -> RunDir:
    """The directory of an existing run; OpError if there is none of that name."""
    try:
        run = RunDir.of(root, name)
    except ValueError as e:
        raise OpError("usage", str(e)) from None
    if not run.exists():
        raise OpError("not_found", "there is no run %s" % run.run)
    return run


def list_runs(root: str) -> List[RunDir]:
    """All runs, the newest first (by the time in their state, the name where that is missing)."""
    found = []
    try:
        names = os.listdir(runs_dir(root))
    except OSError:
        return []
    for name in names:
        if not RUN_ID.match(name):
            continue
        run = RunDir.of(root, name)
        if not run.exists():
            continue
        state, _ = run.state()
        created = (state or {}).get("created")
        if not isinstance(created, (int, float)):
            try:
                created = os.stat(run.path).st_mtime
            except OSError:
                continue
        found.append((float(created), name, run))
    found.sort(key=lambda item: item[:2], reverse=True)
    return [run for _, _, run in found]


def lock_file(path: str, patience: float = 0.0) -> Optional[int]:
    """An exclusive flock on `path` (made if missing): its descriptor, or None if it stays held for
    `patience` s."""
    end = time.monotonic() + patience
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except OSError as e:
            if e.errno not in (errno.EAGAIN, errno.EACCES, errno.EINTR):
                os.close(fd)
                raise
        if time.monotonic() >= end:
            os.close(fd)
            return None
        time.sleep(0.02)


@contextlib.contextmanager
def locked(path: str, patience: float) -> Iterator[None]:
    """Hold a flock on `path`; TimeoutError if it stays held for `patience` seconds."""
    fd = lock_file(path, patience)
    if fd is None:
        raise TimeoutError("%s is held by another process" % path)
    try:
        yield
    finally:
        os.close(fd)


def open_file(path: str) -> BinaryIO:
    """A regular file, to read; OSError for anything else, such as a FIFO that nobody writes to: it is not waited
    for."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        raise OSError(errno.EISDIR, "is a directory" if stat.S_ISDIR(mode) else "not a regular file", path)
    return open(fd, "rb")


def read_json(path: str, most: int = _SMALL) -> Tuple[Optional[Dict[str, Any]], Optional[str]]:
    """(object, None), or (None, why not) for a file that is missing, broken, too large, or no JSON object."""
    try:
        with open_file(path) as f:
            text = f.read(most + 1)
    except OSError as e:
        return None, "%s: %s" % (os.path.basename(path), e.strerror)
    if len(text) > most:
        return None, "%s: larger than %d bytes" % (os.path.basename(path), most)
    try:
        value = json.loads(text.decode("utf-8", "replace"))
    except (ValueError, RecursionError) as e:
        return None, "%s: %s" % (os.path.basename(path), e)
    if not isinstance(value, dict):
        return None, "%s: not an object" % os.path.basename(path)
    return value, None


def _unsound(state: State) -> Optional[str]:
    """What is wrong with a state that no program of ours has written so; None if nothing is."""
    for key, kinds in KINDS.items():
        value = state.get(key)
        if value is not None and not isinstance(value, kinds):
            return "state.json: %s is a %s" % (key, type(value).__name__)
    created = state.get("created")
    if created is not None and not -1e12 < created < 1e12:  # NaN too
        return "state.json: created is no time"
    for key in ("runner", "trainer"):
        if state.get(key) is not None and not isinstance(state[key].get("pid"), int):
            return "state.json: the pid of %s is no number" % key
    return None


def write_json(path: str, value: Dict[str, Any]) -> None:
    write_file(path, json.dumps(value, ensure_ascii=False, indent=1).encode("utf-8", "surrogatepass") + b"\n")


def write_file(path: str, data: bytes, mode: int = 0o600) -> None:
    """Put `data` at `path` whole or not at all, on the disk before it is seen. Nothing is left over on
    failure."""
    tmp = "%s.tmp-%d" % (path, os.getpid())
    try:
        fd = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(tmp, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(tmp)
        raise
    fsync_dir(os.path.dirname(path))


def no_exit(reason: str) -> Dict[str, Any]:
    """The exit record of a trainer of whose end nothing is known, or that never began."""
    record: Dict[str, Any] = {"code": None, "signal": None, "at": time.time(), "oom_kills": None}
    record.update(machine_oom_kills=None, reason=reason)
    return record


def fsync_dir(path: str) -> None:
    """Make a rename last; not every file system can, and a rename that was not synced is still a rename."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def append_line(path: str, line: str) -> None:
    """Append a line in one write, so that several writers do not mix. OSError if the disk does not take it.

    A line that an earlier, failed write left half-written is closed first: it costs itself only.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        size = os.fstat(fd).st_size
        data = line.encode("utf-8", "surrogatepass") + b"\n"
        if size and os.pread(fd, 1, size - 1) != b"\n":
            data = b"\n" + data
        written = os.write(fd, data)
        if written != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(fd)
