"""`orch exec`: the command's own status, or 255 with a line that begins with `orch:`."""

from __future__ import annotations

import sys

from orchestrator.cli.context import project_and_hosts
from orchestrator.errors import OrchError, UsageError

_OWN_FAILURE = 255


def exec_command(place: str, argv: list[str], *, explain: bool) -> None:
    """Run `argv` at the place and leave with its exit status."""
    from orchestrator.cli.output import report_error
    from orchestrator.config import resolve_place

    if argv[:1] == ["--"]:
        argv = argv[1:]
    try:
        if not argv:
            raise UsageError("there is no command to run", hint=f"orch exec {place} -- uname -a")
        _, hosts = project_and_hosts()
        found = resolve_place(hosts, place)
        from orchestrator.place.exec import explain_exec, run_exec

        if explain:
            print("\n".join(explain_exec(found, argv)))
            return
        status = run_exec(found, argv)
    except OrchError as error:
        report_error(error)
        sys.exit(_OWN_FAILURE)
    sys.exit(status)
