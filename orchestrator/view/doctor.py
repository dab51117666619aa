"""The report of `orch doctor` for people, in 80 columns: a row a check, and below each problem what to do."""

from __future__ import annotations

import textwrap

from rich.console import Console

from orchestrator.doctor.model import FAULT, OK, UNKNOWN, WARNING, Report

_WIDTH = 80
_MARKS = {OK: "ok", WARNING: "warning", FAULT: "FAULT", UNKNOWN: "unknown"}
_PAD = " " * 24


def print_report(console: Console, report: Report) -> None:
    """The rows in their order, and a last line that counts them."""
    console.print(report.place, soft_wrap=True)
    for one in report.findings:
        head = f"  {_MARKS[one.status]:<8}{one.title:<14}"
        lines = textwrap.wrap(
            one.text or "-",
            _WIDTH,
            initial_indent=head,
            subsequent_indent=_PAD,
            break_on_hyphens=False,
        )
        style = {FAULT: "red", WARNING: "yellow"}.get(one.status, "")
        console.print("\n".join(lines), style=style, soft_wrap=True)
        for remedy in one.remedy:
            # Not wrapped: a command is copied whole.
            console.print(f"{'':10}→ {remedy}", soft_wrap=True)
    counts = {status: sum(one.status == status for one in report.findings) for status in _MARKS}
    parts = [
        f"{counts[status]} {word}{'' if counts[status] == 1 or status == UNKNOWN else 's'}"
        for status, word in ((FAULT, "fault"), (WARNING, "warning"), (UNKNOWN, "unknown"))
        if counts[status]
    ]
    which = "a launch that needs GPUs" if report.only_without_gpus else "a launch"
    verdict = "a launch can work here" if report.good else f"{which} would fail here"
    console.print(f"{verdict}: {', '.join(parts) or 'nothing is missing'}", soft_wrap=True)
