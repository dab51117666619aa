"""`orch init` from its first question to its plan: a machine, a container of it, a program, an environment.

Nothing is written here: `files` writes what came out, once all of it is known.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from orchestrator.bundled import bundled_dir
from orchestrator.config import LOCAL, Host, Place, Project, list_environments, load_hosts, parse_ssh
from orchestrator.config.models import RECIPE_NAME
from orchestrator.config.words import did_you_mean, quote
from orchestrator.config.yaml_source import shown as path_shown
from orchestrator.doctor.checks import judge
from orchestrator.doctor.model import Facts, Report
from orchestrator.doctor.read import read
from orchestrator.errors import Refused, Unreachable, UsageError
from orchestrator.init.aliases import aliases
from orchestrator.init.asking import Answer, Asker
from orchestrator.init.containers import Found, Listed, containers
from orchestrator.init.environment import Choice, Gpu, choose, gpu_of
from orchestrator.init.hosts_text import Entry, host_name
from orchestrator.init.program import PYTHON, Needs, candidates, needs, script_of, words
from orchestrator.init.recipe_text import recipe_name

NONE = "none"
_COMMAND = "--command 'python train.py'"
_OTHER = "alias or user@host"
EXAMPLE = "train.py"
T = TypeVar("T")


@dataclass(frozen=True)
class Options:
    """What the command line said; None and "" where it was silent."""

    machine: str | None = None
    container: str | None = None
    kind: str | None = None
    command: str | None = None
    name: str | None = None
    environment: str | None = None
    sudo: bool = False
    check: bool = True


@dataclass(frozen=True)
class Chosen:
    """All that the files will say."""

    root: Path  # of the project: where recipes/ lies, or will
    entry: Entry
    known: bool  # whether hosts.yaml has this place already
    command: tuple[str, ...]
    needs: Needs
    environment: Choice
    recipe: str  # its name
    example: bool  # whether a program is to be written too
    report: Report | None = None


# Called with a host whose key is not known; records it or raises Refused.
Trust = Callable[[Host], None]


def decide(
    project: Project, options: Options, ask: Asker, trust: Trust, show_report: Callable[[Report], None]
) -> Chosen:
    """Asks, looks, and settles everything. Raises UsageError, Unreachable, Refused; nothing was written then."""
    root = project.own_root or project.cwd
    hosts = load_hosts(project)
    if root != project.cwd:
        ask.show(f"This folder is part of the project {root}, which holds recipes/.")
    options = _parted(options)
    if options.command is not None:
        words(options.command)  # before anybody is asked
    entry = _machine(project, hosts, options, ask)
    host = hosts.get(entry.name) or entry.host()
    ask = replace(ask, command=f"{ask.command} {entry.ssh or entry.name}")
    listed = Listed(())
    if options.check:
        listed = _listed(host, options, ask, trust)
    entry, host = _container(entry, host, listed, options, ask)
    facts, report = None, None
    if options.check:
        ask.show(f"checking {entry.place} …")
        facts, report = _checked(Place(host, entry.container), trust)
        show_report(report)
    command, example = _command(root, options, ask)
    wanted = needs(root, command) if not example else Needs(said_by=EXAMPLE, metrics=True)
    name = _name(root, command, options, ask)
    environment = _environment(project, wanted, facts, name, options, ask)
    known = entry.name in hosts and (entry.container is None or entry.container in hosts[entry.name].containers)
    known = known and not (entry.name == LOCAL and project.hosts_bundled)
    return Chosen(root, entry, known, tuple(command), wanted, environment, name, example, report)


# -- where --


def _parted(options: Options) -> Options:
    """A place, such as pve/200, is a machine and its container: it is written so everywhere else."""
    said = options.machine or ""
    machine, slash, container = said.partition("/") if "://" not in said else (said, "", "")
    if not slash:
        return options
    if not machine or not container or options.container not in (None, container):
        raise UsageError(
            f"{quote(said)} is not a machine and its container"
            + (f", for --container says {quote(options.container)}" if options.container else ""),
            "orch init pve/200",
        )
    return replace(options, machine=machine, container=container)


def _machine(project: Project, hosts: dict[str, Host], options: Options, ask: Asker) -> Entry:
    known = aliases()
    said = options.machine
    if said is None:
        offered = [Answer(name, name, f"in {path_shown(project.hosts_file)}") for name in hosts if name != LOCAL]
        offered += [Answer(one.name, one.name, one.detail) for one in known if one.name not in hosts]
        first = 0 if len(offered) == 1 else None
        offered.append(Answer(LOCAL, LOCAL, "this machine"))
        if len(offered) == 1 and ask.terminal and not ask.yes:
            ask.show("~/.ssh/config names no machine; one can be given as user@host.")
            first = 0
        said = ask.choose("Which machine", offered, first, offered[0].value, free=_OTHER)
    if said == LOCAL:
        return Entry(LOCAL, None)
    if said in hosts:
        return Entry(said, None if hosts[said].ssh is None else said, sudo=hosts[said].sudo)
    try:
        parsed = parse_ssh(said)
        entry = Entry(host_name(said), said)
        entry.host()
    except (ValueError, ValidationError):
        raise UsageError(f"{quote(said)} is neither an alias of ~/.ssh/config nor user@host", "orch init") from None
    same = [name for name, host in hosts.items() if host.ssh is not None and host.ssh == entry.host().ssh]
    if same:
        return replace(entry, name=same[0])
    number = 2
    while entry.name in hosts:  # another machine has that name
        entry = replace(entry, name=f"{host_name(said)}-{number}")
        number += 1
    if parsed["host"] not in [one.name for one in known] and "@" not in said:
        near = did_you_mean(said, [one.name for one in known])
        ask.show(f"~/.ssh/config has no alias {quote(said)}{near}; it is taken for a name.")
    return entry


def _listed(host: Host, options: Options, ask: Asker, trust: Trust) -> Listed:
    ask.show(f"asking {host.name} for its containers …")
    return _trusting(host, trust, lambda: containers(Place(host)))


def _checked(place: Place, trust: Trust) -> tuple[Facts, Report]:
    facts = _trusting(place.host, trust, lambda: read(place))
    return facts, judge(facts)


def _trusting(host: Host, trust: Trust, go: Callable[[], T]) -> T:
    """What `go` answers; where the host's key is not known, once that was settled."""
    try:
        return go()
    except Refused as error:
        if error.hint != f"orch trust {host.name}":
            hint = error.hint.replace(f"orch trust {host.name}", f"orch init {host.name}")  # it may be in no file yet
            raise Refused(f"{error.message}; nothing was written", hint) from None
        trust(host)
        return go()
    except Unreachable as error:
        hint = f"orch init {host.name} --no-check, which asks nobody and writes the files all the same"
        said = error.message.replace(": check host: in hosts.yaml", "")  # where it may not stand yet
        raise Unreachable(f"{said}; nothing was written", error.hint or hint) from None


