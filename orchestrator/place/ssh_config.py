"""How a host is reached, out of hosts.yaml and the user's SSH configuration.

OpenSSH itself reads the configuration (`ssh -G`), where it is installed: what its many keywords mean is its business.
Elsewhere paramiko's reader has to do, and a keyword that it would pass over is refused by name.
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.errors import UsageError

if TYPE_CHECKING:
    from orchestrator.config.models import Ssh

# Seconds for `ssh -G`, which may run the commands of `Match exec`.
BOUND = 10.0
# Jumps behind one another before the configuration counts as one that goes in circles.
MOST_JUMPS = 8

DEFAULT_KEYS = ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa")

# What the fallback understands, and what it may pass over since it does not change where and as whom one arrives.
UNDERSTOOD = (
    "host match hostname user port identityfile identitiesonly identityagent userknownhostsfile "
    "globalknownhostsfile hashknownhosts proxyjump proxycommand hostkeyalias connecttimeout addressfamily compression"
)
PASSED_OVER = (
    "addkeystoagent batchmode checkhostip connectionattempts controlmaster controlpath controlpersist "
    "enableescapecommandline escapechar exitonforwardfailure fingerprinthash forwardagent forwardx11 "
    "forwardx11trusted gssapiauthentication gssapidelegatecredentials ignoreunknown ipqos kbdinteractiveauthentication "
    "localforward loglevel numberofpasswordprompts passwordauthentication permitlocalcommand preferredauthentications "
    "pubkeyauthentication remoteforward requesttty sendenv serveralivecountmax serveraliveinterval setenv "
    "stricthostkeychecking tcpkeepalive updatehostkeys usekeychain verifyhostkeydns visualhostkey xauthlocation"
)


@dataclass(frozen=True)
class Route:
    """One machine on the way, all settled."""

    alias: str
    hostname: str
    port: int
    user: str
    identity_files: tuple[Path, ...] = ()
    identities_only: bool = False
    agent: str | None = None  # path of its socket
    known_hosts: tuple[Path, ...] = ()  # the user's, the first is written to
    global_known_hosts: tuple[Path, ...] = ()
    hash_known_hosts: bool = False
    host_key_alias: str | None = None
    family: int = socket.AF_UNSPEC
    connect_timeout: float = 10.0
    compress: bool = False
    proxy_command: str | None = None
    jump: Route | None = None

    @property
    def recorded_as(self) -> str:
        """The name under which known_hosts files hold this machine's keys."""
        if self.host_key_alias:
            return self.host_key_alias.lower()
        name = self.hostname.lower()
        return name if self.port == 22 else f"[{name}]:{self.port}"

    @property
    def hops(self) -> tuple[Route, ...]:
        """Every machine on the way, this one last."""
        return (*(self.jump.hops if self.jump is not None else ()), self)

    @property
    def address(self) -> str:
        """user@host:port, as the user would write it."""
        return f"{self.user}@{self.hostname}" + ("" if self.port == 22 else f":{self.port}")


def resolve(ssh: Ssh) -> Route:
    """The way to a host of hosts.yaml. Raises UsageError where the SSH configuration is wrong or not supported."""
    if ssh.ssh_config is not None and not ssh.ssh_config.expanduser().is_file():
        raise UsageError(f"the SSH configuration {ssh.ssh_config} of hosts.yaml does not exist")
    route = _lookup(ssh, ssh.host, ssh.user, ssh.port, 0)
    route = replace(route, connect_timeout=ssh.connect_timeout)
    if ssh.identity_file is not None:
        own = ssh.identity_file.expanduser()
        if not own.is_file():
            raise UsageError(f"the identity_file {ssh.identity_file} of hosts.yaml does not exist")
        # As with `ssh -i`, the named key comes first.
        route = replace(route, identity_files=(own, *(f for f in route.identity_files if f != own)))
    if ssh.known_hosts is not None:
        route = _judged_by(route, ssh.known_hosts.expanduser())
    return route


