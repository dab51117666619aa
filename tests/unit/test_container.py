"""The ways into containers, what their texts mean, and whose a process is."""

from __future__ import annotations

import json
import re
import subprocess

import pytest

from orchestrator.cli.attach import attach_argv
from orchestrator.config.models import Container, Host, Place, Ssh
from orchestrator.errors import Refused, Unreachable, UsageError
from orchestrator.place import container
from orchestrator.place.container import KINDS, learn_keep_env, typed, wrap
from orchestrator.place.container_config import memory_limit, of_engine, of_incus
from orchestrator.place.failures import FAILURES, classify, foreign_shell
from orchestrator.place.greeting import Greeting, ended, script


def place(kind: str, ident: str = "train", **host) -> Place:
    host = {"name": "pve", "ssh": Ssh(host="pve"), **host}
    return Place(Host(containers={ident: Container(kind=kind, id=ident)}, **host), ident)


PCT = place("pct", "200")


@pytest.fixture(autouse=True)
def nothing_learnt(monkeypatch):
    monkeypatch.setattr(container, "_without_keep_env", set())


@pytest.mark.parametrize(
    ("kind", "words", "with_tty"),
    [
        ("pct", "pct exec train --keep-env 0 --", None),
        ("lxc", "lxc-attach -n train --clear-env --", None),
        ("incus", "incus exec train --force-noninteractive --", "incus exec train --force-interactive --"),
        ("docker", "docker exec -i train", "docker exec -it train"),
        ("podman", "podman exec -i train", "podman exec -it train"),
    ],
)
def test_argv_of_each_kind(kind, words, with_tty):
    assert wrap(place(kind), ["ls", "-l"]) == [*words.split(), "ls", "-l"]
    assert wrap(place(kind), ["ls"], tty=True) == [*(with_tty or words).split(), "ls"]
    assert wrap(place(kind, sudo=True), ["ls"]) == ["sudo", "-n", "--", *words.split(), "ls"]


def test_the_host_itself_is_not_entered_and_gets_no_sudo():
    assert wrap(Place(Host(name="pve", ssh=Ssh(host="pve"), sudo=True)), ["ls"]) == ["ls"]


def test_attaching_brings_the_terminal_along():
    argv = attach_argv(place("docker", sudo=True), "demo-1")
    assert argv[:2] == ["ssh", "-t"] and argv[-2] == "pve"
    assert argv[-1].startswith("sudo -n -- docker exec -it train env -u TMUX_TMPDIR TERM=")


def test_an_older_pct_is_learnt_once_a_host():
    text = "Unknown option: keep-env\n400 unable to parse option\npct exec <vmid> [<extra-args>]\n"
    assert not learn_keep_env("pve", "something else")
    assert learn_keep_env("pve", text)
    assert not learn_keep_env("pve", text)
    assert wrap(PCT, ["true"]) == ["pct", "exec", "200", "--", "true"]
    assert "--keep-env" in wrap(place("pct", "200", name="other"), ["true"])


def test_what_a_user_is_told_to_type():
    def of(**host) -> str:
        return typed(place("docker", **host).host, "docker start {id}", "train")

    assert of() == "ssh pve docker start train"
    assert of(ssh=None) == "docker start train" and of(ssh=None, sudo=True) == "sudo docker start train"
    assert of(ssh=Ssh(host="192.0.2.1", user="me", port=2222)) == "ssh -p 2222 me@192.0.2.1 docker start train"
    assert of(sudo=True) == "ssh -t pve sudo docker start train"


SHIM = 'OCI runtime exec failed: exec failed: unable to start container process: exec: "sh": executable file not found'
SOCKET = "/var/run/docker.sock"

