from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.view.status import log_lines
from orchestrator.view.text import duration, mebibytes, printable, rate, size


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (-3, "0s"), (59.9, "59s"), (60, "1m00s"), (3599, "59m59s"), (3600, "1h00m"), (200000, "2d07h")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(None, "-"), (0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (64_200_000, "64.2 MB"), (5e15, "5000.0 TB")],
)
def test_sizes(count, text):
    assert size(count) == text


def test_rates_and_memory():
    assert [rate(value) for value in (None, 850, 20100, 1.2e6)] == ["-", "850", "20.1k", "1.2M"]
    assert mebibytes(70000, 143771) == "68.4/140"
    assert mebibytes(None, 1024) == "-/1"
    assert mebibytes(None, None) == "-"


def test_a_progress_bar_shows_its_last_state():
    assert printable("10%\r50%\r90%\n") == "90%"


def test_escapes_cannot_reach_the_terminal():
    assert printable("\x1b[31mred\x1b[0m \x1b]0;title\x07\x1b[2Jdone\x07") == "red done�"


@given(st.text())
def test_nothing_that_moves_the_cursor_is_left(text):
    assert not any(char != "\t" and (char < " " or "\x7f" <= char < "\xa0") for char in printable(text))


def test_a_line_without_end_is_shown_by_its_beginning():
    assert printable("x" * 10_000_000) == "x" * 499 + "…"
    assert len(log_lines(b"x" * 10_000_000 + b"\ny")[0]) == 500
