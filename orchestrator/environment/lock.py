"""requirements.lock: exact versions with the hashes of their files, markers kept, for many targets at once.

`orch env lock NAME` makes it. Comments say what is missing in it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from orchestrator.environment.target import Target, markers
from orchestrator.errors import ConfigError, OrchError

# Part of every id: what is built from the same inputs changes with it.
BUILD_VERSION = 2

# Packages that are needed and not even named: no environment can be built from this lock.
UNLISTED = "#     unlisted: "
# Says that no package is wanted: a lock without pins is taken for a damaged one otherwise.
NOTHING = "# No package is wanted: Python's own library is all that is there."
_MISSING = re.compile(r"^#     (unknown|unlisted): (.+)$", re.MULTILINE)
_HASH = re.compile(r"--hash=(\S+)")
_SHA256 = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True)
class Pin:
    """One distribution that a target needs: its exact version and the sha256 digests its file may have."""

    name: str
    version: str
    hashes: tuple[str, ...]  # hex, sorted

    def __str__(self) -> str:
        return f"{self.name}=={self.version}"


def missing(lock_text: str) -> list[str]:
    """What the lock itself says is missing in it, each a phrase."""
    return [what for _, what in _MISSING.findall(lock_text)]


def unlisted(lock_text: str) -> list[str]:
    """The packages that are needed and that the lock does not name, each a phrase."""
    return [what for kind, what in _MISSING.findall(lock_text) if kind == "unlisted"]


def pins(lock_text: str, target: Target, *, where: str = "requirements.lock") -> list[Pin]:
    """What the lock says the target needs, sorted by name.

    Raises ConfigError naming every line that is no pin, and OrchError where the target can have no torch.
    """
    environment = markers(target)
    found: dict[str, Pin] = {}
    problems: list[str] = []
    for number, line in _logical_lines(lock_text):
        pin, problem = _pin(line, environment)
        if problem:
            problems.append(f"{where}:{number}: {problem}")
        elif pin and pin.name in found:
            problems.append(f"{where}:{number}: {pin.name} is pinned a second time for {target}")
        elif pin:
            found[pin.name] = pin
    if not problems and not found and NOTHING not in lock_text:
        problems.append(f"{where}: nothing is pinned for {target}")
    if problems:
        raise ConfigError(problems, hint="make the lock anew: orch env lock NAME")
    if "torch" in found and target.libc and target.libc[0] == "musl":
        raise OrchError(
            f"torch has no wheels for musl, and the place is {target}: use a container with glibc, such as Debian's"
        )
    return sorted(found.values(), key=lambda pin: pin.name)


def environment_id(wanted: Sequence[Pin], target: Target) -> str:
    """16 hex digits that name the environment of these pins at this target."""
    inputs = {
        "build": BUILD_VERSION,
        "pins": [[pin.name, pin.version, list(pin.hashes)] for pin in wanted],
        "python": target.python_version,
        "platform": [target.system, target.machine, list(target.libc or ())],
    }
    text = json.dumps(inputs, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines with their continuations, without comments, each with the number of its first."""
    start = 0
    parts: list[str] = []
    for number, raw in enumerate(text.splitlines(), 1):
        line = re.sub(r"(^|\s)#.*$", "", raw).rstrip()
        if not parts:
            start = number
        parts.append(line.rstrip("\\"))
        if not line.endswith("\\"):
            joined = " ".join(parts).strip()
            parts = []
            if joined:
                yield start, joined
    if parts:
        yield start, " ".join(parts).strip()


def _pin(line: str, environment: dict[str, str]) -> tuple[Pin | None, str]:
    """The pin of a line (None where its marker says no), or what is wrong with it."""
    if line.startswith("-"):
        return None, f"{line.split()[0]} has no place in a lock: it holds pins and hashes alone"
    try:
        requirement = Requirement(_HASH.split(line)[0].strip())
    except InvalidRequirement as error:
        return None, f"not a requirement: {str(error).splitlines()[0]}"
    exact = [clause for clause in requirement.specifier if clause.operator in ("==", "===")]
    if requirement.url or len(requirement.specifier) != 1 or not exact or exact[0].version.endswith("*"):
        return None, f"{requirement.name} is not pinned to one version (name==version)"
    digests = _HASH.findall(line)
    odd = [digest for digest in digests if not _SHA256.fullmatch(digest)]
    if odd:
        return None, f"{requirement.name} has a hash that is not sha256: {odd[0][:40]}"
    if requirement.marker and not requirement.marker.evaluate(environment):
        return None, ""
    name = str(canonicalize_name(requirement.name))
    return Pin(name, exact[0].version, tuple(sorted(d.partition(":")[2] for d in digests))), ""
