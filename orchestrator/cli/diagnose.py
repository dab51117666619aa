"""`orch diagnose`: what went wrong with a run, or with any log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.cli.context import project_and_hosts
from orchestrator.cli.output import console, print_json
from orchestrator.config import Place
from orchestrator.diagnosis import collect, user_rules
from orchestrator.diagnosis.facts import Facts
from orchestrator.diagnosis.model import Verdict
from orchestrator.diagnosis.rules import diagnose
from orchestrator.errors import OrchError, Unreachable, UsageError
from orchestrator.explain import explanation

if TYPE_CHECKING:
    from rich.console import Console

    from orchestrator.place.session import Session


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


def show_bad_end(
    out: Console, place: Place, run: str, phase: str, session: Session | None, *, brief: bool = False
) -> None:
    """After a run that was followed: what went wrong, if anything did. A diagnosis that fails is one sentence, and
    changes nothing of what the command says otherwise."""
    if phase not in collect.BAD_ENDS:
        return
    try:
        try:
            facts, verdict = collect.diagnose_at(place, run, session=session)
        except Unreachable:
            if session is None:
                raise
            facts, verdict = collect.diagnose_at(place, run)
    except OrchError as error:
        out.print(f"not diagnosed: {error.message}", soft_wrap=True)
        return
    show_verdict(out, facts, verdict, brief=brief)


def show_verdict(out: Console, facts: Facts, verdict: Verdict, *, brief: bool = False) -> None:
    """One diagnosis below what a command says of its run."""
    from orchestrator.view.diagnosis import print_brief, print_diagnosis

    command = collect.fill(verdict.command, facts)
    if brief:
        print_brief(out, verdict, facts.run)
    else:
        print_diagnosis(out, verdict, command, traceback=verdict.cause in ("unknown", "uncaught-exception"))


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
