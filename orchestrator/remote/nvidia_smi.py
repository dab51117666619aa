"""Asking nvidia-smi without ever waiting for it beyond a bound, and reading what it says, on both sides of
the wire.

A driver fault leaves nvidia-smi in an uninterruptible sleep that not even SIGKILL ends: it is then left
behind. Its errors may be on stdout with any exit code, so the text decides, not the status.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
import time
from typing import Any, Dict, List, Optional, Tuple

from .tmux import search_path

Gpu = Dict[str, Any]

# The name comes last: there are boards with a comma in it.
FIELDS = (
    "index",
    "uuid",
    "memory.used",
    "memory.total",
    "utilization.gpu",
    "temperature.gpu",
    "power.draw",
    "name",
)
KEYS = ("index", "uuid", "memory_used", "memory_total", "utilization", "temperature", "power", "name")
TIMEOUT = 5.0
_DRIVER_PATHS = "/usr/local/nvidia/bin:/usr/lib/wsl/lib:/opt/bin"
_MOST = 1 << 20


class Query:
    """One question under way. `poll` never blocks; once it has answered, `text`, `rc` and `why` hold the
    outcome.

    `text`: stdout (str) or None; `rc`: exit status or None; `why`: None, or one sentence why there is no
    answer.
    """

    def __init__(self, timeout: float = TIMEOUT) -> None:
        self.text: Optional[str] = None
        self.rc: Optional[int] = None
        self.why: Optional[str] = None
        self.done = False
        self._timeout = timeout
        self._end = time.monotonic() + timeout
        self._process: Optional[subprocess.Popen[bytes]] = None
        # a file, not a pipe: nothing to drain, and a process left behind holds nothing of ours up
        self._out = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the outcome is there
        program = shutil.which("nvidia-smi", path=search_path() + ":" + _DRIVER_PATHS)
        if program is None:
            self._finish("nvidia-smi is not here")
            return
        argv = [program, "--query-gpu=" + ",".join(FIELDS), "--format=csv,noheader,nounits"]
        try:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=self._out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as e:
            self._finish("nvidia-smi could not be started: %s" % e.strerror)

    @property
    def pid(self) -> Optional[int]:
        """Of the process that may still be there, also one that was given up; None if there is none."""
        if self._process is None or self._process.poll() is not None:
            return None
        return self._process.pid

    def poll(self) -> bool:
        """Whether the outcome is there. Past its time the process is killed and no longer waited for."""
        if self.done:
            return True
        assert self._process is not None
        rc = self._process.poll()
        if rc is not None:
            self._out.seek(0)
            self.text, self.rc = self._out.read(_MOST).decode("utf-8", "replace"), rc
            self._finish(None)
        elif time.monotonic() >= self._end:
            with contextlib.suppress(OSError):
                self._process.kill()
            self._finish("nvidia-smi gave no answer in %g s" % self._timeout)
        return self.done

    def wait(self) -> None:
        """Until `poll` says yes, within the time-out."""
        while not self.poll():
            time.sleep(0.01)

    def outcome(self) -> Dict[str, Any]:
        """`{"text": str|None, "rc": int|None, "why": str|None}`."""
        return {"text": self.text, "rc": self.rc, "why": self.why}

    def _finish(self, why: Optional[str]) -> None:
        self.why, self.done = why, True
        self._out.close()


def parse(text: str) -> Tuple[List[Gpu], List[str]]:
    """(GPUs, lines that are about no GPU, such as error texts) of the answer to FIELDS in
    csv,noheader,nounits.

    A Gpu has `index` (int), `uuid`, `name` (str), `memory_used`, `memory_total` (MiB, int), `utilization`
    (%, int), `temperature` (°C, int), `power` (W, float), each possibly None, and `why`: {key: what stood
    there instead}. A line that begins as a GPU's but is broken gives a GPU of which nothing is known but its
    index.
    """
    gpus: List[Gpu] = []
    problems: List[str] = []
    for line in text.splitlines():
        if not line.strip():
            continue
        gpu = _gpu(line)
        if gpu is None or any(gpu["index"] == other["index"] for other in gpus):
            problems.append(line.strip())
        else:
            gpus.append(gpu)
    gpus.sort(key=lambda gpu: int(gpu["index"]))
    return gpus, problems


def parse_gpus(text: str) -> List[Gpu]:
    """The GPUs of `parse`."""
    return parse(text)[0]


def explain(outcome: Dict[str, Any]) -> Optional[str]:
    """Why an answer names no GPU at all, in one sentence; None if it names some."""
    if outcome.get("why"):
        return str(outcome["why"])
    gpus, problems = parse(outcome.get("text") or "")
    if gpus:
        return None
    said = " ".join(problems)[:500]
    return "nvidia-smi ended with status %s: %s" % (outcome.get("rc"), said or "it said nothing")


def _gpu(line: str) -> Optional[Gpu]:
    parts = [part.strip() for part in line.split(",", len(FIELDS) - 1)]
    if len(parts) < 2 or not (parts[0].isascii() and parts[0].isdigit()) or len(parts[0]) > 6:
        return None
    gpu: Gpu = dict.fromkeys(KEYS)
    gpu["index"] = int(parts[0])
    why: Dict[str, str] = {}
    gpu["why"] = why
    if len(parts) < len(FIELDS):
        said = ", ".join(parts[1:])[:200]
        for key in KEYS[1:]:
            why[key] = "broken line: " + said
        return gpu
    for key, value in zip(KEYS[1:], parts[1:]):
        if key in ("uuid", "name"):
            gpu[key] = value if value and not _is_excuse(value) else None
        else:
            gpu[key] = _number(key, value)
        if gpu[key] is None:
            why[key] = value.strip("[]") or "nothing"
    return gpu


def _is_excuse(value: str) -> bool:
    """`[N/A]`, `[Not Supported]`, `[Unknown Error]`, `[GPU is lost]`, `N/A` stand where a value should."""
    return (value.startswith("[") and value.endswith("]")) or value in ("N/A", "ERR!")


def _number(key: str, value: str) -> Optional[float]:
    word = value.split(" ", 1)[0]  # a unit may follow in spite of nounits
    try:
        number = float(word)
    except ValueError:
        return None
    lowest = -300 if key == "temperature" else 0
    if not lowest <= number < 1e12:  # NaN too
        return None
    return round(number, 2) if key == "power" else int(number)


def sample_line(at: float, outcome: Dict[str, Any], known: Dict[int, str]) -> Dict[str, Any]:
    """One line of gpu.jsonl.

    `{"at": s, "gpus": [{"index", "memory_used", "utilization", "temperature", "power"}, ...]}`, units as in
    `parse`, None where unknown, then with `"why"`. The first time that a GPU is seen the line also has
    `"devices": [{"index", "uuid", "name", "memory_total"}, ...]`. No answer: `{"at", "error": sentence}`.
    `known` (index -> uuid) is kept by the caller from line to line.
    """
    error = explain(outcome)
    if error is not None:
        return {"at": round(at, 3), "error": error}
    gpus, problems = parse(outcome.get("text") or "")
    line: Dict[str, Any] = {"at": round(at, 3), "gpus": []}
    devices = []
    for gpu in gpus:
        one = {key: gpu[key] for key in ("index", "memory_used", "utilization", "temperature", "power")}
        if gpu["why"]:
            one["why"] = gpu["why"]
        line["gpus"].append(one)
        if gpu["uuid"] is not None and known.get(gpu["index"]) != gpu["uuid"]:
            known[gpu["index"]] = gpu["uuid"]
            devices.append({key: gpu[key] for key in ("index", "uuid", "name", "memory_total")})
    if devices:
        line["devices"] = devices
    if problems:
        line["problems"] = problems[:8]
    return line


def here() -> bool:
    """Whether there is a nvidia-smi to ask."""
    return shutil.which("nvidia-smi", path=search_path() + ":" + _DRIVER_PATHS) is not None
