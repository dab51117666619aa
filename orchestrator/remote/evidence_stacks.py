"""Where each thread of a run stands, without ending any: py-spy where it is at hand, else the program's own dump.

A Python program that registered faulthandler for SIGUSR1 writes its stacks into console.log when it gets that
signal; whether it did is seen from its mask of caught signals, so that no other program is ever sent one. What the
kernel knows (state, what each thread waits in) is always there.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import signal
import subprocess
import time
from typing import Any, Dict, List, Optional

from . import processes
from .derive import Standing
from .rundir import RunDir, find, open_file
from .tmux import search_path

_MOST = 200 << 10
_PROCESSES = 32
_PATIENCE = 2.0


def stacks(args: Dict[str, Any], call: Any) -> Dict[str, Any]:
    """`{run}` -> `{"run", "stacks": text}`."""
    run = find(call.root, args.get("run"))
    return {"run": run.run, "stacks": dump(run, Standing(run))}


def dump(run: RunDir, standing: Optional[Standing]) -> str:
    """One text: first what the programs tell of their Python threads, then what the kernel tells."""
    state = (standing.state if standing is not None else None) or {}
    trainer = state.get("trainer") or {}
    roots = [trainer["pid"]] if isinstance(trainer.get("pid"), int) and processes.stat(trainer["pid"]) else []
    found = processes.of_run(run.run, run.real, roots=roots)
    found += [one for one in (processes.stat(pid) for pid in roots) if one is not None]
    runner = (state.get("runner") or {}).get("pid")
    mine = [one for one in found if one.pid != runner and one.state not in "ZX"][:_PROCESSES]
    spy = _py_spy(run)
    parts: List[str] = []
    asked: List[int] = []
    for one in mine:
        said = _by_spy(spy, one.pid) if spy else None
        if said:
            parts.append("process %d (%s), by py-spy:\n%s" % (one.pid, one.comm, said))
        elif _catches(one.pid, signal.SIGUSR1) and _is_python(one.pid):
            asked.append(one.pid)
    if asked:
        parts.append(_own_dumps(run, asked))
    parts += [_kernel_view(one) for one in mine]
    return "\n".join(part for part in parts if part)[:_MOST]


def _py_spy(run: RunDir) -> Optional[str]:
    inside = glob.glob(os.path.join(run.path, "..", "..", "envs", "*", "bin", "py-spy"))
    return shutil.which("py-spy", path=search_path()) or next(iter(sorted(inside)), None)


def _by_spy(spy: str, pid: int) -> Optional[str]:
    try:
        done = subprocess.run(
            [spy, "dump", "--nonblocking", "--pid", str(pid)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=15,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else None


def _own_dumps(run: RunDir, pids: List[int]) -> str:
    """Have the programs write their stacks into the log, and read what came."""
    try:
        before = os.stat(run.console).st_size
    except OSError:
        return ""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGUSR1)
        except OSError:
            continue
    end, size = time.monotonic() + _PATIENCE, before
    while time.monotonic() < end:
        time.sleep(0.2)
        now = os.stat(run.console).st_size
        if now == size and now > before:
            break
        size = now
    try:
        with open_file(run.console) as f:
            f.seek(before)
            return f.read(_MOST).decode("utf-8", "replace")
    except OSError:
        return ""


def _catches(pid: int, signum: int) -> bool:
    status = _read("/proc/%d/status" % pid)
    found = re.search(r"(?m)^SigCgt:\s*([0-9a-f]+)$", status)
    return bool(found) and bool(int(found.group(1), 16) & (1 << (signum - 1))) if found else False


def _is_python(pid: int) -> bool:
    try:
        return "python" in os.path.basename(os.readlink("/proc/%d/exe" % pid))
    except OSError:
        return False


def _kernel_view(one: processes.Stat) -> str:
    lines = ["process %d (%s), state %s" % (one.pid, one.comm, one.state)]
    threads = sorted(glob.glob("/proc/%d/task/[0-9]*" % one.pid))
    for path in threads[:64]:
        name, where = _read(path + "/comm").strip(), _read(path + "/wchan").strip()
        state = re.search(r"(?m)^State:\s*(\S)", _read(path + "/status"))
        lines.append("  thread %s %s %s %s" % (os.path.basename(path), name, state.group(1) if state else "?", where))
    return "\n".join(lines)


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as f:
            return f.read(1 << 16)
    except OSError:
        return ""
