"""Makes an environment's requirements.lock from its requirements.in, by uv and the user's pip configuration.

The lock is universal: one text for every Python of the spec, on Linux and macOS. It holds hashes and no
address.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from orchestrator.environment.lock import NOTHING, UNLISTED, missing
from orchestrator.environment.pip_settings import pip_settings, uv_environment, uv_flags
from orchestrator.environment.progress import Progress, silent
from orchestrator.environment.pylock import NamedWheel, read_pylock
from orchestrator.environment.store import fits
from orchestrator.environment.target import Target, uv_platform
from orchestrator.environment.torch_cpu import is_cuda_only, name_wheel
from orchestrator.environment.uv_tool import workstation_uv
from orchestrator.errors import OrchError, UsageError

_PYTHONS = tuple(f"3.{minor}" for minor in range(10, 15))
_LINUX = (("x86_64", "2.28"), ("aarch64", "2.28"))
_TIMEOUT = 600.0  # seconds that one resolution may take
_KNOWN = "#     known: "
_UNKNOWN = "#     unknown: "
_UNLISTED = UNLISTED


@dataclass(frozen=True)
class Locked:
    """A lock that was written."""

    path: Path
    distributions: int
    missing: tuple[str, ...]  # what it has no hash of, or does not list, each a phrase


def write(directory: Path, progress: Progress = silent) -> Locked:
    """Writes `directory`'s requirements.lock by one rename. Raises UsageError, OrchError."""
    text = lock(directory, progress)
    path = directory / "requirements.lock"
    beside = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    beside.write_text(text)
    beside.replace(path)
    return Locked(path, len(_names(text)), tuple(missing(text)))


def lock(directory: Path, progress: Progress = silent) -> str:
    """The text of the lock that `directory`'s requirements.in and spec.yaml ask for.

    What the lock had before is kept where fewer indexes are in reach now. Raises UsageError for what is wrong with
    those files, OrchError where uv finds no solution.
    """
    spec = _spec(directory)
    given = _requirements(directory / "requirements.in")
    torch = next((r for r in given if canonicalize_name(r.name) == "torch"), None)
    settings = pip_settings()
    environment, flags = uv_environment(settings), uv_flags(settings)
    pythons = [python for python in _PYTHONS if python in SpecifierSet(spec["python"])]
    if not pythons:
        raise UsageError(f"{directory / 'spec.yaml'}: python {spec['python']} fits none of {', '.join(_PYTHONS)}")
    backend = spec["backend"] if torch is not None else "auto"
    version = Version(spec["torch"]).public if backend != "auto" else spec["torch"]
    # CUDA builds are for Linux alone.
    systems = ", ".join(f"\"sys_platform == '{s}'\"" for s in ("linux", "darwin")[: 1 if backend[:2] == "cu" else 2])
    with tempfile.TemporaryDirectory(prefix="orch-lock-") as folder:
        work = Path(folder)
        # A project that needs nothing: uv takes the platforms to resolve for, and the range of Pythons,
        # from it.
        (work / "pyproject.toml").write_text(
            '[project]\nname = "lock"\nversion = "0"\n'
            f'requires-python = ">={pythons[0]},<3.{_after(pythons)}"\n'
            f"[tool.uv]\nenvironments = [{systems}]\n"
        )
        # uv's configuration is read from this folder alone.
        environment.pop("UV_NO_CONFIG", None)
        _exclude(work, set())
        others = [str(r) for r in given if backend == "auto" or r is not torch]
        if backend.startswith("cu"):
            progress(f"asking for torch {version}+{backend}", 0, None, "s")
            (work / "requirements.in").write_text("\n".join([*others, f"torch=={version}+{backend}"]) + "\n")
            with contextlib.suppress(OrchError):
                text = _compile(work, pythons[0], environment, [*flags, "--torch-backend", backend], "requirements")
                return _head(directory, []) + text
        # `===` takes the index's plain build, whose metadata knows every platform; other builds are added below.
        lines = others if backend == "auto" else [*others, f"torch==={version}"]
        (work / "requirements.in").write_text("\n".join(lines) + "\n")
        progress("resolving", 0, None, "s")
        environment = _sufficient(work, pythons[0], environment, flags)
        text = _resolved(work, pythons[0], environment, flags, backend)
        notes: list[str] = [] if given else [NOTHING]
        if backend == "cpu":
            listed = read_pylock(_compile(work, pythons[0], environment, flags, "pylock.toml"))
            plain = [wheel for wheel in listed if wheel.name == "torch" and "-macosx_" in wheel.filename]
            builds = _cpu_builds(version, pythons, settings, _known(directory / "requirements.lock"), progress)
            text = _without(text, "torch")
            for full, marker, wheels in (
                (version, "sys_platform == 'darwin'", plain),
                (f"{version}+cpu", "sys_platform == 'linux'", list(builds.values())),
            ):
                text = _insert(text, f"torch=={full} ; {marker}", wheels)
            notes = _cpu_notes(version, pythons, builds)
        elif backend.startswith("cu"):
            text = _insert(_without(text, "torch"), f"torch=={version}+{backend} ; sys_platform == 'linux'", [])
            notes = [f"# torch {version}+{backend}: no index that could be reached from where this was made has it"]
            notes.append(f"{_UNKNOWN}torch {version}+{backend}")
            notes.append(f"{_UNLISTED}the CUDA libraries that torch {version}+{backend} requires")
            notes.append("# The command above adds both where such an index can be reached.")
    return _head(directory, notes) + text


