"""What most commands need first: the project, its hosts, and the run that is meant."""

from __future__ import annotations

import sys

from orchestrator.config import Host, Place, Project, find_project, load_hosts
from orchestrator.survey import find_run


def project_and_hosts() -> tuple[Project, dict[str, Host]]:
    """The project found from the current directory upwards, and its hosts."""
    project = find_project()
    return project, load_hosts(project)


def meant_place(name: str | None) -> Place:
    """The place given, else that of the latest launch, else this machine."""
    from orchestrator import history
    from orchestrator.config import resolve_place
    from orchestrator.survey import is_place

    project, hosts = project_and_hosts()
    known = [entry for entry in history.known(None) if is_place(hosts, entry.place)] if name is None else []
    latest = max(known, key=lambda entry: entry.created, default=None)
    return resolve_place(hosts, name or (latest.place if latest else "local"), project)


def meant_run(reference: str | None, place: str | None) -> tuple[list[Place], str]:
    """The run that the user means, with all its places in its order, or the one that is named.

    Raises:
        NotFound: there is none.
    """
    _, hosts = project_and_hosts()
    return find_run(hosts, reference, place)


def one_place(places: list[Place], run: str, what: str) -> Place:
    """The first of a run's places, and a word on stderr where there are others."""
    if len(places) > 1:
        others = " or ".join(f"--place {place.name}" for place in places[1:])
        print(f"orch: {what} of {run} at {places[0].name}; there is more: {others}", file=sys.stderr)
    return places[0]
