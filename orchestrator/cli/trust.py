"""`orch trust`."""

from __future__ import annotations

import sys

from orchestrator.cli.context import project_and_hosts
from orchestrator.config import resolve_place
from orchestrator.errors import Refused, UsageError


def trust_command(host: str, *, fingerprint: str | None, yes: bool) -> None:
    """Show the key that a host offers and record it after a yes."""
    from orchestrator.place.hostkeys import offered_key, record, recorded

    _, hosts = project_and_hosts()
    found = resolve_place(hosts, host).host
    if found.ssh is None:
        raise UsageError(f"{found.name} is this machine: there is no key to trust")
    key = offered_key(found)
    print(f"{found.name} offers {key.kind} {key.fingerprint}")
    if fingerprint is not None and fingerprint != key.fingerprint:
        raise Refused(f"that is not {fingerprint}: nothing was recorded")
    if recorded(found, key):
        print("it is recorded already")
        return
    if not yes and fingerprint is None:
        if not sys.stdin.isatty():
            raise Refused(
                "a key is recorded only after a yes: compare the fingerprint with the host's own",
                hint=f"orch trust {host} --fingerprint {key.fingerprint}",
            )
        print("the host itself prints it with: ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub")
        if input("record it? [y/N] ").strip().lower() not in ("y", "yes"):
            raise Refused("nothing was recorded")
    print(f"recorded in {record(found, key)}")
