"""A diagnosis for people: the cause, what shows it, what to do, the command to type."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from orchestrator.diagnosis.catalogue import THEMES
from orchestrator.diagnosis.model import HEALTHY, UNKNOWN, Cause, Verdict
from orchestrator.view.text import printable

_STYLE = {HEALTHY: "bold green", UNKNOWN: "bold magenta"}
_LONGEST = 400  # characters of one line of evidence
_LINES = 80  # of a traceback, unless all is wanted


def diagnosis_lines(verdict: Verdict, command: str, *, traceback: bool = True) -> list[Text]:
    """The lines of one diagnosis; `command` is what to type, with the run's names in it."""
    head = Text.assemble(("cause: ", "bold"), (verdict.cause, _STYLE.get(verdict.cause, "bold red")))
    head.append(f", {verdict.title} (confidence {verdict.confidence})")
    lines = [head]
    if traceback and verdict.traceback:
        lines += _traceback(verdict.traceback)
    for item in verdict.evidence:
        rank = "" if item.rank is None else f", rank {item.rank}"
        lines.append(Text(f"  {item.place}{rank}: {_short(item.text)}"))
    if len(verdict.witnesses) > 1:
        lines.append(Text(f"  witnesses that agree: {', '.join(verdict.witnesses)}", style="dim"))
    lines += [Text(f"  {note}", style="dim") for note in verdict.notes]
    lines += [Text(f"  {text}") for text in verdict.advice]
    if verdict.cause != HEALTHY:
        lines.append(Text("  launching again, unchanged, " + ("can help" if verdict.retry else "does not help")))
    if command:
        lines.append(Text(f"  {command}", style="bold"))
    return lines


def print_diagnosis(console: Console, verdict: Verdict, command: str, *, traceback: bool = True) -> None:
    """Write it, each line whole."""
    for line in diagnosis_lines(verdict, command, traceback=traceback):
        console.print(line, soft_wrap=True)


def print_brief(console: Console, verdict: Verdict, run: str) -> None:
    """The cause, what shows it first, and where more is."""
    lines = diagnosis_lines(verdict, "", traceback=False)
    for line in [*lines[:2], Text(f"  orch diagnose {run}", style="bold")]:
        console.print(line, soft_wrap=True)


def print_catalogue(console: Console, causes: Sequence[Cause]) -> None:
    """Every entry, by theme."""
    width = max(len(cause.id) for cause in causes)
    theme = ""
    for cause in causes:
        if cause.theme != theme:
            theme = cause.theme
            console.print(Text(THEMES.get(theme, theme), style="bold"), soft_wrap=True)
        console.print(Text(f"  {cause.id:<{width}}  {cause.title}"), soft_wrap=True)


def _traceback(text: str) -> list[Text]:
    rows = text.splitlines()
    if len(rows) > _LINES:
        rest = len(rows) - _LINES
        rows = [*rows[: _LINES // 4], f"    … {rest} lines …", *rows[-3 * _LINES // 4 :]]
    return [Text(f"  │ {printable(row)}", style="dim") for row in rows]


def _short(text: str) -> str:
    shown = printable(text)
    return shown if len(shown) <= _LONGEST else shown[: _LONGEST - 1] + "…"
