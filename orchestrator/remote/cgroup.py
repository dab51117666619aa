"""How much memory the cgroup of a process has, and how often the kernel killed in it for want of memory.

cgroup v2 counts in `memory.events`, v1 in `memory.oom_control`; a machine may mount both. Inside a container
the path in /proc/<pid>/cgroup and the mount point need not fit together, so several readings of it are tried.
"""

from __future__ import annotations

import os
from typing import Any, Dict, List, Optional, Tuple

PROC = "/proc"
_UNLIMITED = 1 << 60  # v1 says "no limit" by a huge number


class MemoryGroup:
    """The memory cgroup of one process, found once: the process may be gone when it is asked."""

    def __init__(self, pid: str = "self", proc: str = PROC) -> None:
        self.version: Optional[int] = None
        self.path: Optional[str] = None
        self.why: Optional[str] = "no memory cgroup is visible"
        for version, path in _candidates(pid, proc):
            name = "memory.events" if version == 2 else "memory.oom_control"
            if os.path.exists(os.path.join(path, name)):
                self.version, self.path, self.why = version, path, None
                break

    def events(self) -> Tuple[Optional[Dict[str, int]], Optional[str]]:
        """(counters such as oom_kill, on v2 also oom, high, max; None), or (None, why they are unknown)."""
        if self.path is None:
            return None, self.why
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        try:
            with open(os.path.join(self.path, name)) as f:
                text = f.read()
        except OSError as e:
            return None, "%s: %s" % (name, e.strerror)
        counters = {}
        for line in text.splitlines():
            key, _, value = line.partition(" ")
            if value.strip().isdigit():
                counters[key] = int(value)
        return counters, None

    def oom_kills(self) -> Tuple[Optional[int], Optional[str]]:
        """(processes that the kernel killed for want of memory so far, None), or (None, why that is
        unknown)."""
        counters, why = self.events()
        if counters is None:
            return None, why
        if "oom_kill" not in counters:
            return None, "this kernel does not count its out-of-memory kills here"
        return counters["oom_kill"], None

    def report(self) -> Dict[str, Any]:
        """`{"version", "limit", "current", "events", "why"}`: bytes, None where there is no limit or no
        reading."""
        counters, why = self.events()
        limit, current = ("memory.max", "memory.current")
        if self.version == 1:
            limit, current = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        most = self._number(limit)
        return {
            "version": self.version,
            "limit": None if most is None or most >= _UNLIMITED else most,
            "current": self._number(current),
            "events": counters,
            "why": why,
        }

    def _number(self, name: str) -> Optional[int]:
        if self.path is None:
            return None
        try:
            with open(os.path.join(self.path, name)) as f:
                return int(f.read())
        except (OSError, ValueError):  # "max" is no number: no limit
            return None


def machine_oom_kills(proc: str = PROC) -> Optional[int]:
    """How many processes the kernel killed for want of memory so far, on the whole machine and in all containers;
    seen also where a container shows no cgroup. None if unknown."""
    try:
        with open(proc + "/vmstat") as f:
            for line in f:
                key, _, value = line.partition(" ")
                if key == "oom_kill":
                    return int(value)
    except (OSError, ValueError):
        pass
    return None


def _candidates(pid: str, proc: str) -> List[Tuple[int, str]]:
    """(version, directory) to look into, the most exact first; v1 first, since where v1 holds memory v2
    does not."""
    mounts: List[Tuple[int, str, str]] = []  # version, root of the mount within the hierarchy, mount point
    for fields, kind, options in _mountinfo(pid, proc):
        if kind == "cgroup2":
            mounts.append((2, fields[3], fields[4]))
        elif kind == "cgroup" and "memory" in options.split(","):
            mounts.append((1, fields[3], fields[4]))
    paths: Dict[int, str] = {}
    try:
        with open("%s/%s/cgroup" % (proc, pid)) as f:
            for line in f:
                number, names, path = line.rstrip("\n").split(":", 2)
                if "memory" in names.split(","):
                    paths[1] = path
                elif number == "0" and not names:
                    paths[2] = path
    except (OSError, ValueError):
        pass
    out: List[Tuple[int, str]] = []
    for version, root, point in sorted(mounts):
        path = paths.get(version, "/")
        if root != "/" and (path + "/").startswith(root.rstrip("/") + "/"):
            out.append((version, _join(point, path[len(root.rstrip("/")) :])))
        out.append((version, _join(point, path)))
        out.append((version, point))
    return out


def _join(point: str, path: str) -> str:
    return os.path.normpath(point + "/" + path.lstrip("/"))


def _mountinfo(pid: str, proc: str) -> List[Tuple[List[str], str, str]]:
    """(fields before the dash, file system, its own options) of each mount."""
    out = []
    try:
        with open("%s/%s/mountinfo" % (proc, pid)) as f:
            lines = f.read().splitlines()
    except OSError:
        return []
    for line in lines:
        left, _, right = line.partition(" - ")
        fields, rest = left.split(), right.split()
        if len(fields) >= 5 and len(rest) >= 1:
            out.append((fields, rest[0], rest[-1]))
    return out
