"""hosts.yaml as `orch init` writes it: a new file with comments, or a host more in one that is there.

A file that is there is edited as text, so that its comments and its order stay. What comes out is read by the loader
and held against what was meant; where the text cannot be edited so, there is the piece to paste.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import yaml

from orchestrator.config import LOCAL, Container, Host, Project, Ssh, load_hosts, parse_ssh
from orchestrator.config.models import HOST_NAME
from orchestrator.errors import OrchError
from orchestrator.init.recipe_text import quoted

_TITLES = {
    "pct": "a Proxmox container, by its VMID",
    "lxc": "an LXC container, by its name",
    "incus": "an Incus container, by its name",
    "docker": "a Docker container, by its name",
    "podman": "a Podman container, by its name",
}


@dataclass(frozen=True)
class Entry:
    """What hosts.yaml is to hold: a host as it is reached, and perhaps one container of it."""

    name: str
    ssh: str | None  # as the file has it; None: this machine
    container: str | None = None
    kind: str = ""
    sudo: bool = False

    @property
    def place(self) -> str:
        return self.name if self.container is None else f"{self.name}/{self.container}"

    def host(self) -> Host:
        """As the loader reads it. Raises pydantic's ValidationError, ValueError."""
        containers = {}
        if self.container is not None:
            containers[self.container] = Container.model_validate({"kind": self.kind, "id": self.container})
        ssh = Ssh(**parse_ssh(self.ssh)) if self.ssh is not None else None
        more = {"sudo": True} if self.sudo else {}
        return Host.model_validate({"name": self.name, "ssh": ssh, "containers": containers, **more})


def host_name(ssh: str) -> str:
    """A name for a machine, from how it is reached: the alias, the first part of a name, or the address."""
    host = str(parse_ssh(ssh)["host"])
    short = host if re.fullmatch(r"[0-9.]+", host) or "." not in host or "@" not in ssh else host.partition(".")[0]
    name = re.sub(r"[^a-z0-9._-]+", "-", short.lower()).strip("._-")
    name = name if re.fullmatch(HOST_NAME, name) else "host"
    return f"{name}-ssh" if name == LOCAL else name


def new_file(entry: Entry, pointer: str) -> str:
    """A whole hosts.yaml. `pointer` is the line for editors."""
    lines = [
        pointer,
        "# The machines that orch works on, each named once. A place is HOST or HOST/CONTAINER, such",
        f"# as {entry.place if entry.name != LOCAL else 'pve/200'}; this machine is `local`. "
        "`orch schema hosts` has every key.",
        "",
        "hosts:",
    ]
    if entry.name == LOCAL and entry.container is None:
        lines += ["  local: {}", "  #", "  # One that is reached by SSH:", "  #", "  # server:"]
        lines += ["  #   ssh: user@server.example        # or an alias of ~/.ssh/config"]
        return "\n".join(lines) + "\n"
    lines += _host_lines(entry, 2, comments=True)
    return "\n".join(lines) + "\n"


def piece(entry: Entry) -> str:
    """What to paste under `hosts:`."""
    return "\n".join(_host_lines(entry, 2, comments=False)) + "\n"


def _host_lines(entry: Entry, indent: int, *, comments: bool) -> list[str]:
    rows: list[tuple[str, str]] = []
    if entry.name != LOCAL:
        said = "an alias of ~/.ssh/config, user@host, or user@host:port"
        rows.append((f"  ssh: {_scalar(entry.ssh or '')}", said))
    if entry.sudo:
        rows.append(("  sudo: true", "into containers goes `sudo -n`"))
    if entry.container is not None:
        rows += [("  containers:", ""), (f"    {_container(entry)}", _TITLES.get(entry.kind, ""))]
    if comments and entry.container is not None:
        more = {"pct": "201: {kind: pct}", "lxc": "other: {kind: lxc}"}.get(entry.kind)
        rows += [(f"    # {more}", "as many as there are")] if more and entry.container != "201" else []
    if comments and entry.name != LOCAL:
        rows.append(("  # root: /srv/orch", "where orch keeps its files on the host itself"))
    width = max((len(left) for left, right in rows if right), default=0) + 2
    pad = " " * indent
    text = [f"{pad}{left.ljust(width) + '# ' + right if right and comments else left}" for left, right in rows]
    return [f"{pad}{_scalar(entry.name)}:", *text] if rows else [f"{pad}{_scalar(entry.name)}: {{}}"]


