"""hosts.yaml: the machines and their containers, and places by name."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from orchestrator.config.models import HOST_NAME, Host, Place
from orchestrator.config.problems import in_order, keys_of, validate
from orchestrator.config.project import Project
from orchestrator.config.words import did_you_mean, listing, nearest, quote
from orchestrator.config.yaml_source import Document, Loc, read_yaml
from orchestrator.errors import ConfigError, UsageError

LOCAL = "local"
_VMID = re.compile(r"[1-9][0-9]{2,8}\Z")
_PATHS = ("identity_file", "known_hosts", "ssh_config")


class _HostsFile(BaseModel):
    model_config = ConfigDict(extra="forbid")
    hosts: Any = None


def load_hosts(project: Project) -> dict[str, Host]:
    """Every host by its name; `local`, this machine, is always among them."""
    document = read_yaml(project.hosts_file)
    problems = list(document.problems)
    problems += validate(_HostsFile, document)[1]
    hosts: dict[str, Host] = {}
    entries = document.data.get("hosts") if isinstance(document.data, dict) else None
    if entries is not None and not isinstance(entries, dict):
        problems.append(f"{document.where_key(('hosts',))}: hosts must be a mapping of names, not {quote(entries)}")
    for name in entries if isinstance(entries, dict) else ():
        found, wrong = _host(document, name, project.hosts_file.parent)
        problems += wrong
        if found is not None:
            hosts[name] = found
    if problems:
        raise ConfigError(in_order(problems))
    return {LOCAL: Host(name=LOCAL), **hosts}


def resolve_place(hosts: Mapping[str, Host], name: str, project: Project | None = None) -> Place:
    """The place `local`, `pve`, or `pve/200`. With the project given, an error says where it looked."""
    host_name, slash, container = name.partition("/")
    looked = f"; looked in {' and '.join(project.hosts_looked)}" if project else ""
    if project and project.hosts_bundled:
        looked += "; orch init writes one"
    host = hosts.get(host_name)
    if host is None:
        places = _place_names(hosts)
        inside = [place for place in places if place.endswith(f"/{name}")]
        meant = f" (did you mean {quote(inside[0])}?)" if inside else did_you_mean(name, places)
        if not meant and slash:
            meant = did_you_mean(host_name, hosts)
        raise UsageError(f"there is no host {quote(host_name)}{meant}", f"hosts: {listing(hosts)}{looked}")
    if not slash:
        return Place(host)
    if container not in host.containers:
        raise UsageError(
            f"host {quote(host_name)} has no container {quote(container)}{did_you_mean(container, host.containers)}",
            f"containers of {host_name}: {listing(host.containers)}{looked}",
        )
    return Place(host, container)


def _place_names(hosts: Mapping[str, Host]) -> list[str]:
    return [place for name, host in hosts.items() for place in (name, *(f"{name}/{c}" for c in host.containers))]


def _host(document: Document, name: str, folder: Path) -> tuple[Host | None, list[str]]:
    """One host; the shorthands of the file are written out before the models see it."""
    at: Loc = ("hosts", name)
    problems: list[str] = []
    if not re.fullmatch(HOST_NAME, name):
        problems.append(
            f"{document.where_key(at)}: the name of a host must be lower-case letters, digits, "
            f"and . _ - inside it, not {quote(name)}"
        )
    entry = document.data["hosts"][name]
    if isinstance(entry, dict) or entry is None:
        entry = document.data["hosts"][name] = dict(entry or {})
        problems += _ssh(document, at, name, entry, folder)
        problems += _containers(document, at, entry)
    found, wrong = validate(Host, document, at, given={"name": name if re.fullmatch(HOST_NAME, name) else LOCAL})
    return found, problems + wrong


def _ssh(document: Document, at: Loc, name: str, entry: dict[str, Any], folder: Path) -> list[str]:
    if name == LOCAL:
        if entry.pop("ssh", None) is not None:
            return [
                f"{document.where_key((*at, 'ssh'))}: local is this machine and takes no ssh; "
                "give a host that has one another name"
            ]
        return []
    if "ssh" not in entry:
        if any(nearest(key, keys_of(Host)) == "ssh" for key in entry):
            return []  # misspelt, which is told
        return [
            f'{document.where_key(at)}: the key "ssh" is missing in host {quote(name)}; add "ssh: {name}" '
            '(or "ssh: null" when it is this machine)'
        ]
    ssh = entry["ssh"]
    if isinstance(ssh, str):
        try:
            ssh = parse_ssh(ssh)
        except ValueError as error:
            del entry["ssh"]
            return [f"{document.where((*at, 'ssh'))}: {error}"]
    if isinstance(ssh, dict):
        ssh = dict(ssh)
        for key in _PATHS:
            if isinstance(ssh.get(key), str) and ssh[key]:
                # as a shell would take it: from home, else from the folder of the file that says so
                ssh[key] = str(folder / os.path.expanduser(ssh[key]))  # noqa: PTH111  (unknown ~user is no error)
        entry["ssh"] = ssh
    return []


def _containers(document: Document, at: Loc, entry: dict[str, Any]) -> list[str]:
    containers = entry.get("containers")
    if not isinstance(containers, dict):
        return []
    problems = []
    written: dict[str, Any] = {}
    for name, container in containers.items():
        if isinstance(container, str):
            container = {"kind": container}
        written[name] = container
        if not isinstance(container, dict) and container is not None:
            continue
        filled = {key: value for key, value in (container or {}).items() if value is not None}
        filled.setdefault("kind", "pct" if name.isascii() and name.isdigit() else "lxc")
        written[name] = {"id": name, **filled}
        if filled["kind"] == "pct" and not _VMID.match(str(written[name]["id"])):
            loc: Loc = (*at, "containers", name, *(["id"] if "id" in filled else []))
            problems.append(
                f"{document.where_key(loc)}: containers.{name}.id must be a VMID, a whole number from 100 "
                f"without leading zeros, not {quote(written[name]['id'])}"
            )
    entry["containers"] = written
    return problems


def parse_ssh(text: str) -> dict[str, Any]:
    """The parts of `[ssh://][user@]host[:port]`; an IPv6 address with a port stands in brackets.

    Raises ValueError with a sentence that does not repeat the text: it might hold a password.
    """
    rest = text.removeprefix("ssh://").rstrip("/") if text.startswith("ssh://") else text
    user, at, address = rest.rpartition("@")
    if ":" in user:
        raise ValueError("ssh holds a password, which is never taken from a file; use a key or an agent")
    found: dict[str, Any] = {"user": user} if at else {}
    bracketed = re.fullmatch(r"\[([^\[\]]*)\](?::(.*))?", address)
    host: str
    port: str | None
    if bracketed:
        host, port = bracketed.group(1), bracketed.group(2)
    elif _is_ipv6(address):
        host, port = address, None
    else:
        host, colon, after = address.partition(":")
        port = after if colon else None
    if port is not None:
        found["port"] = port
    return {"host": host, **found}


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True
