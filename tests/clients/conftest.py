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

Client = Callable[[str, list[dict[str, Any]]], list[dict[str, Any]]]


@pytest.fixture(scope="session")
def client(tmp_path_factory: pytest.TempPathFactory) -> Client:
    """client(NAME, cases) runs NAME_client.py in the clients' environment; its answers, one for each case.

    Skips where there is no such environment, and fails where the lab has to run: there nothing may be skipped.
    """

    def run(name: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
        has = PYTHON.exists() and _python(
            ["-c", f"import importlib.util as u, sys; sys.exit(not u.find_spec('{name}'))"]
        )
        if not has or has.returncode:
            text = f"there is no {name} in {PYTHON.parents[1].name}: `./run tests` installs it, on Python 3.11 or newer"
            if os.environ.get("CI") or os.environ.get("ORCH_REQUIRE_LAB") == "1":
                pytest.fail(text)
            pytest.skip(text)
        job = tmp_path_factory.mktemp(name) / "job.json"
        job.write_text(json.dumps(cases))
        done = _python([str(HERE / f"{name}_client.py"), str(job)])
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


def _python(words: list[str]) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
    return subprocess.run([str(PYTHON), *words], env={**env, **offline}, capture_output=True, text=True, timeout=300)
