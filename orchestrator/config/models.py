"""What hosts.yaml, a recipe and an environment's spec.yaml hold.

`Expect` says in words what a value must be, for the sentence that refuses another; `Given` marks what is not
a key of the file but comes from around it (a name from the file's stem, say).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, StringConstraints

from orchestrator.config.patterns import searchable

HOST_NAME = r"[a-z0-9][a-z0-9._-]*"
CONTAINER_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
RECIPE_NAME = r"[a-z0-9][a-z0-9_-]{0,39}"
ENVIRONMENT_NAME = HOST_NAME
VARIABLE_NAME = r"[A-Za-z_][A-Za-z0-9_]*"


@dataclass(frozen=True)
class Expect:
    """What a value must be: completes "KEY must be …"; `add` shows how to write a missing one."""

    words: str
    add: str = ""
    private: bool = False  # a wrong value is not repeated in the sentence


@dataclass(frozen=True)
class Given:
    """The field is not a key of the file."""


def _whole(pattern: str) -> StringConstraints:
    return StringConstraints(pattern=rf"^(?:{pattern})\z")


def _python_range(text: str) -> str:
    version = _version_or_range(text)
    if version is None:
        return text
    # a bare 3.11 means any 3.11, and a bare 3.11.7 that one alone
    return f"=={text}" if version.count(".") >= 2 else f"=={text}.*"


def _cause(name: str) -> str:
    if name in ("healthy", "unknown"):
        raise ValueError("what a diagnosis says where there is no cause")
    return name


def _torch_version(text: str) -> str:
    _version_or_range(text)
    return text


def _version_or_range(text: str) -> str | None:
    """The version when it is one, None when it is a range; ValueError when it is neither."""
    # imported here: only environments need it, and every command loads this module
    from packaging.specifiers import InvalidSpecifier, SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        return str(Version(text))
    except InvalidVersion:
        pass
    try:
        if len(SpecifierSet(text)) == 0:
            raise ValueError("empty")
    except InvalidSpecifier as error:
        raise ValueError(str(error)) from error
    return None


Text = Annotated[str, _whole(r"[^\x00]*"), Expect('text (write "" for an empty one)')]
AbsolutePath = Annotated[
    str,
    _whole(r"/[^\x00-\x1f\x7f]*[^\x00-\x1f\x7f/]"),
    Expect("an absolute path at the place, such as /srv/orch"),
]
VariableName = Annotated[
    str,
    _whole(VARIABLE_NAME),
    Expect("the name of an environment variable (letters, digits and _, no digit first)"),
]


SecretName = Annotated[
    str,
    _whole(VARIABLE_NAME),
    Expect("the name alone of a secret, such as HF_TOKEN, without its value", private=True),
]


class _Model(BaseModel):
    # defaults are what the annotations say, and nothing changes once it is read
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class Ssh(_Model):
    """How a host is reached by SSH; what is not said here is taken from the SSH configuration."""

    host: Annotated[
        str,
        _whole(r"[A-Za-z0-9_][A-Za-z0-9._-]*|[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*(?:%[A-Za-z0-9._-]+)?"),
        Expect("a host name, an address, or an alias of the SSH configuration", "host: NAME"),
    ]
    user: Annotated[str | None, _whole(r"[A-Za-z0-9_][A-Za-z0-9._@\\$-]*"), Expect("a user name")] = None
    port: Annotated[int | None, Field(ge=1, le=65535), Expect("a whole number from 1 to 65535")] = None
    identity_file: Annotated[Path | None, Expect("the path of a private key")] = None
    known_hosts: Annotated[Path | None, Expect("the path of a known_hosts file")] = None
    ssh_config: Annotated[Path | None, Expect("the path of an SSH configuration file")] = None
    connect_timeout: Annotated[
        float, Field(gt=0, le=600, allow_inf_nan=False), Expect("a number of seconds above 0, at most 600")
    ] = 10.0


Wheels = Annotated[
    str | None,
    _whole(r"auto|workstation|place|/[^\x00-\x1f\x7f]+|https?://[!-~]+"),
    Expect('"auto", "workstation", "place", a folder at the place such as /srv/wheels, or the address of an index'),
]
Protect = Annotated[bool | None, Expect("true or false")]
# where the other places of a run reach this one
Address = Annotated[
    Annotated[str, AfterValidator(lambda text: str(IPv4Address(text)))] | None,
    Expect("an IPv4 address, such as 192.0.2.11"),
]
Interface = Annotated[str | None, _whole(r"[^\s/:\x00]{1,15}"), Expect("the name of a network interface, such as eth0")]


_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_MOST_CODE = 2 << 30  # bytes: a snapshot is made in memory


def size_of(text: str) -> int:
    """Bytes of a size such as 64MB (10^6) or 64MiB (2^20); ValueError for anything else."""
    found = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,6})?) ?([kKmMgG]?i?[bB]?)", text)
    if found is None or found[2].lower() not in _UNITS:
        raise ValueError(text)
    return int(float(found[1]) * _UNITS[found[2].lower()])


class Container(_Model):
    """A container of a host: `pct` by its VMID, the other kinds by their name."""

    kind: Annotated[
        Literal["pct", "lxc", "incus", "docker", "podman"],
        Expect('"pct" (Proxmox), "lxc", "incus", "docker" or "podman"', "kind: pct"),
    ]
    id: Annotated[str, _whole(CONTAINER_NAME), Expect("a VMID or the name of a container", "id: 200")]
    root: AbsolutePath | None = None
    wheels: Wheels = None
    protect: Protect = None
    address: Address = None
    interface: Interface = None


class Host(_Model):
    """A machine reached by SSH, or (without `ssh`) this one."""

    name: Annotated[str, _whole(HOST_NAME), Given()]
    ssh: Annotated[Ssh | None, Expect("a mapping with host, user, port, …, or text such as root@192.0.2.10:22")] = None
    root: AbsolutePath | None = None
    wheels: Wheels = None
    protect: Protect = None
    address: Address = None
    interface: Interface = None
    python: Annotated[
        str | None, _whole(r"[A-Za-z0-9_/][A-Za-z0-9._/+-]*"), Expect("a command or the path of a Python")
    ] = None
    # the way into a container goes through sudo, and nothing else does
    sudo: Annotated[bool, Expect("true or false")] = False
    containers: Annotated[
        dict[
            Annotated[str, _whole(CONTAINER_NAME), Expect("a name of letters, digits, and . _ - inside it")],
            Annotated[Container, Expect("a mapping such as {kind: pct}, or a kind alone")],
        ],
        Expect("a mapping of names to containers"),
    ] = Field(default_factory=dict)


@dataclass(frozen=True)
class Place:
    """Where commands run and files lie: a host and, perhaps, one of its containers."""

    host: Host
    container_name: str | None = None

    @property
    def name(self) -> str:
        """`local`, or `pve/200` for a container."""
        return self.host.name if self.container_name is None else f"{self.host.name}/{self.container_name}"

    @property
    def container(self) -> Container | None:
        """The container, or None for the host itself."""
        return None if self.container_name is None else self.host.containers[self.container_name]

    @property
    def root(self) -> str | None:
        """The directory to use at the place, where one is set; a container's is its own, not its host's."""
        return self.host.root if self.container is None else self.container.root

    @property
    def wheels(self) -> str:
        """Where wheels come from: "auto", "workstation", "place", a folder there, or the address of an index."""
        own = self.container.wheels if self.container else None
        return own or self.host.wheels or "auto"

    @property
    def address(self) -> str | None:
        """At which other places of a run reach this one, where hosts.yaml says."""
        return self.host.address if self.container is None else self.container.address

    @property
    def interface(self) -> str | None:
        """The network interface that has this address, where hosts.yaml says."""
        return self.host.interface if self.container is None else self.container.interface

    @property
    def protect(self) -> bool:
        """Whether environments are made immutable. By itself not on this very machine, where a folder of one's own
        should go away with `rm`."""
        own = self.container.protect if self.container else None
        said = self.host.protect if own is None else own
        return said if said is not None else self.host.ssh is not None or self.container is not None


class Health(_Model):
    """What a run must reach to count as healthy."""

    step: Annotated[int | None, Field(ge=1), Expect("a whole number from 1")] = None
    tokens_per_second: Annotated[float | None, Field(gt=0, allow_inf_nan=False), Expect("a number above 0")] = None


class Rule(_Model):
    """A rule of the user's own for diagnoses: lines that match it have that cause."""

    pattern: Annotated[
        str,
        AfterValidator(searchable),
        Expect(
            "a regular expression with three or more characters of plain text in a row", "pattern: 'text of the line'"
        ),
    ]
    cause: Annotated[
        str,
        _whole(r"[a-z0-9][a-z0-9-]{0,39}"),
        AfterValidator(_cause),
        Expect("a name of lower-case letters, digits and -, and neither healthy nor unknown", "cause: NAME"),
    ]
    title: Text = ""
    advice: Text = ""
    command: Text = ""
    retry: Annotated[bool, Expect("true or false")] = False


