"""Following one run: what changed, as it changes, over drops of the connection."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from orchestrator.config import Place
from orchestrator.errors import ConnectionLost, NotFound, Unreachable
from orchestrator.place.session import Session, open_session
from orchestrator.run import RunStatus, from_probe

_LONGEST_PAUSE = 30.0


@dataclass(frozen=True)
class Observed:
    """One look at the run. `status.log` holds the log's bytes since the look before."""

    status: RunStatus


@dataclass(frozen=True)
class Interrupted:
    """The place does not answer: the run's state is unknown until it does. Asked again in `seconds`."""

    problem: Unreachable
    seconds: float

    @property
    def reason(self) -> str:
        return self.problem.message


@dataclass(frozen=True)
class Position:
    """Where a reader of the log stands: what lies before `offset` has been read of the file `inode` (None: any)."""

    inode: int | None
    offset: int


def follow(
    place: Place,
    run: str,
    *,
    session: Session | None = None,
    position: Position | None = None,
    tail_lines: int | None = None,
    wait: float = 5.0,
    give_up_after: float | None = None,
) -> Iterator[Observed | Interrupted]:
    """Look at a run again and again until it has ended and its log is read to the end.

    The first look returns the last `tail_lines` lines (None: the whole log), or what comes after
    `position`; each further one exactly the bytes after those of the look before, also over a lost
    connection. `wait` is how long (seconds) the place holds an answer back while nothing changes.

    Raises:
        NotFound: there is no such run at the place.
        Unreachable: nothing was heard for `give_up_after` seconds (None: never given up).
    """
    own_session = session is None
    pause, silent_since = 1.0, time.monotonic()
    patience = 0.0
    try:
        while True:
            try:
                if session is None:
                    session = open_session(place)
                status = _look(session, run, position, tail_lines, patience)
            except ConnectionLost as lost:
                problem: Unreachable = lost
            except Unreachable as unreachable:
                problem = unreachable
            else:
                pause, silent_since, patience = 1.0, time.monotonic(), wait
                if status.log_inode is not None:
                    position = Position(status.log_inode, status.log_next)
                yield Observed(status)
                if status.has_ended and status.log_next >= (status.log_size or 0):
                    return
                continue
            if session is not None:
                session.close()
                session, own_session = None, True
            if give_up_after is not None and time.monotonic() - silent_since > give_up_after:
                raise problem
            yield Interrupted(problem, pause)
            time.sleep(pause)
            pause = min(_LONGEST_PAUSE, 2 * pause)
            patience = 0.0
    finally:
        if session is not None and own_session:
            session.close()


def _look(session: Session, run: str, position: Position | None, lines: int | None, wait: float) -> RunStatus:
    if position is None and lines is None:
        position = Position(None, 0)
    arguments = {
        "runs": [run],
        "tail_lines": lines,
        "offset": {run: {"inode": position.inode, "offset": position.offset}} if position else None,
        "screen": False,
        "gpus": False,
        "wait": wait,
    }
    reply = session.call("probe", arguments, timeout=wait + 30.0)
    found = from_probe(reply.data, reply.payload, session.place.name)
    if not found:
        raise NotFound(f"there is no run {run} at {session.place.name}", hint="orch status --all")
    return found[0]
