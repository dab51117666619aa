"""`orch doctor`: what is there at a place, what is missing, and what to do."""

from __future__ import annotations

import typer

from orchestrator.cli.context import meant_place
from orchestrator.cli.output import console, print_json


def doctor_command(place: str | None, *, json: bool, explain: bool) -> None:
    """Ask once, and show what was found.

    Raises:
        typer.Exit: 1 where a launch would fail.
        Unreachable, Refused, UsageError: the host cannot be reached, or there is no such container.
    """
    from orchestrator.config import find_project
    from orchestrator.doctor.checks import judge
    from orchestrator.doctor.read import explanation, read
    from orchestrator.schema_files import refresh
    from orchestrator.view.doctor import print_report

    where = meant_place(place)
    if explain:
        print(explanation(where))
        return
    refresh(find_project())
    report = judge(read(where))
    if json:
        print_json(report.to_json())
    else:
        print_report(console(), report)
    if not report.good:
        raise typer.Exit(1)