# kind, what the tool says, the error, a piece of its message, and its hint
TEXTS = [
    (
        "pct",
        "Configuration file 'nodes/pve/lxc/200.conf' does not exist",
        UsageError,
        "no container train",
        "ssh pve pct list",
    ),
    ("pct", "400 Parameter verification failed.\nvmid: invalid format - x", UsageError, "not a VMID", ""),
    ("pct", "container '200' not running!", Unreachable, "train on pve is not running", "ssh pve pct start train"),
    ("pct", "CT 200 not running", Unreachable, "train on pve is not running", "ssh pve pct start train"),
    (
        "pct",
        "ipcc_send_rec[1] failed: Connection refused\nUnable to load access control list: Connection refused",
        Unreachable,
        "cluster file system on pve is down",
        "ssh pve systemctl restart pve-cluster",
    ),
    ("pct", "please run as root", Unreachable, "sudo: true", ""),
    (
        "pct",
        "trying to acquire lock...\ncan't lock file '/run/lock/lxc/pve-config-200.lock' - got timeout",
        Unreachable,
        "pve-config-200.lock",
        "ssh pve pct status train --verbose",
    ),
    ("pct", "CT is locked (backup)", Unreachable, "locked (backup)", "ssh pve pct status train --verbose"),
    ("pct", "Device /dev/nvidia0 does not exist", Unreachable, "/dev/nvidia0", "ssh pve nvidia-smi"),
    (
        "pct",
        "sh: 1: pct: not found",
        UsageError,
        "has no pct for this user",
        "kind: lxc in hosts.yaml, or the right host",
    ),
    (
        "pct",
        "orch-host: 60: exec: pct: not found",
        UsageError,
        "has no pct for this user",
        "kind: lxc in hosts.yaml, or the right host",
    ),
    (
        "pct",
        "bash: line 1: pct: command not found",
        UsageError,
        "has no pct",
        "kind: lxc in hosts.yaml, or the right host",
    ),
    ("pct", "missing command at /usr/share/perl5/PVE/CLI/pct.pm line 246.", Unreachable, "does not understand", ""),
    ("pct", "400 not enough arguments\npct exec <vmid>", Unreachable, "does not understand", ""),
    ("pct", "Unknown option: l\n400 unable to parse option", Unreachable, "Unknown option: l", ""),
    (
        "lxc",
        "lxc-attach: train: attach.c: 1: Failed to get init pid",
        Unreachable,
        "train on pve is not running",
        "ssh pve lxc-start -n train",
    ),
    (
        "lxc",
        "lxc-attach: train: ../src/lxc/attach.c: lxc_attach: 993 Connection refused",
        Unreachable,
        "not running",
        "ssh pve lxc-start -n train",
    ),
    (
        "lxc",
        "lxc-attach: train: tools/lxc_attach.c: main: 1 Insufficent privileges to control train",
        Unreachable,
        "needs root",
        "",
    ),
    ("lxc", "sh: 1: lxc-attach: not found", UsageError, "LXC is not installed", ""),
    ("incus", "Error: Instance is not running", Unreachable, "is not running", "ssh pve incus start train"),
    ("incus", "Error: Instance is frozen", Unreachable, "is frozen", "ssh pve incus resume train"),
    (
        "incus",
        'Error: Failed to fetch instance "train" in project "default": Instance not found',
        UsageError,
        "no container train",
        "ssh pve incus list",
    ),
    (
        "incus",
        "Error: You don't have the needed permissions to talk to the incus daemon (socket path: /x/unix.socket)",
        Unreachable,
        "incus-admin",
        "ssh -t pve sudo usermod -aG incus-admin USER",
    ),
    (
        "incus",
        "Error: The incus daemon doesn't appear to be started (socket path: /var/lib/incus/unix.socket)",
        Unreachable,
        "daemon on pve is not running",
        "ssh pve systemctl start incus",
    ),
    ("incus", "Error: Command not found", Unreachable, "has no sh", ""),
    ("incus", "orch-host: 1: exec: incus: not found", UsageError, "has no incus", ""),
    ("docker", "Error: No such container: train", UsageError, "no container train", "ssh pve docker ps -a"),
    (
        "docker",
        "Error response from daemon: No such container: train",
        UsageError,
        "no container train",
        "ssh pve docker ps -a",
    ),
    (
        "docker",
        "Error response from daemon: Container 31922b236bfd is not running",
        Unreachable,
        "not running",
        "ssh pve docker start train",
    ),
    (
        "docker",
        "Error response from daemon: Container train is paused, unpause the container before exec",
        Unreachable,
        "is paused",
        "ssh pve docker unpause train",
    ),
    (
        "docker",
        "Error response from daemon: Container train is restarting, wait until the container is running",
        Unreachable,
        "is restarting",
        "ssh pve docker logs --tail 20 train",
    ),
    (
        "docker",
        f"Cannot connect to the Docker daemon at unix://{SOCKET}. Is the docker daemon running?",
        Unreachable,
        "daemon on pve is not running",
        "ssh pve systemctl start docker",
    ),
    (
        "docker",
        f"failed to connect to the docker API at unix://{SOCKET}; check if the path is correct and if …",
        Unreachable,
        "daemon on pve is not running",
        "ssh pve systemctl start docker",
    ),
    (
        "docker",
        f"permission denied while trying to connect to the Docker daemon socket at unix://{SOCKET}: Get "
        f'"http://%2Fvar%2Frun%2Fdocker.sock/v1.24/containers/train/json": dial unix {SOCKET}: permission denied',
        Unreachable,
        "join the group docker",
        "ssh -t pve sudo usermod -aG docker USER",
    ),
    ("docker", f"{SHIM} in $PATH: unknown", Unreachable, "has no sh", ""),
    ("docker", "orch-host: 1: exec: docker: not found", UsageError, "has no docker", ""),
    (
        "podman",
        'Error: no container with name or ID "train" found: no such container',
        UsageError,
        "no container train",
        "ssh pve podman ps -a",
    ),
    (
        "podman",
        "Error: can only create exec sessions on running containers: container state improper",
        Unreachable,
        "not running, or paused",
        "ssh pve podman ps -a --filter name=train",
    ),
    (
        "podman",
        'Error: runc: exec failed: unable to start container process: exec: "sh": executable file not found in $PATH: '
        "OCI runtime attempted to invoke a command that was not found",
        Unreachable,
        "has no sh",
        "",
    ),
    (
        "podman",
        "Error: crun: executable file `sh` not found in $PATH: No such file or directory: OCI runtime attempted to "
        "invoke a command that was not found",
        Unreachable,
        "has no sh",
        "",
    ),
]


