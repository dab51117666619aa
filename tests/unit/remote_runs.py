"""What the tests of runs share: a root, a call, trainers, and the end of everything they started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from orchestrator.remote import probe, processes, runs, tmux
from orchestrator.remote.rundir import RunDir

LAB_SMI = Path(__file__).parents[1] / "lab" / "shared" / "nvidia-smi"


class Call:
    """What the server gives an operation."""

    def __init__(self, root: str, keep: dict[str, Any], payload: bytes = b"") -> None:
        self.root = root
        self.keep = keep
        self.payload = payload
        self.children: list[subprocess.Popen[bytes]] = []
        self.events: list[dict[str, Any]] = []

    def event(self, data: dict[str, Any]) -> None:
        self.events.append(data)

    def parts(self) -> Iterator[bytes]:
        return iter(())


class Client:
    """One server's life: what it holds goes when it dies."""

    def __init__(self, root: Path, user: str = "ada") -> None:
        self.root = str(root)
        self.user = user
        self.keep: dict[str, Any] = {}
        self.events: list[dict[str, Any]] = []

    def call(self, op: str, payload: bytes = b"", **args: Any) -> Any:
        call = Call(self.root, self.keep, payload)
        table = {**runs.OPS, **probe.OPS}
        try:
            return table[op](args, call)
        finally:
            self.events += call.events

    def claim(self, digest: str = "d1", **more: Any) -> dict[str, Any]:
        args = {"recipe": "demo", "digest": digest, "user": self.user}
        args.update(workstation="desk", place="local")
        answer: dict[str, Any] = self.call("claim", **{**args, **more})
        return answer

    def start(self, run: str, program: str, secrets: dict[str, str] | None = None, **launch: Any) -> Any:
        payload = json.dumps(secrets).encode() if secrets else b""
        files = {"launch.json": json.dumps(launch_of(program, **launch)), "recipe.yaml": "name: demo\n"}
        return self.call("start", payload, run=run, files=files, env="e1", code="c1")

    def launch(self, program: str, digest: str = "d1", **more: Any) -> str:
        run: str = self.claim(digest)["run"]
        self.start(run, program, **more)
        return run

    def look(self, run: str, **more: Any) -> dict[str, Any]:
        found: dict[str, Any] = self.call("probe", runs=[run], **more)[0]["runs"][0]
        return found

    def until(self, run: str, *phases: str, timeout: float = 60) -> dict[str, Any]:
        return eventually(lambda: (r := self.look(run))["phase"] in phases and r, timeout, f"{run} {phases}")

    def dir(self, run: str) -> RunDir:
        return RunDir.of(self.root, run)

    def die(self) -> None:
        """As the kernel does it when the server is killed."""
        for fd in self.keep.values():
            os.close(fd)
        self.keep.clear()

    def events_of(self, run: str) -> list[dict[str, Any]]:
        text = Path(self.dir(run).file("events.jsonl")).read_text()
        return [json.loads(line) for line in text.splitlines()]


def launch_of(program: str, **more: Any) -> dict[str, Any]:
    """A launch.json that runs a Python program given as text."""
    base = {
        "argv": [sys.executable, "-c", program],
        "cwd": "/",
        "env": {"COLOUR": "red"},
        "metrics": True,
        "stop_grace": 1.0,
        "sample_seconds": 0,
        "health": {},
    }
    return {**base, **more}


def eventually(check: Callable[[], Any], timeout: float = 60, what: str = "it") -> Any:
    end = time.monotonic() + timeout
    while True:
        found = check()
        if found:
            return found
        assert time.monotonic() < end, f"not in {timeout} s: {what}"
        time.sleep(0.03)


def gone(pid: int) -> bool:
    """Whether the process has ended; its parent may not have collected it yet."""
    found = processes.stat(pid)
    return found is None or found.state in "ZX"


def clean_up(root: Path) -> None:
    """End what the runs under `root` left, by their own marks."""
    for path in (root / "runs").glob("*/state.json"):
        run = RunDir(str(path.parent))
        state = run.state()[0] or {}
        pane = tmux.pane(run.run)["pane_pid"]
        tmux.kill(run.run)
        processes.send(state.get("runner"), signal.SIGKILL)
        for one in processes.of_run(run.run, run.real):
            os.kill(one.pid, signal.SIGKILL)
        found = processes.stat(pane) if pane else None
        if found is not None:
            processes.kill_each([found], signal.SIGKILL)
