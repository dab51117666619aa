"""GPUs and who has them, in words."""

from __future__ import annotations

import time
from collections.abc import Sequence

from orchestrator.gpus.model import Claim, Conflict, Held, Holder, Process
from orchestrator.plain import plain
from orchestrator.run import Gpu


def numbers(gpus: Sequence[Gpu]) -> str:
    """`GPU 0`, `GPUs 0-3, 7`, by the host's indices."""
    known = sorted(gpu.index for gpu in gpus if gpu.index is not None)
    parts: list[list[int]] = []
    for one in known:
        if parts and one == parts[-1][-1] + 1:
            parts[-1].append(one)
        else:
            parts.append([one])
    text = ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
    return f"GPU{'' if len(known) == 1 else 's'} {text or '?'}"


def gib(mib: float | None) -> str:
    return "memory not known" if mib is None else f"{mib / 1024:.1f} GiB"


def container(owner: str | None) -> str:
    """Where a process is: completes "process 12 …"."""
    if owner is None:
        return "in an unknown container"
    return "on the host" if owner == "host" else f"in container {owner}"


def since(at: float | None) -> str:
    """`03:11`, or with its day where that is not today, in the workstation's time; "" where it is not known."""
    if at is None:
        return ""
    then = time.localtime(at)
    today = time.strftime("%Y-%m-%d", then) == time.strftime("%Y-%m-%d")
    return time.strftime("%H:%M" if today else "%Y-%m-%d %H:%M", then)


def of_claim(claim: Claim) -> str:
    """`exp-… (pve/201, me@desk, since 03:11)`."""
    who = f"{claim.user}@{claim.workstation}" if claim.workstation else claim.user
    when = since(claim.since)
    state = {"held": "being launched", "unknown": "not known to live"}.get(claim.alive, "")
    parts = [claim.place, who, f"since {when}" if when else "", state]
    return f"{claim.run} ({', '.join(part for part in parts if part)})"


def of_process(process: Process) -> str:
    """`process 12 (python train.py) in container 201 of run exp-…`."""
    command = process.command if len(process.command) <= 60 else f"{process.command[:57]}…"
    told = f"process {process.pid}{f' ({command})' if command else ''} {container(process.owner)}"
    return told + (f" of run {process.run}" if process.run else "")


def of_holder(holder: Holder) -> str:
    """Completes "GPU 0 is held by …"."""
    if holder.claim is not None:
        return plain(of_claim(holder.claim))
    if holder.process is not None:
        return plain(of_process(holder.process))
    return "an unknown holder"


def held(all_: Sequence[Held]) -> str:
    """Which GPUs are whose, those of one holder together: `GPUs 0-3 are held by …; GPU 7 has 12.3 GiB in use that no
    visible process holds`."""
    groups: dict[tuple[str, ...], list[Gpu]] = {}
    ghosts: list[str] = []
    for one in all_:
        known = tuple(dict.fromkeys(of_holder(holder) for holder in one.holders if holder.ghost is None))
        if known:
            groups.setdefault(known, []).append(one.gpu)
        ghosts += [
            f"{numbers([one.gpu])} has {gib(holder.ghost)} in use by an unknown holder (no visible process)"
            for holder in one.holders
            if holder.ghost is not None
        ]
    parts = [
        f"{numbers(gpus)} {'is' if len(gpus) == 1 else 'are'} held by {' and by '.join(known)}"
        for known, gpus in groups.items()
    ]
    return "; ".join(parts + ghosts)


def conflict(place: str, found: Conflict, share: bool = True) -> str:
    """One sentence: what is in the way, and what can be done; `share`: by the option that launches all the same."""
    few = ""
    if found.count:
        few = f"{found.count} GPU{'' if found.count == 1 else 's'} are wanted and {len(found.free)} free: "
        few = few.replace("1 GPU are", "1 GPU is")
    sharing = ", or launch all the same with --share-gpus" if share else ""
    return f"{place}: {few}{held(found.held)}; wait or stop what is there{sharing}"
