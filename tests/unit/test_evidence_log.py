"""The scan of a log: both ways of finding agree, and what is kept of a flood."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.diagnosis import collect
from orchestrator.remote import evidence_find, evidence_log
from tests.logs import corpus

RULES = [{"literals": ["Killed"], "regex": "^Killed"}, {"literals": ["out of memory", "OOM"], "regex": "memory|OOM"}]
WORDS = st.sampled_from(
    ["Killed", "out of memory", "OOM", "step 1", "", "\r", "é", "Traceback (most recent call last):"]
)


def both(path, rules=RULES, prefix=""):
    return [evidence_log.scan(str(path), rules, prefix, plain=plain) for plain in (False, True)]


@pytest.mark.skipif(evidence_find.gnu_grep() is None, reason="there is no GNU grep here")
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(WORDS, max_size=4).map(" ".join), max_size=30))
def test_grep_and_python_find_the_same(tmp_path, lines):
    path = tmp_path / "log"
    path.write_text("\n".join(lines))
    by_grep, by_hand = both(path)
    assert by_grep == by_hand


@pytest.mark.skipif(evidence_find.gnu_grep() is None, reason="there is no GNU grep here")
@pytest.mark.parametrize("name", ["gpu/dense_plain.log", "gpu/nccl_same_card.log", "cpu/rank_raises.log"])
def test_grep_and_python_find_the_same_in_the_corpus(name):
    asked = collect.request()
    by_grep, by_hand = both(corpus.HERE / name, asked["rules"], asked["prefix"])
    assert by_grep == by_hand and by_grep["matches"]


@pytest.mark.parametrize("plain", [False, True])
def test_a_flood_keeps_the_first_and_the_last(tmp_path, monkeypatch, plain):
    monkeypatch.setattr(evidence_log, "ENOUGH", 50)
    path = tmp_path / "log"
    path.write_text("".join(f"out of memory {n}\n" for n in range(5000)) + "Killed\nout of memory at last\n")
    found = evidence_log.scan(str(path), RULES, "", plain=plain)
    texts = [match["text"] for match in found["matches"]]
    assert texts[0] == "out of memory 0" and texts[-1] == "out of memory at last" and "Killed" in texts
    assert len(texts) <= 2 * 24 + 1


def test_a_traceback_past_the_lines_of_another_rank(tmp_path):
    path = tmp_path / "log"
    path.write_text(
        "[rank1]: Traceback (most recent call last):\n[rank0]: Traceback (most recent call last):\n"
        '[rank1]:   File "a.py", line 1, in f\n[rank0]:   File "b.py", line 2, in g\n'
        "[rank1]: ValueError: one\n[rank0]: KeyError: 'zero'\n"
    )
    found = evidence_log.scan(str(path), RULES, "")["tracebacks"]
    assert [one["raised"][0]["text"] for one in found] == ["ValueError: one", "KeyError: 'zero'"]
    assert all("rank" not in one["text"] for one in found)


def test_a_log_that_is_missing_or_empty(tmp_path):
    assert evidence_log.scan(str(tmp_path / "none"), RULES, "")["why"].startswith("none: No such file")
    (tmp_path / "empty").write_bytes(b"")
    assert evidence_log.scan(str(tmp_path / "empty"), RULES, "")["matches"] == []


@pytest.mark.skipif(evidence_find.gnu_grep() is None, reason="there is no GNU grep here")
@pytest.mark.parametrize("often", [10, 10**9])
@pytest.mark.parametrize("name", ["gpu/dense_plain.log", "gpu/nccl_same_card.log", "public/nccl_watchdog_stuck.log"])
def test_a_large_log_is_found_the_same_in(tmp_path, monkeypatch, name, often):
    """By gates first: the same matches, whether or not a gate stands in every line."""
    path = tmp_path / "log"
    filler = "".join(f"step {n} loss 1.0 Error rate 0.{n}\n" for n in range(2000))
    path.write_text(filler + (corpus.HERE / name).read_text() + filler)
    asked = collect.request()
    whole = evidence_log.scan(str(path), asked["rules"], asked["prefix"])
    monkeypatch.setattr(evidence_log, "BIG", 1000)
    monkeypatch.setattr(evidence_log, "OFTEN", often)
    large = evidence_log.scan(str(path), asked["rules"], asked["prefix"])

    def told(found):
        return [(match["rule"], match["offset"], match["after"]) for match in found["matches"]]

    assert told(large) == told(whole) and large["tracebacks"] == whole["tracebacks"]
