"""What is known of a host's GPUs, and what a launch wants of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from orchestrator.run import Gpu

# MiB that a GPU may show as used with nobody on it: a driver's own, and that of a context which is just ending.
IDLE = 1024.0


@dataclass(frozen=True)
class Claim:
    """A claim that lives, or of which nobody can say that it does not (`alive` is "unknown").

    `alive`: "held" by a launch that is being prepared, "runs" by a runner. `owner` is the container by its processes'
    cgroup, as `Process.owner`; `since` is Unix time by the host's clock.
    """

    run: str
    place: str
    owner: str
    user: str
    workstation: str
    since: float | None
    uuids: tuple[str, ...]
    alive: str = "runs"


@dataclass(frozen=True)
class Process:
    """A compute process on one GPU. `owner`: the container (a VMID, a name, a short id), "host", or None where that
    is not known; `memory` in MiB; `run` where its environment says that it is one's."""

    pid: int
    uuid: str
    memory: float | None = None
    owner: str | None = None
    user: str | None = None
    run: str | None = None
    command: str = ""


@dataclass(frozen=True)
class Reading:
    """What a host told. `problem`: why its GPUs are not known, "" where they are; `apps_problem`: why it is not known
    which processes are on them. `own` is the owner of the place that asks; `busy`: the lock was not to be had."""

    gpus: tuple[Gpu, ...] = ()
    processes: tuple[Process, ...] = ()
    claims: tuple[Claim, ...] = ()
    own: str = "?"
    time: float | None = None
    problem: str = ""
    apps_problem: str = ""
    lock_problem: str = ""
    busy: bool = False


@dataclass(frozen=True)
class Wanted:
    """What a launch wants: all GPUs of the place, `count` of them, or those that are `named` by index or UUID.

    `at_most`: fewer do, where the place has fewer. `whose`: whose indices are meant, the host's or the place's own.
    """

    all: bool = False
    count: int = 0
    named: tuple[str, ...] = ()
    at_most: bool = False
    whose: Literal["host", "place"] = "host"

    @property
    def none(self) -> bool:
        return not (self.all or self.count or self.named)


@dataclass(frozen=True)
class Holder:
    """Who has a GPU: one of the three. `ghost` is MiB that no visible process holds."""

    claim: Claim | None = None
    process: Process | None = None
    ghost: float | None = None


@dataclass(frozen=True)
class Held:
    """One GPU with all that have it."""

    gpu: Gpu
    holders: tuple[Holder, ...]


@dataclass(frozen=True)
class Chosen:
    """GPUs that are to be claimed. `all`: they are all that the place has; `held`: those that others have too."""

    gpus: tuple[Gpu, ...]
    all: bool = False
    held: tuple[Held, ...] = ()


@dataclass(frozen=True)
class Conflict:
    """GPUs that the launch needs and others have; `free` are those of the place that nobody has."""

    held: tuple[Held, ...]
    free: tuple[Gpu, ...] = ()
    count: int = 0  # how many were wanted, where any would do


@dataclass(frozen=True)
class Claimed:
    """What a launch has: for `launch.json`, provenance and the run's CUDA_VISIBLE_DEVICES."""

    gpus: tuple[Gpu, ...] = ()
    all: bool = False
    by_env: bool = False  # the recipe's own CUDA_VISIBLE_DEVICES says which
    shared: bool = False
    unknown: str = ""  # why nothing could be claimed

    @property
    def visible(self) -> str | None:
        """The value of CUDA_VISIBLE_DEVICES; None where it is left alone."""
        if self.all or self.by_env or not self.gpus:
            return None
        return ",".join(str(gpu.uuid) for gpu in self.gpus)

    def to_json(self) -> Mapping[str, Any]:
        return {
            "uuids": [gpu.uuid for gpu in self.gpus],
            "indices": [gpu.index for gpu in self.gpus],
            "names": [gpu.name for gpu in self.gpus],
            "shared": self.shared,
            "unknown": self.unknown or None,
        }
