"""Every log of the corpus is called what it is; the catalogue, its document and the matrix agree with each other."""

from __future__ import annotations

import collections
import re
from pathlib import Path

import pytest

from orchestrator.config.patterns import literal_of
from orchestrator.diagnosis.catalogue import BY_ID, CAUSES, THEMES
from orchestrator.diagnosis.conditions import MATCH
from orchestrator.diagnosis.document import document
from orchestrator.diagnosis.figures import FACTS
from tests.logs import corpus

ROOT = Path(__file__).parents[2]
CASES = corpus.cases()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.file)
def test_a_log_is_called_what_it_is(case):
    verdict = case.verdict()
    assert verdict.cause == case.expect, verdict
    assert verdict.evidence
    if case.expect != "healthy":
        assert verdict.advice


def test_the_matrix_is_printed_and_kept(capsys):
    text = corpus.confusion([(case, case.verdict().cause) for case in CASES])
    with capsys.disabled():
        print(f"\n{text}")
    assert (ROOT / "docs/diagnosis-confusion.md").read_text() == text, "python -m tests.logs.report"


def test_every_entry_has_logs_that_differ_and_most_are_produced():
    seen = collections.defaultdict(list)
    for case in CASES:
        seen[case.expect].append(case)
        assert case.path.stat().st_size <= 60_000, case.file
        assert case.origin in ("produced", "public", "written")
        assert (case.origin == "produced") == bool(case.maker) and (case.origin == "public") == bool(case.source)
        assert not case.maker or (corpus.HERE / case.maker).is_file(), case.file
        assert not case.source or case.source.startswith("https://"), case.file
    few = {cause.id: len(seen[cause.id]) for cause in CAUSES if len(seen[cause.id]) < 2}
    assert not few
    assert set(seen) <= {*BY_ID, "healthy", "unknown"}
    for cause, cases in seen.items():
        texts = {(re.sub(r"\d+", "0", case.path.read_text()), str(case.facts)) for case in cases}
        assert len(texts) == len(cases), cause
    produced = sum(case.origin == "produced" for case in CASES)
    assert produced * 2 >= len(CASES)
    listed = {case.path for case in CASES}
    lying = {path for folder in ("cpu", "gpu", "public", "lab") for path in (corpus.HERE / folder).glob("*.log")}
    assert lying == listed


def test_the_catalogue_is_well_formed():
    assert len(BY_ID) == len(CAUSES)
    for cause in CAUSES:
        assert re.fullmatch(r"[a-z0-9-]+", cause.id) and cause.theme in THEMES and cause.advice and cause.title
        assert cause.patterns or cause.structured or cause.id == "uncaught-exception", cause.id
        assert set(cause.structured) <= set(FACTS), cause.id
        for pattern in cause.patterns:
            re.compile(pattern.regex)
            assert all(len(literal) >= 3 and "\n" not in literal for literal in pattern.literals), pattern
            assert not pattern.when or pattern.when in MATCH


def test_the_document_is_up_to_date():
    made = document()
    assert (ROOT / "docs/diagnosis.md").read_text() == made, "python -m orchestrator.diagnosis.document"


def test_a_literal_is_found_in_a_pattern():
    assert literal_of(r"^step \d+ of the planner failed$") == " of the planner failed"
    assert literal_of(r"(?:no|bad) (plan) at \w+") == "plan"
    assert literal_of(r"\d+") == literal_of(r"a|b") == ""
