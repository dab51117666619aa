"""`orch diagnose`: what went wrong with a run, or with any log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
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
from orchestrator.together import at_once, joined

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
    places, run = find_run(hosts, run, place)
    if explain:
        asked = [f"evidence of {run}: its log is scanned there, once"]
        print("\n".join(explanation(one, asked) for one in places))
        return
    facts, verdict = _leading(places, run, stacks=stacks)
    _show(verdict, facts, json, stacks=stacks)


def _leading(
    places: Sequence[Place], run: str, *, session: Session | None = None, stacks: bool = False
) -> tuple[Facts, Verdict]:
    """The diagnosis of a run: of several places that one's whose end was the first, with a word on the others.
    `session` is one that is open at the first of them.

    Raises:
        OrchError: nothing is known of any.
    """

    def look(place: Place) -> tuple[Facts, Verdict]:
        there = session if place is places[0] else None
        try:
            return collect.diagnose_at(place, run, session=there, stacks=stacks)
        except Unreachable:
            if there is None:
                raise
            return collect.diagnose_at(place, run, stacks=stacks)

    done, errors = at_once(look, places)
    if not done:
        raise joined(errors)
    found = sorted((what for _, what in done), key=lambda one: (one[0].followed, not one[1].bad))
    facts, verdict = found[0]
    notes = [f"at {other.place}: {of.title}" for other, of in found[1:]]
    notes += [f"not known: {error.message}" for error in errors]
    return facts, replace(verdict, notes=(*verdict.notes, *notes))


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
    out: Console, places: Sequence[Place], run: str, phase: str, session: Session | None, *, brief: bool = False
) -> None:
    """After a run that was followed: what went wrong, if anything did. A diagnosis that fails is one sentence, and
    changes nothing of what the command says otherwise."""
    if phase not in collect.BAD_ENDS:
        return
    try:
        facts, verdict = _leading(places, run, session=session)
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
