"""What is expected of a launch's steps, and how their times come to be known."""

from __future__ import annotations

import io
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator import history
from orchestrator.expect import BUILT, FIRST_STEP, IN_PLACE, STREAMED, Expectation, expected, latest, way, with_times
from orchestrator.history import StepTime
from orchestrator.plan import LaunchPlan, PlannedStep
from orchestrator.timing import Timed

MB = 10**6


@pytest.fixture(autouse=True)
def _own_state(tmp_path, monkeypatch):
    monkeypatch.setenv("ORCH_STATE_DIR", str(tmp_path / "state"))


def took(seconds, step="code", place="pve/200", recipe="demo", environment="e1", how=IN_PLACE, bytes=0):
    return StepTime(0.0, step, place, recipe, environment, how, bytes, seconds)


def ask(times, step="code", place="pve/200", recipe="demo", environment="e1", how=IN_PLACE, size=0):
    return expected(times, step, place, recipe, environment, how, size)


def test_the_same_recipe_at_the_same_place_goes_first():
    times = [took(9.0, recipe="other"), took(2.0), took(50.0, place="local"), took(70.0, how=STREAMED, bytes=5)]
    assert ask(times) == Expectation(2.0, "as last time")
    assert ask([took(4.0), *times, took(100.0)]) == Expectation(4.0, "as the last 3 times")
    assert ask(times, recipe="new") == Expectation(5.5, "as other there")
    assert ask(times, place="nowhere") is None
    assert ask([]) is None


def test_only_the_newest_count():
    assert ask([took(1.0)] * 5 + [took(100.0)] * 9) == Expectation(1.0, "as the last 5 times")


def test_what_is_streamed_follows_the_bytes():
    alike, line = took(4.0, how=STREAMED, bytes=40 * MB), took(6.0, step="cache", how=STREAMED, bytes=60 * MB)
    assert ask([alike, line], how=STREAMED, size=50 * MB) == Expectation(4.0, "as last time")
    assert ask([alike, line], how=STREAMED, size=500 * MB) == Expectation(50.0, "at 10.0 MB/s as before")
    few = took(0.2, how=STREAMED, bytes=300)  # tells of round trips, not of the line
    assert ask([few], how=STREAMED, size=500 * MB) is None


def test_a_build_says_nothing_of_another_environment():
    times = [took(90.0, step="environment", how=BUILT, bytes=MB, recipe="demo", environment="e1")]
    asked = {"step": "environment", "how": BUILT, "size": None}
    assert ask(times, **asked) == Expectation(90.0, "as last time")
    assert ask(times, recipe="b", environment="e1", **asked) == Expectation(90.0, "as demo there")
    assert ask(times, recipe="b", environment="e2", **asked) is None
    assert ask(times, recipe="b", environment="", **asked) is None


def test_the_first_step_is_that_of_the_recipe_and_of_its_cache():
    times = [took(80.0, step=FIRST_STEP, how="cold"), took(9.0, step=FIRST_STEP, how="warm")]
    assert ask(times, step=FIRST_STEP, how="warm") == Expectation(9.0, "as last time")
    assert ask(times, step=FIRST_STEP, how="cold") == Expectation(80.0, "as last time")
    assert ask(times, step=FIRST_STEP, how="warm", recipe="other") is None


def test_before_a_step_has_shown_how_it_goes_it_is_as_last_time():
    times = [took(0.4), took(30.0, how=STREAMED, bytes=MB)]
    assert latest(times, "code", "pve/200", "demo") == Expectation(0.4, "as last time")
    assert latest(times[1:], "code", "pve/200", "demo") == Expectation(30.0, "as last time")
    assert latest(times, "gpus", "pve/200", "demo") is None


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.builds(
            took,
            st.floats(0, 1e5),
            step=st.sampled_from(["code", "cache", "environment", FIRST_STEP]),
            place=st.sampled_from(["local", "pve/200"]),
            recipe=st.sampled_from(["demo", "other"]),
            environment=st.sampled_from(["", "e1", "e2"]),
            how=st.sampled_from([IN_PLACE, STREAMED, BUILT]),
            bytes=st.integers(0, 1 << 40),
        ),
        max_size=12,
    ),
    st.sampled_from([IN_PLACE, STREAMED, BUILT]),
    st.none() | st.integers(0, 1 << 40),
)
def test_nothing_comes_from_another_place_and_own_times_bound_what_is_expected(times, how, size):
    found = ask(times, how=how, size=size)
    assert found == ask([time for time in times if time.place == "pve/200"], how=how, size=size)
    if found is not None and not found.why.endswith("as before"):
        alike = [t.seconds for t in times if (t.step, t.place, t.how) == ("code", "pve/200", how)]
        assert min(alike) <= found.seconds <= max(alike)


