"""Which environment suits a program at a place: one that is there already, else one of the project's own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from orchestrator.config import Project, list_environments
from orchestrator.doctor.model import Facts
from orchestrator.init.program import Needs
from orchestrator.place.greeting import driver_version

PLAIN, TORCH, DEMO = "plain", "torch", "demo"
_CUDA_13 = 580  # the first driver that runs torch's usual builds, of CUDA 13.0
# Driver -> torch's build for it, and the last torch that has both of these builds in the indexes that were seen.
_OLDER = ((570, "cu128"), (525, "cu126"))
_OLDER_TORCH = "2.11.0"
_USUAL_TORCH = "2.13.0"  # as in the environment `torch`


@dataclass(frozen=True)
class Gpu:
    """Whether a place has NVIDIA GPUs, None unknown, and the major version of their driver."""

    present: bool | None = None
    driver: int | None = None


@dataclass(frozen=True)
class Choice:
    """An environment by name, and why it; `requirements` where it has to be made, with its build of torch."""

    name: str
    why: str
    requirements: tuple[str, ...] = ()
    torch: str = _USUAL_TORCH
    backend: str = "auto"

    @property
    def own(self) -> bool:
        return bool(self.requirements)


def gpu_of(facts: Facts | None) -> Gpu:
    """What the doctor's facts tell of GPUs; as for torch's build, `nvidia-smi` is what counts."""
    if facts is None or facts.hello is None:
        return Gpu()
    if not (facts.hello.get("tools") or {}).get("nvidia-smi"):
        return Gpu(False)
    kernel = driver_version(((facts.here or {}).get("driver") or {}).get("value")) or facts.host.get("driver")
    found = re.match(r"\d+", kernel or "")
    return Gpu(True, int(found[0]) if found else None)


def choose(project: Project, needs: Needs, gpu: Gpu, own_name: str) -> Choice:
    """The first environment that holds all that is needed; where none does, one named `own_name` is to be made."""
    wants = ", ".join(_named(needs.requirements)) or "nothing"
    who = needs.said_by or "it"
    if not needs.requirements:
        why = f"{who} needs no package" if needs.said_by else "no package is known to be needed"
        return Choice(PLAIN, why)
    old = gpu.present and gpu.driver is not None and gpu.driver < _CUDA_13
    for name in _in_order(project):
        # the lock of `demo` is for CPUs, and has hashes of torch's CPU builds, which that of `torch` has not
        if (name == DEMO and gpu.present is not False) or (name == TORCH and (gpu.present is False or old)):
            continue
        if _holds(project, name, needs):
            return Choice(name, f"it has what {who} needs: {wants}")
    torch, backend = _build_for(gpu)
    lines = []
    for line in needs.requirements:
        if _is_torch(line):
            torch, backend, line = _torch_as_asked(line, torch, backend)
        lines.append(line)
    names = _named(needs.requirements)
    if "torch" in names and "numpy" not in names:
        lines.append("numpy  # torch warns where it is missing")
    return Choice(own_name, f"{who} needs {wants}", tuple(lines), torch, backend)


def _is_torch(line: str) -> bool:
    return _named((line,)) == ["torch"]


def _torch_as_asked(line: str, torch: str, backend: str) -> tuple[str, str, str]:
    """spec.yaml's torch and backend, and the requirement: spec and lock have to agree on the version."""
    from packaging.requirements import Requirement

    wanted = Requirement(line)
    exact = [clause.version for clause in wanted.specifier if clause.operator in ("==", "===")]
    if wanted.specifier.contains(torch):
        return torch, backend, f"torch=={torch}"
    if len(exact) == 1 and "*" not in exact[0]:
        return exact[0].partition("+")[0], backend, f"torch=={exact[0].partition('+')[0]}"
    return str(wanted.specifier), "auto", line  # some other version, which the lock will name


def _named(requirements: tuple[str, ...]) -> list[str]:
    return [re.split(r"[\s<>=!~;@\[(]", line, maxsplit=1)[0] for line in requirements]


def _in_order(project: Project) -> list[str]:
    """Environments of the project's own first, then those that come with orch, the small ones first."""
    known = list_environments(project)
    bundled = [name for name in (TORCH, DEMO) if name in known]
    own = [name for name, path in known.items() if path.parent.parent == project.recipe_dirs[0] and name not in bundled]
    return [*(own if project.own_root is not None else []), *bundled]


def _holds(project: Project, name: str, needs: Needs) -> bool:
    """Whether an environment's lock has every requirement, in a version that it allows."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    pinned = _pins(list_environments(project)[name])
    for line in needs.requirements:
        wanted = Requirement(line)
        versions = pinned.get(str(canonicalize_name(wanted.name)), [])
        if wanted.extras or wanted.url or not versions:
            return False
        if not all(wanted.specifier.contains(version, prereleases=True) for version in versions):
            return False
    return True


def _pins(folder: Path) -> Mapping[str, list[str]]:
    try:
        text = (folder / "requirements.lock").read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return {}
    found: dict[str, list[str]] = {}
    for name, version in re.findall(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;\\+]+)", text, re.MULTILINE):
        found.setdefault(name.lower().replace("_", "-"), []).append(version)
    return {} if "#     unlisted: " in text else found


def _build_for(gpu: Gpu) -> tuple[str, str]:
    if gpu.present and gpu.driver is not None and gpu.driver < _CUDA_13:
        return _OLDER_TORCH, next((build for driver, build in _OLDER if gpu.driver >= driver), _OLDER[-1][1])
    return _USUAL_TORCH, "cpu" if gpu.present is False else "auto"
