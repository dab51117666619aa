"""The way into a container: argv put in front of a command, over whatever connection.

A kind of container is a row of `KINDS` and a branch of `_entrance`; what its tool says when it fails is in `failures`.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.config.models import Container, Host, Place


@dataclass(frozen=True)
class Kind:
    """One kind of container: the command that enters it, and the commands a user is told to type on the host.

    `{id}` is the container's. `look` shows its state, `thaw` lets a frozen or paused one go on, `memory` raises its
    limit; an empty `restart` means that there is no such command.
    """

    enter: str
    look: str
    listing: str
    start: str
    thaw: str
    memory: str
    restart: str = ""

    @property
    def program(self) -> str:
        return self.enter.split()[0]


KINDS = {
    "pct": Kind(
        enter="pct exec",
        look="pct status {id} --verbose",
        listing="pct list",
        start="pct start {id}",
        thaw="lxc-unfreeze -n {id}",
        memory="pct set {id} --memory 32768",
        restart="pct reboot {id}",
    ),
    "lxc": Kind(
        enter="lxc-attach",
        look="lxc-info -n {id}",
        listing="lxc-ls",
        start="lxc-start -n {id}",
        thaw="lxc-unfreeze -n {id}",
        memory="lxc-cgroup -n {id} memory.max 32G",
    ),
    "incus": Kind(
        enter="incus exec",
        look="incus info {id}",
        listing="incus list",
        start="incus start {id}",
        thaw="incus resume {id}",
        memory="incus config set {id} limits.memory 32GiB",
        restart="incus restart {id}",
    ),
    "docker": Kind(
        enter="docker exec",
        look="docker inspect {id}",
        listing="docker ps -a",
        start="docker start {id}",
        thaw="docker unpause {id}",
        memory="docker update --memory 32g --memory-swap 32g {id}",
        restart="docker restart {id}",
    ),
    "podman": Kind(
        enter="podman exec",
        look="podman inspect {id}",
        listing="podman ps -a",
        start="podman start {id}",
        thaw="podman unpause {id}",
        memory="podman update --memory 32g --memory-swap 32g {id}",
        restart="podman restart {id}",
    ),
}

# Without -n it would ask for a password at a terminal, which there is none.
SUDO = ("sudo", "-n", "--")

# Hosts whose pct is older than --keep-env (pve-container 5.0.9), as found out by this process.
_without_keep_env: set[str] = set()


def kind_of(container: Container) -> Kind:
    """The row of a container's kind."""
    return KINDS[container.kind]


def wrap(place: Place, argv: Sequence[str], *, tty: bool = False) -> list[str]:
    """`argv` as the place's host is given it. Inside a container it runs as that one's own default user, and the host's
    environment stays outside where the host's tool can do that. `tty`: the caller has a terminal, and so gets the
    command."""
    if place.container is None:
        return list(argv)
    return [*(SUDO if place.host.sudo else ()), *_entrance(place.host, place.container, tty), *argv]


def _entrance(host: Host, container: Container, tty: bool) -> list[str]:
    name = container.id
    if container.kind == "pct":
        # Both are needed: pct looks for options anywhere before the --.
        option = [] if host.name in _without_keep_env else ["--keep-env", "0"]
        return ["pct", "exec", name, *option, "--"]
    if container.kind == "lxc":
        return ["lxc-attach", "-n", name, "--clear-env", "--"]
    # The three below pass nothing of the caller's environment on, but for TERM with a terminal.
    if container.kind == "incus":
        # By itself it looks at stdin and stdout, of which a terminal may be only one.
        return ["incus", "exec", name, "--force-interactive" if tty else "--force-noninteractive", "--"]
    # After the name all is the command's: docker takes a -- there for a program. And without -i stdin is empty.
    return [container.kind, "exec", "-it" if tty else "-i", name]


def learn_keep_env(host: str, stderr: str) -> bool:
    """Whether this stderr tells, for the first time, that the host's pct does not know --keep-env: it is then called
    without, and the environment that comes in has to be lived with."""
    if "Unknown option: keep-env" not in stderr or host in _without_keep_env:
        return False
    _without_keep_env.add(host)
    return True


def typed(host: Host, command: str, ident: str = "", *, root: bool = True) -> str:
    """What a user types here to have a command run on the host; `{id}` in it is `ident`. `root`: it is one that has
    to be root's, so that it goes through sudo where the way into containers does."""
    if not command:
        return ""
    words = command.replace("{id}", ident)
    if root and host.sudo and not words.startswith("sudo "):
        words = f"sudo {words}"
    if host.ssh is None:
        return words
    # A terminal, where sudo may ask for a password.
    port = ["-p", str(host.ssh.port)] if host.ssh.port not in (None, 22) else []
    to = f"{host.ssh.user}@{host.ssh.host}" if host.ssh.user else host.ssh.host
    return f"{shlex.join(['ssh', *(['-t'] if words.startswith('sudo ') else []), *port, to])} {words}"
