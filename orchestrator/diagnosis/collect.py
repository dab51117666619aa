"""Getting the facts: of a run at its place, in one request; or of a log file that lies here."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.config import Place
from orchestrator.diagnosis import reading, user_rules
from orchestrator.diagnosis.catalogue import CAUSES
from orchestrator.diagnosis.catalogue.words import PREFIX
from orchestrator.diagnosis.facts import Facts
from orchestrator.diagnosis.model import HEALTHY, UNKNOWN, Cause, Verdict
from orchestrator.diagnosis.rules import diagnose, patterns
from orchestrator.errors import OrchError, Unreachable, UsageError
from orchestrator.place.session import Session, open_session
from orchestrator.remote.evidence_log import scan
from orchestrator.run import RunStatus


def request(causes: Sequence[Cause] = CAUSES) -> dict[str, Any]:
    """The rules as they travel: plain data."""
    return {
        "prefix": PREFIX,
        "rules": [{"literals": list(p.literals), "regex": p.regex} for _, p in patterns(causes)],
    }


def of_file(path: str, causes: Sequence[Cause] = CAUSES) -> Facts:
    """The facts of one log by itself; `-` is stdin, which is kept in a file for as long as it is read.

    Raises:
        UsageError: there is no such file.
    """
    if path == "-":
        with tempfile.NamedTemporaryFile(prefix="orch-log-") as kept:
            shutil.copyfileobj(sys.stdin.buffer, kept)
            kept.flush()
            return _of_file(kept.name, "stdin", causes)
    if Path(path).is_dir():
        raise UsageError(f"{path} is a folder; name a log file")
    return _of_file(path, os.path.basename(path), causes)  # noqa: PTH119  (only its name is shown)


def _of_file(path: str, name: str, causes: Sequence[Cause]) -> Facts:
    asked = request(causes)
    answer = scan(path, asked["rules"], asked["prefix"])
    if answer["why"]:
        raise UsageError(f"{path} cannot be read: {answer['why'].partition(': ')[2] or answer['why']}")
    return Facts(source="log", log=reading.log(answer, name))


def of_run(session: Session, run: str, causes: Sequence[Cause] = CAUSES, *, stacks: bool = False) -> Facts:
    """The facts of a run, collected at the place: only what was found travels."""
    arguments = {**request(causes), "run": run, "stacks": stacks}
    sent = time.time()
    reply = session.call("evidence", arguments, timeout=90.0)
    skew = clock_skew(reply.data.get("time"), sent, time.time())
    return reading.facts(reply.data, session.place.name, session.hello.host, session.hello.container, skew)


def diagnose_at(
    place: Place, run: str, *, session: Session | None = None, stacks: bool = False
) -> tuple[Facts, Verdict]:
    """The facts of a run at its place, and what they amount to. A place that does not answer because its container
    is stopped or frozen has a verdict too.

    Raises:
        Unreachable: nothing is known, and nothing of the container either.
    """
    try:
        if session is not None:
            return _diagnose(session, run, stacks)
        with open_session(place) as opened:
            return _diagnose(opened, run, stacks)
    except Unreachable as error:
        facts = Facts(source="run", run=run, place=place.name, connection=error.message)
        verdict = diagnose(facts)
        if verdict.cause not in (HEALTHY, UNKNOWN):
            return facts, verdict
        raise


BAD_ENDS = frozenset({"failed", "lost"})
_MOST = 3  # runs of one place that are diagnosed unasked


def bad_ends(
    statuses: Iterable[RunStatus], sessions: Mapping[str, Session]
) -> Iterator[tuple[RunStatus, Facts | None, Verdict | None, str]]:
    """(run, facts, verdict, why there is none) of the runs that ended badly, over sessions that are open already."""
    diagnosed: dict[str, int] = {}
    statuses = list(statuses)
    leading = {(status.run, status.place) for status in statuses if status.phase in BAD_ENDS and not status.followed}
    for status in statuses:
        if status.followed and (status.run, str((status.first or {}).get("place"))) in leading:
            continue  # the other place's end says it all
        session = sessions.get(status.place)
        if status.phase not in BAD_ENDS or session is None or diagnosed.get(status.place, 0) >= _MOST:
            continue
        diagnosed[status.place] = diagnosed.get(status.place, 0) + 1
        try:
            facts, verdict = _diagnose(session, status.run, stacks=False)
        except OrchError as error:
            yield status, None, None, error.message
        else:
            yield status, facts, verdict, ""


def _diagnose(session: Session, run: str, stacks: bool) -> tuple[Facts, Verdict]:
    causes = user_rules.catalogue(_recipe_rules(session, run))
    facts = of_run(session, run, causes, stacks=stacks)
    return facts, diagnose(facts, causes)


def _recipe_rules(session: Session, run: str) -> Sequence[Any]:
    """The rules of the recipe as it was launched; what cannot be read there has none."""
    import yaml

    text = session.call("recipe_of", {"run": run}).data.get("recipe") or ""
    if "rules:" not in text:
        return ()
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError:
        return ()
    rules = found.get("rules") if isinstance(found, dict) else None
    return [rule for rule in rules or () if isinstance(rule, dict) and user_rules.usable(rule)]


def clock_skew(there: object, sent: float, received: float) -> float | None:
    """Seconds that the place is ahead, by the time it told in an answer to a question that was sent and answered at
    these times here; 0 if its time lies between them, None if it told none."""
    if not isinstance(there, (int, float)):
        return None
    return min(0.0, there - sent) + max(0.0, there - received)


def fill(text: str, facts: Facts, recipe: str = "") -> str:
    """A command of the catalogue with this run's names in it; a part that is not known stays a word in capitals."""
    host, _, container = facts.place.partition("/")
    names: Mapping[str, str] = {
        "run": f"{facts.run or 'RUN'} --place {facts.place}" if facts.apart else facts.run or "RUN",
        "run_id": facts.run or "RUN",
        "place": facts.place or "PLACE",
        "host": host or "HOST",
        "container": container or "CONTAINER",
        "first_place": str((facts.first or {}).get("place") or "PLACE"),
        "recipe": recipe or re.sub(r"-\d{8}-\d{6}(?:-\d+)?$", "", facts.run) or "RECIPE",
        "run_dir": facts.run_dir or "RUN_DIRECTORY",
        "root": facts.root or "/",
    }
    return re.sub(r"\{(\w+)\}", lambda found: names.get(found[1], found[0]), text)
