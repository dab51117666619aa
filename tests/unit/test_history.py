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
