"""The report of `orch probe` for people, in 80 columns."""

from __future__ import annotations

import textwrap

from rich.console import Console

from orchestrator.probe import GUARDED, Report, Setting, Way

_WIDTH = 80
_ASKED = ("error_on_nested_fx_trace", "suppress_errors", "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", "disable", "stance")


def print_report(console: Console, report: Report) -> None:
    """Versions, the condition, settings, the ways to dense, the four failures, and what is unknown."""

    def say(text: str = "", indent: int = 0) -> None:
        pad = " " * indent
        lines = textwrap.wrap(text, _WIDTH, initial_indent=pad, subsequent_indent=pad, break_on_hyphens=False)
        console.print("\n".join(lines) or "", soft_wrap=True)

    environment = report.environment
    say(f"{report.place}: " + (f"environment {environment['name']} {environment['id']}" if environment else "a Python"))
    say(report.python, 2)
    if environment and environment["polluted"]:
        say(f"it is polluted: {environment['polluted']}", 2)
    if report.torch:
        found = report.torch
        parts = [f"torch {found['version']}", f"CUDA {found['cuda'] or 'none'}", f"triton {found['triton'] or 'none'}"]
        say(", ".join([*parts, f"Python {found['python']}"]), 2)
    if report.error:
        say()
        say(f"not tried: {report.error}")
    if report.condition:
        say()
        _condition(say, report)
    say()
    _settings(say, report.settings)
    if report.ways:
        say()
        _ways(console, report.ways)
    if report.failures:
        say()
        say("what this torch can do when threads compile")
        for one in report.failures:
            verdict = {True: "yes", False: "no", None: "unknown"}[one.possible]
            say(f"{one.title:<27}{verdict}{'' if one.how == 'unknown' else f' ({one.how})'}", 2)
            say(one.text, 6)
            if one.possible is not False and one.advice:
                say(f"→ {one.advice}", 6)
    for line in report.unknown:
        say(f"unknown: {line}")


def _condition(say, report: Report) -> None:  # type: ignore[no-untyped-def]
    found = report.condition
    whose = {"process": "the whole process's", "thread": "each thread's own", None: "unknown whose"}
    say("the check at each compiled call")
    say(f"asks is_fx_symbolic_tracing()  {found['checked'] or 'nowhere that was found'}", 2)
    say(f"the flag is {whose[found['flag']]}  {found['flag_line'] or ''}", 2)
    if found["masked_by_is_compiling"]:
        shared = found["is_compiling"] == "process"
        says = "true while any thread compiles" if shared else "not true because of other threads"
        say(f"and is masked by is_compiling(), which is {says}", 2)
    if found["config"] is not None:
        say(f"settings of torch._dynamo.config are {whose[found['config']]}", 2)
    binds = {True: "takes hold", False: "does NOT take hold", None: "unknown"}[found["dense_guard_binds"]]
    say(f"the guard against dense attention: {binds}", 2)


def _settings(say, settings: tuple[Setting, ...]) -> None:  # type: ignore[no-untyped-def]
    say("settings as a program finds them at its start")
    shown = [one for one in settings if one.source != "torch" or one.name in _ASKED or one.bad]
    for one in shown:
        source = "" if one.source == "torch" else f"  (from {one.source})"
        say(f"{one.name} = {one.value}{source}", 2)
        if one.bad:
            say(f"CHANGE IT: {one.bad}", 6)
        elif one.note:
            say(one.note, 6)
    if not any(one.source != "torch" for one in settings):
        say("no variable that torch heeds is set", 2)


def _ways(console: Console, ways: tuple[Way, ...]) -> None:
    row = "  {:<27}{:<18}{:<18}{}".format
    console.print("ways to dense attention, tried on the CPU", soft_wrap=True)
    console.print(row("", "fullgraph=False", "fullgraph=True", "with a guard"), soft_wrap=True)
    for way in ways:
        if way.cells:
            guarded = " / ".join(dict.fromkeys(way.cells.get(cell, "?") for cell in GUARDED))
            text = row(way.name, way.cells.get("loose", "?"), way.cells.get("fullgraph", "?"), guarded)
        else:
            text = "\n".join(
                textwrap.wrap(
                    f"{way.name}: not tried, {way.why}",
                    _WIDTH,
                    initial_indent="  ",
                    subsequent_indent=" " * 6,
                    break_on_hyphens=False,
                )
            )
        console.print(text, soft_wrap=True)
