"""The containers of a host, as its own tools list them, over one connection."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.place.greeting import Greeting
from orchestrator.place.session import Connect, connect
from orchestrator.plain import plain

if TYPE_CHECKING:
    from orchestrator.config.models import Place

_SILENCE = 30.0  # seconds that the host may say nothing
_MOST = 100

# Each line behind the nonce, so that a banner is not taken for one. Where sudo asks for no password, it is taken by who
# is not root: at once for pct and LXC, whose containers only root enters, and for the others where they refuse without.
# Proxmox's containers are LXC's too, and would be there twice.
LIST = r"""
nonce=$1
PATH=${PATH:-/usr/bin:/bin}:/usr/sbin:/sbin
LC_ALL=C
export LC_ALL PATH
say() { while IFS= read -r line; do printf '%s %s %s\n' "$nonce" "$1" "$line"; done; }
ask() {
  kind=$1
  shift
  command -v "$1" >/dev/null 2>&1 || return 1
  if command -v timeout >/dev/null 2>&1; then set -- timeout -k 1 15 "$@"; fi
  case $kind in pct | lxc) only_root=1 ;; *) only_root= ;; esac
  if [ -z "$only_root" ] && out=$("$@" 2>/dev/null); then
    printf '%s\n' "$out" | say "$kind"
  elif [ "$(id -u)" != 0 ] && command -v sudo >/dev/null 2>&1 && out=$(sudo -n -- "$@" 2>/dev/null); then
    printf '%s\n' "$out" | say "$kind"
    echo "$kind" | say sudo
  elif [ -n "$only_root" ] && out=$("$@" 2>/dev/null); then
    printf '%s\n' "$out" | say "$kind"
  else
    echo "$kind" | say failed
  fi
}
{
  ask pct pct list || ask lxc lxc-ls --fancy --fancy-format NAME,STATE
  ask incus incus list --format csv --columns ns
  ask docker docker ps --all --format '{{.Names}},{{.State}}'
  ask podman podman ps --all --format '{{.Names}},{{.State}}'
} </dev/null
echo 1 | say end
"""


@dataclass(frozen=True)
class Found:
    """One container: its kind, by what its kind calls it, whether it runs as the host says, a name for people."""

    kind: str
    id: str
    state: str
    label: str = ""

    @property
    def running(self) -> bool:
        return self.state.lower() == "running"


@dataclass(frozen=True)
class Listed:
    """The containers of a host; `sudo`: kinds that are root's there; `failed`: kinds whose tool did not answer."""

    found: tuple[Found, ...]
    sudo: frozenset[str] = frozenset()
    failed: tuple[str, ...] = ()


def containers(place: Place, connect: Connect = connect) -> Listed:
    """Asks a host for its containers. Raises Unreachable, Refused, UsageError where it cannot be asked."""
    nonce = secrets.token_hex(8)
    greet = Greeting(nonce)
    connection = connect(place)
    try:
        channel = connection.open(["sh", "-c", LIST, "orch-list", nonce])
        while "end" not in greet.facts:
            try:
                data = channel.read(_SILENCE)
            except TimeoutError:
                break  # what came is what is offered
            if not data:
                break
            greet.feed(data)
        channel.close()
    finally:
        connection.close()
    return read(greet.facts)


def read(facts: dict[str, list[str]]) -> Listed:
    """What the tools' lines say, by the kind that they are of."""
    found: list[Found] = []
    for kind in ("pct", "lxc", "incus", "docker", "podman"):
        for line in map(plain, facts.get(kind, [])):
            words = line.split(",") if kind in ("incus", "docker", "podman") else line.split()
            if len(words) < 2 or words[0] in ("VMID", "NAME") or not words[0]:
                continue
            # VMID, status, at times a lock, and the name
            label = words[-1] if kind == "pct" and len(words) > 2 else ""
            found.append(Found(kind, words[0].strip(), words[1].strip().lower(), label))
    return Listed(tuple(found[:_MOST]), frozenset(facts.get("sudo", [])), tuple(facts.get("failed", [])))