@pytest.mark.parametrize(("kind", "text", "error", "words", "hint"), TEXTS, ids=[f"{t[0]}: {t[1][:50]}" for t in TEXTS])
def test_texts_of_each_kind(kind, text, error, words, hint):
    found = classify(f"perl: warning: Setting locale failed.\n{text}\n", place(kind))
    assert type(found) is error
    assert words in found.message and found.hint == hint
    assert not re.search(r"[{}\n]", found.message + found.hint)
    for other in {"pct", "lxc-", "docker", "podman", "incus"} - {kind, f"{kind}-", "lxc-" if kind == "pct" else ""}:
        assert other not in found.hint or kind == "pct", found.hint


SUDO = [
    ("sudo: a password is required", Unreachable, "without a password", "ssh -t me@pve sudo -l"),
    ("sudo: interactive authentication is required", Unreachable, "without a password", "ssh -t me@pve sudo -l"),
    (
        "Sorry, user me is not allowed to execute '/usr/sbin/pct exec 200 -- sh -c #\nx' as root on pve.",
        Unreachable,
        "does not let me enter",
        "ssh -t me@pve sudo -l",
    ),
    ("me is not in the sudoers file.", Unreachable, "does not let me enter", "ssh -t me@pve sudo -l"),
    (
        "sudo: sorry, you must have a tty to run sudo",
        Unreachable,
        "requiretty",
        "Defaults:me !requiretty, in sudoers on pve (visudo)",
    ),
    ("orch-host: 90: exec: sudo: not found", UsageError, "has no sudo", ""),
    ("sudo: docker: command not found", UsageError, "finds no docker", ""),
]


@pytest.mark.parametrize(("text", "error", "words", "hint"), SUDO)
@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_sudo(kind, text, error, words, hint):
    found = classify(text, place(kind, ssh=Ssh(host="pve", user="me"), sudo=True))
    assert type(found) is error and words in found.message and found.hint == hint


def test_other_texts_say_nothing():
    text = "bash: warning: something\nTraceback (most recent call last):"
    assert all(classify(text, place(kind)) is None for kind in KINDS)
    assert classify("CT is locked (backup)", Place(Host(name="pve"))) is None
    # one kind's words are nothing to another
    assert classify("container '200' not running!", place("docker")) is None


def test_docker_tells_on_stdout_why_it_starts_nothing():
    greet = Greeting("n0")
    greet.feed(b"welcome\nn0 host.shell sh\n" + SHIM.encode() + b"\n")
    error = ended(place("docker"), greet, 126, "")
    assert isinstance(error, Unreachable) and "has no sh" in error.message


def test_every_failure_is_of_known_kinds():
    assert all(set(failure.kinds) <= set(KINDS) for failure in FAILURES)


def test_a_login_shell_that_does_not_read_posix_quoting():
    assert isinstance(foreign_shell("Unmatched '''.\n"), Refused)
    assert isinstance(foreign_shell("fish: Unknown command: x"), Refused)
    assert foreign_shell("bash: x: not found") is None