def _head(directory: Path, notes: Sequence[str]) -> str:
    head = [
        "# Exact versions and file hashes for every platform and Python of spec.yaml. Do not edit: made by",
        f"#     orch env lock {directory.resolve().name}",
        *notes,
    ]
    return "\n".join(head) + "\n"


def _resolved(work: Path, python: str, environment: Mapping[str, str], flags: Sequence[str], backend: str) -> str:
    """What uv resolves, without the CUDA libraries of a build of torch that is not the one that is wanted."""
    excluded: set[str] = set()
    while True:
        _exclude(work, excluded)
        text = _compile(work, python, environment, flags, "requirements")
        cuda = {name for name in _names(text) if is_cuda_only(name)} if backend != "auto" else set()
        if backend.startswith("cu"):
            cuda.discard("triton")  # the same for every CUDA
        if cuda <= excluded:
            return text
        excluded |= cuda


def _spec(directory: Path) -> dict[str, str]:
    path = directory / "spec.yaml"
    try:
        data = yaml.safe_load(path.read_text())
        return {key: str(data[key]) for key in ("python", "torch", "backend")}
    except FileNotFoundError:
        raise UsageError(f"{path} is not there") from None
    except (yaml.YAMLError, KeyError, TypeError) as error:
        raise UsageError(f"{path}: it must give python, torch and backend ({error})") from None


def _requirements(path: Path) -> list[Requirement]:
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        raise UsageError(f"{path} is not there") from None
    found, problems = [], []
    for number, raw in enumerate(lines, 1):
        line = re.sub(r"(^|\s)#.*$", "", raw).strip()
        try:
            if line:
                found.append(Requirement(line))
        except InvalidRequirement as error:
            problems.append(f"{path}:{number}: {str(error).splitlines()[0]}")
    if problems:
        raise UsageError("\n".join(problems))
    return found


def _after(pythons: Sequence[str]) -> int:
    return int(pythons[-1].split(".")[1]) + 1