def _container(entry: Entry, host: Host, listed: Listed, options: Options, ask: Asker) -> tuple[Entry, Host]:
    said = options.container
    named = host.containers
    if said is None:
        offered = [Answer(one.id, one.id, _beside(one)) for one in listed.found]
        ids = [one.id for one in listed.found]
        offered += [Answer(name, name, "in hosts.yaml") for name in named if name not in ids]
        offered.append(Answer(NONE, NONE, f"{host.name} itself"))
        running = [index for index, one in enumerate(listed.found) if one.running]
        sure = running[0] if len(running) == 1 or (running and ask.terminal and not ask.yes) else None
        default = sure if listed.found else 0 if len(offered) == 1 else None
        if len(named) == 1:  # what this project had before is the likeliest
            default = next(index for index, one in enumerate(offered) if one.value in named)
        if len(offered) == 1 and options.check:
            said = NONE  # there is nothing to choose from
            if listed.failed:
                silent = ", ".join(listed.failed)
                ask.show(f"{silent} on {host.name} did not say what there is; --container names one all the same.")
        else:
            free = "VMID or name" if offered[:-1] else f"VMID, name or {NONE}"
            option = f"--container {offered[0].value}"
            question = f"Which container of {host.name}"
            others = "pct" not in [one.kind for one in listed.found]  # else every VMID is there
            said = ask.choose(question, offered, default, option, free=free, numbers=others)
    if said == NONE:
        return entry, host
    if said in named:
        return replace(entry, container=said, kind=named[said].kind), host
    found = next((one for one in listed.found if said in (one.id, one.label)), None)
    # where a tool did not answer, its containers may still be meant by a name; a number is a VMID
    unheard = options.kind in listed.failed if options.kind or said.isdigit() else bool(listed.failed)
    if found is None and listed.found and not unheard:
        known = [one.id for one in listed.found]
        raise UsageError(
            f"{host.name} has no container {quote(said)}{did_you_mean(said, known)}; it has {', '.join(known)}",
            f"orch init {entry.ssh or entry.name} --container {known[0]}",
        )
    kind = options.kind or (found.kind if found else "pct" if said.isdigit() else "lxc")
    entry = replace(entry, container=found.id if found else said, kind=kind)
    if (options.sudo or kind in listed.sudo) and not host.sudo:
        entry = replace(entry, sudo=True)
    try:
        made = entry.host()
    except ValidationError:
        raise UsageError(
            f"{quote(said)} of kind {quote(kind)} cannot be a container: it takes a VMID or a name, and a kind",
            "orch init … --container 200 --kind pct",
        ) from None
    more = {"sudo": True} if entry.sudo else {}
    return entry, host.model_copy(update={"containers": {**host.containers, **made.containers}, **more})


