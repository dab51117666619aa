"""A container's configuration as lines, of which a digest tells whether it is still the same.

What says nothing of how a program runs there is left out, and so is what may hold a secret: these lines are kept in
the records of runs.
"""

from __future__ import annotations

import json
import re
from typing import Any

# Of what docker and podman tell: no environment, no labels, no logging options.
ENGINE_KEYS = """
AutoRemove Binds CapAdd CapDrop CgroupnsMode CpuPeriod CpuQuota CpuShares CpusetCpus CpusetMems DeviceCgroupRules
DeviceRequests Devices GroupAdd Init IpcMode Memory MemorySwap Mounts NanoCpus NetworkMode OomKillDisable PidMode
PidsLimit Privileged ReadonlyRootfs RestartPolicy Runtime SecurityOpt ShmSize Tmpfs Ulimits UsernsMode VolumesFrom
"""
# Of incus: what it keeps for itself and changes at each start, and what is the user's.
INCUS_LEFT_OUT = ("volatile.", "user.", "environment.", "cloud-init.", "image.description")


def of_engine(text: str) -> list[str] | None:
    """Lines `Key: value` of `inspect`'s Image and HostConfig, `{"image": …, "host": …}`; null where it is no such."""
    try:
        found = json.loads(text)
        image, host = found["image"], found["host"]
    except (ValueError, TypeError, KeyError):
        return None
    if not isinstance(host, dict):
        return None
    # An empty value is the default, whichever way the engine writes it.
    return [f"Image: {image}", *(f"{key}: {_value(host[key])}" for key in ENGINE_KEYS.split() if host.get(key))]


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def of_incus(lines: list[str]) -> list[str]:
    """The lines of `incus config show`, without the keys of its `config:` that do not count, and what hangs on them."""
    kept, section, left_out = [], "", False
    for line in lines:
        depth = len(line) - len(line.lstrip(" "))
        key = line.strip()
        if depth == 0 and not line.startswith("-"):
            section, left_out = key, False
        elif section == "config:" and depth <= 2:
            left_out = key.startswith(INCUS_LEFT_OUT)
        if not left_out and line.strip():
            kept.append(line)
    return kept


def memory_limit(kind: str, lines: list[str]) -> int | None:
    """Bytes that the configuration allows, null where it says nothing of it."""
    key = {"pct": "memory:", "incus": "limits.memory:", "docker": "Memory:", "podman": "Memory:"}.get(kind)
    said = next((line.split(":", 1)[1].strip() for line in lines if key and line.strip().startswith(key)), "")
    if kind == "pct":
        return int(said) << 20 if said.isdigit() else None
    if kind == "incus":
        return _incus_size(said.strip("\"'"))
    return int(said) if said.isdigit() and int(said) else None


def _incus_size(text: str) -> int | None:
    """Bytes of a size with a unit; null for a percentage."""
    units = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    units |= {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
    found = re.fullmatch(r"([0-9]+)([A-Za-z]*)", text)
    return int(found[1]) * units[found[2]] if found and found[2] in units else None
