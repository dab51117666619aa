"""torch's builds that the usual index does not have: for the CPU, and for another CUDA.

The usual index has gigabytes of one CUDA for Linux, of no use without a GPU.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from packaging.version import Version

from orchestrator.environment.lock import Pin
from orchestrator.environment.pip_download import NoWheel, WrongHash, download
from orchestrator.environment.pip_settings import pip_settings, uv_environment, uv_flags
from orchestrator.environment.progress import Progress
from orchestrator.environment.pylock import NamedWheel, read_pylock
from orchestrator.environment.store import Wheel, WheelStore, fits
from orchestrator.environment.target import Facts, Target, uv_platform
from orchestrator.environment.uv_tool import workstation_uv
from orchestrator.errors import OrchError

_TIMEOUT = 90.0  # seconds for uv to name one wheel
_BUILD = re.compile(r"cpu|cu\d{3}")
_CUDA_ONLY = re.compile(r"(nvidia|cuda|triton)(-|$)")
_UNREACHABLE = re.compile(r"error sending request|dns error|Failed to fetch|client error|timed out", re.IGNORECASE)


_INSTEAD = ("another build", "a CUDA build")


class Backend(Protocol):
    """The part of an environment's spec that this module reads."""

    @property
    def backend(self) -> str: ...


@dataclass(frozen=True)
class Named:
    """What uv answered: a wheel, or why there is none."""

    wheel: NamedWheel | None
    unreachable: bool = False


def unhashed(what: Sequence[str]) -> OrchError:
    """Why files that the lock has no hash of are not taken."""
    return OrchError(
        f"requirements.lock has no hash for {', '.join(what)}: what is fetched could not be checked",
        hint="orch env lock NAME, where an index that has it can be reached; or orch env build NAME PLACE "
        "--allow-unhashed",
    )


def is_cuda_only(name: str) -> bool:
    """Whether a distribution is of use to CUDA builds of torch alone."""
    return _CUDA_ONLY.match(name) is not None


def wants_cpu(spec: Backend, facts: Facts) -> bool:
    """Whether torch's CPU build is wanted: by name, or by `auto` where the place shows no NVIDIA GPU."""
    return spec.backend == "cpu" or (
        spec.backend == "auto" and not (facts.container.get("tools") or {}).get("nvidia-smi")
    )


def cpu_pins(wanted: Sequence[Pin], target: Target) -> list[Pin]:
    """The pins with torch's CPU build (macOS: the plain wheel is it), and without what only CUDA needs."""
    kept = [pin for pin in wanted if not is_cuda_only(pin.name)]
    if target.system != "Linux":
        return kept
    return [
        replace(pin, version=f"{pin.version}+cpu", hashes=())
        if pin.name == "torch" and Version(pin.version).local is None
        else pin
        for pin in kept
    ]


def build_of(pin: Pin) -> str | None:
    """The build of torch that a pin is for, such as cpu or cu128, where the usual index does not have it."""
    local = Version(pin.version).local or ""
    return local if pin.name == "torch" and _BUILD.fullmatch(local) else None


def fetch_build(
    pin: Pin, target: Target, store: WheelStore, progress: Progress, *, stated_will_do: bool = True
) -> Wheel:
    """Brings the wheel of one of torch's builds into the store.

    By the lock's hashes from where pip looks, else from the address that an index states, and by its hash where
    `stated_will_do`. Raises OrchError where neither works; another build is never taken in its place.
    """
    build = build_of(pin)
    of = "CPU builds" if build == "cpu" else f"{build} builds"
    with store.workspace() as folder:
        if pin.hashes:
            line = " ".join([str(pin), *(f"--hash=sha256:{digest}" for digest in pin.hashes)])
            try:
                return store.add(download([line], target, folder, progress)[0])
            except (NoWheel, WrongHash):
                pass  # the lock knows other platforms' builds, or pip knows no index that has one
        progress(f"looking for torch's {build} build", 0, 1, "wheels")
        settings = pip_settings()
        unreachable = False
        for backend in (False, True):
            answer = name_wheel(pin.version, target, settings, backend=backend, files_too=False)
            if answer.wheel:
                break
            unreachable = unreachable or answer.unreachable
        else:
            raise OrchError(
                f"torch {pin.version} for {target} is not to be had: "
                + (f"the index of torch's {of} cannot be reached" if unreachable else "no index has it")
                + f", pip's settings name no source that has it, and {_INSTEAD[build == 'cpu']} is not taken for it",
                hint="put the wheel's folder in pip's find-links and its hash in the lock, or use a network",
            )
        wheel = answer.wheel
        stated = wheel.sha256 not in pin.hashes
        if stated and not stated_will_do:
            raise unhashed([f"{pin} for {target}"])
        again = folder / "named"
        again.mkdir()
        line = f"torch @ {wheel.url.split('#')[0]} --hash=sha256:{wheel.sha256}"
        return store.add(download([line], target, again, progress)[0], origin="index" if stated else "lock")


def name_wheel(version: str, target: Target, settings: Mapping[str, str], *, backend: bool, files_too: bool) -> Named:
    """What uv says of torch's wheel for a target.

    It looks where pip looks, or (`backend`) on the index of such builds that it knows by itself. A file in a
    folder has no index to vouch for its hash: it counts only with `files_too`.
    """
    argv = [
        workstation_uv(),
        "pip",
        "compile",
        "--quiet",
        "--no-deps",
        "--no-header",
        "--format",
        "pylock.toml",
    ]
    argv += [
        "--python-version",
        ".".join(map(str, target.python_minor)),
        "--python-platform",
        uv_platform(target),
    ]
    argv += ["--only-binary", ":all:", *uv_flags(settings)]
    if backend:
        argv += ["--torch-backend", Version(version).local or "cpu"]
    with tempfile.TemporaryDirectory(prefix="orch-torch-") as folder:
        wanted = Path(folder) / "torch.in"
        wanted.write_text(f"torch=={version}\n")
        try:
            answer = subprocess.run(
                [*argv, str(wanted)],
                cwd=folder,
                env=uv_environment(settings),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Named(None, unreachable=True)
    if answer.returncode:
        return Named(None, unreachable=_UNREACHABLE.search(answer.stderr) is not None)
    for wheel in read_pylock(answer.stdout):
        if wheel.name == "torch" and fits(wheel.filename, target) and (files_too or not wheel.on_disk):
            return Named(wheel)
    return Named(None)
