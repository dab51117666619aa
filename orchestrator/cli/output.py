"""Where the command's words go: results to stdout, errors to stderr, JSON when asked."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from orchestrator.plain import plain

if TYPE_CHECKING:
    from rich.console import Console

    from orchestrator.errors import OrchError

JSON_VERSION = 1
_NARROWEST = 20


def console() -> Console:
    """A console on stdout; colours, width and animation follow the terminal, `NO_COLOR` and pipes."""
    from rich.console import Console

    made = Console(highlight=False, markup=False, emoji=False)
    # COLUMNS=0 is what some terminals and build machines say that do not know
    return made if made.width >= _NARROWEST else Console(highlight=False, markup=False, emoji=False, width=80)


def sound_streams() -> None:
    """All three streams are there, even where the caller closed them; what a terminal's encoding does not have is
    shown as a question mark, and stops nothing."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115, PTH123  (for good)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def error_console() -> Console:
    """The same on stderr, beside results that a program may read."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, markup=False, emoji=False)


def print_json(value: dict[str, Any]) -> None:
    """One JSON object with its format's version first. NaN and infinities become null."""
    whole = {"version": JSON_VERSION, **_finite(value)}
    text = json.dumps(whole, ensure_ascii=False, indent=2)
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        text = json.dumps(whole, indent=2)
    print(text)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def report_error(error: OrchError) -> None:
    """The error on stderr: its sentences, then the next command to type."""
    lines = [_wrapped(f"orch: {line}") for line in error.message.splitlines() or [type(error).__name__]]
    _say([*lines, f"  try: {error.hint}"] if error.hint else lines)


def report_fault(error: Exception) -> None:
    """What nobody foresaw: one line on stderr, and how to see more."""
    if isinstance(error, OSError) and error.strerror:
        what = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    else:
        what = f"this is a fault in orch: {type(error).__name__}: {error}"
    _say([f"orch: {what}", "  try: the same with ORCH_DEBUG=1, which shows where it happened"])


def _wrapped(sentence: str) -> str:
    """On a terminal it breaks between words. What is to be typed is never broken: it is copied whole."""
    if not sys.stderr.isatty():
        return sentence
    import shutil
    import textwrap

    width = max(_NARROWEST, shutil.get_terminal_size().columns)
    return textwrap.fill(plain(sentence), width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _say(lines: list[str]) -> None:
    with contextlib.suppress(OSError):  # nobody can be told, but the exit status stays
        print(plain("\n".join(lines)), file=sys.stderr, flush=True)
