"""What a place is, as far as wheels care: machine, system, libc, Python.

Tags and markers are worked out from the facts of the place alone; the interpreter that runs this has no say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from packaging.specifiers import SpecifierSet
from packaging.tags import Tag, compatible_tags, cpython_tags, mac_platforms
from packaging.version import InvalidVersion, Version

from orchestrator.errors import OrchError

# The oldest glibc with a manylinux tag, by machine: 2.5 is manylinux1, which only x86 ever had.
_OLDEST_GLIBC = {"x86_64": 5, "i686": 5}
_LEGACY_GLIBC = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
# The glibc versions that uv has a platform name for.
_UV_GLIBC = (17, 28, *range(31, 41))


class Facts(Protocol):
    """The part of a session's hello that this module reads."""

    @property
    def container(self) -> Mapping[str, Any]: ...


class Wanted(Protocol):
    """The part of an environment's spec that this module reads."""

    @property
    def name(self) -> str: ...

    @property
    def python(self) -> str: ...


@dataclass(frozen=True)
class PythonAtPlace:
    """A Python interpreter that the place has."""

    path: str
    version: str


@dataclass(frozen=True)
class Target:
    """Where wheels are to be installed."""

    machine: str  # as `uname -m` says it: x86_64, aarch64, arm64
    system: str  # Linux or Darwin
    libc: tuple[str, str] | None  # ("glibc", "2.36"), ("musl", "1.2"), or None where it could not be told
    python_version: str  # in full, such as 3.11.2
    python_path: str
    release: str = ""  # the kernel's, which tells a macOS version

    @property
    def python_minor(self) -> tuple[int, int]:
        """(3, 11) for 3.11.2."""
        release = Version(self.python_version).release
        return release[0], release[1]

    @property
    def abi(self) -> str:
        """The ABI tag of a plain build of CPython, such as cp311."""
        return "cp{}{}".format(*self.python_minor)

    def __str__(self) -> str:
        python = ".".join(map(str, self.python_minor))
        if self.system == "Darwin":
            return f"CPython {python} on macOS {self.machine}"
        libc = " ".join(self.libc) if self.libc else "unknown libc"
        return f"CPython {python} on {self.system} {self.machine} ({libc})"


def target_of(facts: Facts, python: PythonAtPlace) -> Target:
    """The target that a place's `python` makes it. Raises OrchError for a system that has no wheels."""
    container = facts.container
    libc = container.get("libc")
    target = Target(
        machine=str(container.get("machine", "")),
        system=str(container.get("system", "")),
        libc=(str(libc[0]), str(libc[1])) if libc else None,
        python_version=python.version,
        python_path=python.path,
        release=str(container.get("kernel", "")),
    )
    platforms(target)
    return target


def choose_python(spec: Wanted, facts: Facts) -> PythonAtPlace:
    """The place's own `python` where it fits the spec, else the newest that fits.

    Raises OrchError where none does, naming what is there.
    """
    wanted = SpecifierSet(spec.python)
    found: list[tuple[Version, PythonAtPlace]] = []
    for entry in (facts.container.get("python"), *(facts.container.get("pythons") or ())):
        try:
            python = PythonAtPlace(str(entry["path"]), str(entry["version"]))
            version = Version(python.version)
        except (TypeError, KeyError, InvalidVersion):
            continue
        found.append((version, python))
    if found and found[0][0] in wanted and facts.container.get("python"):
        return found[0][1]
    fitting = [(version, python) for version, python in found if version in wanted]
    if fitting:
        return max(fitting, key=lambda pair: pair[0])[1]
    there = sorted({f"{python.version} ({python.path})" for _, python in found})
    raise OrchError(
        f"environment {spec.name} needs Python {spec.python}, and the place has "
        f"{', '.join(there) if there else 'none'}: install one that fits there, or put a standalone build of one where "
        "it is found",
        hint="a cpython-…-install_only.tar.gz for the place, into pythons/ beside the lock or in ORCH_CACHE_DIR",
    )


def platforms(target: Target) -> list[str]:
    """Platform tags that fit, best first. Raises OrchError for a system that has no wheels."""
    return list(_platforms(target))


def _platforms(target: Target) -> Iterator[str]:
    machine = target.machine
    if target.system == "Darwin":
        yield from mac_platforms(_macos_version(target.release), machine)
        return
    if target.system != "Linux" or not machine:
        raise OrchError(
            f"no wheels exist for {target.system or 'an unknown system'} on "
            f"{machine or 'an unknown machine'}: the place must be Linux or macOS"
        )
    if target.libc is None:
        raise OrchError(
            "the place's C library could not be told, so no wheel can be chosen for it: "
            "`ldd --version` there should name glibc or musl"
        )
    name, version = target.libc
    major, minor = _two(version)
    if name == "musl":
        for step in range(minor, -1, -1):
            yield f"musllinux_{major}_{step}_{machine}"
    else:
        for step in range(minor, _OLDEST_GLIBC.get(machine, 17) - 1, -1):
            yield f"manylinux_{major}_{step}_{machine}"
            if step in _LEGACY_GLIBC:
                yield f"{_LEGACY_GLIBC[step]}_{machine}"
    yield f"linux_{machine}"


def _two(version: str) -> tuple[int, int]:
    release = (*Version(version).release, 0)
    return release[0], release[1]


def _macos_version(release: str) -> tuple[int, int]:
    """The macOS version of a Darwin kernel: 23.x is 14, 25.x is 26. An unreadable one counts as macOS 11."""
    try:
        darwin = _two(release.split("-")[0])[0]
    except InvalidVersion:
        return 11, 0
    if darwin >= 25:
        return darwin + 1, 0
    return (darwin - 9, 0) if darwin >= 20 else (10, darwin - 4)


def tags(target: Target) -> list[Tag]:
    """Every wheel tag that fits, best first."""
    where = platforms(target)
    minor = target.python_minor
    return [
        *cpython_tags(minor, [target.abi], where),
        *compatible_tags(minor, "cp{}{}".format(*minor), where),
    ]


def markers(target: Target) -> dict[str, str]:
    """The marker environment of the target."""
    darwin = target.system == "Darwin"
    return {
        "implementation_name": "cpython",
        "implementation_version": target.python_version,
        "os_name": "posix",
        "platform_machine": target.machine,
        "platform_python_implementation": "CPython",
        "platform_release": target.release,
        "platform_system": target.system,
        "platform_version": "",
        "python_full_version": target.python_version,
        "python_version": "{}.{}".format(*target.python_minor),
        "sys_platform": "darwin" if darwin else target.system.lower(),
        "extra": "",
    }


def uv_platform(target: Target) -> str:
    """The name that uv's `--python-platform` has for the target."""
    if target.system == "Darwin":
        return f"{'aarch64' if target.machine == 'arm64' else target.machine}-apple-darwin"
    if target.libc and target.libc[0] == "musl":
        return f"{target.machine}-unknown-linux-musl"
    minor = _two(target.libc[1])[1] if target.libc else 17
    known = max((glibc for glibc in _UV_GLIBC if glibc <= minor), default=17)
    return f"{target.machine}-manylinux_2_{known}"
