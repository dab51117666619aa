"""What `orch doctor` asks of a place beyond the facts of the hello: each reading has a value, or why there is none."""

from __future__ import annotations

import glob
import os
import re
import shutil
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional

from . import facts, nvidia_smi

if TYPE_CHECKING:
    from .serve import Call

MANAGERS = ("apt-get", "dnf", "apk", "zypper", "pacman")
COMPILERS = {"c": ("cc", "gcc", "clang"), "c++": ("c++", "g++", "clang++")}
LIBRARIES = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/nvidia/lib64",
    "/usr/lib/nvidia",
)
# Any index has it: what is asked is only whether there is one.
PACKAGE = "pip"
_OPEN = 2.0  # seconds that opening a device may take


def doctor(args: Dict[str, Any], call: Call) -> Dict[str, Any]:
    """`{seconds}` -> `manager`, `compilers`, `headers`, `shm`, `devices`, `uvm`, `driver`, `libcuda`, `nvidia_smi`,
    `index`, each `{"value": ...}` or `{"why": ...}`. The time is told at once, as an event: what comes after takes its
    time. `seconds`: how long a package index may take to answer.
    """
    call.event({"time": time.time()})
    query = nvidia_smi.Query()  # asked first and collected last: it takes the longest
    index = _reading(lambda: index_reached(call, float(args.get("seconds") or 8.0)))
    answer = {
        "manager": _reading(manager),
        "compilers": _reading(compilers),
        "headers": _reading(headers),
        "shm": _reading(shm),
        "devices": _reading(devices),
        "uvm": _reading(lambda: opens("/dev/nvidia-uvm")),
        "driver": _reading(driver),
        "libcuda": _reading(libcuda),
        "index": index,
    }
    query.wait()
    answer["nvidia_smi"] = {"value": query.outcome()}
    return answer


def _reading(read: Callable[[], Any]) -> Dict[str, Any]:
    try:
        return {"value": read()}
    except Exception as error:  # one that cannot be read is unknown, and keeps no other from being read
        return {"why": getattr(error, "strerror", None) or "%s: %s" % (type(error).__name__, error)}


def _which(name: str) -> Optional[str]:
    return shutil.which(name, path=os.pathsep.join(facts.search_path()))


def manager() -> Optional[str]:
    """The program that installs packages here, null where none is known."""
    return next((name for name in MANAGERS if _which(name)), None)


def compilers() -> Dict[str, Optional[str]]:
    """Language -> the compiler that torch would find: that of CC or CXX, else the usual names."""
    found = {}
    for language, names in COMPILERS.items():
        given = os.environ.get("CC" if language == "c" else "CXX")
        found[language] = next((path for name in ([given] if given else names) if (path := _which(name))), None)
    return found


def headers() -> Dict[str, Any]:
    """`{"path", "present"}` of the C headers of the Python that this runs on."""
    import sysconfig  # here, since every session imports this module and few ask

    path = os.path.join(sysconfig.get_paths()["include"], "Python.h")
    return {"path": path, "present": os.path.exists(path)}


def shm() -> Dict[str, Any]:
    """`{"total", "free"}` in bytes of /dev/shm. Raises OSError where it is not there."""
    info = os.statvfs("/dev/shm")
    return {"total": info.f_blocks * info.f_frsize, "free": info.f_bavail * info.f_frsize}


def devices() -> List[str]:
    """The names of NVIDIA's nodes under /dev."""
    return sorted(os.path.basename(path) for path in glob.glob("/dev/nvidia*"))


def opens(path: str) -> Optional[Dict[str, Any]]:
    """Null where there is no such node, else `{"opens": bool or null, "why"}`: a node may be there and be refused, by
    the container's device rules or since its number is an old one. A driver that hangs is not waited for."""
    if not os.path.exists(path):
        return None
    said: List[Optional[str]] = []

    def attempt() -> None:
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
            said.append(None)
        except OSError as error:
            said.append(error.strerror)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(_OPEN)
    if not said:
        return {"opens": None, "why": "opening it gave no answer in %g s" % _OPEN}
    return {"opens": said[0] is None, "why": said[0]}


def driver() -> Optional[str]:
    """The first line of the kernel module's version, which is the host's; null where no module is loaded."""
    path = "/proc/driver/nvidia/version"
    return facts.read_text(path).splitlines()[0] if os.path.exists(path) else None


def libcuda() -> List[str]:
    """The versions of the driver's library that lie here."""
    found = set()
    for folder in LIBRARIES:
        for path in glob.glob(folder + "/libcuda.so.*"):
            match = re.search(r"libcuda\.so\.(\d{3,}\.\d+(?:\.\d+)?)$", path)
            if match:
                found.add(match.group(1))
    return sorted(found)


def index_reached(call: Call, seconds: float) -> bool:
    """Whether a package index answers, by the place's own settings. Raises FileNotFoundError where there is no uv."""
    uv = facts.find_tool("uv", call.root)
    if uv is None:
        raise FileNotFoundError(2, "there is no uv here yet to ask with")
    variables = dict(os.environ, UV_HTTP_TIMEOUT="5", UV_HTTP_RETRIES="0", UV_SYSTEM_CERTS="true", NO_COLOR="1")
    child = subprocess.Popen(
        [uv, "pip", "compile", "--quiet", "--no-deps", "--no-cache", "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env=variables,
        start_new_session=True,
    )
    call.children.append(child)
    try:
        child.communicate(PACKAGE.encode("ascii"), timeout=seconds)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    finally:
        call.children.remove(child)
    return child.returncode == 0


OPS = {"doctor": doctor}
