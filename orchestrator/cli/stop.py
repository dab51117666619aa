"""`orch stop`."""

from __future__ import annotations

import platform
from typing import Any

from orchestrator.cli.context import meant_run
from orchestrator.cli.output import console, print_json
from orchestrator.config import Place
from orchestrator.errors import Refused
from orchestrator.explain import explanation
from orchestrator.place.session import open_session
from orchestrator.plain import plain
from orchestrator.together import at_once, joined
from orchestrator.user import user_name

_LONGEST_GRACE = 3600.0


def stop_command(reference: str, place: str | None, *, kill: bool, json: bool, explain: bool) -> None:
    """Stop a run, at all its places at once, and wait until nothing of it is left.

    Raises:
        OrchError: it could not be stopped somewhere; the other places are.
    """
    places, run = meant_run(reference, place)
    if explain:
        how = "end every process of it at once" if kill else "ask it to end; after its grace end every process of it"
        print("\n".join(explanation(one, [f"stop {run}: {how}"]) for one in places))
        return
    out = console()
    several = len(places) > 1

    def stop(one: Place) -> dict[str, Any]:
        at = f"{one.name}: " if several else ""

        def tell(event: dict[str, Any]) -> None:
            out.print(plain(f"  {at}{event.get('stopping', '')}"), soft_wrap=True)

        arguments = {"run": run, "by": f"{user_name()}@{platform.node()}", "grace": None, "kill": kill}
        if reference != run and not several:
            arguments["recipe"] = reference
        try:
            with open_session(one) as session:
                return session.call("stop", arguments, timeout=_LONGEST_GRACE, on_event=None if json else tell).data
        except Refused as refused:
            raise Refused(refused.message, "name the run: orch stop RUN") from None

    stopped, errors = at_once(stop, places)
    if json:
        rows = [
            {"run": run, "place": one.name, "phase": state.get("phase"), "already": bool(state.get("already"))}
            for one, state in stopped
        ]
        print_json({**rows[0], **({"places": rows} if several else {})} if rows else {"run": run, "places": []})
    else:
        for one, state in stopped:
            at = f" at {one.name}" if several else ""
            had = "had ended already:" if state.get("already") else "is"
            out.print(f"{run}{at} {had} {state.get('phase')}", soft_wrap=True)
    if errors:
        raise joined(errors)