ENGINE = {
    "Binds": ["/data:/data"],
    "ShmSize": 67108864,
    "Memory": 34359738368,
    "Privileged": False,
    "CpusetCpus": "",
    "Devices": None,
    "DeviceRequests": [{"Driver": "", "Count": -1, "Capabilities": [["gpu"]]}],
    "LogConfig": {"Type": "splunk", "Config": {"splunk-token": "secret"}},
}


def test_the_configuration_of_docker_as_lines():
    lines = of_engine(json.dumps({"image": "sha256:5c80", "host": ENGINE}))
    assert lines is not None and lines[0] == "Image: sha256:5c80" and "ShmSize: 67108864" in lines
    assert any(line.startswith("DeviceRequests: [{") for line in lines) and not any("secret" in line for line in lines)
    assert not [line for line in lines if line.startswith(("Privileged", "CpusetCpus", "Devices:"))]
    assert memory_limit("docker", lines) == 32 << 30
    assert of_engine("map[x]") is None and of_engine('{"image": 1}') is None and of_engine("[]") is None


INCUS = """\
architecture: x86_64
config:
  image.description: Debian
  limits.memory: 8GiB
  environment.HF_TOKEN: secret
  user.user-data: |-
    #cloud-config
    password: secret
  volatile.eth0.hwaddr: 10:66:6a:00:00:01
  nvidia.runtime: "true"
devices:
  gpu:
    type: gpu
ephemeral: false
profiles:
- default
""".splitlines()


def test_the_configuration_of_incus_as_lines():
    lines = of_incus(INCUS)
    assert [line.strip() for line in lines] == [
        "architecture: x86_64",
        "config:",
        "limits.memory: 8GiB",
        'nvidia.runtime: "true"',
        "devices:",
        "gpu:",
        "type: gpu",
        "ephemeral: false",
        "profiles:",
        "- default",
    ]
    assert memory_limit("incus", lines) == 8 << 30
    assert memory_limit("incus", ["  limits.memory: 50%"]) is None and memory_limit("incus", []) is None


FULL = "da5e4b28086a4e9629472955e67cdbe89b6a4ee9fff99c65318f7f9a7473b71a"
OWNERS = {
    "0::/": "host",
    "0::/user.slice/user-1000.slice/session-1.scope": "host",
    "0::/system.slice/docker.service": "host",
    # Proxmox, and LXC by itself, newer and older
    "0::/lxc/200/ns/init.scope": "200",
    "0::/lxc.monitor/200": "host",
    "0::/lxc.payload.train/init.scope": "train",
    "12:memory:/lxc.payload/train": "train",
    # incus, in a project of its own too
    "0::/lxc.payload.ml_train/system.slice/ssh.service": "ml_train",
    # docker, by both of its cgroup drivers
    f"0::/system.slice/docker-{FULL}.scope": FULL[:12],
    f"9:name=systemd:/\n8:pids:/docker/{FULL}": FULL[:12],
    # podman, as root and as a user, and its own process beside the container
    f"0::/machine.slice/libpod-{FULL}.scope/container": FULL[:12],
    f"0::/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{FULL}.scope": FULL[:12],
    f"0::/libpod_parent/libpod-{FULL}": FULL[:12],
    f"0::/machine.slice/libpod-conmon-{FULL}.scope": "host",
    f"0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-{FULL}.scope": FULL[:12],
    # of containers in containers, the outermost
    f"0::/lxc/200/ns/system.slice/docker-{FULL}.scope": "200",
    "0::/lxc/200/ns/lxc.payload.inner": "200",
}


@pytest.mark.parametrize("shell", [["dash"], ["bash", "--posix"]])
def test_whose_a_process_is_by_its_cgroup(shell):
    found = re.search(r"^owner_of\(\) \{.*?^\}$", script("host"), re.M | re.S)
    assert found
    # One shell for all of them, as on a host with many processes: nothing may be left over of the one before.
    asks = "".join(f"owner_of <<'X'\n{text}\nX\nprintf '%s\\n' \"$owner\"\n" for text in OWNERS)
    done = subprocess.run([*shell, "-c", f"{found[0]}\n{asks}"], capture_output=True, text=True, check=True)
    assert dict(zip(OWNERS, done.stdout.splitlines(), strict=True)) == OWNERS
