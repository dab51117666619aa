"""A workstation for tests: a directory of its own, with its own index and wheel store, that calls `orch`."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

# What a shell starts in the background ignores Ctrl-C, and hands that on: tests are for what hears it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

LONG = (
    "test_demo.py",
    "test_ranks.py",
    "test_launch_resumed.py",
    "test_verify.py",
    "test_several_torch.py",
    "test_run.py",
)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take minutes come first: where several go at a time, none of them is left alone at the end."""
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


@dataclass
class Workstation:
    """Where a user sits. `directory` holds hosts.yaml and recipes/; nothing is shared with another one but `cache`."""

    directory: Path
    cache: Path

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "ORCH_STATE_DIR": str(self.directory / ".state"),
            "ORCH_CACHE_DIR": str(self.cache),
            "ORCH_DATA_DIR": str(self.directory / ".data"),
            "ORCH_USER": "tester",
            "COLUMNS": "120",
            **({"PIP_FIND_LINKS": links} if (links := self._links()) else {}),
        }

    def _links(self) -> str:
        given = os.environ.get("PIP_FIND_LINKS", "")
        return f"{self.directory / 'links'} {given}".strip() if (self.directory / "links").exists() else given

    @property
    def program(self) -> list[str]:
        return [sys.executable, "-c", "from orchestrator.cli import main; main()"]

    def start(self, *words: str, **more: Any) -> subprocess.Popen[bytes]:
        """`orch` in the background."""
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        env = {**self.environment, **more.pop("env", {})}
        return subprocess.Popen([*self.program, *words], cwd=self.directory, env=env, **{**streams, **more})

    def orch(
        self, *words: str, code: int | None = 0, timeout: float = 120, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """`orch` to its end; `code` is the exit status that it has to have (None: any)."""
        done = subprocess.run(
            [*self.program, *words],
            cwd=self.directory,
            env={**self.environment, **env},
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
        )
        assert "Traceback" not in done.stderr, done.stderr
        assert code is None or done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def json(self, *words: str, **more: Any) -> dict[str, Any]:
        return json.loads(self.orch(*words, "--json", **more).stdout)

    def runs(self, place: str) -> list[dict[str, Any]]:
        """Every run at a place, the newest first."""
        (report,) = self.json("status", "--all", "--place", place)["places"]
        assert report["reachable"], report["error"]
        return report["runs"]

    def write(self, path: str, content: Any) -> None:
        file = self.directory / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content if isinstance(content, str) else yaml.safe_dump(content))

    def tiny_environment(self, name: str = "tiny") -> None:
        """An environment of one small package, whose wheel lies where `PIP_FIND_LINKS` says."""
        wheel = self.directory / "links" / "tiny-1.0-py3-none-any.whl"
        digest = make_wheel(wheel)
        self.write(f"recipes/envs/{name}/spec.yaml", {"python": ">=3.8", "torch": "2.13.0", "backend": "cpu"})
        self.write(f"recipes/envs/{name}/requirements.in", "tiny==1.0\n")
        self.write(f"recipes/envs/{name}/requirements.lock", f"tiny==1.0 --hash=sha256:{digest}\n")

    def recipe(self, name: str, **keys: Any) -> None:
        self.write(f"recipes/{name}.yaml", keys)


def make_wheel(path: Path) -> str:
    """A wheel of one module, the same bytes each time; its sha256."""
    path.parent.mkdir(parents=True, exist_ok=True)
    info = "tiny-1.0.dist-info"
    files = {
        "tiny.py": "answer = 42\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = []
    for name, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        rows.append(f"{name},sha256={digest},{len(text)}\n")
    files[f"{info}/RECORD"] = "".join(rows) + f"{info}/RECORD,,\n"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(zipfile.ZipInfo(name), text)
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def make_workstation(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Workstation]:
    """Makes workstations; those of one test session share their wheels, as users of one machine do."""
    shared = os.environ.get("ORCH_TEST_CACHE_DIR")
    cache = Path(shared) if shared else tmp_path_factory.getbasetemp() / "wheels"

    def make(name: str) -> Workstation:
        directory = tmp_path / name
        directory.mkdir()
        return Workstation(directory, cache)

    return make
