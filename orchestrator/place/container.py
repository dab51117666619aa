"""The way into a container: argv put in front of a command, over whatever connection, and what its errors mean.

`pct` answers with exit codes that also commands use, so only its texts are looked at.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from orchestrator.errors import OrchError, Refused, Unreachable, UsageError


class ContainerModel(Protocol):
    """What is needed to know of a container."""

    @property
    def kind(self) -> str: ...
    @property
    def id(self) -> str: ...


# Hosts whose pct is older than --keep-env (pve-container 5.0.9), as found out by this process.
_without_keep_env: set[str] = set()


def wrap(container: ContainerModel, argv: Sequence[str], host: str) -> list[str]:
    """`argv` run inside. The host's environment stays outside, where the host's pct can do that."""
    if container.kind == "pct":
        # Both are needed: pct looks for options anywhere before the --.
        option = [] if host in _without_keep_env else ["--keep-env", "0"]
        return ["pct", "exec", container.id, *option, "--", *argv]
    if container.kind == "lxc":
        return ["lxc-attach", "-n", container.id, "--clear-env", "--", *argv]
    raise UsageError(f"containers of kind {container.kind!r} are not supported: pct or lxc")


def learn_keep_env(host: str, stderr: str) -> bool:
    """Whether this stderr tells, for the first time, that the host's pct does not know --keep-env: it is then called
    without, and the environment that comes in has to be lived with."""
    if "Unknown option: keep-env" not in stderr or host in _without_keep_env:
        return False
    _without_keep_env.add(host)
    return True


@dataclass(frozen=True)
class Failure:
    """One kind of failure of the way in: how it reads in stderr, and what to tell the user."""

    pattern: str
    error: type[OrchError]
    message: str
    hint: str = ""


# {place} is the place, {host} the host, {id} the container, {1} what the pattern caught. The first match counts.
FAILURES = (
    Failure(
        r"Configuration file '[^']*' does not exist",
        UsageError,
        "{host} has no container {id}: it may be on another node of the cluster, or gone",
        "ssh {host} pct list",
    ),
    Failure(
        r"400 Parameter verification failed[\s\S]*vmid",
        UsageError,
        "{id} is not a VMID: {host} takes whole numbers from 100 on",
    ),
    Failure(
        r"container '[^']*' not running|CT \S+ not running",
        Unreachable,
        "the container {id} on {host} is not running",
        "ssh {host} pct start {id}",
    ),
    Failure(
        r"ipcc_send_rec|[Uu]nable to load access control list|cluster not ready|pmxcfs",
        Unreachable,
        "the cluster file system on {host} is down, so pct cannot look up container {id}",
        "ssh {host} systemctl restart pve-cluster",
    ),
    Failure(
        r"please run as root",
        Unreachable,
        "pct on {host} needs root: log in as root there (ssh: user: root in hosts.yaml)",
    ),
    Failure(
        r"can't lock file '([^']*)' - got timeout",
        Unreachable,
        "the container {id} on {host} is locked by another operation ({1}): try again when that is done",
    ),
    Failure(
        r"CT is locked \(([^)]*)\)",
        Unreachable,
        "the container {id} on {host} is locked ({1}): try again when that is done",
    ),
    Failure(
        r"Device (\S+) does not exist",
        Unreachable,
        "the container {id} on {host} wants the device {1}, which the host lost: is its driver loaded?",
    ),
    Failure(
        r"(?:pct: (?:command )?not found|exec: pct: not found|unknown command:? ['\"]?pct)",
        UsageError,
        "{host} has no pct: it is no Proxmox VE host, so the container cannot be of kind pct",
        "kind: lxc in hosts.yaml, or the right host",
    ),
    Failure(
        r"lxc-attach: (?:command )?not found",
        UsageError,
        "{host} has no lxc-attach: LXC is not installed there",
    ),
    Failure(
        r"lxc-attach: .*(?:[Pp]ermission denied|Operation not permitted|Insuffici?ent privileges)",
        Unreachable,
        "entering the container {id} on {host} needs root: log in as root there (ssh: user: root in hosts.yaml)",
    ),
    Failure(
        r"lxc-attach: .*(?:No such file or directory|does not exist|[Nn]o such container).*",
        UsageError,
        "{host} has no container {id}, or no shell in it",
        "ssh {host} lxc-ls",
    ),
    Failure(
        r"lxc-attach: .*(?:[Ff]ailed to get init pid|Connection refused|Failed to attach|[Nn]ot running|"
        r"Failed to get attach context)",
        Unreachable,
        "the container {id} on {host} is not running",
    ),
    Failure(
        r"(missing command at|400 (?:not enough|too many) arguments|Unknown option: \S+)",
        Unreachable,
        "the pct on {host} does not understand how it is called ({1})",
    ),
)


def classify(stderr: str, place: str, host: str, container: ContainerModel) -> OrchError | None:
    """What stopped the way into a container, or None where its texts do not say. Pure."""
    for failure in FAILURES:
        found = re.search(failure.pattern, stderr)
        if found:
            fill = _filler(place, host, container, found)
            hint = fill(failure.hint)
            if container.kind == "lxc":
                hint = hint.replace("pct start", "lxc-start -n").replace("pct list", "lxc-ls")
            return failure.error(fill(failure.message), hint)
    return None


def _filler(place: str, host: str, container: ContainerModel, found: re.Match[str]) -> Callable[[str], str]:
    first = found.group(1) if found.re.groups else ""
    words = {"{place}": place, "{host}": host, "{id}": container.id, "{1}": first}

    def fill(text: str) -> str:
        return re.sub(r"\{\w+\}", lambda m: words.get(m.group(0), m.group(0)), text)

    return fill


def foreign_shell(stderr: str) -> Refused | None:
    """Whether the host's login shell is one that does not read POSIX quoting."""
    if re.search(r"Unmatched ['\"]|: Undefined variable|fish: |Unknown command: |nu::parser", stderr):
        return Refused(
            "the login shell there does not read POSIX quoting (csh or fish?)",
            "chsh -s /bin/sh, on that host",
        )
    return None
