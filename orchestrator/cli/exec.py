"""`orch exec`: the command's own status, or 255 with a line that begins with `orch:`."""

from __future__ import annotations

import shlex
import sys

from orchestrator.cli.context import project_and_hosts
from orchestrator.cli.output import report_error
from orchestrator.errors import OrchError, UsageError
from orchestrator.explain import counts

_OWN_FAILURE = 255


def exec_command(place: str, argv: list[str], *, explain: bool) -> None:
    """Run `argv` at the place and leave with its exit status."""
    from orchestrator.config import resolve_place

    try:
        if not argv:
            raise UsageError("there is no command to run", hint=f"orch exec {place} -- uname -a")
        project, hosts = project_and_hosts()
        found = resolve_place(hosts, place, project)
    except OrchError as error:
        report_error(error)
        sys.exit(_OWN_FAILURE)
    from orchestrator.place.exec import command, run_exec
    from orchestrator.place.greeting import script

    if explain:
        words = ["$EXEC_SH" if word == script("exec") else word for word in command(found, argv, "NONCE")]
        print(f"{found.name}: {counts(found, 0)}\n  {shlex.join(words)}")
        return
    sys.exit(run_exec(found, argv, sys.stdin.buffer, sys.stdout.buffer, sys.stderr.buffer))
