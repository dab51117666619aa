"""`orch diagnose`: what went wrong with a run, or with any log."""

from __future__ import annotations

from orchestrator.cli.context import project_and_hosts
from orchestrator.cli.output import console, print_json
from orchestrator.diagnosis import collect, user_rules
from orchestrator.diagnosis.facts import Facts
from orchestrator.diagnosis.model import Verdict
from orchestrator.diagnosis.rules import diagnose
from orchestrator.errors import UsageError
from orchestrator.explain import explanation


def diagnose_command(
    run: str | None,
    place: str | None,
    *,
    log: str | None,
    list_: bool,
    stacks: bool,
    explain: bool,
    json: bool,
) -> None:
    """Print a diagnosis, or the catalogue.

    Raises:
        UsageError: a run and a log at once, or a log that cannot be read.
    """
    if list_:
        _list(json)
        return
    if log is not None:
        if run is not None or place is not None or stacks:
            raise UsageError("--log is of a file by itself: it goes with no run, place or --stacks")
        causes = user_rules.catalogue()
        facts = collect.of_file(log, causes)
        _show(diagnose(facts, causes), facts, json)
        return
    from orchestrator.survey import find_run

    _, hosts = project_and_hosts()
    found, run = find_run(hosts, run, place)
    if explain:
        print("\n".join(explanation(found, [f"evidence of {run}: its log is scanned there, once"])))
        return
    facts, verdict = collect.diagnose_at(found, run, stacks=stacks)
    _show(verdict, facts, json, stacks=stacks)


def _show(verdict: Verdict, facts: Facts, json: bool, stacks: bool = False) -> None:
    command = collect.fill(verdict.command, facts)
    if json:
        more = {"run": facts.run or None, "place": facts.place or None, "phase": facts.phase}
        print_json({**more, **verdict.to_json(), "command": command or None, "stacks": facts.stacks})
        return
    from orchestrator.view.diagnosis import print_diagnosis
    from orchestrator.view.text import printable

    out = console()
    if facts.run:
        out.print(f"{facts.run} at {facts.place}: {facts.phase or 'unknown'}", soft_wrap=True)
    if stacks and facts.stacks:
        for line in facts.stacks.splitlines():
            out.print(f"  │ {printable(line)}", soft_wrap=True)
    print_diagnosis(out, verdict, command)


def _list(json: bool) -> None:
    causes = user_rules.catalogue()
    if json:
        rows = [
            {"cause": c.id, "title": c.title, "theme": c.theme, "advice": list(c.advice), "retry": c.retry}
            for c in causes
        ]
        print_json({"causes": rows})
        return
    from orchestrator.view.diagnosis import print_catalogue

    print_catalogue(console(), causes)
