"""The workstation's index of runs: which run is at which place.

The place is the truth. This file only saves the asking, and can be deleted at any time: a run that is
not in it is looked for at every place, and put back.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_SCHEMA = """
create table if not exists runs (
    run text not null,
    place text not null,
    recipe text not null,
    created real not null,
    primary key (run, place)
)
"""


@dataclass(frozen=True)
class Entry:
    """One run at one place; `created` is Unix time on the place's clock."""

    run: str
    place: str
    recipe: str
    created: float


def state_directory() -> Path:
    """Where the workstation keeps its index (`ORCH_STATE_DIR`, else the platform's state directory)."""
    given = os.environ.get("ORCH_STATE_DIR")
    if given:
        return Path(given)
    from platformdirs import user_state_path

    return Path(user_state_path("orch"))


@contextmanager
def _database() -> Iterator[sqlite3.Connection]:
    directory = state_directory()
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "index.sqlite"
    try:
        connection = _opened(path)
    except sqlite3.DatabaseError:
        # An index is worth nothing that a look at the places can't give back.
        path.unlink(missing_ok=True)
        connection = _opened(path)
    try:
        with connection:
            yield connection
    finally:
        connection.close()


def _opened(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=10)
    try:
        connection.execute(_SCHEMA)
        connection.commit()
    except sqlite3.DatabaseError:
        connection.close()
        raise
    return connection


def remember(entries: list[Entry]) -> None:
    """Put runs into the index."""
    with _database() as database:
        database.executemany(
            "insert or replace into runs values (?, ?, ?, ?)",
            [(entry.run, entry.place, entry.recipe, entry.created) for entry in entries],
        )


def known(place: str | None = None) -> list[Entry]:
    """Every run in the index, the newest first."""
    with _database() as database:
        rows = database.execute(
            "select run, place, recipe, created from runs where ?1 is null or place = ?1 "
            "order by created desc, run desc",
            (place,),
        ).fetchall()
    return [Entry(*row) for row in rows]


def matching(reference: str | None, entries: list[Entry]) -> list[Entry]:
    """What `reference` can mean, the newest first: a run's id; else the latest run of the recipe of that
    name; else the runs whose id begins so. None means the latest of all."""
    ordered = sorted(entries, key=lambda entry: (entry.created, entry.run), reverse=True)
    if reference is None:
        return ordered[:1]
    exact = [entry for entry in ordered if entry.run == reference]
    if exact:
        return exact
    of_recipe = [entry for entry in ordered if entry.recipe == reference]
    if of_recipe:
        return of_recipe[:1]
    return [entry for entry in ordered if entry.run.startswith(reference)]