def _compile(work: Path, python: str, environment: Mapping[str, str], flags: Sequence[str], form: str) -> str:
    argv = [
        workstation_uv(),
        "pip",
        "compile",
        "--quiet",
        "--universal",
        "--no-header",
        "--no-annotate",
        *flags,
    ]
    argv += ["--python-version", python, "--excludes", "excluded.txt", "--format"]
    argv += ["requirements.txt", "--generate-hashes"] if form == "requirements" else [form]
    try:
        answer = subprocess.run(
            [*argv, "requirements.in"],
            cwd=work,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise OrchError(f"uv resolved nothing within {_TIMEOUT:.0f} s") from None
    if answer.returncode:
        raise OrchError(f"uv finds no solution: {' '.join(answer.stderr.split())[:2000]}")
    return answer.stdout


def _exclude(work: Path, names: set[str]) -> None:
    (work / "excluded.txt").write_text("".join(f"{name}\n" for name in sorted(names)))


def _sufficient(work: Path, python: str, environment: dict[str, str], flags: Sequence[str]) -> dict[str, str]:
    """The environment with the fewest of the user's sources that have everything.

    Extra indexes and folders often hold one platform's file of a release, and uv takes a release's files from
    one source alone: the lock would then lack all other platforms.
    """
    extra = ("UV_EXTRA_INDEX_URL", "UV_FIND_LINKS")
    _exclude(work, set())
    fewer = {name: value for name, value in environment.items() if name not in extra}
    if fewer == environment:
        return environment
    try:
        _compile(work, python, fewer, flags, "requirements")
    except OrchError:
        return environment
    return fewer


def _names(text: str) -> set[str]:
    return {m.group(1) for line in text.splitlines() if (m := re.match(r"([a-z0-9-]+)==", line))}


def _without(text: str, name: str) -> str:
    """The lock without the entries of one distribution."""
    kept, drop = [], False
    for line in text.splitlines():
        if not line.startswith((" ", "\t")):
            drop = line.startswith(f"{name}==")
        if not drop:
            kept.append(line)
    return "\n".join(kept) + "\n"


def _insert(text: str, head: str, wheels: Sequence[NamedWheel]) -> str:
    """The lock with one more entry, in its place by name."""
    entry = " \\\n".join([head, *(f"    --hash=sha256:{digest}" for digest in sorted({w.sha256 for w in wheels}))])
    lines = text.splitlines()
    for index, line in enumerate(lines):
        if not line.startswith((" ", "\t", "#")) and line > head:
            return "\n".join([*lines[:index], entry, *lines[index:]]) + "\n"
    return "\n".join([*lines, entry]) + "\n"


def _known(path: Path) -> list[NamedWheel]:
    """torch's CPU builds that the lock had before: none of them is lost where fewer sources are in reach."""
    if not path.exists():
        return []
    found = re.findall(rf"^{_KNOWN}(torch-([^-]+)-\S+\.whl) ([0-9a-f]{{64}})$", path.read_text(), re.MULTILINE)
    return [NamedWheel("torch", version, "", filename, digest) for filename, version, digest in found]


def _cpu_builds(
    version: str,
    pythons: Sequence[str],
    settings: Mapping[str, str],
    known: Sequence[NamedWheel],
    progress: Progress,
) -> dict[tuple[str, str], NamedWheel]:
    """torch's CPU wheels that can be found from here or are known from before, by Python and machine."""
    builds: dict[tuple[str, str], NamedWheel] = {}
    reachable = True
    for python in pythons:
        for machine, glibc in _LINUX:
            target = Target(machine, "Linux", ("glibc", glibc), f"{python}.0", "")
            for wheel in known:
                if wheel.version == f"{version}+cpu" and fits(wheel.filename, target):
                    builds[python, machine] = wheel
            progress(f"torch {version}+cpu for {python}, {uv_platform(target)}", 0, None, "s")
            for backend in (False, True) if reachable else (False,):
                answer = name_wheel(f"{version}+cpu", target, settings, backend=backend, files_too=True)
                if answer.wheel:
                    builds[python, machine] = answer.wheel
                    break
                reachable = reachable and not (backend and answer.unreachable)  # asked once, not again
    return builds


def _cpu_notes(version: str, pythons: Sequence[str], builds: Mapping[tuple[str, str], NamedWheel]) -> list[str]:
    wanted = [(python, machine) for python in pythons for machine, _ in _LINUX]
    missing = [pair for pair in wanted if pair not in builds]
    notes = [f"# torch {version}+cpu: hashes of {len(builds)} of {len(wanted)} Linux builds are here"]
    notes += [f"{_KNOWN}{wheel.filename} {wheel.sha256}" for wheel in builds.values()]
    if missing:
        lacking: dict[str, list[str]] = {}
        for python, machine in missing:
            lacking.setdefault(machine, []).append(python)
        what = f"torch {version}+cpu for CPython"
        notes += [f"{_UNKNOWN}{what} {', '.join(p)} on {machine}" for machine, p in lacking.items()]
        notes.append("# No index that could be reached from where this was made has the others. The command above adds")
        notes.append("# them where one is.")
    return notes
