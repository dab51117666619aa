"""What there is at the place: read from files where possible, each fact null by itself where it cannot be read.

Versions of programs need a process each. They are kept in a small cache under the root, by path, size and time, so
that only the first contact pays for them.
"""

from __future__ import annotations

import glob
import json
import os
import platform
import pwd
import re
import shutil
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional

if TYPE_CHECKING:
    from .serve import Call

# Seconds that all version questions together may take.
BOUND = 3.0
# Arguments that make a program say its version in one line.
TOOLS = {"tmux": ["-V"], "zstd": ["--version"], "uv": ["--version"], "rsync": ["--version"]}
# Asked for its presence only: with a broken driver it may hang in the kernel.
SILENT_TOOLS = ["nvidia-smi"]
ASK_PYTHON = "import platform; print(platform.python_version())"
OLDEST, NEWEST = 8, 19


def gather(root: str) -> Dict[str, Any]:
    """The facts of the hello frame."""
    user = _or_none(lambda: pwd.getpwuid(os.getuid()).pw_name)
    versions = Versions(os.path.join(root, "bin", "versions.json"))
    pythons = find_pythons(root)
    tools = {name: find_tool(name, root) for name in [*TOOLS, *SILENT_TOOLS]}
    for path in pythons:
        versions.ask(path, ["-IS", "-c", ASK_PYTHON])
    for name, question in TOOLS.items():
        tool = tools[name]
        if tool:
            versions.ask(tool, question)
    known = versions.answers()
    own = {"path": sys.executable, "version": platform.python_version()}
    others = [path for path in pythons if os.path.realpath(path) != os.path.realpath(sys.executable)]
    found = [{"path": path, "version": known[path]} for path in others if new_enough(known.get(path))]
    return {
        "uid": os.getuid(),
        "user": user,
        "home": os.environ.get("HOME"),
        "root": root,
        "hostname": socket.gethostname(),
        "machine": platform.machine(),
        "system": platform.system(),
        "libc": _or_none(libc),
        "kernel": platform.release(),
        "boot_id": _or_none(boot_id),
        "uptime": _or_none(uptime),
        "time": time.time(),
        "cpus": _or_none(lambda: len(os.sched_getaffinity(0))) or os.cpu_count(),
        "memory_limit": _or_none(memory_limit),
        "memory_current": _or_none(memory_current),
        "disk_free": _or_none(lambda: disk_free(root)),
        "python": own,
        "pythons": [own, *found],
        "tools": {name: _tool(path, known) for name, path in tools.items()},
    }


def _tool(path: Optional[str], known: Dict[str, Optional[str]]) -> Optional[Dict[str, Optional[str]]]:
    return {"path": path, "version": known.get(path)} if path else None