PLAN = LaunchPlan(
    "demo",
    "pve/200",
    (
        PlannedStep("connect", "there"),
        PlannedStep("environment", "e1, in place"),
        PlannedStep("code", "to send", 50 * MB),
    ),
    (),
    environment="e1",
    compiling="warm",
)
TIMES = [
    took(0.8, step="connect"),
    took(2.0, step="environment"),
    took(4.0, how=STREAMED, bytes=40 * MB),
    took(12.0, step=FIRST_STEP, how="warm"),
]


def test_a_plan_with_times_sums_up_what_is_known_of_every_step():
    plan = with_times(PLAN, TIMES)
    assert [step.seconds for step in plan.steps] == [0.8, 2.0, 4.0]
    assert plan.seconds == pytest.approx(6.8) and plan.to_json()["seconds"] == plan.seconds
    assert plan.first_step == Expectation(12.0, "as last time")
    partly = with_times(PLAN, TIMES[1:2])
    assert [step.seconds for step in partly.steps] == [None, 2.0, None]
    assert partly.seconds is None and partly.to_json()["seconds"] is None and partly.first_step is None
    cold = with_times(replace(PLAN, compiling="cold"), TIMES)
    assert cold.first_step is None


def test_nothing_is_expected_of_what_will_not_come_about():
    steps = (PLAN.steps[0], replace(PLAN.steps[1], how="refused"), PLAN.steps[2])
    plan = with_times(replace(PLAN, steps=steps), TIMES)
    assert [step.seconds for step in plan.steps] == [0.8, None, None] and plan.first_step is None


def test_bytes_that_are_not_known_yet_are_not_counted_as_none():
    steps = (replace(PLAN.steps[1], how=BUILT, bytes=3 * MB, more=True), PLAN.steps[2])
    plan = replace(PLAN, steps=steps)
    assert (plan.bytes, plan.more) == (53 * MB, True) and plan.to_json()["more"] is True
    text = shown(with_times(plan, [took(60.0, step="environment", how=BUILT, bytes=900 * MB)]))
    assert "[3.0 MB and more]  (about 1 m 00 s, as last time)" in text and "stream at least 53,000,000 bytes" in text


@pytest.mark.parametrize(
    ("times", "said"),
    [
        (TIMES, "take about 6.8 s; first step about 12 s after the start, as last time"),
        (TIMES[:2], "take about 2.8 s, and what is not known yet: code"),
        ([], "not known yet: nothing like it was launched from here to pve/200"),
    ],
)
def test_the_plan_says_what_it_knows(times, said):
    assert said in shown(with_times(PLAN, times))


def test_the_plan_ends_where_the_launch_would():
    steps = (PLAN.steps[0], replace(PLAN.steps[1], how="refused"), PLAN.steps[2])
    text = shown(with_times(replace(PLAN, steps=steps), TIMES))
    assert "end there: nothing would be started" in text and "code" not in text and "bytes" not in text


def shown(plan):
    from rich.console import Console

    from orchestrator.view.plan import print_plan

    out = io.StringIO()
    print_plan(Console(file=out, width=200), plan)
    return out.getvalue()


def test_a_step_that_goes_on_is_shown_with_what_is_expected_of_it(monkeypatch):
    from rich.console import Console

    from orchestrator.view import follow

    monkeypatch.setattr(follow, "_PLAIN_EVERY", 0.0)
    for terminal in (True, False):
        for expectation, said in [(Expectation(28.0, "as last time"), True), (Expectation(0.4, "as last time"), False)]:
            out = io.StringIO()
            console = Console(file=out, force_terminal=terminal, width=100, color_system=None)
            with follow.LaunchDisplay(console) as display:
                display.expected = lambda step, expectation=expectation: expectation
                display.begin("environment")
                display.progress("environment", "installing", 3, 9, "packages")
                display.end("environment", "built")
            assert ("(about 28 s, as last time)" in out.getvalue()) == said
            assert "installing" in out.getvalue() and out.getvalue().rstrip().endswith("built")


