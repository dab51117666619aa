"""What most commands need first: the project, its hosts, and the run that is meant."""

from __future__ import annotations

from orchestrator.config import Host, Place, Project, find_project, load_hosts
from orchestrator.survey import find_run


def project_and_hosts() -> tuple[Project, dict[str, Host]]:
    """The project found from the current directory upwards, and its hosts."""
    project = find_project()
    return project, load_hosts(project)


def meant_run(reference: str | None, place: str | None) -> tuple[Place, str]:
    """The run that the user means.

    Raises:
        NotFound: there is none.
    """
    _, hosts = project_and_hosts()
    return find_run(hosts, reference, place)