def _judged_by(route: Route, file: Path) -> Route:
    """A known_hosts file that is named in hosts.yaml counts for every machine on the way, and alone."""
    jump = _judged_by(route.jump, file) if route.jump is not None else None
    return replace(route, known_hosts=(file,), global_known_hosts=(), jump=jump)


def _lookup(ssh: Ssh, alias: str, user: str | None, port: int | None, depth: int) -> Route:
    if depth > MOST_JUMPS:
        raise UsageError(f"the SSH configuration for {alias} jumps in circles (ProxyJump)")
    config = ssh.ssh_config.expanduser() if ssh.ssh_config is not None else None
    program = shutil.which("ssh")
    if program is not None:
        words = ask_openssh(program, config, alias, user, port)
    else:
        words = read_without_openssh(config or Path("~/.ssh/config").expanduser(), alias)
    route = settle(words, alias, user, port)
    jumps = first(words, "proxyjump")
    if jumps and jumps.lower() != "none":
        previous: Route | None = None
        for hop in jumps.split(","):
            hop_user, hop_host, hop_port = split_destination(hop.strip())
            jump = _lookup(ssh, hop_host, hop_user, hop_port, depth + 1)
            # The first hop is reached as its own configuration says, each further one through the one before.
            previous = jump if previous is None else replace(jump, jump=previous, proxy_command=None)
        route = replace(route, jump=previous, proxy_command=None)
    return route


def ask_openssh(
    program: str, config: Path | None, alias: str, user: str | None, port: int | None
) -> dict[str, list[str]]:
    """What `ssh -G` says, keyword by keyword. Raises UsageError in its words."""
    argv = [program, "-G"]
    if config is not None:
        argv += ["-F", str(config)]
    if user is not None:
        argv += ["-l", user]
    if port is not None:
        argv += ["-p", str(port)]
    try:
        done = subprocess.run(
            [*argv, "--", alias], stdin=subprocess.DEVNULL, capture_output=True, timeout=BOUND, check=False
        )
    except subprocess.TimeoutExpired:
        raise UsageError(f"the SSH configuration for {alias} took ssh -G more than {BOUND:.0f} s to read") from None
    if done.returncode:
        why = done.stderr.decode("utf-8", "replace").strip().splitlines()
        # The first line names the file and the line in it; the last only says that it was terminated.
        raise UsageError(f"OpenSSH refuses its configuration for {alias}: {why[0] if why else 'no reason given'}")
    words: dict[str, list[str]] = {}
    for line in done.stdout.decode("utf-8", "replace").splitlines():
        key, _, value = line.partition(" ")
        words.setdefault(key.lower(), []).append(value)
    return words


def read_without_openssh(config: Path, alias: str) -> dict[str, list[str]]:
    """The same by paramiko's reader. Raises UsageError on a keyword that it does not know."""
    if not config.is_file():
        return {}
    text = config.read_text("utf-8", "replace")
    refuse_unsupported(text, str(config))
    import paramiko

    try:
        found = paramiko.SSHConfig.from_text(text).lookup(alias)
    except paramiko.ConfigParseError as error:
        raise UsageError(f"{config} cannot be read: {error}") from None
    words: dict[str, Any] = dict(found)  # IdentityFile is a list, all others are text
    return {key: value if isinstance(value, list) else [str(value)] for key, value in words.items()}


def refuse_unsupported(text: str, name: str) -> None:
    """Raises UsageError, naming keyword and line, where the fallback would misread a configuration."""
    for number, line in enumerate(text.splitlines(), 1):
        found = re.match(r"\s*([A-Za-z0-9]+)", line)
        word = found.group(1) if found else ""
        if word and word.lower() not in f"{UNDERSTOOD} {PASSED_OVER}".split():
            raise UsageError(
                f"{name}:{number}: the keyword {word} is understood by OpenSSH only, and no ssh is installed here",
                "install openssh-client, or leave the keyword out",
            )


