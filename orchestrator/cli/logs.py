"""`orch logs`: the log's own bytes on stdout, and nothing else there."""

from __future__ import annotations

import sys

from orchestrator import watch
from orchestrator.cli.context import meant_run, one_place
from orchestrator.cli.diagnose import show_bad_end
from orchestrator.cli.output import error_console
from orchestrator.config import Place
from orchestrator.errors import OrchError, UsageError
from orchestrator.explain import explanation
from orchestrator.place.session import open_session


def logs_command(
    run: str | None, place: str | None, *, follow: bool, tail: int | None, pane: bool, explain: bool
) -> None:
    """Write a run's log.

    Raises:
        UsageError: `--pane` together with what only a file has.
        OrchError: the pane cannot be read.
    """
    if pane and (follow or tail is not None):
        raise UsageError("--pane shows the screen as tmux has it: it goes with neither --follow nor --tail")
    places, run = meant_run(run, place)
    found = one_place(places, run, "the log")
    if explain:
        how = (
            "pane with its history" if pane else f"log from {'its start' if tail is None else f'the last {tail} lines'}"
        )
        more = ["probe, waiting up to 5 s for news, again and again until the run has ended"] if follow else []
        print(explanation(found, [f"{how} of {run}", *more]))
        return
    if pane:
        with open_session(found) as session:
            answer = session.call("pane", {"run": run}).data
        if answer.get("error"):
            raise OrchError(f"the pane of {run} can't be read: {answer['error']}", hint=f"orch logs {run}")
        print(answer.get("screen") or "")
        return
    _write(found, run, tail, keep_on=follow)


def _write(found: Place, run: str, tail: int | None, *, keep_on: bool) -> None:
    out = sys.stdout.buffer
    status = None
    for event in watch.follow(found, run, tail_lines=tail):
        if isinstance(event, watch.Interrupted):
            if not keep_on:
                raise event.problem
            print(f"orch: {event.reason}; asking again in {event.seconds:.0f} s", file=sys.stderr)
            continue
        status = event.status
        if status.log_truncated:
            print("orch: the log was replaced or cut; from here on it is the new one", file=sys.stderr)
        out.write(status.log)
        out.flush()
        if not keep_on and status.log_next >= (status.log_size or 0):
            break
    if status is not None:
        show_bad_end(error_console(), [found], run, status.phase, None, brief=True)
