"""`orch trust`: recording the host key that a machine offers, once its user has compared it."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from orchestrator.errors import Refused, UsageError
from orchestrator.place import known_hosts
from orchestrator.place.known_hosts import Entry, HostKey
from orchestrator.place.ssh_config import Route, resolve

if TYPE_CHECKING:
    from orchestrator.config.models import Host


@dataclass(frozen=True)
class Trusted:
    """What `trust` did: the key is in `path` now, or was there before."""

    host: str
    address: str
    key: HostKey
    path: Path
    how: Literal["recorded", "known", "replaced"]
    removed: tuple[Entry, ...] = ()
    # The same of jump hosts on the way that were not known.
    hops: tuple[Trusted, ...] = ()


# Shown the host's address, the key it offers, and the entries that would go; answers whether to go on.
Confirm = Callable[[str, HostKey, list[Entry]], bool]


def offered_key(host: Host) -> HostKey:
    """The key that a host offers now, of a type that is recorded already where it has one. Nothing is judged.

    Raises Unreachable, UsageError; Refused where a jump host on the way is not known.
    """
    return _offered(host, _route(host))


def trust(
    host: Host, *, fingerprint: str | None = None, replace: bool = False, confirm: Confirm | None = None
) -> Trusted:
    """Records the key that a host offers; before it those of jump hosts on the way, where `confirm` is there to ask
    and no `fingerprint`, which is the host's own.

    Raises Refused where `fingerprint` (SHA256:…) is not that of the offered key, where another key is recorded and
    `replace` is false, where `confirm` says no, or where the key is revoked; UsageError, Unreachable.
    """
    *jumps, route = _route(host).hops
    hops = []
    for jump in jumps:
        key = _offered(host, jump)
        try:
            known_hosts.check(key, _files(jump), jump.recorded_as, host.name, jump.address)
        except Refused:
            if confirm is None or fingerprint is not None:
                raise
            hops.append(_record(host, jump, key, replace, confirm))
    key = _offered(host, route)
    if fingerprint is not None and not same_fingerprint(fingerprint, key.fingerprint):
        raise Refused(
            f"the host key of {route.address} is {key.type} {key.fingerprint}, not {fingerprint}: nothing is recorded"
        )
    return dataclasses.replace(_record(host, route, key, replace, confirm), hops=tuple(hops))


def _files(route: Route) -> tuple[Path, ...]:
    return (*route.known_hosts, *route.global_known_hosts)


def _record(host: Host, route: Route, key: HostKey, replace: bool, confirm: Confirm | None) -> Trusted:
    entries = known_hosts.recorded(_files(route), route.recorded_as)
    if any(entry.revoked and entry.key == key for entry in entries):
        known_hosts.check(key, _files(route), route.recorded_as, host.name, route.address)
    good = [entry for entry in entries if not entry.revoked]
    for entry in good:
        if entry.key == key:
            return Trusted(host.name, route.address, key, entry.path, "known")
    if good and not replace:
        refusal = known_hosts.changed(key, good[0], route.recorded_as, host.name, route.address)
        raise Refused(refusal.message, f"orch trust {host.name} --replace, when you know why it changed")
    fixed = [entry for entry in good if entry.path not in route.known_hosts]
    if fixed:
        raise Refused(
            f"another key of {route.address} is recorded in {fixed[0].path}:{fixed[0].line}, "
            "which is not the user's own file: take it out there"
        )
    if not route.known_hosts:
        raise UsageError(
            f"there is no known_hosts file to write to for {host.name} (UserKnownHostsFile is none)",
            "known_hosts: in hosts.yaml",
        )
    if confirm is not None and not confirm(route.address, key, good):
        raise Refused(f"the host key of {route.address} is not recorded")
    path = route.known_hosts[0]
    try:
        for file in {entry.path for entry in good}:
            remove_lines(file, {entry.line for entry in good if entry.path == file})
        known_hosts.append(path, known_hosts.line_for(key, route.recorded_as, route.hash_known_hosts))
    except OSError as error:
        raise UsageError(f"{error.filename or path} cannot be written: {error.strerror}") from None
    return Trusted(host.name, route.address, key, path, "replaced" if good else "recorded", tuple(good))


def _route(host: Host) -> Route:
    if host.ssh is None:
        raise UsageError(f"{host.name} is this machine: there is no host key to trust")
    return resolve(host.ssh)


def _offered(host: Host, route: Route) -> HostKey:
    # Imported here: paramiko takes 0.2 s.
    from orchestrator.place.ssh import offered_key as ask

    return ask(host.name, route)


def same_fingerprint(given: str, ours: str) -> bool:
    """Whether a fingerprint that somebody typed is this one: the prefix and padding may be left out."""
    return given.strip().removeprefix("SHA256:").rstrip("=") == ours.removeprefix("SHA256:")


def remove_lines(path: Path, numbers: set[int]) -> None:
    """Takes lines out of a file, all others as they are, by rename; the old file is kept as `.old`. Raises OSError."""
    real = path.resolve()
    old = real.read_bytes()
    lines = old.splitlines(keepends=True)
    kept = b"".join(line for number, line in enumerate(lines, 1) if number not in numbers)
    mode = real.stat().st_mode & 0o7777
    backup = real.with_name(real.name + ".old")
    backup.write_bytes(old)
    backup.chmod(mode)
    fd, temporary = tempfile.mkstemp(prefix=real.name, dir=real.parent)
    with os.fdopen(fd, "wb") as file:
        file.write(kept)
        os.fchmod(file.fileno(), mode)
    Path(temporary).replace(real)
