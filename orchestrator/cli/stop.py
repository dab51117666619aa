"""`orch stop`."""

from __future__ import annotations

import platform

from orchestrator.cli.context import meant_run
from orchestrator.cli.output import console, print_json
from orchestrator.explain import explanation
from orchestrator.place.session import open_session
from orchestrator.plain import plain
from orchestrator.user import user_name

_LONGEST_GRACE = 3600.0


def stop_command(reference: str, place: str | None, *, kill: bool, json: bool, explain: bool) -> None:
    """Stop a run and wait until nothing of it is left."""
    found, run = meant_run(reference, place)
    if explain:
        how = "end every process of it at once" if kill else "ask it to end; after its grace end every process of it"
        print(explanation(found, [f"stop {run}: {how}"]))
        return
    out = console()
    with open_session(found) as session:
        arguments = {"run": run, "by": f"{user_name()}@{platform.node()}", "grace": None, "kill": kill}
        reply = session.call(
            "stop",
            arguments,
            timeout=_LONGEST_GRACE,
            on_event=None if json else lambda event: out.print(plain(f"  {event.get('stopping', '')}"), soft_wrap=True),
        )
    state = reply.data
    if json:
        print_json(
            {
                "run": run,
                "place": found.name,
                "phase": state.get("phase"),
                "already": bool(reply.data.get("already")),
            }
        )
    elif reply.data.get("already"):
        out.print(f"{run} had ended already: {state.get('phase')}", soft_wrap=True)
    else:
        out.print(f"{run} is {state.get('phase')}", soft_wrap=True)