def _beside(one: Found) -> str:
    return f"{one.kind}, {one.state}{f', {one.label}' if one.label else ''}"


# -- what --


def _command(root: Path, options: Options, ask: Asker) -> tuple[list[str], bool]:
    """The words of the command, and whether the program it names is to be written."""
    if options.command is not None:
        return words(options.command), False
    found = candidates(root)
    if not found:
        question = f"There is no program here yet. Write a small one to begin with, {EXAMPLE}"
        if ask.sure(question, _COMMAND, default=True):
            return [PYTHON, EXAMPLE], True
        return words(ask.text("What runs", "python train.py", _COMMAND)), False
    answers = [Answer(shown(one), shown(one)) for one in found]
    said = ask.choose("What runs", answers, 0, _COMMAND, free="or a command")
    return next((one for one in found if shown(one) == said), None) or words(said), False


def shown(command: list[str]) -> str:
    """The command as somebody would type it."""
    return shlex.join("python" if word == PYTHON else word for word in command)


def _name(root: Path, command: list[str], options: Options, ask: Asker) -> str:
    if options.name is not None:
        if not re.fullmatch(RECIPE_NAME, options.name):
            raise UsageError(f"a recipe's name is lower-case letters, digits, _ and -, not {quote(options.name)}")
        return options.name
    script = script_of(root, command)
    plain = script.stem if script else next((Path(word).stem for word in command[1:] if word[0] not in "-{"), root.name)
    name = recipe_name(plain if plain not in ("main", "run", "__main__") else root.name)
    bundled = {path.stem for path in (bundled_dir() / "recipes").glob("*.yaml")}
    return name if name not in bundled else recipe_name(f"my-{name}")


def _environment(
    project: Project, wanted: Needs, facts: Facts | None, name: str, options: Options, ask: Asker
) -> Choice:
    gpu = gpu_of(facts) if facts is not None else Gpu()
    if options.environment is not None:
        known = list_environments(project)
        if options.environment not in known:
            near = did_you_mean(options.environment, known)
            raise UsageError(
                f"there is no environment {quote(options.environment)}{near}; there are: {', '.join(known)}",
                "--environment NAME, or leave it out",
            )
        return Choice(options.environment, "as was said")
    return choose(project, wanted, gpu, name)
