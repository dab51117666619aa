"""`orch status`."""

from __future__ import annotations

import time

from orchestrator.cli.context import project_and_hosts
from orchestrator.cli.output import console, print_json
from orchestrator.config import Place, resolve_place
from orchestrator.errors import NotFound, Unreachable, UsageError
from orchestrator.explain import explanation
from orchestrator.survey import PlaceReport, Sessions, all_places, find_run, is_place, survey

_LOOK_EVERY = 2.0  # seconds between two looks of --watch


def status_command(
    run: str | None, place: str | None, *, watch: bool, all_: bool, tail: int, json: bool, explain: bool
) -> None:
    """Show the runs that are meant.

    Raises:
        Unreachable: the one place asked for, or every place, did not answer (after showing what is known).
    """
    if watch and json:
        raise UsageError("--watch and --json exclude each other: call --json again and again instead")
    project, hosts = project_and_hosts()
    selector: str | list[str] = "all" if all_ else "latest"
    if run is not None and place is None and is_place(hosts, run):
        run, place = None, run
    if run is not None:
        places, run = find_run(hosts, run, place)
        selector = [run]
    else:
        places = [resolve_place(hosts, place, project)] if place else all_places(hosts)
    if explain:
        asked = run or selector
        print("\n".join(explanation(one, [f"probe {asked}, {tail} lines of log, GPUs, tmux"]) for one in places))
        return
    if watch:
        _watch(places, selector, tail)
        return
    sessions = Sessions()
    try:
        reports = survey(places, runs=selector, tail_lines=tail, sessions=sessions)
        _show(reports, sessions, named=run is not None, all_=all_, json=json)
    finally:
        sessions.close()
    _raise_for(reports, run)


def _show(reports: list[PlaceReport], sessions: Sessions, *, named: bool, all_: bool, json: bool) -> None:
    """What the places said, and why runs ended badly; not of every run there ever was."""
    from orchestrator.diagnosis.collect import bad_ends

    runs = [] if all_ else [item for report in reports for item in report.runs]
    if json:
        diagnosed = {(status.run, status.place): verdict for status, _, verdict, _ in bad_ends(runs, sessions.open)}
        places = [report.to_json() for report in reports]
        for item in (item for place in places for item in place["runs"]):
            verdict = diagnosed.get((item["run"], item["place"]))
            item["diagnosis"] = verdict.to_json() if verdict is not None else None
        print_json({"places": places})
        return
    from orchestrator.cli.diagnose import show_verdict
    from orchestrator.view.status import print_status

    out = console()
    print_status(out, reports, details=named)
    for status, facts, found, why in bad_ends(runs, sessions.open):
        at = f" at {status.place}:" if status.places else ""
        out.print(f"\n{status.run}{at} {status.phase}", soft_wrap=True)
        if facts is None or found is None:
            out.print(f"not diagnosed: {why}", soft_wrap=True)
        else:
            show_verdict(out, facts, found, brief=not named)


def _raise_for(reports: list[PlaceReport], run: str | None) -> None:
    failed = [report.error for report in reports if report.error is not None]
    if failed and len(failed) == len(reports):
        raise failed[0] if len(failed) == 1 else Unreachable("no place answered")
    if run is not None and not failed and not any(item.run == run for report in reports for item in report.runs):
        places = ", ".join(report.place for report in reports)
        raise NotFound(f"there is no run {run} at {places}", hint="orch status --all")


def _watch(places: list[Place], selector: str | list[str], tail: int) -> None:
    from rich.live import Live

    from orchestrator.view.status import status_view

    screen = console()
    sessions = Sessions()
    details = not isinstance(selector, str)
    try:
        with Live(console=screen, screen=screen.is_terminal, auto_refresh=False) as live:
            while True:
                reports = survey(places, runs=selector, tail_lines=tail, sessions=sessions)
                live.update(status_view(reports, screen.width, details=details), refresh=True)
                time.sleep(_LOOK_EVERY)
    finally:
        sessions.close()
