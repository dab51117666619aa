"""The first words with a place: the scripts that are run there, and the lines they answer with before the frames."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

from orchestrator.errors import ConnectionLost, OrchError, Unreachable, UsageError
from orchestrator.place import container_config
from orchestrator.place.connection import Tail
from orchestrator.place.container import kind_of, typed, wrap
from orchestrator.place.failures import classify, foreign_shell
from orchestrator.remote import zipapp

if TYPE_CHECKING:
    from orchestrator.config.models import Place

# Bytes without a line of ours: more than any banner.
NOISE = 4 << 20
# Bytes of such lines that are remembered for messages.
NOISE_KEPT = 4096


class CannotServe(OrchError):
    """The place was entered and has no Python (`lacks` is "python") or no room for the programs ("root")."""

    def __init__(self, lacks: str, message: str, hint: str) -> None:
        super().__init__(message, hint)
        self.lacks = lacks


@functools.lru_cache(maxsize=4)
def script(name: str) -> str:
    """A constant shell script of the remote programs, by its stem."""
    return (resources.files("orchestrator.remote") / f"{name}.sh").read_text("ascii")


def command(place: Place, nonce: str, digest: str, size: int) -> list[str]:
    """The argv for the host: host.sh, then the way into the container, then enter.sh. Values go by position only."""
    enter = ["sh", "-c", script("enter"), "orch-enter", nonce, digest, str(size), place.root or ""]
    enter.append(place.host.python or "")
    return on_host(place, nonce, wrap(place, enter))


def on_host(place: Place, nonce: str, then: Sequence[str]) -> list[str]:
    """The argv for the host: host.sh, which becomes `then`."""
    container = place.container
    kind, name = (container.kind, container.id) if container is not None else ("none", "none")
    sudo = "sudo" if place.host.sudo else "-"
    return ["sh", "-c", script("host"), "orch-host", nonce, kind, name, sudo, "--", *then]


class Greeting:
    """Reads lines behind the nonce and ignores all others, until the server takes over."""

    def __init__(self, nonce: str) -> None:
        self._mark = nonce.encode("ascii") + b" "
        self._buffer = bytearray()
        self.facts: dict[str, list[str]] = {}
        self.lines = 0
        self.serving = False
        self.sent = False
        # Of lines that are not ours, the last: docker tells on stdout why it did not start a command.
        self.noise = Tail(NOISE_KEPT)
        self.rest = b""

    def feed(self, data: bytes) -> None:
        """Takes what came; once `serving`, `rest` is what belongs to the server. Raises ConnectionLost on a flood."""
        self._buffer += data
        while not self.serving:
            line, newline, rest = self._buffer.partition(b"\n")
            if not newline:
                if len(self._buffer) > NOISE:
                    raise ConnectionLost("the place floods the channel with something else than its answer")
                return
            self._buffer = rest
            if line.startswith(self._mark):
                self._take(line[len(self._mark) :].decode("utf-8", "replace").rstrip("\r"))
            elif line:
                self.noise.add(bytes(line) + b"\n")
        self.rest = bytes(self._buffer)

    def _take(self, line: str) -> None:
        self.lines += 1
        key, _, value = line.partition(" ")
        if key == "serve":
            self.serving = True
        self.facts.setdefault(key, []).append(value)

    def first(self, key: str) -> str | None:
        """The first value of a key."""
        return self.facts.get(key, [None])[0]

    def take_need(self) -> bool:
        """Whether the programs are asked for; true once."""
        asked = "need" in self.facts and not self.sent
        self.sent = self.sent or asked
        return asked

    @property
    def error(self) -> str | None:
        return self.first("error")

    @property
    def no_python(self) -> bool:
        return "nopython" in self.facts

    @property
    def entered(self) -> bool:
        """Whether the place itself has spoken, not only its host."""
        return "enter.root" in self.facts

    def host_facts(self) -> dict[str, Any]:
        """What the host said, each fact null where it is not known there."""
        config = self._config()
        uptime, time = self.first("host.uptime"), self.first("host.time")
        return {
            "hostname": self.first("host.hostname"),
            "kernel": self.first("host.kernel"),
            "boot_id": self.first("host.boot_id"),
            "uptime": _number((uptime or "").partition(" ")[0]),
            "time": _number(time),
            "driver": driver_version(self.first("host.driver")),
            "state": self.first("host.state"),
            "config": config,
            "config_digest": config_digest(config) if config is not None else None,
            "kernel_log": self.facts.get("host.kernel_log", []),
            "gpu_processes": self._gpu_processes(),
        }

    def _config(self) -> list[str] | None:
        """The container's configuration, a line each; null where the host does not tell."""
        inspected = self.first("host.inspect")
        if inspected is not None:
            return container_config.of_engine(inspected)
        lines = self.facts.get("host.config")
        return container_config.of_incus(lines) if lines is not None and "host.incus" in self.facts else lines

    def _gpu_processes(self) -> list[dict[str, Any]] | None:
        """Processes on the host's GPUs, by the host's pids; null where its nvidia-smi does not say."""
        if "host.gpus" not in self.facts:
            return None
        found = []
        for text in self.facts.get("host.gpu_process", []):
            pid, _, rest = text.partition(" ")
            owner, _, command = rest.partition(" ")
            found.append({"pid": int(pid), "container": None if owner == "host" else owner, "command": command})
        return found


