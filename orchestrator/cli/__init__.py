"""The `orch` command: parse, call, show. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Entry point of the script `orch`. Exit codes: see docs/operations.md."""
    from orchestrator.cli.app import app
    from orchestrator.cli.output import report_error
    from orchestrator.errors import OrchError

    try:
        app()
    except OrchError as error:
        report_error(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output is gone; say nothing, also not when Python flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