def _container(entry: Entry) -> str:
    return f"{_scalar(entry.container or '')}: {{kind: {entry.kind}}}"


def _scalar(text: str) -> str:
    """The text as one word of YAML, quoted where it has to be."""
    plain = re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_./@-]*(?::\d+)?", text) and text.lower() not in ("null", "true")
    return text if plain else quoted(text)


def added(project: Project, entry: Entry) -> str | None:
    """The text of the project's hosts.yaml with the entry in it; None where it cannot be put there as text."""
    path = project.hosts_file
    text = path.read_text("utf-8")
    try:
        changed = _insert(text, entry)
        if changed is None:
            return None
        beside = path.with_name(f".{path.name}.orch-check")
        try:
            beside.write_text(changed, "utf-8")
            read = load_hosts(Project(project.cwd, beside, (), ()))
        finally:
            beside.unlink(missing_ok=True)
    except (OrchError, yaml.YAMLError, OSError):
        return None
    before = load_hosts(project)
    wanted = entry.host()
    old = before.get(entry.name) if entry.name in before and entry.name in _names(text) else None
    if old is not None:
        wanted = old.model_copy(update={"containers": {**old.containers, **wanted.containers}})
    return changed if read == {**before, entry.name: wanted} else None


def _names(text: str) -> list[str]:
    data = yaml.safe_load(text)
    hosts = data.get("hosts") if isinstance(data, dict) else None
    return [str(name) for name in hosts] if isinstance(hosts, dict) else []


def _insert(text: str, entry: Entry) -> str | None:
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if root is None:
        return _after(text, len(text.splitlines()), ["hosts:", *_host_lines(entry, 2, comments=False)])
    hosts = _child(root, "hosts")
    if hosts is None:
        return None
    key, value = hosts
    if not isinstance(value, yaml.MappingNode):  # nothing after `hosts:`
        empty = isinstance(value, yaml.ScalarNode) and value.value == ""
        return _after(text, key.end_mark.line + 1, _host_lines(entry, 2, comments=False)) if empty else None
    if value.flow_style or not value.value:
        return None
    known = _child(value, entry.name)
    if known is None:
        indent = value.value[0][0].start_mark.column
        return _after(text, _end(value), _host_lines(entry, indent, comments=False))
    if entry.container is None or not isinstance(known[1], yaml.MappingNode) or known[1].flow_style:
        return None
    inner = _child(known[1], "containers")
    indent = known[1].value[0][0].start_mark.column
    if inner is None:
        lines = [f"{' ' * indent}containers:", f"{' ' * (indent + 2)}{_container(entry)}"]
        return _after(text, _end(known[1]), lines)
    if isinstance(inner[1], yaml.MappingNode) and not inner[1].flow_style and inner[1].value:
        line = f"{' ' * inner[1].value[0][0].start_mark.column}{_container(entry)}"
        return _after(text, _end(inner[1]), [line])
    return None


def _child(node: yaml.Node, name: str) -> tuple[yaml.Node, yaml.Node] | None:
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    return next(((key, value) for key, value in pairs if key.value == name), None)


def _end(node: yaml.Node) -> int:
    """The number of lines up to the last word of a value: a block's own end lies behind the comments that follow."""
    if isinstance(node, yaml.MappingNode) and not node.flow_style and node.value:
        key, value = node.value[-1]
        return max(int(key.end_mark.line) + 1, _end(value))
    if isinstance(node, yaml.SequenceNode) and not node.flow_style and node.value:
        return _end(node.value[-1])
    return int(node.end_mark.line) + 1


def _after(text: str, line: int, more: list[str]) -> str:
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    return "".join([*lines[:line], *(f"{one}\n" for one in more), *lines[line:]])


def replace_file(path: Path, text: str) -> None:
    """Writes a file by rename, with the old one's mode; a link stays one. Raises OSError."""
    real = path.resolve()
    beside = real.with_name(f".{real.name}.orch-new")
    beside.write_text(text, "utf-8")
    if real.exists():
        beside.chmod(real.stat().st_mode & 0o7777)
    beside.replace(real)