def first(words: Mapping[str, Sequence[str]], key: str) -> str | None:
    """The first value of a keyword."""
    values = words.get(key)
    return values[0] if values else None


def split_destination(text: str) -> tuple[str | None, str, int | None]:
    """user, host and port of a ProxyJump hop: [user@]host[:port], ssh://… included. Raises UsageError."""
    text = text.removeprefix("ssh://").rstrip("/")
    user, at, rest = text.rpartition("@")
    found = re.fullmatch(r"(?:\[([^\]]+)\]|([^:]*|[^:]*:.*:[^:]*))(?::(\d+))?", rest)
    if not found or not (found.group(1) or found.group(2)):
        raise UsageError(f"the ProxyJump {text!r} is not [user@]host[:port]")
    return (
        (user if at else None),
        found.group(1) or found.group(2),
        int(found.group(3)) if found.group(3) else None,
    )


def settle(words: Mapping[str, Sequence[str]], alias: str, user: str | None, port: int | None) -> Route:
    """A Route (without jumps) out of keywords; what hosts.yaml says comes first. Raises UsageError."""
    if (first(words, "proxyusefdpass") or "no") == "yes":
        raise UsageError(f"the SSH configuration for {alias} uses ProxyUseFdpass, which is not supported")
    hostname = (first(words, "hostname") or alias).replace("%h", alias)
    login = user or first(words, "user") or getpass.getuser()
    number = port or int(first(words, "port") or 22)
    alias_of_key = first(words, "hostkeyalias")
    tokens = {
        "%": "%",
        "h": hostname,
        "n": alias,
        "p": str(number),
        "r": login,
        "u": getpass.getuser(),
        "d": str(Path.home()),
        "i": str(os.getuid()),
        "k": alias_of_key or hostname,
        "L": socket.gethostname().split(".")[0],
        "l": socket.gethostname(),
    }

    def expand(text: str) -> str:
        return re.sub(r"%(.)", lambda m: tokens.get(m.group(1), m.group(0)), text)

    def paths(key: str, default: str) -> tuple[Path, ...]:
        value = first(words, key) or default
        if value.lower() == "none":
            return ()
        one = Path(expand(value)).expanduser()
        names = [value] if one.exists() else value.split()
        return tuple(Path(expand(name)).expanduser() for name in names)

    command = first(words, "proxycommand")
    # OpenSSH names its default keys itself.
    named = [*words.get("certificatefile", []), *words.get("identityfile", DEFAULT_KEYS)]
    families = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}
    return Route(
        alias=alias,
        hostname=hostname,
        port=number,
        user=login,
        identity_files=tuple(Path(expand(f)).expanduser() for f in named if f.lower() != "none"),
        identities_only=(first(words, "identitiesonly") or "no") in ("yes", "true"),
        agent=_agent(first(words, "identityagent"), expand),
        known_hosts=paths("userknownhostsfile", "~/.ssh/known_hosts ~/.ssh/known_hosts2"),
        global_known_hosts=paths("globalknownhostsfile", "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"),
        hash_known_hosts=(first(words, "hashknownhosts") or "no") in ("yes", "true"),
        host_key_alias=alias_of_key,
        family=families.get((first(words, "addressfamily") or "any").lower(), socket.AF_UNSPEC),
        compress=(first(words, "compression") or "no") in ("yes", "true"),
        proxy_command=expand(command) if command and command.lower() != "none" else None,
    )


def _agent(said: str | None, expand: Callable[[str], str]) -> str | None:
    if said is None or said == "SSH_AUTH_SOCK":
        return os.environ.get("SSH_AUTH_SOCK") or None
    if said.lower() == "none":
        return None
    if said.startswith("$"):
        return os.environ.get(said.strip("${}")) or None
    return str(Path(expand(said)).expanduser())
