"""The workstation's index: which run is at which place, how long the steps of launches took, and which generations
and caches were last seen where.

The place is the truth. This file only saves the asking, and can be deleted at any time: a run that is
not in it is looked for at every place, and put back; how long steps take is learnt again from the next launches, and
names from the next lists.
"""

from __future__ import annotations

import functools
import os
import sqlite3
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

_SCHEMA = (
    """
create table if not exists runs_at_places (
    run text not null,
    place text not null,
    recipe text not null,
    created real not null,
    number integer not null,
    primary key (run, place)
)""",
    """
create table if not exists step_times (
    at real not null,
    step text not null,
    place text not null,
    recipe text not null,
    environment text not null,
    how text not null,
    bytes integer not null,
    seconds real not null
)""",
    """
create table if not exists names_seen (
    kind text not null,
    place text not null,
    recipe text not null,
    name text not null,
    words text not null
)""",
)
_LINUX: bool = sys.platform == "linux"
_LONGEST = 30 * 86400.0  # seconds of a step that are believed
_MOST_TIMES = 2000  # the newest are kept: some two hundred launches


@dataclass(frozen=True)
class Entry:
    """One run at one place; `created` is Unix time on the place's clock, `number` which of the run's places it is."""

    run: str
    place: str
    recipe: str
    created: float
    number: int = 0


@dataclass(frozen=True)
class StepTime:
    """How long one step of one launch took. `place` names all of its places, as `orch plan` does; `how` is one of
    `expect`'s ways; `environment` is an id, or "" where the step came before it was known."""

    at: float  # Unix seconds on this machine's clock
    step: str
    place: str
    recipe: str
    environment: str
    how: str
    bytes: int  # that were streamed
    seconds: float


@dataclass(frozen=True)
class Seen:
    """A name that a list showed at a place, kept for whoever types it next: a recipe's "generation", or a "cache"."""

    kind: str
    place: str
    recipe: str
    name: str
    words: str = ""  # what it is


def state_directory() -> Path:
    """Where the workstation keeps its index (`ORCH_STATE_DIR`, else the platform's state directory)."""
    given = os.environ.get("ORCH_STATE_DIR")
    if given:
        return Path(given)
    if _LINUX:  # the same, without the time that the import takes
        return Path(os.environ.get("XDG_STATE_HOME", "").strip() or Path.home() / ".local/state") / "orch"
    from platformdirs import user_state_path

    return Path(user_state_path("orch"))


@contextmanager
def _database() -> Iterator[sqlite3.Connection]:
    directory = state_directory()
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "index.sqlite"
    try:
        connection = _opened(path)
    except sqlite3.DatabaseError as error:
        if not _damaged(error):
            raise
        # An index is worth nothing that a look at the places can't give back.
        path.unlink(missing_ok=True)
        connection = _opened(path)
    try:
        with connection:
            yield connection
    except sqlite3.DatabaseError as error:
        if _damaged(error):
            path.unlink(missing_ok=True)
        raise
    finally:
        connection.close()


def _damaged(error: sqlite3.DatabaseError) -> bool:
    """Not so where the disk is full, or another command keeps the file locked: its kinds are more special."""
    return type(error) is sqlite3.DatabaseError


@functools.lru_cache(maxsize=1)
def _warn(why: str) -> None:
    """Once: without the index everything still works, only slower."""
    print(
        f"orch: the index of runs in {state_directory()} cannot be used ({why}): each place is asked instead "
        "(ORCH_STATE_DIR names another folder)",
        file=sys.stderr,
    )


def _opened(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=10)
    try:
        for table in _SCHEMA:
            connection.execute(table)
        connection.commit()
    except sqlite3.DatabaseError:
        connection.close()
        raise
    return connection


def remember(entries: list[Entry]) -> None:
    """Put runs into the index, as far as it can be written."""
    try:
        with _database() as database:
            database.executemany(
                "insert or replace into runs_at_places values (?, ?, ?, ?, ?)",
                [astuple(entry) for entry in entries],
            )
    except (OSError, sqlite3.Error) as error:
        _warn(str(error))


def forget_all_but(place: str, runs: Collection[str]) -> None:
    """Take those runs of a place out of the index that are not there any more."""
    gone = [(entry.run, place) for entry in known(place) if entry.run not in runs]
    if gone:
        try:
            with _database() as database:
                database.executemany("delete from runs_at_places where run = ? and place = ?", gone)
        except (OSError, sqlite3.Error) as error:
            _warn(str(error))


