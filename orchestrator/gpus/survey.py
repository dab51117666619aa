"""The GPUs of hosts, all at once: who has which."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from orchestrator.config import Place
from orchestrator.errors import OrchError
from orchestrator.gpus import read
from orchestrator.gpus.decide import holders
from orchestrator.gpus.model import Holder, Reading
from orchestrator.place.session import Connect, connect, open_session
from orchestrator.run import Gpu


@dataclass(frozen=True)
class HostReport:
    """What one host answered. With `error` nothing is known of it; `reading.problem` says why its GPUs are not."""

    host: str
    reading: Reading = field(default_factory=Reading)
    error: OrchError | None = None

    def to_json(self) -> dict[str, Any]:
        reading = self.reading
        return {
            "host": self.host,
            "reachable": self.error is None,
            "error": self.error.message if self.error else None,
            "time": reading.time,
            "problem": reading.problem or None,
            "processes_problem": reading.apps_problem or None,
            "gpus": [
                {**asdict(gpu), "held_by": [_holder(one, gpu, reading) for one in holders(gpu, reading)]}
                for gpu in reading.gpus
            ],
            "claims": [_claim(claim) for claim in reading.claims],
        }


def _claim(claim: Any) -> dict[str, Any]:
    return {**asdict(claim), "container": _container(claim.owner)} | {"uuids": list(claim.uuids)}


def _holder(holder: Holder, gpu: Gpu, reading: Reading) -> dict[str, Any]:
    if holder.claim is not None:
        claim = holder.claim
        pids = [one.pid for one in reading.processes if (one.uuid, one.run) == (gpu.uuid, claim.run)]
        told: dict[str, Any] = {
            "run": claim.run,
            "place": claim.place,
            "user": claim.user,
            "alive": claim.alive,
            "pids": pids,
        }
        return {"kind": "run", **told, "container": _container(claim.owner)}
    if holder.process is not None:
        one = holder.process
        told = {"pid": one.pid, "command": one.command, "user": one.user, "run": one.run, "memory": one.memory}
        return {"kind": "process", **told, "container": _container(one.owner), "owner_known": one.owner is not None}
    return {"kind": "ghost", "memory": holder.ghost}


def _container(owner: str | None) -> str | None:
    return None if owner in (None, "host", "?") else owner


def look(places: Sequence[Place], connect: Connect = connect) -> list[HostReport]:
    """One report a place's host, in their order; one that fails costs only its own."""
    if not places:
        return []
    with ThreadPoolExecutor(max_workers=min(16, len(places))) as pool:
        return list(pool.map(lambda place: _look(place, connect), places))


def _look(place: Place, connect: Connect) -> HostReport:
    host = Place(place.host)
    try:
        connection = connect(host)
        try:
            asked = read.ask(host, connection)
            asked.close()
        finally:
            connection.close()
        reading = asked.reading
        if reading.problem:
            reading = _of_containers(place, reading, connect)
    except OrchError as error:
        return HostReport(place.host.name, error=error)
    return HostReport(place.host.name, reading)


def _of_containers(place: Place, reading: Reading, connect: Connect) -> Reading:
    """Where the host itself has no nvidia-smi, what its containers show."""
    names = [place.container_name] if place.container_name else list(place.host.containers)
    found: dict[str | None, Gpu] = {}
    for name in names:
        try:
            with open_session(replace(place, container_name=name), connect) as session:
                gpus, problem = read.of_place(session)
        except OrchError:
            continue
        if not problem:
            found |= {gpu.uuid: gpu for gpu in gpus}
    return read.with_place(reading, tuple(found.values()), "")


def explanation(places: Sequence[Place]) -> str:
    """What `look` would run, without running it."""
    lines = []
    for place in places:
        connections = 0 if place.host.ssh is None else 1
        count = f"{connections} connection{'' if connections == 1 else 's'}, 1 command, 1 round trip"
        lines.append(f"{place.host.name}: {count}")
        lines.append("  command: sh -c $GPUS_SH, which reads GPUs, processes and claims on the host")
        if place.host.containers:
            lines.append("  and where the host has no nvidia-smi, the same question in its containers")
    return "\n".join(lines)
