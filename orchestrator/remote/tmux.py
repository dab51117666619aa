"""The tmux server of a run: one of its own, on a socket `orch-<run>`, with one session named `run`.

tmux is the terminal one can look at and nothing more: what happened is in the run's files. Its dead panes
may never tell their status (a lost SIGCHLD), and `display-message` succeeds on what does not exist, so
neither is relied on.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
from typing import Any, Dict, List, Optional, Sequence, Tuple

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SESSION = "=run:"  # exact for every command: without "=" a prefix would do, without ":" panes are not found
COLUMNS, ROWS, HISTORY = 200, 50, 50000
TIMEOUT = 5.0
_FIELDS = "#{pane_dead}\t#{pane_dead_status}\t#{pane_dead_signal}\t#{pane_pid}"


def socket_name(run: str) -> str:
    return "orch-" + run


def socket_path(run: str) -> str:
    """Where tmux puts that socket when TMUX_TMPDIR is unset, as it always is here."""
    return "/tmp/tmux-%d/%s" % (os.getuid(), socket_name(run))


def reserve(run: str) -> bool:
    """Take the name of the run's socket, so that no other run of this user gets it, whatever root it lies
    under: one server for two runs would be one run that ends the other. False if it is taken."""
    path = socket_path(run)
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        # tmux takes a plain file for the rest of a server that is gone, and puts its socket there
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        return False
    except OSError:
        return True  # tmux will say what is wrong there, when it is started
    return True


def _has_socket(run: str) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(socket_path(run)).st_mode)
    except OSError:
        return False


def clean_environment() -> Dict[str, str]:
    """What the server begins with: nothing of its caller's but where programs and the home are."""
    env = {"PATH": search_path(), "LANG": "C.UTF-8", "TERM": "screen"}
    home = os.environ.get("HOME") or os.path.expanduser("~")
    if os.path.isabs(home):
        env["HOME"] = home
    return env


def search_path() -> str:
    """The caller's PATH and the usual folders: a container entered from outside has /bin and little else."""
    parts = os.environ.get("PATH", "").split(":") + SYSTEM_PATH.split(":")
    return ":".join(dict.fromkeys(part for part in parts if part))


def program() -> Optional[str]:
    return shutil.which("tmux", path=search_path())


def call(run: str, *words: str) -> Tuple[Optional[int], str, str]:
    """(status, stdout, stderr) of `tmux -L <socket> <words>`; status None if it is missing or does not
    answer."""
    tmux = program()
    if tmux is None:
        return None, "", "tmux is not installed"
    argv = [tmux, "-u", "-L", socket_name(run), "-f", "/dev/null", *words]
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=clean_environment(),
            timeout=TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        return None, "", "tmux gave no answer in %g s" % TIMEOUT
    except OSError as e:
        return None, "", "tmux: %s" % e.strerror
    return (
        done.returncode,
        done.stdout.decode("utf-8", "replace"),
        done.stderr.decode("utf-8", "replace").strip(),
    )


def start(run: str, command: Sequence[str], directory: str) -> Optional[str]:
    """Start the session with `command` in its pane; None, or why it did not start.

    The options come before the session: set later, the history stays at 2000 lines and a fast end takes the
    pane along. All three descriptors are detached, so the server does not hang on whoever started it.
    """
    tmux = program()
    if tmux is None:
        return "tmux is not installed here"
    argv: List[str] = [tmux, "-u", "-L", socket_name(run), "-f", "/dev/null"]
    argv += ["start-server", ";", "set-option", "-g", "history-limit", str(HISTORY), ";"]
    argv += ["set-option", "-wg", "remain-on-exit", "on", ";"]
    argv += [
        "new-session",
        "-d",
        "-s",
        "run",
        "-x",
        str(COLUMNS),
        "-y",
        str(ROWS),
        "-c",
        directory,
        "--",
        *command,
    ]
    try:
        # stderr to a file of no name: a pipe would be held open by the server for its life
        with open(os.devnull, "r+b") as null, _unnamed_file() as errors:
            status = subprocess.call(
                argv, stdin=null, stdout=null, stderr=errors, env=clean_environment(), cwd="/", timeout=15
            )
            errors.seek(0)
            said = errors.read(2000).decode("utf-8", "replace").strip()
    except subprocess.TimeoutExpired:
        return "tmux did not start in 15 s"
    except OSError as e:
        return "tmux did not start: %s" % e.strerror
    return None if status == 0 else "tmux did not start: %s" % (said or "status %d" % status)


def _unnamed_file() -> Any:
    import tempfile

    return tempfile.TemporaryFile()


def pane(run: str) -> Dict[str, Any]:
    """`{"session": bool|None, "pane_dead": bool|None, "pane_status": int|None, "pane_signal": int|None,
    "pane_pid": int|None, "error": str|None}`. A dead pane without a status is poked once, then left
    unknown."""
    out: Dict[str, Any] = {"session": None, "pane_dead": None, "pane_status": None}
    out.update({"pane_signal": None, "pane_pid": None, "error": None})
    if not _has_socket(run):
        out["session"] = False
        return out
    for attempt in (1, 2):
        status, text, error = call(run, "list-panes", "-t", SESSION, "-F", _FIELDS)
        if status is None:
            out["error"] = error
            return out
        if status != 0:
            out["session"] = False
            return out
        fields = (text.splitlines() or [""])[0].split("\t")
        fields += [""] * (4 - len(fields))
        out["session"] = True
        out["pane_dead"] = fields[0] == "1"
        out["pane_status"], out["pane_signal"], out["pane_pid"] = (_number(f) for f in fields[1:4])
        known = out["pane_status"] is not None or out["pane_signal"] is not None
        if not out["pane_dead"] or known or attempt == 2:
            return out
        call(run, "run-shell", "true")  # another SIGCHLD makes the server collect the one it lost
    return out


def screen(run: str, history: bool = False, limit: int = 1 << 20) -> Tuple[Optional[str], Optional[str]]:
    """(what the pane shows, with its history if asked, at most the last `limit` characters; None), or
    (None, why)."""
    if not _has_socket(run):
        return None, "the run has no tmux session"
    words = ["capture-pane", "-p", "-J", "-t", SESSION]
    status, text, error = call(run, *words, *(["-S", "-"] if history else []))
    if status != 0:
        return None, error or "the run has no tmux session"
    lines = text.rstrip("\n").split("\n")
    if lines[-1].startswith("Pane is dead"):  # tmux's own note, at the foot of an otherwise empty screen
        lines = "\n".join(lines[:-1]).rstrip("\n").split("\n")
    return "\n".join(lines)[-limit:], None


def kill(run: str) -> None:
    """End the run's tmux server, if there is one, and remove its socket, which it leaves behind."""
    path = socket_path(run)
    if not os.path.exists(path):
        return
    status: Optional[int] = 0
    if _has_socket(run):
        status, _, _ = call(run, "kill-server")
    if status is not None:  # ended, or there was none
        with contextlib.suppress(OSError):
            os.unlink(path)


def _number(text: str) -> Optional[int]:
    return int(text) if text.isdigit() else None
