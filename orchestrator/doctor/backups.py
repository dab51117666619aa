"""Proxmox's backup jobs: which of them take a container, and in which mode."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """A backup job. `takes` is None where it goes by a pool, whose members are not known here; `ident` is None for a
    line of the old vzdump.cron."""

    ident: str | None
    when: str
    mode: str
    takes: bool | None


def jobs(files: Mapping[str, Sequence[str]], ident: str, node: str | None) -> list[Job]:
    """The enabled jobs that may take the container `ident` on `node`, in the order of the files."""
    default = "snapshot"
    for line in files.get("vzdump.conf", ()):
        key, colon, value = line.partition(":")
        if colon and key.strip() == "mode":
            default = value.strip()
    found = [_of_section(name, keys, ident, node, default) for name, keys in _sections(files.get("jobs.cfg", ()))]
    found += [_of_cron(line, ident, node, default) for line in files.get("vzdump.cron", ())]
    return [job for job in found if job is not None and job.takes is not False]


def _sections(lines: Iterable[str]) -> list[tuple[str, dict[str, str]]]:
    """`vzdump: NAME` and the indented `key value` lines below it; other kinds of jobs are left out."""
    found: list[tuple[str, dict[str, str]]] = []
    keys: dict[str, str] | None = None
    for line in lines:
        if line[:1].isspace() and line.strip():
            key, _, value = line.strip().partition(" ")
            if keys is not None:
                keys[key] = value.strip()
        elif line.strip() and not line.startswith("#"):
            kind, _, name = line.partition(":")
            keys = {} if kind.strip() == "vzdump" else None
            if keys is not None:
                found.append((name.strip(), keys))
    return found


def _of_section(name: str, keys: Mapping[str, str], ident: str, node: str | None, default: str) -> Job | None:
    if keys.get("enabled", "1") == "0":
        return None
    when = keys.get("schedule") or " ".join(filter(None, (keys.get("dow"), keys.get("starttime"))))
    return Job(name, when, keys.get("mode", default), _takes(keys, ident, node))


def _of_cron(line: str, ident: str, node: str | None, default: str) -> Job | None:
    """`0 2 * * 6 root vzdump 200 --mode stop --quiet 1`."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        return None
    if "vzdump" not in words[5:]:
        return None
    at = words.index("vzdump")
    keys: dict[str, str] = {}
    given: list[str] = []
    rest = iter(words[at + 1 :])
    for word in rest:
        if word.startswith("-"):
            key, equals, value = word.lstrip("-").partition("=")
            keys[key] = value if equals else next(rest, "")
        else:
            given.append(word)
    if given:
        keys["vmid"] = ",".join(given)
    return Job(None, " ".join(words[:5]), keys.get("mode", default), _takes(keys, ident, node))


def _takes(keys: Mapping[str, str], ident: str, node: str | None) -> bool | None:
    if keys.get("node") and node and keys["node"] != node:
        return False
    if ident in keys.get("exclude", "").replace(";", ",").split(","):
        return False
    if keys.get("pool"):
        return None
    return keys.get("all") == "1" or ident in keys.get("vmid", "").replace(";", ",").split(",")
