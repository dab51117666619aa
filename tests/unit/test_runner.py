"""The runner with real processes and a real tmux: how runs begin and end."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from .remote_runs import Client, clean_up

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    yield Client(tmp_path)
    clean_up(tmp_path)


@pytest.mark.parametrize(("code", "phase"), [(0, "finished"), (3, "failed")])
def test_the_exit_status_is_recorded(client: Client, code: int, phase: str) -> None:
    run = client.launch(f"import sys; print('hello'); sys.exit({code})")
    found = client.until(run, "finished", "failed")
    assert found["phase"] == phase
    assert found["state"]["exit"]["code"] == code
    assert found["state"]["exit"]["signal"] is None
    assert Path(client.dir(run).console).read_text() == "hello\n"
