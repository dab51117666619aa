"""Starting the trainer: a session of its own, a clean environment, its output straight into console.log."""

from __future__ import annotations

import contextlib
import os
import pwd
import resource
import signal
import subprocess
from typing import Any, Callable, Dict, List, Optional

from . import tmux
from .rundir import MEETING, RunDir, read_json

# the kernel, short of memory, takes the trainer and not what keeps its record
TRAINER_OOM_SCORE, RUNNER_OOM_SCORE = 500, -500
_OPEN_FILES = 65536  # data loaders with many workers meet the usual 1024


def environment(launch: Dict[str, Any], run: RunDir, secrets: Dict[str, str]) -> Dict[str, str]:
    """All that the trainer's environment holds: nothing comes from whoever started the runner."""
    argv = launch.get("argv") or [""]
    given = {str(k): str(v) for k, v in (launch.get("env") or {}).items()}
    env = {
        "LANG": "C.UTF-8",
        "PYTHONNOUSERSITE": "1",
        "PYTHONUNBUFFERED": "1",
        "HOME": os.path.expanduser("~"),
    }
    with contextlib.suppress(KeyError):
        user = pwd.getpwuid(os.getuid())
        env.update({"HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name})
    env.update(given)
    path = given.get("PATH") or tmux.SYSTEM_PATH
    if os.path.isabs(str(argv[0])):
        path = os.path.dirname(str(argv[0])) + ":" + path
    env["PATH"] = path
    env.update(secrets)
    env["ORCH_RUN_ID"] = run.run
    env["ORCH_RUN_DIR"] = run.path
    env["ORCH_METRICS"] = run.file("metrics.jsonl")
    return env


def take_secrets(run: RunDir, event: Callable[..., Any]) -> Dict[str, str]:
    """Read and removed before anything could see them in the file; `event` is told where that cannot be."""
    secrets, _ = read_json(run.file("secrets.json"))
    for name in ("secrets.json", MEETING):
        try:
            os.unlink(run.file(name))
        except FileNotFoundError:
            pass
        except OSError as e:
            event("secrets_not_removed", why=e.strerror)
    return {str(k): str(v) for k, v in (secrets or {}).items()}


def trainer(launch: Dict[str, Any], run: RunDir, secrets: Dict[str, str]) -> subprocess.Popen[bytes]:
    """Start it. OSError or ValueError if it cannot be: no such program or directory, nothing to run."""
    argv: List[str] = [str(word) for word in launch.get("argv") or []]
    if not argv:
        raise ValueError("launch.json names no program")
    cwd = str(launch.get("cwd") or run.path)
    if not os.path.isdir(cwd):
        raise NotADirectoryError(20, "no such directory", cwd)
    out = os.open(run.console, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        return subprocess.Popen(
            argv,
            cwd=cwd,
            env=environment(launch, run, secrets),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            preexec_fn=_prepare,
        )
    finally:
        os.close(out)


def _prepare() -> None:
    """In the child, before the program: what the runner ignores the trainer need not, and its limits are
    its own."""
    for name in ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTSTP", "SIGTTOU", "SIGTTIN", "SIGTERM", "SIGCHLD"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    set_oom_score(TRAINER_OOM_SCORE)
    os.umask(0o022)
    with contextlib.suppress(OSError, ValueError):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
        if soft != resource.RLIM_INFINITY and soft < most:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def set_oom_score(score: int) -> bool:
    """How readily the kernel takes this process (-1000 never .. 1000 first). False if it may not be."""
    try:
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        os.write(fd, str(score).encode())
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


def exit_record(
    returncode: Optional[int],
    at: float,
    kills: Optional[int] = None,
    machine_kills: Optional[int] = None,
    why_unknown: Optional[str] = None,
) -> Dict[str, Any]:
    """`{"code", "signal", "at", "oom_kills", "machine_oom_kills", "reason"}`: code or signal, the other None.

    `oom_kills`: how many processes of the cgroup the kernel killed meanwhile for want of memory, None if unknown;
    `machine_oom_kills`: the same for the whole machine, of which others may be the victims.
    """
    code = signum = None
    if returncode is not None and returncode < 0:
        signum = -returncode
        reason = "ended by signal %d (%s)" % (signum, _signal_name(signum))
    else:
        code = returncode
        reason = "exit %s" % code
        if code is not None and 128 < code < 128 + 65:
            reason += " (a program below it was ended by %s)" % _signal_name(code - 128)
    killed = signum == signal.SIGKILL or code == 128 + signal.SIGKILL
    if kills:
        reason += "; the kernel killed %s here for want of memory" % _processes(kills)
    elif kills is None and machine_kills:
        reason += "; meanwhile the kernel killed %s for want of memory, here or elsewhere on the machine" % _processes(
            machine_kills
        )
    elif killed and 0 in (kills, machine_kills):
        reason += "; the kernel counted no out-of-memory kill"
    elif killed:
        reason += "; whether memory ran out is unknown (%s)" % why_unknown
    return {
        "code": code,
        "signal": signum,
        "at": at,
        "oom_kills": kills,
        "machine_oom_kills": machine_kills,
        "reason": reason,
    }


def _processes(number: int) -> str:
    return "a process" if number == 1 else "%d processes" % number


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "signal %d" % number
