"""Where the command's words go: results to stdout, errors to stderr, JSON when asked."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from orchestrator.errors import OrchError

JSON_VERSION = 1


def console() -> Console:
    """A console on stdout; colours, width and animation follow the terminal, `NO_COLOR` and pipes."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False)


def print_json(value: dict[str, Any]) -> None:
    """One JSON object with its format's version first. NaN and infinities become null."""
    print(json.dumps({"version": JSON_VERSION, **_finite(value)}, ensure_ascii=False, indent=2))


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
    for line in error.message.splitlines() or [type(error).__name__]:
        print(f"orch: {line}", file=sys.stderr)
    if error.hint:
        print(f"  try: {error.hint}", file=sys.stderr)
