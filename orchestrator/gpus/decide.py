"""From what a launch wants and a host shows to what is claimed, or to who is in the way: pure functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from orchestrator.gpus.model import IDLE, Chosen, Conflict, Held, Holder, Reading, Wanted
from orchestrator.gpus.words import numbers
from orchestrator.run import Gpu

_INDEX = re.compile(r"\+?([0-9]{1,9})(?![0-9])")  # what follows the number counts for nothing, as in C's strtoul


class NotThere(Exception):
    """The place has not the GPUs that are wanted: a sentence."""


def wanted_by(
    gpus: str | Sequence[str] | None,
    env: Mapping[str, str],
    settings: Mapping[str, Any] | None,
    *,
    cpu: bool,
    share: Callable[[int], int] = lambda ranks: ranks,
) -> Wanted:
    """What a recipe wants at a place: by its key `gpus`, by its own CUDA_VISIBLE_DEVICES, or by what it runs.

    `settings` are the bundled trainer's, None of a program of the user's own; `cpu`: without a word of the recipe no
    GPU is used there; `share` gives this place's part of all ranks.
    """
    if gpus is not None:
        if isinstance(gpus, str):
            return Wanted(all=gpus == "all", count=int(gpus) if gpus.isdigit() else 0)
        return Wanted(named=tuple(gpus))
    if "CUDA_VISIBLE_DEVICES" in env:
        return Wanted(named=visible(env["CUDA_VISIBLE_DEVICES"]), whose="place")
    if cpu:
        return Wanted()
    if settings is None:
        return Wanted(all=True)
    device = str(settings.get("device", "auto"))
    if device == "cpu":
        return Wanted()
    if device.startswith("cuda:"):
        return Wanted(all=True)  # counted among all that it sees
    return Wanted(count=max(1, share(ranks(settings))), at_most=True)


def visible(text: str) -> tuple[str, ...]:
    """The devices of a CUDA_VISIBLE_DEVICES: CUDA takes those before the first that is none."""
    named: list[str] = []
    for word in (part.strip() for part in text.split(",")):
        index = _INDEX.match(word)
        if index is None and not word.startswith(("GPU-", "MIG-")):
            break
        named.append(word if index is None else index[1])
    return tuple(named)


def ranks(settings: Mapping[str, Any]) -> int:
    """Of the bundled trainer with these settings, at all places together; 1 where they do not say."""
    topology = settings.get("topology")
    topology = topology if isinstance(topology, Mapping) else {}
    if topology.get("mode", "colocated") != "split":
        return _count(topology.get("ranks"))
    variants = settings.get("drafters")
    if isinstance(variants, Sequence) and not isinstance(variants, str):
        drafters = sum(_count(one.get("ranks")) for one in variants if isinstance(one, Mapping))
    else:
        drafters = _count(topology.get("drafters"))
    return _count(topology.get("targets")) + drafters


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 1


def decide(
    wanted: Wanted, reading: Reading, run: str, place: Sequence[Gpu] | None = None, *, share: bool = False
) -> Chosen | Conflict:
    """Which GPUs the run gets, or which of those that it needs others have. `place`: what the place itself shows, None
    where it is the host. With `share` those that others have are taken too, after the free ones.

    Raises:
        NotThere: the place has not as many, or not those that are named.
    """
    there = claimable(reading.gpus, place)
    all_held = {gpu.uuid: Held(gpu, found) for gpu in there if (found := holders(gpu, reading, run))}
    free = [gpu for gpu in there if gpu.uuid not in all_held]
    if wanted.count:
        count = min(wanted.count, len(there)) if wanted.at_most else wanted.count
        if count > len(there):
            raise NotThere(f"it asks for {_gpus(wanted.count)}, of which {len(there)} can be claimed there")
        picked = [*free, *([held.gpu for held in all_held.values()] if share else [])][:count]
        if len(picked) < count:
            return Conflict(tuple(all_held.values()), tuple(free), count)
    elif wanted.named:
        picked = named(wanted, there, place)
    else:
        picked = list(there)
    held = tuple(all_held[gpu.uuid] for gpu in picked if gpu.uuid in all_held)
    if held and not share:
        return Conflict(held, tuple(free))
    picked.sort(key=lambda gpu: -1 if gpu.index is None else gpu.index)
    whole = reading.gpus if place is None else place
    return Chosen(tuple(picked), len(picked) == len(whole), held)


def _gpus(count: int) -> str:
    return f"{count} GPU{'' if count == 1 else 's'}"


def claimable(gpus: Iterable[Gpu], place: Sequence[Gpu] | None) -> list[Gpu]:
    """Those with a UUID that the place has too: only by that can one be claimed."""
    inside = None if place is None else {gpu.uuid for gpu in place}
    return [gpu for gpu in gpus if gpu.uuid and (inside is None or gpu.uuid in inside)]


def named(wanted: Wanted, there: Sequence[Gpu], place: Sequence[Gpu] | None = None) -> list[Gpu]:
    """The GPUs that are named, each once. Raises NotThere."""
    by_uuid = {str(gpu.uuid): gpu for gpu in there}
    numbered = place if wanted.whose == "place" and place is not None else there
    by_index = {str(gpu.index): by_uuid[str(gpu.uuid)] for gpu in numbered if str(gpu.uuid) in by_uuid}
    found: dict[str, Gpu] = {}
    for word in wanted.named:
        if word.isdigit():
            one = by_index.get(str(int(word)))
        else:  # CUDA takes the beginning of a UUID
            like = [gpu for uuid, gpu in by_uuid.items() if uuid.lower().startswith(word.lower())]
            if len(like) > 1:
                raise NotThere(f"{word} is the beginning of several UUIDs there, those of {numbers(like)}")
            one = like[0] if like else None
        if one is None:
            have = ", ".join(sorted(by_index, key=int)) or "none"
            raise NotThere(f"it names GPU {word}, and those that can be claimed there are {have}")
        found[str(one.uuid)] = one
    return list(found.values())


def holders(gpu: Gpu, reading: Reading, run: str = "") -> tuple[Holder, ...]:
    """All that have the GPU, but for this run in its own container. A claim's own processes are not told again."""
    claims = [claim for claim in reading.claims if gpu.uuid in claim.uuids]
    others = [claim for claim in claims if not run or (claim.run, claim.owner) != (run, reading.own)]
    on_it = [process for process in reading.processes if process.uuid == gpu.uuid]
    foreign = [process for process in on_it if not (run and process.run == run and process.owner == reading.own)]
    covered = {claim.run for claim in others}
    found = [Holder(claim=claim) for claim in others]
    found += [Holder(process=process) for process in foreign if process.run not in covered]
    # of a claim's own, unless it is known that no process of it is there
    if not on_it and not (others and reading.apps_problem) and gpu.memory_used is not None and gpu.memory_used > IDLE:
        found.append(Holder(ghost=gpu.memory_used))
    return tuple(found)
