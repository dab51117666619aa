from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from orchestrator.run import from_probe
from orchestrator.survey import PlaceReport
from orchestrator.view.cache import folded, print_list, recipes
from orchestrator.view.environments import print_checked
from orchestrator.view.follow import FollowDisplay, LaunchDisplay
from orchestrator.view.status import log_lines, print_status
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


def test_of_an_environment_that_is_polluted_all_over_the_first_files_are_shown():
    findings = [
        {
            "kind": "distribution",
            "text": f"d{n} was installed",
            "count": 300,
            "files": [f"d{n}/{i}" for i in range(200)],
        }
        for n in range(400)
    ]
    findings.append({"kind": "changed", "text": "1 file changed in torch/", "count": 1, "files": ["torch/a.py"]})
    report = {"id": "e", "name": "fake", "clean": False, "summary": "much", "findings": findings, "path": "/p"}
    out = io.StringIO()
    print_checked(Console(file=out), "local", [{**report, "runs": [], "processes": [], "notes": []}])
    lines = out.getvalue().splitlines()
    assert len(lines) < 50 and lines[1:3] == ["  1 file changed in torch/", "    torch/a.py"]
    assert "    … and 281 more" in lines and "  … and 381 more like these, in 114300 files: --json names them" in lines


def cache_of(**more):
    snapshot = {"digest": "d" * 16, "files": 9, "bytes": 10, "made": 1.0, "from": "r", "cold_seconds": 5.0, "why": None}
    snapshot["kept_by"] = [f"generation {n} of demo is good" for n in range(1, 31)] + ["demo-1 uses it"]
    return {"key": "a" * 16, "bytes": 10, "parts": {}, "snapshots": [{**snapshot, **more}], "current": "d" * 16}


@pytest.mark.parametrize("terminal", [True, False])
def test_a_list_of_caches_is_broken_between_words_on_a_terminal_alone(terminal):
    out = io.StringIO()
    console = Console(file=out, width=60, force_terminal=terminal, color_system=None)
    print_list(console, "local", [cache_of()])
    lines = out.getvalue().splitlines()
    assert (max(map(len, lines)) <= 60) == terminal
    text = " ".join(out.getvalue().split())
    assert "… 28, 29, 30 (30 in all) of demo are good demo-1 uses it" in text and "unknown: its key.json" in text


def test_a_snapshot_that_cannot_be_used_says_nothing_else():
    out = io.StringIO()
    print_list(Console(file=out), "local", [cache_of(why="manifest.json: broken", files=None, kept_by=[])])
    assert f"    {'d' * 16}  cannot be used: manifest.json: broken" in out.getvalue().splitlines()


def test_whose_a_cache_is():
    assert recipes({"label": {"recipe": "a", "recipes": ["b"]}, "uses": {"recipes": ["a", "c"]}}) == ["a", "b", "c"]
    assert recipes({"label": None}) == [] == recipes({"label": {"recipes": "junk"}, "uses": {"recipes": 5}})
    assert folded(["generation 3 of x is good"]) == ["generation 3 of x is good"]


def look(place="pve/200", log=b"", **metrics):
    item = {"run": "train-20261201-042500", "phase": "training", "state": {"created": 90.0}, "metrics": metrics}
    item["log"] = {"from": 0, "length": len(log)}
    return PlaceReport(place, 100.0, tuple(from_probe({"time": 100.0, "runs": [item]}, log, place)), (), None, None)


def status(width, *reports, terminal=True, details=False):
    out = Console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None)
    print_status(out, reports, details=details)
    return out.file.getvalue().splitlines()


def test_the_runs_have_their_place_where_it_fits_and_no_column_of_what_none_of_them_has():
    plain_run, evaluated = look(), look(eval={"eval": {"headline": {"tau": 1.5}}})
    assert status(80, plain_run)[0].split() == ["RUN", "PLACE", "PHASE", "STEP", "LOSS", "TOK/S", "TIME"]
    assert status(80, plain_run)[1].split() == ["train-20261201-042500", "pve/200", "training", "-", "-", "-", "10s"]
    assert "τ" in status(80, plain_run, evaluated)[0]
    long = look(place="a-machine-with-a-long-name/and-a-container-too")
    assert status(80, long)[0].split()[:2] == ["RUN", "PHASE"] and status(120, long)[0].split()[:2] == ["RUN", "PLACE"]
    assert all(len(line) <= 80 for line in status(80, long))


def test_a_run_whose_launch_was_refused_says_why():
    def head(**end):
        state = {"created": 90.0, "exit": {"code": None, "signal": None, "reason": "refused: no GPU is free", **end}}
        item = {"run": "train-20261201-042500", "phase": "stopped", "state": state}
        runs = tuple(from_probe({"time": 100.0, "runs": [item]}, b"", "here"))
        return status(120, PlaceReport("here", 100.0, runs, (), None, None), details=True)

    assert "train-20261201-042500 at here: stopped, refused: no GPU is free" in head()
    assert "train-20261201-042500 at here: stopped" in head(signal=15)  # of a trainer, whose end the phase tells


def test_a_long_line_of_a_log_is_folded_on_a_terminal_and_stays_one_line_elsewhere():
    line = "step 1 " + "x" * 200
    assert f"  {line}" in status(80, look(log=line.encode()), terminal=False)
    shown = status(80, look(log=line.encode()))
    assert all(len(one) <= 80 for one in shown) and "".join(shown).count("x") == 200


def test_a_run_that_is_followed_shows_the_figures_that_it_tells():
    out = Console(file=io.StringIO(), width=80)
    FollowDisplay(out, None).observed(look().runs[0])
    FollowDisplay(out, None).observed(look(last={"step": 3, "loss": 0.25}).runs[0])
    FollowDisplay(out, 60).observed(look().runs[0])
    assert [" ".join(line.split()) for line in out.file.getvalue().splitlines()] == [
        "training 10s",
        "training step 3 loss 0.250 10s",
        "training step -/60 10s",
    ]


def test_a_progress_bar_is_seen_while_its_line_goes_on():
    out = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    with FollowDisplay(out, None) as display:
        display.observed(look(log=b"begun\n10%\r50%").runs[0])
        display.observed(look(log=b"\r90%").runs[0])
    assert "│ begun" in out.file.getvalue() and "│ 90%" in out.file.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_step_that_says_much_goes_on_below_its_words_on_a_terminal_and_is_one_line_elsewhere(terminal):
    out = Console(file=io.StringIO(), width=60, force_terminal=terminal, color_system=None)
    what = "0123456789abcdef, 12 files of /home/somebody/a-project with changes sent"
    LaunchDisplay(out).note("code", what)
    lines = out.file.getvalue().splitlines()
    assert " ".join(" ".join(lines).split()) == f"code note: {what}"
    assert (len(lines) == 1) is not terminal and all(line.startswith(" " * 15) for line in lines[1:])
