"""The checks of `orch doctor`: a list of small functions, each from the facts to one verdict. Nothing is asked here.

A fault is what a launch would fail by; a warning, what it may fail by later or be slow by. A fact that could not be
read is unknown, with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from orchestrator.doctor import backups
from orchestrator.doctor.gpu import check_driver, check_gpus, check_uvm
from orchestrator.doctor.model import (
    UNKNOWN,
    Facts,
    Finding,
    Report,
    Unread,
    Verdict,
    fault,
    hello,
    ok,
    reading,
    unknown,
    warning,
)
from orchestrator.place.container import KINDS
from orchestrator.place.container_config import memory_limit
from orchestrator.view.text import size

MIB, GIB = 1 << 20, 1 << 30
# Importing torch's CPU build alone takes 224 MB (ru_maxrss of `python -c "import torch"`, torch 2.13).
MEMORY_FAULT, MEMORY_FEW = 256 * MIB, 8 * GIB
# torch with CUDA and what it needs are several GB; below the lower one not even orch's own files have room.
DISK_FAULT, DISK_FEW = 256 * 10**6, 10 * 10**9
# Containers begin with 64 MB, which data loaders and NCCL outgrow.
SHM_FEW, SHM_FREE_FEW = GIB, 64 * MIB
SKEW = 5.0

PACKAGES = {
    "apt-get": ("apt-get install -y", {"c": "gcc", "c++": "g++", "headers": "python3-dev", "python": "python3"}),
    "dnf": ("dnf install -y", {"c": "gcc", "c++": "gcc-c++", "headers": "python3-devel", "python": "python3"}),
    "apk": ("apk add", {"c": "build-base", "c++": "build-base", "headers": "python3-dev", "python": "python3"}),
    "zypper": ("zypper install -y", {"c": "gcc", "c++": "gcc-c++", "headers": "python3-devel", "python": "python3"}),
    "pacman": ("pacman -S --noconfirm", {"c": "gcc", "c++": "gcc", "headers": "python", "python": "python"}),
}


def install(facts: Facts, *what: str) -> str:
    """The command that installs these at the place."""
    try:
        manager = reading(facts, "manager")
    except Unread:
        manager = None
    if manager not in PACKAGES:
        return f"install {', '.join(what)} at {facts.place}"
    command, names = PACKAGES[manager]
    return f"orch exec {facts.place} -- {command} {' '.join(dict.fromkeys(names.get(one, one) for one in what))}"


# --- the container and its host --------------------------------------------------------------------


def check_container(facts: Facts) -> Verdict | None:
    if facts.kind == "none":
        if facts.refusal is not None and facts.refusal.lacks == "way":
            return fault(facts.refusal.message, *filter(None, (facts.refusal.hint,)))
        return None
    kind = KINDS[facts.kind]
    see = facts.on_host(kind.look)
    if facts.state == "STOPPED":
        return fault("it is not running", facts.on_host(kind.start))
    if facts.state in ("FROZEN", "FREEZING"):
        why = ": a backup does that; where none is under way, thaw it" if facts.kind in ("pct", "lxc") else ""
        return fault(f"it is frozen{why}", *([see] if why else []), facts.on_host(kind.thaw))
    if facts.state == "restarting":
        return fault(
            "it restarts again and again: its own program ends at once",
            facts.on_host(f"{kind.program} logs --tail 20 {{id}}"),
        )
    if facts.refusal is not None and facts.refusal.lacks == "way":
        return fault(facts.refusal.message, facts.refusal.hint or see)
    if facts.state == "RUNNING" or facts.hello is not None:
        return ok("running")
    return unknown(facts.unread.get("state") or f"its state is {facts.state}", see)


def check_lock(facts: Facts) -> Verdict | None:
    if facts.kind != "pct":
        return None
    config = facts.host.get("config")
    if config is None:
        raise Unread("the container's configuration could not be read")
    lock = next((line.partition(":")[2].strip() for line in config if line.startswith("lock:")), None)
    if lock is None:
        return ok("none")
    return warning(
        f"it is locked: {lock}. A backup or snapshot under way may freeze or stop it; wait for its end. A lock that "
        "was left behind by one that is over can be taken off",
        facts.on_host("pvesh get /cluster/tasks"),
        facts.on_host("pct unlock {id}"),
    )


def check_memory(facts: Facts) -> Verdict:
    said = memory_limit(facts.kind, facts.host.get("config") or [])
    limits = [said] if said else []
    if facts.hello is not None and facts.hello.get("memory_limit"):
        limits.append(int(facts.hello["memory_limit"]))
    if not limits:
        if facts.kind != "pct" and facts.hello is not None:
            return ok("no limit is seen")
        hello(facts)
        raise Unread("neither the configuration nor a cgroup tells the limit")
    limit = min(limits)
    kind = KINDS.get(facts.kind)
    remedy = facts.on_host(kind.memory) if kind else "raise the memory limit of the service or session that this is in"
    text = f"limit {limit / GIB:.1f} GiB"
    if limit < MEMORY_FAULT:
        return fault(f"{text}: torch alone does not fit", remedy)
    if limit < MEMORY_FEW:
        return warning(f"{text}: little for a model and its data; past it the kernel kills", remedy)
    return ok(text)


def check_backups(facts: Facts) -> Verdict | None:
    if facts.kind not in ("pct", "lxc") or (facts.kind == "lxc" and not facts.pve):
        return None
    if "backups" in facts.unread:
        raise Unread(facts.unread["backups"])
    if not facts.pve:
        raise Unread("the host has no /etc/pve that can be read")
    found = backups.jobs(facts.files, facts.ident, facts.host.get("hostname"))
    if not found:
        return ok("no job takes this container")
    hard = [job for job in found if job.takes and job.mode in ("stop", "suspend")]
    shown = [*hard, *(job for job in found if job not in hard)][0]
    name = shown.ident or "of vzdump.cron"
    more = f" ({len(found) - 1} more)" if len(found) > 1 else ""
    if hard:
        does = "stops" if shown.mode == "stop" else "freezes"
        remedy = (
            facts.on_host(f"pvesh set /cluster/backup/{shown.ident} --mode snapshot")
            if shown.ident
            else f"take `--mode {shown.mode}` out of /etc/pve/vzdump.cron on the host"
        )
        return warning(f"job {name} ({shown.when}, mode {shown.mode}) {does} the container{more}", remedy)
    if shown.takes is None and shown.mode != "snapshot":
        raise Unread(f"job {name} (mode {shown.mode}) takes a pool, whose members are not read{more}")
    return ok(f"job {name} ({shown.when}) makes a snapshot: a short freeze{more}")


def check_clock(facts: Facts) -> Verdict:
    clocks = [("the place", facts.place_clock), ("the host", facts.host_clock)]
    known = [(whose, clock) for whose, clock in clocks if clock is not None]
    if not known:
        raise Unread("neither the host nor the place told its time")
    whose, worst = max(known, key=lambda one: abs(one[1].ahead) - one[1].uncertain)
    if abs(worst.ahead) - worst.uncertain <= SKEW:
        return ok(f"within {SKEW:.0f} s of this machine's")
    way = "ahead of" if worst.ahead > 0 else "behind"
    return warning(
        f"{whose} is {abs(worst.ahead):.0f} s {way} this machine: times are compared, and certificates may be refused",
        *([] if facts.machine.ssh is None else [facts.on_host("timedatectl set-ntp true")]),
        "timedatectl set-ntp true (on this machine, where it is the one that is wrong)",
    )


# --- programs and room at the place ----------------------------------------------------------------


def check_python(facts: Facts) -> Verdict:
    if facts.refusal is not None and facts.refusal.lacks == "python":
        return fault(facts.refusal.message, facts.refusal.hint)
    found = hello(facts)["python"]
    return ok(f"{found['version']} at {found['path']}")


def _tool(facts: Facts, name: str) -> str | None:
    found = (hello(facts).get("tools") or {}).get(name)
    return f"{found.get('version') or 'version unknown'} at {found['path']}" if found else None


def check_tmux(facts: Facts) -> Verdict:
    found = _tool(facts, "tmux")
    return ok(found) if found else fault("not there, and a run lives in it", install(facts, "tmux"))


def check_zstd(facts: Facts) -> Verdict:
    found = _tool(facts, "zstd")
    return ok(found) if found else warning("not there: caches travel by gzip, which is slower", install(facts, "zstd"))


def check_disk(facts: Facts) -> Verdict:
    remedy = f"orch exec {facts.place} -- df -h"
    collect = f"orch env gc {facts.place}"
    if facts.refusal is not None and facts.refusal.lacks == "root":
        return fault(facts.refusal.message, remedy, "or set root: in hosts.yaml to a folder that can be written")
    here = hello(facts)
    free = here.get("disk_free")
    if free is None:
        raise Unread(f"the file system of {here.get('root')} does not tell")
    text = f"{size(free)} free at {here.get('root')}"
    if free < DISK_FAULT:
        return fault(f"{text}: no environment fits", collect, remedy)
    if free < DISK_FEW:
        return warning(f"{text}: torch for CUDA takes several GB", collect, remedy)
    return ok(text)


def check_shm(facts: Facts) -> Verdict:
    found = reading(facts, "shm")
    text = f"{size(found['total'])}, {size(found['free'])} free"
    if found["total"] < SHM_FEW or found["free"] < SHM_FREE_FEW:
        return warning(f"{text}: data loaders and NCCL need more", *_larger_shm(facts))
    return ok(text)


def _larger_shm(facts: Facts) -> tuple[str, ...]:
    """Root inside may mount; in docker's and podman's containers only when let in with more rights, and until the next
    start, since the size is settled when they are made (64 MB)."""
    mount = "mount -o remount,size=16G /dev/shm"
    if facts.kind in ("docker", "podman"):
        return (
            facts.on_host(f"{facts.kind} exec --privileged --user 0 {{id}} {mount}"),
            f"for good: make the container anew with {facts.kind} run --shm-size=16g … (or --ipc=host)",
        )
    return (f"orch exec {facts.place} -- {mount}",)


def check_compiler(facts: Facts) -> Verdict:
    found = reading(facts, "compilers")
    lacking = [language for language in ("c", "c++") if not found.get(language)]
    if lacking:
        names = " and ".join(language.upper() for language in lacking)
        return warning(f"no {names} compiler: torch.compile fails without", install(facts, *lacking))
    return ok(", ".join(str(found[language]) for language in ("c", "c++")))


def check_headers(facts: Facts) -> Verdict:
    found = reading(facts, "headers")
    if not found["present"]:
        return warning(
            f"{found['path']} is not there: what is compiled for this Python fails", install(facts, "headers")
        )
    return ok(str(found["path"]))


def check_index(facts: Facts) -> Verdict:
    reached = reading(facts, "index")
    if reached:
        return ok("a package index answers")
    if facts.wheels == "place":
        return fault(
            "no package index answers, and hosts.yaml says wheels: place",
            "set wheels: auto in hosts.yaml: wheels then travel from this machine",
        )
    return ok("no package index answers: wheels travel from this machine")


CHECKS: tuple[tuple[str, str, Callable[[Facts], Verdict | None]], ...] = (
    ("container", "container", check_container),
    ("lock", "lock", check_lock),
    ("memory", "memory", check_memory),
    ("backups", "backup jobs", check_backups),
    ("clock", "clock", check_clock),
    ("python", "Python", check_python),
    ("tmux", "tmux", check_tmux),
    ("zstd", "zstd", check_zstd),
    ("disk", "disk", check_disk),
    ("shm", "/dev/shm", check_shm),
    ("gpus", "GPUs", check_gpus),
    ("driver", "driver", check_driver),
    ("uvm", "nvidia-uvm", check_uvm),
    ("compiler", "compiler", check_compiler),
    ("headers", "headers", check_headers),
    ("index", "package index", check_index),
)


def judge(facts: Facts) -> Report:
    """One finding a check, in their order; a check that is not about this kind of place is left out. Pure."""
    found = []
    for name, title, check in CHECKS:
        try:
            verdict = check(facts)
        except Unread as error:
            verdict = Verdict(UNKNOWN, str(error))
        if verdict is not None:
            text = re.sub(r"\s+", " ", verdict.text).strip()
            found.append(Finding(name, title, verdict.status, text, tuple(one for one in verdict.remedy if one)))
    return Report(facts.place, tuple(found))
