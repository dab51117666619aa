"""`orch attach`: the run's own tmux session, through OpenSSH, since a terminal is wanted."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

from orchestrator.cli.context import meant_run, one_place
from orchestrator.config import Place
from orchestrator.errors import OrchError, UsageError
from orchestrator.place.container import wrap

# tmux alone would say "no sessions", and nothing of what to do.
_ATTACH = """\
tmux -L "$1" has-session -t =run: 2>/dev/null || {
  printf 'orch: its tmux session is gone; the log is not\\n  try: %s\\n' "$2" >&2
  exit 1
}
exec tmux -L "$1" attach-session -t =run:"""


def attach_command(run: str | None, place: str | None, *, explain: bool) -> None:
    """Replace this process by one that shows the session.

    Raises:
        UsageError: this is not a terminal.
        OrchError: OpenSSH's client is missing here.
    """
    places, run = meant_run(run, place)
    found = one_place(places, run, "the session")
    argv = attach_argv(found, run)
    if explain:
        print(shlex.join(argv))
        return
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("attach needs a terminal", hint=f"orch logs -f {run}")
    program = shutil.which(argv[0])
    if program is None:
        raise OrchError(f"attach needs the program {argv[0]} on this machine: install it", hint=f"orch logs -f {run}")
    sys.stdout.flush()
    os.execv(program, argv)


def attach_argv(place: Place, run: str) -> list[str]:
    """The command line that attaches to a run's session."""
    # TERM may name a terminal that the place does not know; tmux refuses to start then.
    environment = ["env", "-u", "TMUX_TMPDIR", f"TERM={_plain_term()}", "LANG=C.UTF-8"]
    tmux = [*environment, "sh", "-c", _ATTACH, "sh", f"orch-{run}", f"orch logs {run}"]
    inner = wrap(place, tmux, tty=True)
    ssh = place.host.ssh
    if ssh is None:
        return inner
    argv = ["ssh", "-t"]
    if ssh.ssh_config:
        argv += ["-F", str(Path(ssh.ssh_config).expanduser())]
    if ssh.user:
        argv += ["-l", ssh.user]
    if ssh.port:
        argv += ["-p", str(ssh.port)]
    if ssh.identity_file:
        argv += ["-i", str(Path(ssh.identity_file).expanduser())]
    if ssh.known_hosts:
        argv += ["-o", f"UserKnownHostsFile={Path(ssh.known_hosts).expanduser()!s}"]
    return [*argv, "-o", "StrictHostKeyChecking=yes", "--", ssh.host, shlex.join(inner)]


def _plain_term() -> str:
    term = os.environ.get("TERM", "")
    return term if term in ("xterm", "xterm-256color", "screen", "screen-256color", "linux") else "xterm-256color"
