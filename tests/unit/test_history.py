from __future__ import annotations

import pytest

from orchestrator import history
from orchestrator.history import Entry, matching


@pytest.fixture(autouse=True)
def _own_state(tmp_path, monkeypatch):
    monkeypatch.setenv("ORCH_STATE_DIR", str(tmp_path / "state"))


OLD = Entry("demo-20260101-100000", "local", "demo", 1.0)
NEW = Entry("demo-20260102-100000", "pve/200", "demo", 2.0)
OTHER = Entry("other-20260103-100000", "local", "other", 3.0)
ALL = [OLD, NEW, OTHER]


def test_a_run_is_remembered_once_a_place():
    history.remember([OLD, NEW])
    history.remember([OLD])
    assert history.known() == [NEW, OLD]
    assert history.known("local") == [OLD]


def test_a_broken_index_is_made_anew():
    path = history.state_directory()
    path.mkdir(parents=True)
    (path / "index.sqlite").write_bytes(b"not a database, " * 100)
    history.remember([OLD])
    assert history.known() == [OLD]


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        (None, [OTHER]),
        ("demo", [NEW]),  # a recipe: its latest run
        ("demo-20260101-100000", [OLD]),
        ("demo-2026010", [NEW, OLD]),  # a beginning that two share
        ("oth", [OTHER]),
        ("nothing", []),
    ],
)
def test_what_a_reference_can_mean(reference, expected):
    assert matching(reference, ALL) == expected


def test_a_whole_id_wins_over_a_recipe_that_begins_so():
    twin = Entry("demo", "local", "odd", 9.0)
    assert matching("demo", [*ALL, twin]) == [twin]


def test_times_of_steps_are_bounded_and_the_newest_stay(monkeypatch):
    monkeypatch.setattr(history, "_MOST_TIMES", 3)
    times = [history.StepTime(float(n), "code", "local", "demo", "", "in place", 0, 1.0) for n in range(5)]
    history.add_times(times[:4])
    history.add_times(times[4:])
    assert [time.at for time in history.step_times()] == [4.0, 3.0, 2.0]


def test_an_index_from_before_there_were_times_goes_on():
    import sqlite3

    history.remember([OLD])
    path = history.state_directory() / "index.sqlite"
    with sqlite3.connect(path) as database:
        database.execute("drop table step_times")
    assert history.step_times() == [] and history.known() == [OLD]


def test_without_an_index_times_are_not_known_and_nothing_stops(monkeypatch, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ORCH_STATE_DIR", str(tmp_path / "file" / "below"))
    history._warn.cache_clear()
    history.add_times([history.StepTime(0.0, "code", "local", "demo", "", "in place", 0, 1.0)])
    assert history.step_times() == []
    assert capsys.readouterr().err.count("cannot be used") >= 1


def test_an_index_with_other_tables_is_one_that_cannot_be_used(capsys):
    import sqlite3

    history.state_directory().mkdir(parents=True)
    with sqlite3.connect(history.state_directory() / "index.sqlite") as database:
        for table in ("step_times", "runs_at_places", "names_seen"):
            database.execute(f"create table {table} (run text, kind text, odd text)")
            database.execute(f"insert into {table} values ('a', 'cache', 'c')")
    history._warn.cache_clear()
    assert history.step_times() == history.known() == history.at_a_glance() == history.names_at_a_glance("cache") == []
    assert "cannot be used" in capsys.readouterr().err


def test_times_that_no_step_takes_are_not_believed():
    def took(seconds):
        return history.StepTime(1.0, "first step", "local", "demo", "", "warm", 0, seconds)

    history.add_times([took(seconds) for seconds in (-1.0, 12.0, 1.8e9, float("inf"))])
    assert [time.seconds for time in history.step_times()] == [12.0]
