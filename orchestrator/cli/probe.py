"""`orch probe`: what can go wrong with an environment's torch when it compiles."""

from __future__ import annotations

import typer

from orchestrator.cli.context import meant_place
from orchestrator.cli.output import console, print_json
from orchestrator.explain import explanation


def probe_command(place: str | None, *, env: str | None, python: str | None, json: bool, explain: bool) -> None:
    """Try it there, and show what came of it.

    Raises:
        typer.Exit: 1 where a setting has to be changed, or torch could not be tried.
    """
    from orchestrator.place.session import open_session
    from orchestrator.probe import read
    from orchestrator.view.follow import LaunchDisplay
    from orchestrator.view.probe import print_report

    where = meant_place(place)
    if explain:
        asked = [] if python else ["which environments are there?"]
        print(explanation(where, [*asked, f"run a script with {python or 'its Python'}: versions, settings, each way"]))
        return
    out = console()
    with LaunchDisplay(out) as display, open_session(where) as session:

        def progress(done: int, total: int) -> None:
            if not json:
                display.progress("probe", f"trying at {where.name}", done, total, "questions")

        if not json:
            display.begin("probe")
        report = read(session, env=env, python=python, progress=progress)
    if json:
        print_json(report.to_json())
    else:
        print_report(out, report)
    if not report.good:
        raise typer.Exit(1)