PlaceName = Annotated[
    str,
    _whole(rf"{HOST_NAME}(?:/{CONTAINER_NAME})?"),
    Expect("a host or HOST/CONTAINER, such as pve/200", "place: HOST/CONTAINER"),
]


class OneOfPlaces(_Model):
    """One place of a run over several; what is not said of the network is taken from hosts.yaml."""

    place: PlaceName
    address: Address = None
    interface: Interface = None
    ranks: Annotated[int | None, Field(ge=1, le=1024), Expect("a whole number from 1")] = None


class Elastic(_Model):
    """Whether a run over several places may go on at fewer of them."""

    least: Annotated[int, Field(ge=1), Expect("a whole number from 1: of places", "least: 1")]


def _size(text: str) -> str:
    if not 0 < size_of(text) <= _MOST_CODE:
        raise ValueError(text)
    return text


class OwnCode(_Model):
    """The user's own source tree; a relative path is taken from the folder that holds `recipes/`."""

    path: Annotated[str, _whole(r"[^\x00]+"), Expect("the path of a folder, such as .", "path: .")]
    largest: Annotated[
        str, AfterValidator(_size), Expect("a size up to 2GiB, such as 64MB (10^6 bytes) or 64MiB (2^20)")
    ] = "64MiB"


# nothing where the bundled trainer's source is meant: one kind of mapping, so that a problem has one sentence
Code = Annotated[
    OwnCode | None,
    BeforeValidator(lambda value: code_mapping(value)),
    PlainSerializer(lambda code: "bundled" if code is None else code.model_dump()),
    Expect('"bundled", the path of a folder, or a mapping with path and largest'),
]


