"""The `orch` command: parse, call, show. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable


def main() -> None:
    """Entry point of the script `orch`. Exit codes: see docs/operations.md."""
    if "_ORCH_COMPLETE" in os.environ:  # a shell asks what a word can become, at each Tab: nothing else is imported
        from orchestrator.completion.shells import answer

        answer(os.environ["_ORCH_COMPLETE"], sys.argv[1:])
        return
    try:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what was begun is put away
        _main()
    except KeyboardInterrupt:
        sys.exit(130)


def _main() -> None:
    # Inside, since reading these takes long enough to be interrupted.
    from orchestrator.cli.app import app
    from orchestrator.cli.output import report_error, report_fault, sound_streams
    from orchestrator.errors import OrchError

    sound_streams()
    try:
        _run(app)
    except OrchError as error:
        report_error(error)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader of our output is gone; say nothing, also not when Python flushes at its end.
        _drop_output()
        sys.exit(141)
    except Exception as error:
        if os.environ.get("ORCH_DEBUG"):
            raise
        report_fault(error)
        if isinstance(error, OSError):
            _drop_output()
        sys.exit(1)


def _run(app: Callable[[], None]) -> None:
    """The command; what it wrote is out at its end, while a full disk or a reader that left can still be told."""
    try:
        app()
    except SystemExit as ended:
        try:
            sys.stdout.flush()
        except OSError:
            if not ended.code:
                raise
            _drop_output()
        raise


def _drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