def _number(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:
        return None


def driver_version(line: str | None) -> str | None:
    """The version in the first line of /proc/driver/nvidia/version."""
    found = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", line or "")
    return found.group(0) if found else None


def config_digest(lines: list[str]) -> str:
    """sha256 of a container's configuration; notes, and the lock of a passing operation, do not count."""
    counted = [line for line in lines if line and not line.startswith(("#", "lock:"))]
    return hashlib.sha256("\n".join(counted).encode("utf-8", "replace")).hexdigest()


def silent(place: Place, greet: Greeting, seconds: float) -> Unreachable:
    """Nothing more came: who is it that hangs?"""
    if not greet.lines:
        return ConnectionLost(f"{place.host.name} accepted the command and said nothing for {seconds:.0f} s")
    if not greet.entered and place.container is not None:
        kind = kind_of(place.container)
        may = {
            "pct": "the container may be frozen by a backup, or the cluster file system may hang",
            "lxc": "the container may be frozen",
        }.get(place.container.kind, f"the container may be frozen, or {kind.program} may hang")
        return Unreachable(
            f"{kind.enter} {place.container.id} on {place.host.name} gave no answer for {seconds:.0f} s: {may}",
            typed(place.host, kind.look, place.container.id),
        )
    return ConnectionLost(f"{place.name} stopped answering for {seconds:.0f} s while its server started")


def ended(place: Place, greet: Greeting, status: int | None, stderr: str) -> OrchError:
    """The command ended before the server said hello: why?"""
    if not greet.lines:
        error = foreign_shell(stderr)
        if error is not None:
            return error
    if greet.lines and not greet.entered and place.container is not None:
        if "host.missing" in greet.facts:
            return UsageError(
                f"{place.host.name} has no container {place.container.id}",
                typed(place.host, kind_of(place.container).listing),
            )
        known = classify(f"{stderr}\n{greet.noise.get().decode('utf-8', 'replace')}", place)
        if known is not None:
            return known
    words = stderr.strip().splitlines()
    why = words[-1].strip()[:300] if words else "no reason given"
    if status is None:
        return ConnectionLost(f"the connection to {place.name} was lost at the start ({why})")
    where = place.name if greet.entered or place.container is None else f"the way into {place.name}"
    return Unreachable(f"{where} ended with status {status} before it answered: {why}")


def failed(place: Place, greet: Greeting) -> CannotServe:
    """The place itself says why it cannot serve."""
    if greet.error:
        return CannotServe(
            "root",
            f"{place.name}: {greet.error}",
            "free some space, or set root: in hosts.yaml to a folder that can be written",
        )
    given, seen = greet.first("python.given"), (greet.first("python.seen") or "").split()
    managers = {
        "apt-get": "apt-get install -y python3",
        "dnf": "dnf install -y python3",
        "apk": "apk add python3",
        "zypper": "zypper install -y python3",
        "pacman": "pacman -S python",
    }
    install = next((managers[m] for m in greet.facts.get("enter.manager", []) if m in managers), "")
    what = f", python: {given} included" if given else ""
    found = f" (found {', '.join(dict.fromkeys(seen))})" if seen else ""
    system = (greet.first("enter.system") or "").strip('"')
    return CannotServe(
        "python",
        f"there is no Python ≥ 3.8 in {place.name}{found}{what}" + (f"; it runs {system}" if system else ""),
        (f"install one there: {install}" if install else "install one there") + ", or set python: in hosts.yaml",
    )


def explain(place: Place, line: str, size: int, digest: str) -> list[str]:
    """The lines for --explain."""
    host = place.host.ssh.host if place.host.ssh is not None else "this machine"
    container = place.container
    calls, tool = (0, "pct") if container is None else (1, kind_of(container).program)
    connections = int(place.host.ssh is not None)
    return [
        f"connection: {host}",
        f"command: {line}",
        f"stdin: {zipapp.name(digest)} ({size} bytes), only where it is missing there; then requests",
        f"cost: {_count(connections, 'connection')}, {_count(calls, f'{tool} call')}, 1 round trip for each request",
    ]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
