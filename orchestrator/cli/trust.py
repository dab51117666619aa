"""`orch trust`."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

from orchestrator.cli.context import project_and_hosts
from orchestrator.config import resolve_place
from orchestrator.errors import Refused

if TYPE_CHECKING:
    from orchestrator.place.hostkeys import Confirm
    from orchestrator.place.known_hosts import Entry, HostKey


def trust_command(host: str, *, fingerprint: str | None, replace: bool, yes: bool) -> None:
    """Show the key that a host offers and record it after a yes.

    Raises:
        Refused: nothing was recorded, and why.
    """
    from orchestrator.place.hostkeys import trust

    project, hosts = project_and_hosts()
    found = resolve_place(hosts, host, project).host

    confirm = asker(["orch", "trust", host], ask=sys.stdin.isatty(), sure=yes or fingerprint is not None)
    done = trust(found, fingerprint=fingerprint, replace=replace, confirm=confirm)
    if done.how == "known":
        print(f"{done.key.type} {done.key.fingerprint} of {done.address} is recorded already, in {done.path}")
    else:
        print(f"recorded in {done.path}")


def asker(again: list[str], *, ask: bool, sure: bool) -> Confirm:
    """Shows a key and asks whether it is the host's. `sure`: it is not asked; not `ask`: nobody can be.

    `again` are the words of the command to which a fingerprint can be given. What is returned raises Refused.
    """

    def confirm(address: str, key: HostKey, going: list[Entry]) -> bool:
        print(f"{address} offers {key.type} {key.fingerprint}")
        for entry in going:
            print(f"  in place of {entry.key.type} {entry.key.fingerprint}, {entry.path}:{entry.line}")
        if sure:
            return True
        if not ask:
            raise Refused(
                "a key is recorded only after a yes: compare the fingerprint with the host's own",
                hint=shlex.join([*again, "--fingerprint", key.fingerprint]),
            )
        print("the host itself prints it with: ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub")
        return input("record it? [y/N] ").strip().lower() in ("y", "yes")

    return confirm
