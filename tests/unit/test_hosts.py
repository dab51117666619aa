"""hosts.yaml and the places it names."""

from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import Container, Host, Ssh, find_project, load_hosts, parse_ssh, resolve_place
from orchestrator.errors import ConfigError, UsageError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    work = tmp_path / "home" / "work"
    work.mkdir(parents=True)
    monkeypatch.chdir(work)
    return work


def load(text: str) -> dict[str, Host]:
    Path("hosts.yaml").write_text(text)
    return load_hosts(find_project())


def problems(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(text)
    return list(caught.value.problems)


def test_without_a_file_there_is_this_machine() -> None:
    project = find_project()
    assert load_hosts(project) == {"local": Host(name="local")}
    with pytest.raises(UsageError) as caught:
        resolve_place(load_hosts(project), "pve", project)
    assert caught.value.message == 'there is no host "pve"'
    assert caught.value.hint == (
        "hosts: local; looked in hosts.yaml here and in every folder above and ~/.config/orch/hosts.yaml; "
        "orch init writes one"
    )


@pytest.mark.parametrize("text", ["", "# nothing\n", "hosts:\n", "hosts: {}\n", "hosts:\n  local:\n"])
def test_an_empty_file_is_no_error(text: str) -> None:
    assert load(text) == {"local": Host(name="local")}


def test_a_full_file() -> None:
    hosts = load("""
hosts:
  pve:
    ssh: {host: pve, user: root, port: 2222, identity_file: ~/k, known_hosts: k/h, ssh_config: /c, connect_timeout: 2}
    python: /usr/bin/python3.11
    root: /srv/orch
    sudo: true
    containers:
      200:
      201: {kind: pct, root: /data}
      first: {id: 202, kind: pct}
      train: {}
      Other: {kind: lxc, id: other-1}
      box: docker
      210: podman
      web: {kind: incus, id: web-1}
  no: {ssh: root@192.0.2.10:22}
  here: {ssh: null}
  local:
    root: /tmp/orch
    containers: {box: {kind: lxc}}
""")
    folder = Path.cwd()
    assert hosts["pve"] == Host(
        name="pve",
        ssh=Ssh(
            host="pve", user="root", port=2222, identity_file=Path.home() / "k", known_hosts=folder / "k/h",
            ssh_config=Path("/c"), connect_timeout=2.0,
        ),
        python="/usr/bin/python3.11",
        sudo=True,
        root="/srv/orch",
        containers={
            "200": Container(kind="pct", id="200"),
            "201": Container(kind="pct", id="201", root="/data"),
            "first": Container(kind="pct", id="202"),
            "train": Container(kind="lxc", id="train"),
            "Other": Container(kind="lxc", id="other-1"),
            "box": Container(kind="docker", id="box"),
            "210": Container(kind="podman", id="210"),
            "web": Container(kind="incus", id="web-1"),
        },
    )  # fmt: skip
    assert hosts["no"].ssh == Ssh(host="192.0.2.10", user="root", port=22)
    assert hosts["here"].ssh is None
    assert resolve_place(hosts, "local/box").container == Container(kind="lxc", id="box")
    assert resolve_place(hosts, "local").root == "/tmp/orch"
    assert resolve_place(hosts, "local/box").root is None
    place = resolve_place(hosts, "pve/201")
    assert (place.name, place.container_name, place.root, place.host) == (
        "pve/201",
        "201",
        "/data",
        hosts["pve"],
    )
    assert (resolve_place(hosts, "pve").name, resolve_place(hosts, "pve").container) == ("pve", None)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("pve", {"host": "pve"}),
        ("root@pve", {"host": "pve", "user": "root"}),
        ("root@192.0.2.10:22", {"host": "192.0.2.10", "user": "root", "port": "22"}),
        ("[fe80::1]:99", {"host": "fe80::1", "port": "99"}),
        ("me@[2001:db8::1]", {"host": "2001:db8::1", "user": "me"}),
        ("2001:db8::1", {"host": "2001:db8::1"}),
        ("fe80::1%eth0", {"host": "fe80::1%eth0"}),
        ("ssh://root@pve:22/", {"host": "pve", "user": "root", "port": "22"}),
        ("me@corp@pve", {"host": "pve", "user": "me@corp"}),
    ],
)
def test_ssh_as_text(text: str, parts: dict[str, Any]) -> None:
    assert parse_ssh(text) == parts
    assert load(f"hosts: {{a: {{ssh: '{text}'}}}}")["a"].ssh == Ssh.model_validate(parts)