def test_until_its_first_step_a_run_is_shown_with_when_that_is_expected():
    from rich.console import Console

    from orchestrator.run import from_probe
    from orchestrator.view.follow import FollowDisplay

    item = {"run": "demo-1", "phase": "compiling", "state": {"recipe": "demo", "created": 90.0}}
    (waiting,) = from_probe({"time": 100.0, "runs": [item]}, b"", "local")
    (training,) = from_probe({"time": 100.0, "runs": [{**item, "metrics": {"last": {"step": 3}}}]}, b"", "local")
    for terminal in (True, False):
        shown = []
        for status in (waiting, training):
            out = io.StringIO()
            console = Console(file=out, force_terminal=terminal, width=80, color_system=None)
            with FollowDisplay(console, 9, Expectation(118.0, "as last time")) as display:
                display.observed(status)
            shown.append("first step about 1 m 58 s after the start, as last time" in out.getvalue())
        assert shown == [True, False]


class Told:
    """A report that keeps what it was told."""

    def __init__(self):
        self.said = []

    def begin(self, step):
        self.said.append(("begin", step))

    def progress(self, step, what, done, total, unit):
        self.said.append(("progress", step, what, done, total, unit))

    def note(self, step, what):
        self.said.append(("note", step, what))

    def end(self, step, what):
        self.said.append(("end", step, what))


def launching(environment=None):
    return SimpleNamespace(
        place=SimpleNamespace(name="pve/200"), recipe=SimpleNamespace(name="demo"), environment=environment, cache=None
    )


def test_a_launch_leaves_how_long_its_steps_took():
    told, launch = Told(), launching()
    timed = Timed(told)
    timed.launches = [launch]
    timed.begin("connect")
    timed.end("connect", "vm")
    timed.begin("a step that is new")
    timed.note("a step that is new", "so it is")
    timed.end("a step that is new", "done")
    timed.begin("environment")
    launch.environment = SimpleNamespace(id="e1", how="built", bytes_sent=70)
    timed.progress("environment", "sending a.whl", 30, 70, "B")
    timed.progress("environment", "sending b.whl", 70, 70, "B")
    timed.end("environment", "demo e1, built")
    timed.begin("code")
    for done in (40, 90):
        timed.progress("code", "streaming", done, 90, "B")
    timed.end("code", "sent")
    timed.keep()
    timed.keep()  # once each
    assert [(time.step, time.how, time.bytes, time.environment) for time in history.step_times()] == [
        ("code", STREAMED, 90, "e1"),
        ("environment", BUILT, 70, "e1"),
        ("a step that is new", IN_PLACE, 0, ""),
        ("connect", IN_PLACE, 0, ""),
    ]
    assert all(time.place == "pve/200" and time.recipe == "demo" for time in history.step_times())
    assert told.said[0] == ("begin", "connect") and told.said[-1] == ("end", "code", "sent")
    assert ("progress", "environment", "sending b.whl", 70, 70, "B") in told.said


def test_what_goes_on_is_expected_as_it_shows_itself():
    history.add_times([took(60.0, step="environment", how=BUILT, bytes=MB), took(1.5, step="environment")])
    timed = Timed(Told())
    timed.begin("environment")
    assert timed.expected("environment") is None  # of nothing in particular
    timed.launches = [launching()]
    assert timed.expected("environment") == Expectation(1.5, "as last time")
    timed.progress("environment", "digesting", 1, 9, "files")
    assert timed.expected("environment") == Expectation(1.5, "as last time")
    timed.progress("environment", "fetching wheels", 1, 9, "wheels")
    assert timed.expected("environment") == Expectation(60.0, "as last time")


def looked(step, at=None):
    return SimpleNamespace(step=step, step_at=at, started=100.0)


def test_the_first_step_is_timed_only_where_it_was_seen_to_come():
    timed = Timed(Told())
    timed.launches = [launching()]
    timed.first_step(None, looked(7, 130.0))  # it was there before
    timed.first_step(looked(None), looked(None))
    assert history.step_times() == []
    timed.first_step(looked(None), looked(1, 112.5))
    timed.first_step(looked(1, 112.5), looked(2, 113.0))
    assert [(time.step, time.seconds) for time in history.step_times()] == [(FIRST_STEP, 12.5)]
    following = Timed(Told())
    following.launches = [launching()]
    assert following.expected_first_step() == Expectation(12.5, "as last time")


def test_the_ways_a_step_can_go():
    assert way("code", 0, True) == IN_PLACE and way("code", 1, True) == STREAMED
    assert way("environment", 0, True) == BUILT and way("environment", 0, False) == IN_PLACE