def known(place: str | None = None) -> list[Entry]:
    """Every run in the index, the newest first; none where it cannot be read."""
    try:
        with _database() as database:
            rows = database.execute(
                f"select {_columns(Entry)} from runs_at_places where ?1 is null or place = ?1 "
                "order by created desc, run desc",
                (place,),
            ).fetchall()
    except (OSError, sqlite3.Error) as error:
        _warn(str(error))
        return []
    return [Entry(*row) for row in rows]


def add_times(times: Collection[StepTime]) -> None:
    """Keep how long steps took, as far as the index can be written; the oldest go where there are too many."""
    if not times:
        return
    try:
        with _database() as database:
            database.executemany(
                "insert into step_times values (?, ?, ?, ?, ?, ?, ?, ?)", [astuple(time) for time in times]
            )
            database.execute(
                "delete from step_times where rowid not in (select rowid from step_times order by rowid desc limit ?)",
                (_MOST_TIMES,),
            )
    except (OSError, sqlite3.Error) as error:
        _warn(str(error))


def step_times() -> list[StepTime]:
    """How long steps took, the newest first; none where the index cannot be read. What no step takes is left out: it
    comes of a place's clock that was set while it was measured."""
    try:
        with _database() as database:
            rows = database.execute(_TIMES, (_LONGEST,)).fetchall()
    except (OSError, sqlite3.Error) as error:
        _warn(str(error))
        return []
    return [StepTime(*row) for row in rows]


def at_a_glance(place: str | None = None, most: int = 200) -> list[Entry]:
    """The newest runs in the index, for a shell that completes a word: nothing is written or said, and nothing waited
    for. As `known`, where the index can be read at once."""
    return [Entry(*row) for row in _read(_RUNS, (place, most))]


def environments_at_a_glance() -> list[tuple[str, str, str]]:
    """Environments that launches used, the same way: id, recipe and place, the latest first."""
    rows = _read(_ENVIRONMENTS, ())
    return [(str(ident), str(recipe), str(place)) for ident, recipe, place, _ in rows]


def see(kind: str, place: str, recipe: str | None, names: Collection[Seen]) -> None:
    """Put names into the index in place of all of that kind there (with `recipe`: of that recipe's), as far as it can
    be written."""
    try:
        with _database() as database:
            database.execute(
                "delete from names_seen where kind = ?1 and place = ?2 and (?3 is null or recipe = ?3)",
                (kind, place, recipe),
            )
            database.executemany("insert into names_seen values (?, ?, ?, ?, ?)", [astuple(one) for one in names])
    except (OSError, sqlite3.Error) as error:
        _warn(str(error))


def names_at_a_glance(kind: str, place: str | None = None, recipe: str | None = None) -> list[Seen]:
    """Names of a kind, at one place or of one recipe where that is said, as they were put there; see `at_a_glance`."""
    return [Seen(*row) for row in _read(_NAMES, (kind, place, recipe))]


def _columns(of: type) -> str:
    """By name: an index whose tables are others than these, of another version, is one that cannot be used."""
    return ", ".join(one.name for one in fields(of))


_TIMES = f"select {_columns(StepTime)} from step_times where seconds between 0 and ?1 order by rowid desc"
_NAMES = (
    f"select {_columns(Seen)} from names_seen "
    "where kind = ?1 and (?2 is null or place = ?2) and (?3 is null or recipe = ?3) order by rowid limit 200"
)
_RUNS = (
    f"select {_columns(Entry)} from runs_at_places where ?1 is null or place = ?1 "
    "order by created desc, run desc limit ?2"
)
_ENVIRONMENTS = (
    "select environment, recipe, place, max(rowid) as latest from step_times where environment <> '' "
    "group by environment, recipe, place order by latest desc limit 200"
)


def _read(query: str, arguments: tuple[object, ...]) -> list[tuple[Any, ...]]:
    path = state_directory() / "index.sqlite"
    try:
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=0.05)
        try:
            return connection.execute(query, arguments).fetchall()
        finally:
            connection.close()
    except (OSError, ValueError, sqlite3.Error):
        return []


def matching(reference: str | None, entries: list[Entry]) -> list[Entry]:
    """What `reference` can mean, the newest first: a run's id; else the latest run of the recipe of that
    name; else the runs whose id begins so. None means the latest of all. A run over several places is there once for
    each."""
    ordered = sorted(entries, key=lambda entry: (entry.created, entry.run), reverse=True)
    exact = [entry for entry in ordered if entry.run == reference]
    if exact:
        return exact
    latest = ordered if reference is None else [entry for entry in ordered if entry.recipe == reference]
    if latest or reference is None:
        return [entry for entry in latest if entry.run == latest[0].run]
    return [entry for entry in ordered if entry.run.startswith(reference)]