def _or_none(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Exception:  # one fact that cannot be read is unknown, and keeps no other from being read
        return None


def read_text(path: str) -> str:
    """A small file of /proc or /sys, stripped. Raises OSError."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read(1 << 16).strip()


def boot_id() -> str:
    """Changes with each start of the machine."""
    return read_text("/proc/sys/kernel/random/boot_id")


def uptime() -> float:
    """Seconds since the start; under lxcfs that of the container."""
    return float(read_text("/proc/uptime").split()[0])


def libc() -> Optional[List[str]]:
    """["glibc", "2.36"], ["musl", "1.2.4"] or null."""
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    except (ValueError, OSError):
        name, version = "", ""
    if name == "glibc":
        return [name, version]
    for loader in glob.glob("/lib/ld-musl-*.so.1"):
        # musl's loader, run by itself, says its version on stderr and exits 1
        done = subprocess.run([loader], stdin=subprocess.DEVNULL, capture_output=True, timeout=BOUND, check=False)
        found = re.search(rb"^Version (\S+)", done.stderr, re.M)
        return ["musl", found.group(1).decode("ascii") if found else ""]
    return None


def cgroup_files(name_v2: str, name_v1: str) -> List[str]:
    """Where a memory figure of this process's cgroup and those above it may stand, nearest first."""
    found = []
    with open("/proc/self/cgroup", encoding="ascii") as file:
        lines = [line.rstrip("\n").split(":", 2) for line in file]
    for _, controllers, path in lines:
        if controllers == "":
            base, name = "/sys/fs/cgroup", name_v2
        elif "memory" in controllers.split(","):
            base, name = "/sys/fs/cgroup/memory", name_v1
        else:
            continue
        while True:
            at = os.path.join(base + path.rstrip("/"), name)
            if os.path.exists(at):
                found.append(at)
            if path in ("/", ""):
                break
            path = os.path.dirname(path)
    return found


def memory_limit() -> Optional[int]:
    """Bytes: the tightest limit on this process, or null where there is none."""
    limits = []
    for path in cgroup_files("memory.max", "memory.limit_in_bytes"):
        text = read_text(path)
        if text.isdigit() and int(text) < 1 << 60:  # v1 says "none" by a huge number
            limits.append(int(text))
    return min(limits) if limits else None


def memory_current() -> Optional[int]:
    """Bytes in use by this process's cgroup."""
    paths = cgroup_files("memory.current", "memory.usage_in_bytes")
    return int(read_text(paths[0])) if paths else None


def disk_free(root: str) -> int:
    """Bytes that this user may still write where the root is or will be."""
    while not os.path.isdir(root):
        root = os.path.dirname(root)
    info = os.statvfs(root)
    return info.f_bavail * info.f_frsize


def search_path() -> List[str]:
    """Folders of programs: PATH, and where installers put them that PATH may lack."""
    home = os.environ.get("HOME") or "/root"
    folders = os.environ.get("PATH", "").split(os.pathsep)
    folders += ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"]
    folders += [os.path.join(home, ".local/bin"), *sorted(glob.glob("/opt/*/bin"))]
    return [f for f in dict.fromkeys(folders) if f.startswith("/")]


def find_tool(name: str, root: str) -> Optional[str]:
    """The path of a program, or null. What was brought here under the root counts last."""
    found = shutil.which(name, path=os.pathsep.join(search_path()))
    if found is None:
        brought = sorted(glob.glob(os.path.join(root, "bin", name + "-*")))
        found = next((p for p in brought if os.access(p, os.X_OK) and os.path.isfile(p)), None)
    return found


def find_pythons(root: str) -> List[str]:
    """Interpreters that environments may be built with, by their real paths."""
    home = os.environ.get("HOME") or "/root"
    names = ["python3", *("python3.%d" % minor for minor in range(NEWEST, OLDEST - 1, -1))]
    folders = [folder for folder in search_path() if os.path.basename(folder) != "shims"]
    for pattern in (".pyenv/versions/*/bin", ".local/share/uv/python/*/bin"):
        folders += sorted(glob.glob(os.path.join(home, pattern)), reverse=True)
    folders += sorted(glob.glob(os.path.join(root, "python", "*", "bin")), reverse=True)
    found: Dict[str, str] = {}
    for folder in folders:
        for name in names:
            path = os.path.join(folder, name)
            if os.access(path, os.X_OK) and not _in_venv(folder):
                found.setdefault(os.path.realpath(path), path)
    return list(found)


def _in_venv(folder: str) -> bool:
    return os.path.exists(os.path.join(os.path.dirname(folder), "pyvenv.cfg"))


def new_enough(version: Optional[str]) -> bool:
    """Whether this is a Python that environments can be built with."""
    match = re.match(r"3\.(\d+)", version or "")
    return match is not None and int(match.group(1)) >= OLDEST


class Versions:
    """Asks programs for their versions, all at once, those only whose file is not the one asked before."""

    def __init__(self, cache: str) -> None:
        self._cache = cache
        self._known: Dict[str, List[Any]] = _or_none(lambda: json.loads(read_text(cache))) or {}
        self._answers: Dict[str, Optional[str]] = {}
        self._asked: Dict[str, subprocess.Popen[bytes]] = {}

    def ask(self, path: str, arguments: List[str]) -> None:
        """Starts the question, unless its answer is known."""
        known = self._known.get(path)
        if isinstance(known, list) and known[:-1] == _stamp(path):
            self._answers[path] = known[-1]
            return
        try:
            self._asked[path] = subprocess.Popen(
                [path, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError:
            self._answers[path] = None

    def answers(self) -> Dict[str, Optional[str]]:
        """path -> version, null where the program would not say in time."""
        end = time.monotonic() + BOUND
        for path, child in self._asked.items():
            try:
                out, _ = child.communicate(timeout=max(0.05, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                self._answers[path] = None
                continue
            found = re.search(r"\d+\.\d+[\w.+-]*", out.decode("utf-8", "replace"))
            version = found.group(0) if found and child.returncode == 0 else None
            self._answers[path] = version
            if version:
                self._known[path] = [*_stamp(path), version]
        if self._asked:
            _or_none(self._save)
        return self._answers

    def _save(self) -> None:
        temporary = "%s.%d" % (self._cache, os.getpid())
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(self._known, file)
        os.replace(temporary, self._cache)


def _stamp(path: str) -> List[int]:
    info = os.stat(path)
    return [info.st_size, info.st_mtime_ns]


def facts(args: Dict[str, Any], call: Call) -> Dict[str, Any]:
    """The facts again, as they are now."""
    return gather(call.root)


OPS = {"facts": facts}
