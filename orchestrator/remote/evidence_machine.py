"""Witnesses beside the run's own files: the kernel's log, torchelastic's error files, devices, disk, driver."""

from __future__ import annotations

import glob
import json
import os
import re
import subprocess
from typing import Any, Dict, List, Optional

from . import processes
from .rundir import open_file
from .tmux import search_path

_KERNEL = re.compile(
    rb"NVRM: Xid|oom-kill|Out of memory|out of memory|segfault at|I/O error|EXT4-fs error|nvidia.*fell off"
)
_MOST = 40
_BOUND = 2.0


def kernel_log() -> Dict[str, Any]:
    """`{"lines", "boot", "why"}`: those of dmesg that a diagnosis knows, and when its clock began."""
    boot = processes.kernel_began()
    try:
        done = subprocess.run(
            ["dmesg"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_BOUND,
            env={"PATH": search_path(), "LC_ALL": "C"},
            check=False,
        )
    except FileNotFoundError:
        return {"lines": [], "boot": boot, "why": "there is no dmesg here"}
    except (OSError, subprocess.TimeoutExpired) as e:
        return {"lines": [], "boot": boot, "why": "dmesg: %s" % e}
    found = [line.decode("utf-8", "replace") for line in done.stdout.splitlines() if _KERNEL.search(line)]
    why = done.stderr.decode("utf-8", "replace").strip()[:200] if done.returncode else None
    return {"lines": found[-_MOST:], "boot": boot, "why": why}


def elastic_errors(run_dir: str) -> List[Dict[str, Any]]:
    """torchelastic's error files of a run: below its directory, or where TORCHELASTIC_ERROR_FILE put them."""
    patterns = ("error*.json", "*/error*.json", "*/*/error*.json", "*/*/*/*/error.json", "torchelastic/**/error.json")
    paths: List[str] = []
    for pattern in patterns:
        paths += glob.glob(os.path.join(glob.escape(run_dir), pattern), recursive=True)
    out = []
    for path in sorted(set(paths))[:64]:
        one = _elastic_error(path)
        if one is not None:
            out.append(dict(one, file=os.path.relpath(path, run_dir)))
    return out


def _elastic_error(path: str) -> Optional[Dict[str, Any]]:
    try:
        with open_file(path) as f:
            record = json.loads(f.read(1 << 20).decode("utf-8", "replace"))
    except (OSError, ValueError):
        return None
    message = record.get("message") if isinstance(record, dict) else None
    if isinstance(message, str):
        return {"rank": _rank(path), "time": None, "message": message[:20000]}
    if not isinstance(message, dict):
        return None
    extra = message.get("extraInfo") or {}
    text = extra.get("py_callstack") or message.get("message")
    stamp = str(extra.get("timestamp"))
    return {
        "rank": _rank(path),
        "time": float(stamp) if stamp.replace(".", "", 1).isdigit() else None,
        "message": str(text)[:20000],
    }


def _rank(path: str) -> Optional[int]:
    """`…/attempt_0/3/error.json` is of local rank 3."""
    found = re.search(r"/(\d+)/error\.json$|error[._-](\d+)\.json$", path)
    return int(found.group(1) or found.group(2)) if found else None


def machine(run_dir: str) -> Dict[str, Any]:
    """`{"uvm_node", "driver", "library", "disk_free", "inodes_free"}`; what does not apply here is None."""
    out: Dict[str, Any] = {"uvm_node": None, "driver": None, "library": None}
    if os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/nvidia0"):
        out["uvm_node"] = os.path.exists("/dev/nvidia-uvm")
    try:
        with open("/proc/driver/nvidia/version") as f:
            found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", f.readline())
            out["driver"] = found.group(1) if found else None
    except OSError:
        pass
    for path in sorted(glob.glob("/usr/lib/*/libcuda.so.*") + glob.glob("/usr/lib64/libcuda.so.*")):
        found = re.search(r"libcuda\.so\.(\d{3,}\.\d+(?:\.\d+)?)$", path)
        if found:
            out["library"] = found.group(1)
    info = os.statvfs(run_dir)
    out["disk_free"] = info.f_bavail * info.f_frsize
    out["inodes_free"] = info.f_favail if info.f_files else None
    return out