HOST = "a host name, an address, or an alias of the SSH configuration"
KINDS = '"pct" (Proxmox), "lxc", "incus", "docker" or "podman"'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hosts:\n  pve:\n    ssh: {host: a, port: abc}\n",
         ['hosts.yaml:3: ssh.port must be a whole number from 1 to 65535, not "abc"']),
        ("hosts:\n  pve:\n    ssh:\n      host: a\n      port: 70000\n",
         ['hosts.yaml:5: ssh.port must be a whole number from 1 to 65535, not "70000"']),
        ("hosts: {a: {ssh: 'a:b'}}\n",
         ['hosts.yaml:1: ssh.port must be a whole number from 1 to 65535, not "b"']),
        ("hosts: {a: {ssh: 'a:'}}\n",
         ['hosts.yaml:1: ssh.port must be a whole number from 1 to 65535, not ""']),
        ("hosts:\n  pve:\n    ssh: {user: a}\n",
         [f'hosts.yaml:3: the key "host" is missing in ssh; add "host: NAME" ({HOST})']),
        ("hosts:\n  pve:\n    ssh: {host: }\n", [f"hosts.yaml:3: ssh.host has no value: it must be {HOST}"]),
        ("hosts:\n  pve:\n    ssh: {hst: a}\n", ['hosts.yaml:3: unknown key "hst" in ssh (did you mean "host"?)']),
        ("hosts: {a: {ssh: '-oProxyCommand=x'}}\n", [f'hosts.yaml:1: ssh.host must be {HOST}, not "-oProxyCommand=x"']),
        ("hosts: {a: {ssh: [b]}}\n",
         ["hosts.yaml:1: ssh must be a mapping with host, user, port, …, or text such as root@192.0.2.10:22, "
          "not a list"]),
        ("hosts: {a: {ssh: 'root:hunter2@b'}}\n",
         ["hosts.yaml:1: ssh holds a password, which is never taken from a file; use a key or an agent"]),
        ("hosts:\n  pve:\n    containers: {}\n",
         ['hosts.yaml:2: the key "ssh" is missing in host "pve"; add "ssh: pve" (or "ssh: null" when it is this '
          "machine)"]),
        ("hosts:\n  local:\n    ssh: a\n",
         ["hosts.yaml:3: local is this machine and takes no ssh; give a host that has one another name"]),
        ("hosts:\n  Big: {ssh: a}\n",
         ["hosts.yaml:2: the name of a host must be lower-case letters, digits, and . _ - inside it, "
          'not "Big"']),
        ("hosts:\n  a: text\n", ['hosts.yaml:2: hosts.a must be a mapping (key: value), not "text"']),
        ("hosts: [a]\n", ["hosts.yaml:1: hosts must be a mapping of names, not a list"]),
        ("- a\n", ["hosts.yaml:1: the file must be a mapping (key: value), not a list"]),
        ("host:\n  a: {}\n", ['hosts.yaml:1: unknown key "host" (did you mean "hosts"?)']),
        ("pve:\n  ssh: a\n", ['hosts.yaml:1: unknown key "pve" (there are: hosts)']),
        ("hosts:\n  a: {ssh: b, name: c}\n",
         ['hosts.yaml:2: unknown key "name" (there are: ssh, root, wheels, protect, address, interface, python, '
          "sudo, containers)"]),
        ("hosts:\n  a:\n    ssh: b\n  a:\n    ssh: c\n",
         ['hosts.yaml:4: the key "hosts.a" is there already, in line 2; keep one of them']),
        ("hosts:\n  a:\n    ssh: b\n    containers:\n      0200:\n",
         ["hosts.yaml:5: containers.0200.id must be a VMID, a whole number from 100 without leading zeros, "
          'not "0200"']),
        ("hosts:\n  a:\n    ssh: b\n    containers:\n      x:\n        kind: pct\n        id: 99\n",
         ["hosts.yaml:7: containers.x.id must be a VMID, a whole number from 100 without leading zeros, "
          'not "99"']),
        ("hosts: {a: {ssh: b, containers: {x: {kind: dokcer}}}}\n",
         [f'hosts.yaml:1: containers.x.kind must be {KINDS}, not "dokcer" (did you mean "docker"?)']),
        ("hosts:\n  a:\n    ssh: b\n    containers:\n      x: inkus\n",
         [f'hosts.yaml:5: containers.x.kind must be {KINDS}, not "inkus" (did you mean "incus"?)']),
        ("hosts: {a: {ssh: b, sudo: doas}}\n", ['hosts.yaml:1: sudo must be true or false, not "doas"']),
        ("hosts: {a: {ssh: b, containers: {x: {id: '-x'}}}}\n",
         ['hosts.yaml:1: containers.x.id must be a VMID or the name of a container, not "-x"']),
        ("hosts: {a: {ssh: b, containers: {'a b': {id: c}}}}\n",
         ["hosts.yaml:1: a key of containers must be a name of letters, digits, and . _ - inside it, "
          'not "a b"']),
        ("hosts: {a: {ssh: b, containers: [200]}}\n",
         ["hosts.yaml:1: containers must be a mapping of names to containers, not a list"]),
        ("hosts: {a: {ssh: b, containers: {x: [1]}}}\n",
         ["hosts.yaml:1: containers.x must be a mapping such as {kind: pct}, or a kind alone, not a list"]),
        ("hosts: {a: {ssh: b, root: srv}}\n",
         ['hosts.yaml:1: root must be an absolute path at the place, such as /srv/orch, not "srv"']),
        ("hosts: {a: {ssh: b, python: '-c'}}\n",
         ['hosts.yaml:1: python must be a command or the path of a Python, not "-c"']),
        ("hosts:\n  a: {ssh: b, rot: /x}\n  b: {}\n  c: {ssh: {host: d, port: 0}}\nhost: 1\n",
         ['hosts.yaml:2: unknown key "rot" (did you mean "root"?)',
          'hosts.yaml:3: the key "ssh" is missing in host "b"; add "ssh: b" (or "ssh: null" when it is this machine)',
          'hosts.yaml:4: ssh.port must be a whole number from 1 to 65535, not "0"',
          'hosts.yaml:5: unknown key "host" (did you mean "hosts"?)']),
    ],
)  # fmt: skip
def test_every_problem_is_one_sentence(text: str, expected: list[str]) -> None:
    assert problems(text) == expected


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("pvee", 'there is no host "pvee" (did you mean "pve"?)', "hosts: local, pve; looked in hosts.yaml"),
        (
            "pvee/200",
            'there is no host "pvee" (did you mean "pve/200"?)',
            "hosts: local, pve; looked in hosts.yaml",
        ),
        (
            "200",
            'there is no host "200" (did you mean "pve/200"?)',
            "hosts: local, pve; looked in hosts.yaml",
        ),
        ("", 'there is no host ""', "hosts: local, pve; looked in hosts.yaml"),
        (
            "pve/20",
            'host "pve" has no container "20" (did you mean "200"?)',
            "containers of pve: 200, train; looked in hosts.yaml",
        ),
        ("pve/", 'host "pve" has no container ""', "containers of pve: 200, train; looked in hosts.yaml"),
        ("local/x", 'host "local" has no container "x"', "containers of local: none; looked in hosts.yaml"),
    ],
)
def test_unknown_places(name: str, message: str, hint: str) -> None:
    hosts = load("hosts: {pve: {ssh: a, containers: {200: , train: }}}")
    with pytest.raises(UsageError) as caught:
        resolve_place(hosts, name, find_project())
    assert (caught.value.message, caught.value.hint) == (message, hint)


def test_the_nearest_file_counts(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = Path.home() / ".config/orch/hosts.yaml"
    user.parent.mkdir(parents=True)
    user.write_text("hosts: {user: {ssh: a}}")
    inner = home / "project" / "deep"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    assert set(load_hosts(find_project())) == {"local", "user"}
    (home / "hosts.yaml").write_text("hosts: {outer: {ssh: a}}")
    assert set(load_hosts(find_project())) == {"local", "outer"}
    (inner.parent / "hosts.yaml").write_text("hosts: {inner: {ssh: a}}")
    assert set(load_hosts(find_project())) == {"local", "inner"}
    other = home.parent / "elsewhere"
    (other / "orch").mkdir(parents=True)
    (other / "orch" / "hosts.yaml").write_text("hosts: {xdg: {ssh: a}}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(other))
    monkeypatch.chdir(other)
    assert set(load_hosts(find_project())) == {"local", "xdg"}


def test_a_directory_that_is_gone(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = home / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(UsageError, match="the current directory is not there any more"):
        find_project()
    monkeypatch.chdir(home)