def code_mapping(value: Any) -> Any:
    """A recipe's `code` with a path alone written as a mapping; None for the bundled trainer."""
    if isinstance(value, str):
        return None if value == "bundled" else {"path": value}
    return value


def _gpus(value: Any) -> Any:
    """`gpus` of a recipe: "all", "none", a number as text, or a list of indices and UUIDs as text; None: automatic."""
    if value is None or isinstance(value, (list, tuple)):
        words = None if value is None else [str(word) for word in value]
        if words is not None and (not words or len(set(words)) < len(words) or not all(map(_GPU.fullmatch, words))):
            raise ValueError("no list of GPUs")
        return words
    text = str(value)
    if re.fullmatch("0*[0-9]{1,4}", text):
        return str(int(text)) if int(text) else "none"
    if text not in ("all", "none"):
        raise ValueError("no number of GPUs")
    return text


_GPU = re.compile("[0-9]{1,4}|GPU-[0-9A-Fa-f-]{4,60}")

Gpus = Annotated[
    str | list[str] | None,
    BeforeValidator(_gpus),
    Expect("all, none, a number such as 2, or a list of indices and UUIDs such as [0, 1]"),
]


class Recipe(_Model):
    """What to run, where, in which environment, and what counts as healthy."""

    name: Annotated[
        str,
        _whole(RECIPE_NAME),
        Expect("at most 40 lower-case letters, digits, _ and -, a letter or digit first"),
    ]
    # resolved when a recipe is read, so that what a run records stands for itself
    extends: Annotated[str | None, Field(exclude=True), Expect("the name of a recipe, or the path of its file")] = None
    description: Text = ""
    place: PlaceName = "local"
    places: Annotated[
        list[Annotated[OneOfPlaces, Expect("a mapping with place, address, interface and ranks")]] | None,
        Field(min_length=2),
        Expect("a list of two or more mappings with place, address, interface and ranks"),
    ] = None
    elastic: Annotated[Elastic | None, Expect("a mapping with least, such as {least: 1}")] = None
    environment: Annotated[
        str,
        _whole(ENVIRONMENT_NAME),
        Expect("the name of an environment, such as demo", "environment: NAME"),
    ]
    code: Code = None
    command: Annotated[
        list[Text] | None, Field(min_length=1), Expect("a list of words, such as [python, train.py]")
    ] = None
    settings: Annotated[dict[str, Any], Expect("a mapping: the trainer's configuration")] = Field(default_factory=dict)
    env: Annotated[dict[VariableName, Text], Expect("a mapping of names to text")] = Field(default_factory=dict)
    gpus: Gpus = None
    secrets: Annotated[list[SecretName], Expect("a list of names of environment variables")] = Field(
        default_factory=list
    )
    metrics: Annotated[bool, Expect("true or false")] = True
    health: Annotated[Health, Expect("a mapping with step and tokens_per_second")] = Health()
    stop_grace: Annotated[
        float, Field(ge=0, le=86400, allow_inf_nan=False), Expect("a number of seconds from 0 to 86400")
    ] = 30.0
    sample_seconds: Annotated[
        float, Field(ge=0.1, le=3600, allow_inf_nan=False), Expect("a number of seconds from 0.1 to 3600")
    ] = 5.0
    rules: Annotated[list[Rule], Expect("a list of mappings with pattern and cause")] = Field(default_factory=list)


class EnvironmentSpec(_Model):
    """An environment's spec.yaml, with the lock that lies beside it."""

    name: Annotated[str, Given()]
    directory: Annotated[Path, Given()]
    lock_text: Annotated[str, Given()] = Field(repr=False)
    allow_unhashed: Annotated[bool, Given()] = False  # for one build: files that the lock has no hash of
    python: Annotated[
        str,
        AfterValidator(_python_range),
        Expect("a version or a range of versions, such as >=3.10,<3.14", "python: '>=3.10,<3.14'"),
    ]
    torch: Annotated[
        str,
        AfterValidator(_torch_version),
        Expect("a version or a range of versions, such as 2.11.0", "torch: 2.11.0"),
    ]
    backend: Annotated[
        Literal["cpu", "cu126", "cu128", "cu130", "auto"],
        Expect("cpu, cu126, cu128, cu130 or auto", "backend: cpu"),
    ]
    index_hashes: Annotated[bool, Expect("true or false")] = False
