"""A run's own tmux server."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.remote import tmux

from .remote_runs import eventually

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")


@pytest.fixture
def run() -> Iterator[str]:
    name = f"tmux-test-{os.getpid()}"
    yield name
    for suffix in ("", "0"):
        tmux.kill(name + suffix)


def test_a_session_from_start_to_end(run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEAKED", "1")
    monkeypatch.setenv("TMUX_TMPDIR", str(tmp_path))
    program = "pwd; tput cols; env; for i in $(seq 3000); do echo line $i; done; sleep 300"
    assert tmux.start(run, ["sh", "-c", program], str(tmp_path)) is None
    assert os.path.exists(tmux.socket_path(run))  # noqa: PTH110
    screen = eventually(lambda: "line 3000" in (s := tmux.screen(run, history=True)[0] or "") and s.splitlines())
    assert screen[:2] == [str(tmp_path), "200"]
    assert "line 1" in screen  # the history is longer than tmux's own 2000
    assert not any(line.startswith("LEAKED") for line in screen)
    pane = tmux.pane(run)
    assert pane["session"] is True and pane["pane_dead"] is False and pane["pane_pid"] > 1
    tmux.kill(run)
    assert tmux.pane(run)["session"] is False
    assert tmux.screen(run)[0] is None and tmux.screen(run)[1]


def test_a_second_session_is_refused(run: str) -> None:
    assert tmux.start(run, ["sleep", "300"], "/") is None
    why = tmux.start(run, ["sleep", "300"], "/")
    assert why is not None and "duplicate session" in why


def test_a_run_whose_name_begins_like_another(run: str) -> None:
    assert tmux.start(run + "0", ["sleep", "300"], "/") is None
    assert tmux.pane(run)["session"] is False
    tmux.kill(run)
    assert tmux.pane(run + "0")["session"] is True


@pytest.mark.parametrize("attempt", range(6))
def test_a_dead_pane_tells_its_status_or_nothing(run: str, attempt: int) -> None:
    assert tmux.start(run, ["sh", "-c", "echo bye; exit 7"], "/") is None
    pane = eventually(lambda: (p := tmux.pane(run))["pane_dead"] and p)
    assert pane["session"] is True
    assert pane["pane_status"] in (7, None)
    time.sleep(0.02)


def test_no_server_and_no_program(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tmux.pane(run) == {
        "session": False,
        "pane_dead": None,
        "pane_status": None,
        "pane_signal": None,
        "pane_pid": None,
        "error": None,
    }
    tmux.kill(run)
    monkeypatch.setattr(tmux, "program", lambda: None)
    assert tmux.start(run, ["true"], "/") == "tmux is not installed here"


def test_a_stale_socket_is_no_session(run: str) -> None:
    assert tmux.start(run, ["sleep", "300"], "/") is None
    socket = Path(tmux.socket_path(run))
    spare = socket.with_name(socket.name + "-spare")
    socket.rename(spare)
    try:
        socket.touch()
        assert tmux.pane(run)["session"] is False
        socket.unlink()
    finally:
        spare.rename(socket)


def test_a_killed_server_leaves_no_socket(run: str) -> None:
    assert tmux.start(run, ["sleep", "300"], "/") is None
    tmux.kill(run)
    assert not Path(tmux.socket_path(run)).exists()
    Path(tmux.socket_path(run)).touch()
    tmux.kill(run)
    assert not Path(tmux.socket_path(run)).exists()
