"""Tests against the real clients of an exported drafter, which live in an environment of their own (`./run tests`)."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
PYTHON = HERE.parents[1] / ".venv-clients/bin/python"
collect_ignore = [] if importlib.util.find_spec("torch") else ["test_clients.py"]

Client = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]  # runs NAME_client.py: one answer for each case


@pytest.fixture(scope="session")
def run_dflash(tmp_path_factory: pytest.TempPathFactory) -> Client:
    return _client("dflash", tmp_path_factory.mktemp("dflash"))


@pytest.fixture(scope="session")
def run_speculators(tmp_path_factory: pytest.TempPathFactory) -> Client:
    return _client("speculators", tmp_path_factory.mktemp("speculators"))


def _client(name: str, folder: Path) -> Client:
    """Skips where the clients' environment lacks it, and fails where the lab has to run: there nothing is skipped."""
    if not PYTHON.exists() or _python(["-c", f"import importlib.metadata as m; m.version('{name}')"]).returncode:
        text = f"there is no {name} in {PYTHON.parents[1].name}: `./run tests` installs it, on Python 3.11 or newer"
        if os.environ.get("CI") or os.environ.get("ORCH_REQUIRE_LAB") == "1":
            pytest.fail(text)
        pytest.skip(text)

    def run(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
        job = folder / "job.json"
        job.write_text(json.dumps(cases))
        done = _python([str(HERE / f"{name}_client.py"), str(job)])
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


def _python(words: list[str]) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
    return subprocess.run([str(PYTHON), *words], env={**env, **offline}, capture_output=True, text=True, timeout=300)
