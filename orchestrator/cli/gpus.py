"""`orch gpus`: all GPUs of a host, and who has them."""

from __future__ import annotations

from orchestrator.cli.context import project_and_hosts
from orchestrator.cli.output import console, print_json
from orchestrator.config import Place, resolve_place
from orchestrator.errors import Unreachable


def gpus_command(place: str | None, *, json: bool, explain: bool) -> None:
    """Ask once, and show what was found.

    Raises:
        Unreachable: the one host asked for, or every host, did not answer (after showing what is known).
    """
    from orchestrator.gpus.survey import explanation, look
    from orchestrator.view.gpus import print_gpus

    project, hosts = project_and_hosts()
    places = [resolve_place(hosts, place, project)] if place else [Place(host) for host in hosts.values()]
    if explain:
        print(explanation(places))
        return
    reports = look(places)
    failed = [report.error for report in reports if report.error is not None]
    if json:
        print_json({"hosts": [report.to_json() for report in reports]})
    elif len(reports) > 1 or not failed:
        print_gpus(console(), reports)
    if failed and len(failed) == len(reports):
        raise failed[0] if len(failed) == 1 else Unreachable("no host answered")
