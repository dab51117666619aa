"""`orch init`: questions, a check of the place, and the files of a project."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

import typer

from orchestrator.cli.output import console
from orchestrator.cli.trust import asker
from orchestrator.config import LOCAL, find_project
from orchestrator.errors import OrchError

if TYPE_CHECKING:
    from rich.console import Console

    from orchestrator.config import Host
    from orchestrator.init.flow import Chosen, Options


def init_command(options: Options, *, yes: bool, fingerprint: str | None) -> None:
    """Settles everything, then writes the files and says what comes next.

    Raises:
        typer.Exit: 1 where the place was checked and a launch would fail there; the files are written.
        UsageError, Unreachable, Refused: nothing was written.
    """
    from orchestrator.init.asking import Asker
    from orchestrator.init.files import write
    from orchestrator.init.flow import decide
    from orchestrator.view.doctor import print_report
    from orchestrator.view.init import print_choice, print_files, print_next

    out = console()
    terminal = sys.stdin.isatty()

    def trust(host: Host) -> None:
        from orchestrator.place.hostkeys import trust as record

        words = ["orch", *sys.argv[1:]]
        print(f"{host.name} is a machine whose key is not known here yet:")
        done = record(host, fingerprint=fingerprint, confirm=asker(words, ask=terminal, sure=fingerprint is not None))
        print(f"recorded in {done.path}")

    project = find_project()
    ask = Asker(input, lambda text: out.print(text, soft_wrap=True), terminal, yes)
    chosen = decide(project, options, ask, trust, lambda report: print_report(out, report))
    print_choice(out, chosen)
    print_files(out, write(project, chosen))
    locked = not chosen.environment.own or _locked(out, chosen)
    print_next(out, _next(chosen, locked))
    if chosen.report is not None and not chosen.report.good:
        raise typer.Exit(1)


def _locked(out: Console, chosen: Chosen) -> bool:
    """Whether the new environment has its lock now. Where it cannot be made here, that is said and no error."""
    from orchestrator.environment.lock import unlisted
    from orchestrator.environment.relock import write
    from orchestrator.init.files import environment_folder
    from orchestrator.view.follow import LaunchDisplay

    folder = environment_folder(chosen)
    if (folder / "requirements.lock").exists():
        return True
    try:
        with LaunchDisplay(out) as display:
            display.begin("lock")
            done = write(folder, lambda what, done, total, unit: display.progress("lock", what, done, total, unit))
            display.end("lock", f"{done.distributions} packages with their hashes")
    except OrchError as error:
        out.print(f"  not locked   {error.message}", soft_wrap=True)
        return False
    # CPU builds of other Pythons may have no hash there; what is not even named stops every build
    lacking = unlisted(done.path.read_text("utf-8"))
    for what in lacking:
        out.print(f"  not locked   {what}: no index that has it can be reached from here", soft_wrap=True)
    return not lacking


def _next(chosen: Chosen, locked: bool) -> list[tuple[str, str]]:
    place = chosen.entry.place
    commands = []
    if not locked:
        commands.append((f"orch env lock {chosen.environment.name}", "exact versions and hashes of its packages"))
    if chosen.report is None or not chosen.report.good:
        commands.append((f"orch doctor {place}", "what is missing there, and what to do"))
    elif place != LOCAL:
        commands.append((f"orch doctor {place}", "the same check again, at any time"))
    commands.append((f"orch plan {chosen.recipe}", "what a launch would do, with bytes"))
    commands.append((shlex.join(["orch", "launch", chosen.recipe]), "do it, and follow the run"))
    return commands
