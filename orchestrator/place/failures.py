"""What the texts of the ways into containers mean, in a sentence and a command.

Their exit codes are also those of commands inside, so only texts are looked at. Those of docker 20.10 and 28, podman
4.3, LXD 5.0 (from which incus comes) and sudo 1.9 were seen, as were pct's and lxc-attach's; wordings of newer docker,
of incus and of sudo-rs stand beside them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.errors import OrchError, Refused, Unreachable, UsageError
from orchestrator.place.container import KINDS, typed

if TYPE_CHECKING:
    from orchestrator.config.models import Place

PCT, LXC, INCUS, DOCKER, PODMAN = "pct", "lxc", "incus", "docker", "podman"
ENGINES = (DOCKER, PODMAN)
ALL = (PCT, LXC, INCUS, DOCKER, PODMAN)


@dataclass(frozen=True)
class Failure:
    """How one kind of failure reads, and what to tell the user.

    `{host}`, `{id}`, `{user}`, `{login}` and `{1}`, what the pattern caught, are filled in; so are `{start}`, `{thaw}`,
    `{look}` and `{listing}`, commands of the kind of container. `run` is a command for the host, `hint` anything else.
    """

    kinds: tuple[str, ...]
    pattern: str
    error: type[OrchError]
    message: str
    run: str = ""
    hint: str = ""


_STOPPED = "the container {id} on {host} is not running"
_MISSING = "{host} has no container {id}"
_NO_SHELL = "the container {id} on {host} has no sh, which orch needs: use an image that has one, and Python"
_ROOT = "log in as root there (ssh: root@… in hosts.yaml), or say sudo: true for that host"

# The first match counts.
FAILURES = (
    # sudo comes before what it starts
    Failure(
        ALL,
        r"sudo: (?:a password is required|a terminal is required|interactive authentication is required)",
        Unreachable,
        "sudo on {host} does not let {user} enter the container {id} without a password, which orch cannot give: "
        "sudoers has to allow it with NOPASSWD (docs/hosts.md has the line)",
        "sudo -l",
    ),
    Failure(
        ALL,
        r"(?:[Ss]orry, )?user \S+ is not allowed to execute|is not in the sudoers file|"
        r"may not run sudo on|I'm afraid I can't do that",
        Unreachable,
        "sudo on {host} does not let {user} enter the container {id}: sudoers has to allow it (docs/hosts.md has the "
        "line)",
        "sudo -l",
    ),
    Failure(
        ALL,
        r"you must have a tty to run sudo",
        Unreachable,
        "sudo on {host} wants a terminal (requiretty), which orch has none of: lift that for {user}",
        hint="Defaults:{user} !requiretty, in sudoers on {host} (visudo)",
    ),
    Failure(
        ALL,
        r"sudo: (?:command )?not found|exec: sudo: not found|unknown command:? ['\"]?sudo",
        UsageError,
        "{host} has no sudo: leave sudo: true out of hosts.yaml and log in as root, or install sudo there",
    ),
    Failure(
        ALL,
        r"sudo: ([^\s:]+): command not found",
        UsageError,
        "sudo on {host} finds no {1} (its secure_path counts): is {id} of that kind, and is {host} the right host?",
    ),
    # pct
    Failure(
        (PCT,),
        r"Configuration file '[^']*' does not exist",
        UsageError,
        "{host} has no container {id}: it may be on another node of the cluster, or gone",
        "{listing}",
    ),
    Failure(
        (PCT,),
        r"400 Parameter verification failed[\s\S]*vmid",
        UsageError,
        "{id} is not a VMID: {host} takes whole numbers from 100 on",
    ),
    Failure((PCT,), r"container '[^']*' not running|CT \S+ not running", Unreachable, _STOPPED, "{start}"),
    Failure(
        (PCT,),
        r"ipcc_send_rec|[Uu]nable to load access control list|cluster not ready|pmxcfs",
        Unreachable,
        "the cluster file system on {host} is down, so pct cannot look up container {id}",
        "systemctl restart pve-cluster",
    ),
    Failure((PCT,), r"please run as root", Unreachable, "pct on {host} needs root: " + _ROOT),
    Failure(
        (PCT,),
        r"can't lock file '([^']*)' - got timeout",
        Unreachable,
        "the container {id} on {host} is locked by another operation ({1}): try again when that is done",
        "{look}",
    ),
    Failure(
        (PCT,),
        r"CT is locked \(([^)]*)\)",
        Unreachable,
        "the container {id} on {host} is locked ({1}): try again when that is done",
        "{look}",
    ),
    Failure(
        (PCT,),
        r"Device (\S+) does not exist",
        Unreachable,
        "the container {id} on {host} wants the device {1}, which the host lost: is its driver loaded?",
        "nvidia-smi",
    ),
    Failure(
        (PCT,),
        r"pct: (?:command )?not found|exec: pct: not found|unknown command:? ['\"]?pct",
        UsageError,
        "{host} has no pct for {user}: it is no Proxmox VE host, so the container cannot be of kind pct, or this is "
        "no login of root's, which needs sudo: true in hosts.yaml",
        hint="kind: lxc in hosts.yaml, or the right host",
    ),
    Failure(
        (PCT,),
        r"(missing command at|400 (?:not enough|too many) arguments|Unknown option: \S+)",
        Unreachable,
        "the pct on {host} does not understand how it is called ({1})",
    ),
    # lxc-attach, beneath pct too
    Failure(
        (PCT, LXC),
        r"lxc-attach: (?:command )?not found",
        UsageError,
        "{host} has no lxc-attach: LXC is not installed there",
    ),
    Failure(
        (PCT, LXC),
        r"lxc-attach: .*(?:[Pp]ermission denied|Operation not permitted|Insuffici?ent privileges|You lack access)",
        Unreachable,
        "entering the container {id} on {host} needs root: " + _ROOT,
    ),
    Failure(
        (PCT, LXC),
        r"lxc-attach: .*(?:No such file or directory|does not exist|[Nn]o such container).*",
        UsageError,
        "{host} has no container {id}, or no shell in it",
        "{listing}",
    ),
    Failure(
        (PCT, LXC),
        r"lxc-attach: .*(?:[Ff]ailed to get init pid|Connection refused|Failed to attach|[Nn]ot running|"
        r"Failed to get attach context)",
        Unreachable,
        _STOPPED,
        "{start}",
    ),
    # incus
    Failure((INCUS,), r"[Ii]nstance is frozen", Unreachable, "the container {id} on {host} is frozen", "{thaw}"),
    Failure((INCUS,), r"(?:[Ii]nstance|[Cc]ontainer) is (?:not running|stopped)", Unreachable, _STOPPED, "{start}"),
    Failure(
        (INCUS,),
        r"the needed permissions to talk to the incus daemon|unix\.socket: connect: permission denied",
        Unreachable,
        "{user} may not talk to the incus daemon on {host}: join the group incus-admin there and log in again, or say "
        "sudo: true for that host in hosts.yaml",
        "sudo usermod -aG incus-admin {login}",
    ),
    Failure(
        (INCUS,),
        r"incus daemon doesn't appear to be started|unix\.socket: connect: ",
        Unreachable,
        "the incus daemon on {host} is not running",
        "systemctl start incus",
    ),
    Failure((INCUS,), r"Error: Command not (?:found|executable)", Unreachable, _NO_SHELL),
    Failure(
        (INCUS,),
        r"Instance not found|Error: not found|No such object",
        UsageError,
        _MISSING + " in incus's present project",
        "{listing}",
    ),
    Failure(
        (INCUS,),
        r"incus: (?:command )?not found|unknown command:? ['\"]?incus",
        UsageError,
        "{host} has no incus: it is not installed there, or not in the PATH of a login without a terminal",
    ),
    # docker and podman
    Failure(ENGINES, r"[Cc]ontainer \S+ is paused", Unreachable, "the container {id} on {host} is paused", "{thaw}"),
    Failure(
        ENGINES,
        r"[Cc]ontainer \S+ is restarting",
        Unreachable,
        "the container {id} on {host} is restarting: its own program may end at once, again and again",
        "{program} logs --tail 20 {id}",
    ),
    Failure(ENGINES, r"[Cc]ontainer \S+ is not running", Unreachable, _STOPPED, "{start}"),
    Failure(
        (PODMAN,),
        r"exec sessions on running containers",
        Unreachable,
        "the container {id} on {host} is not running, or paused",
        "podman ps -a --filter name={id}",
    ),
    Failure(
        ENGINES,
        r"[Nn]o such container",
        UsageError,
        "{host} has no container {id}; a rootless engine shows each user their own",
        "{listing}",
    ),
    Failure(
        ENGINES,
        r"permission denied while trying to connect to the [Dd]ocker|docker\.sock\b.*permission denied|"
        r"podman\.sock\b.*permission denied",
        Unreachable,
        "{user} may not talk to the docker daemon on {host}: join the group docker there and log in again, or say "
        "sudo: true for that host in hosts.yaml",
        "sudo usermod -aG docker {login}",
    ),
    Failure(
        ENGINES,
        r"Is the docker daemon running|failed to connect to the docker API|Cannot connect to the Docker daemon",
        Unreachable,
        "the docker daemon on {host} is not running, or listens elsewhere (DOCKER_HOST)",
        "systemctl start docker",
    ),
    Failure(
        ENGINES,
        r'exec: "sh": |executable file `sh` not found',
        Unreachable,
        _NO_SHELL,
    ),
    Failure(
        ENGINES,
        r"(?:docker|podman): (?:command )?not found|unknown command:? ['\"]?(?:docker|podman)",
        UsageError,
        "{host} has no {program}: it is not installed there, or not in the PATH of a login without a terminal",
    ),
)


def classify(text: str, place: Place) -> OrchError | None:
    """What stopped the way into a container, or None where what its tool said does not tell. Pure."""
    container = place.container
    if container is None:
        return None
    for failure in FAILURES:
        found = re.search(failure.pattern, text) if container.kind in failure.kinds else None
        if found:
            hint = typed(place.host, _fill(failure.run, place, found)) if failure.run else failure.hint
            return failure.error(_fill(failure.message, place, found), _fill(hint, place, found))
    return None


def _fill(text: str, place: Place, found: re.Match[str]) -> str:
    container = place.container
    assert container is not None
    kind = KINDS[container.kind]
    login = place.host.ssh.user if place.host.ssh is not None else None
    words = {
        "host": place.host.name,
        "id": container.id,
        "user": login or "this user",
        "login": login or "USER",
        "1": found.group(1) if found.re.groups and found.group(1) else "",
        "program": kind.program,
        **{name: getattr(kind, name).replace("{id}", container.id) for name in ("start", "thaw", "look", "listing")},
    }
    return re.sub(r"\{(\w+)\}", lambda m: words.get(m.group(1), m.group(0)), text)


def foreign_shell(stderr: str) -> Refused | None:
    """Whether the host's login shell is one that does not read POSIX quoting."""
    if re.search(r"Unmatched ['\"]|: Undefined variable|fish: |Unknown command: |nu::parser", stderr):
        return Refused(
            "the login shell there does not read POSIX quoting (csh or fish?)",
            "chsh -s /bin/sh, on that host",
        )
    return None
