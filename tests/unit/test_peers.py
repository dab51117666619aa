"""The star of runners: one verdict everywhere, whatever is said in which order, and by nobody who lacks the token."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from orchestrator.remote import peers
from orchestrator.remote.lines import Lines, Refused
from orchestrator.remote.peers import Peers
from orchestrator.remote.ranks import RankWatch

from .remote_runs import eventually

PLACES = ["a", "b", "c"]
Star = Callable[..., list[Peers]]


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        found: int = free.getsockname()[1]
    return found


@pytest.fixture
def star(port: int) -> Iterator[Star]:
    """Starts the runners' parts of these places, the first in the middle."""
    started: list[Peers] = []

    def start(*which: str, token: str = "secret") -> list[Peers]:
        made = [Peers(place, PLACES, "127.0.0.1", port, token) for place in which]
        for one in made:
            one.start()
        started.extend(made)
        return made

    yield start
    for one in started:
        one._closing = True
    for one in started:
        one.join(5)
        assert not one.is_alive()


def joined(middle: Peers, *places: str) -> bool:
    return bool(eventually(lambda: middle._joined >= set(places), what="joined"))


def first(one: Peers) -> dict[str, Any]:
    found: dict[str, Any] = eventually(lambda: one.first, what="a verdict")
    return found


def test_what_one_place_tells_all_know(star: Star) -> None:
    a, b, c = star(*PLACES)
    assert joined(a, "b", "c")
    b.tell("failed", "rank 3 at b was killed", rank=3, killed=True)
    for one in (a, b, c):
        assert first(one) == b.verdict() and first(one)["place"] == "b" and first(one)["rank"] == 3


def test_how_far_the_run_is_all_know(star: Star) -> None:
    a, b, c = star(*PLACES)
    c.progress = {"phase": "training", "step": 7}
    for one in (a, b):
        assert eventually(one.heard, what="progress") == c.progress


def test_the_first_end_is_the_earliest_and_a_kill_came_before_the_errors_around_it(star: Star) -> None:
    a, b, c = star(*PLACES)
    assert joined(a, "b", "c")
    now = time.monotonic()
    a.tell("failed", "an error", now)
    b.tell("failed", "an earlier error", now - 0.1)
    c.tell("failed", "a kill", now + 0.1, killed=True)
    assert {first(one)["said"] for one in (a, b, c)} == {"a kill"}


def test_a_place_that_finished_is_not_missed_and_one_that_vanished_is(
    star: Star, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "GONE", 0.5)
    a, b, c = star(*PLACES)
    assert joined(a, "b", "c")
    b.finished()
    b.close()
    time.sleep(1.0)
    assert a.first is None and c.first is None
    c._closing = True  # as when its runner is killed: the connection closes, and nothing was said
    assert (first(a)["kind"], first(a)["place"]) == ("silent", "c")


def test_a_connection_that_stays_open_and_says_nothing(star: Star, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "SILENCE", 1.0)
    a, b = star("a", "b")
    with socket.create_connection(("127.0.0.1", port)) as sock:
        mute = Lines(sock, "secret", first=False, patience=3)
        mute.send({"place": "c"})
        assert joined(a, "b", "c")
        for one in (a, b):
            assert (first(one)["kind"], first(one)["place"]) == ("silent", "c")
            assert "unknown" in first(one)["said"]


def test_a_middle_that_is_gone_is_missed_by_each(star: Star, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "GONE", 0.5)
    a, b, c = star(*PLACES)
    assert joined(a, "b", "c")
    a._closing = True
    for one in (b, c):
        assert (first(one)["kind"], first(one)["place"]) == ("silent", "a")


def test_who_lacks_the_token_is_not_heard(star: Star, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "JOIN", 2.0)
    a, c = star("a", "c")
    assert joined(a, "c")
    (b,) = star("b", token="another")
    b.tell("failed", "a lie")
    assert first(a)["said"].startswith("nothing was heard of b") and first(c) == first(a)


@pytest.mark.parametrize("change", ["token", "text", "order"])
def test_lines_are_bound_to_the_token_their_text_and_their_order(change: str) -> None:
    ours, theirs = socket.socketpair()
    made: list[Lines] = []
    greeting = threading.Thread(target=lambda: made.append(Lines(theirs, "one", first=False, patience=3)))
    greeting.start()
    here = Lines(ours, "another" if change == "token" else "one", first=True, patience=3)
    greeting.join()
    sent = bytearray()
    here._sock = type("Tap", (), {"sendall": lambda _, data: sent.extend(data)})()  # type: ignore[assignment]
    here.send({"n": 1})
    here.send({"n": 2})
    one, two, _ = bytes(sent).split(b"\n")
    lines = {"token": [one], "text": [one.replace(b"1}", b"7}")], "order": [two, one]}[change]
    ours.sendall(b"\n".join(lines) + b"\n")
    with pytest.raises(Refused):
        made[0].receive(1)
    ours.close(), theirs.close()


RANKS = """
import os, subprocess, sys, time
code = "import os, sys, time; time.sleep(float(sys.argv[1])); sys.exit(int(sys.argv[2]))"
def rank(number, seconds, status, **more):
    env = {**os.environ, "RANK": str(number), "TORCHELASTIC_RUN_ID": "x", **more}
    return subprocess.Popen([sys.executable, "-c", code, str(seconds), str(status)], env=env, start_new_session=True)
ranks = [%s]
print(*[one.pid for one in ranks], flush=True)
while True:
    time.sleep(0.1)
    [one.poll() for one in ranks]
"""


@contextlib.contextmanager
def launcher(ranks: str) -> Iterator[tuple[RankWatch, list[int]]]:
    """A stand-in for torchrun that looks at its ranks ten times a second, and a watch over it."""
    with subprocess.Popen([sys.executable, "-c", RANKS % ranks], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        watch = RankWatch(process.pid, lambda: None)
        watch.start()
        try:
            yield watch, pids
        finally:
            process.kill()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def test_the_first_rank_that_fails_is_known_with_its_status() -> None:
    with launcher("rank(0, 60, 0), rank(1, 1.5, 0), rank(2, 2, 3)") as (watch, _):
        found = eventually(lambda: watch.failed, what="a failed rank")
        assert (found["rank"], found["what"], found["killed"]) == (2, "ended with exit 3", False)
    with launcher("rank(0, 60, 0), rank(1, 60, 0)") as (watch, pids):
        eventually(lambda: len(watch._ranks) == 2, what="the ranks")
        os.kill(pids[1], signal.SIGKILL)
        found = eventually(lambda: watch.failed, what="a failed rank")
        assert (found["rank"], found["what"], found["killed"]) == (1, "was killed by signal 9 (SIGKILL)", True)


def test_a_rank_that_is_started_anew_has_not_failed() -> None:
    with launcher("rank(0, 1.5, 3, TORCHELASTIC_MAX_RESTARTS='1'), rank(1, 2, 4)") as (watch, _):
        assert eventually(lambda: watch.failed, what="a failed rank")["rank"] == 1
