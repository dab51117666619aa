"""Other ways to a place: containers of docker, podman and incus, a host reached by sudo, and one behind another.

The lab's host has real sshds, real LXC containers and the real sudo; the engines are stand-ins (`engine`)."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest

from orchestrator.config.models import Container, Host, Place, Ssh
from orchestrator.doctor.checks import judge
from orchestrator.doctor.read import read
from orchestrator.errors import Refused, Unreachable, UsageError
from orchestrator.place import ssh_config
from orchestrator.place.exec import run_exec
from orchestrator.place.session import open_session

from .conftest import Lab, required

ENGINES = ("docker", "podman", "incus")
USER = """\
set -e
echo 'me:x:1500:1500::/home/me:/bin/sh' >>/etc/passwd
echo 'me:*:19000:0:99999:7:::' >>/etc/shadow
echo 'me:x:1500:' >>/etc/group
mkdir -p /home/me && chown 1500:1500 /home/me
"""
# The first is the line of docs/hosts.md.
SUDOERS = """\
Defaults use_pty
me ALL=(root) NOPASSWD: /usr/sbin/pct exec 200 *, /usr/bin/cat /etc/pve/lxc/200.conf
me ALL=(root) NOPASSWD: /usr/local/bin/docker *, /usr/bin/lxc-attach -n 200 *
"""
SSHD = """\
Port 22
HostKey /root/ssh/key
PidFile none
AuthorizedKeysFile /root/ssh/authorized_keys
UsePAM no
StrictModes no
"""


@pytest.fixture(scope="module")
def lab(make_module_lab) -> Lab:
    """A lab with a network of its own, so that containers are reached through its host alone, and with a user."""
    if shutil.which("sudo") is None:
        (pytest.fail if required() else pytest.skip)("the lab's tests of sudo need sudo")
    it = make_module_lab("--net", "bridge", "--containers", "2", "--dead", "--pct-delay", "0")
    engine = (Path(__file__).parent / "engine").read_text()
    for name in ENGINES:
        it.run("sh", "-c", f"cat >/usr/local/bin/{name} && chmod 755 /usr/local/bin/{name}", input=engine)
    it.run("sh", "-c", USER)
    it.run("sh", "-c", "cat >/etc/sudoers.d/orch && chmod 440 /etc/sudoers.d/orch", input=SUDOERS)
    # sshd reads a user's authorized_keys as that user
    for path, mode in ((it.dir, 0o711), (it.dir / "ssh", 0o711), (it.dir / "ssh/authorized_keys", 0o644)):
        path.chmod(mode)
    for name in ENGINES:
        it.places |= {f"{name}-{vmid}": Container(kind=name, id=vmid) for vmid in ("200", "202", "999")}
    return it


def run(place: Place, *argv: str, stdin: bytes = b"") -> tuple[int, bytes, str]:
    out, err = io.BytesIO(), io.BytesIO()
    status = run_exec(place, argv, io.BytesIO(stdin), out, err)
    return status, out.getvalue(), err.getvalue().decode()


def as_me(lab: Lab, name: str = "200", *, sudo: bool = True) -> Place:
    """A place of the lab by way of an ordinary user."""
    host = lab.host()
    assert host.ssh is not None
    return Place(host.model_copy(update={"ssh": host.ssh.model_copy(update={"user": "me"}), "sudo": sudo}), name)


BYTES = bytes(range(256)) * 1000


@pytest.mark.parametrize("kind", ENGINES)
def test_an_engines_container_is_a_place(lab, kind):
    place = lab.place(f"{kind}-200")
    assert run(place, "sh", "-c", "cat; exit 7", stdin=BYTES) == (7, BYTES, "")
    status, _, said = run(place, "no-such-program")
    assert status == 127 and "orch:" not in said
    with open_session(place) as session:
        assert session.hello.container["hostname"] == "train200"
        host = session.hello.host
    assert host["state"] in ("running", "RUNNING") and len(host["config_digest"]) == 64
    assert ("  limits.memory: 8GiB" if kind == "incus" else "Memory: 8589934592") in host["config"]
    assert not [line for line in host["config"] if "volatile" in line or "Privileged" in line]


@pytest.mark.parametrize("kind", ["docker", "incus"])
def test_a_container_that_cannot_be_entered(lab, kind):
    for name, error, words, hint in (
        ("202", Unreachable, "not running", f"ssh pve {kind} "),
        ("999", UsageError, "pve has no container 999", f"ssh pve {kind} "),
    ):
        with pytest.raises(error, match=words) as caught:
            open_session(lab.place(f"{kind}-{name}"))
        assert caught.value.hint.startswith(hint)
        status, _, said = run(lab.place(f"{kind}-{name}"), "true")
        assert status == 255 and words in said and hint in said
    stopped = {row.check: row for row in judge(read(lab.place(f"{kind}-202"))).findings}
    assert stopped["container"].status == "fault" and stopped["container"].remedy == (f"ssh pve {kind} start 202",)
    lab.run("lxc-freeze", "-n", "200")
    try:
        frozen = {row.check: row for row in judge(read(lab.place(f"{kind}-200"))).findings}
        with pytest.raises(Unreachable, match=r"frozen|paused"):
            open_session(lab.place(f"{kind}-200"))
    finally:
        lab.run("lxc-unfreeze", "-n", "200")
    thaw = "resume" if kind == "incus" else "unpause"
    assert frozen["container"].status == "fault" and frozen["container"].remedy == (f"ssh pve {kind} {thaw} 200",)


@pytest.mark.parametrize("kind", ["docker", "incus"])
def test_a_daemon_that_does_not_answer(lab, kind):
    with pytest.raises(Unreachable, match=f"may not talk to the {kind} daemon") as caught:
        open_session(as_me(lab, f"{kind}-200", sudo=False))
    assert caught.value.hint.startswith("ssh -t me@pve sudo usermod -aG ") and "sudo: true" in caught.value.message
    down = Path(lab.info["knobs"]) / "engine-down"
    down.touch()
    try:
        with pytest.raises(Unreachable, match="daemon on pve is not running") as caught:
            open_session(lab.place(f"{kind}-200"))
    finally:
        down.unlink()
    assert caught.value.hint == f"ssh pve systemctl start {kind}"


def test_a_container_without_a_shell(lab):
    lab.run("sh", "-c", "mv /usr/bin/sh /usr/bin/sh.away; hash -r", vmid="201")
    place = lab.place(None)
    place = Place(place.host.model_copy(update={"containers": {"x": Container(kind="docker", id="201")}}), "x")
    try:
        with pytest.raises(Unreachable, match="has no sh"):
            open_session(place)
        assert "has no sh" in run(place, "true")[2]
        row = judge(read(place)).findings[0]
    finally:
        lab.run("mv", "/usr/bin/sh.away", "/usr/bin/sh", vmid="201")
    assert (row.check, row.status) == ("container", "fault") and "has no sh" in row.text


def test_sudo_is_the_way_into_containers(lab):
    """Nothing of it is lost on the way, through the terminal of its own that sudo makes (use_pty) too."""
    assert run(as_me(lab), "sh", "-c", "id -u; cat; exit 7", stdin=BYTES) == (7, b"0\n" + BYTES, "")
    for name in ("docker-200", "lxc"):
        assert run(as_me(lab, name), "hostname")[:2] == (0, b"train200\n")
    with open_session(as_me(lab)) as session:
        assert session.root == "/var/lib/orch"
        # which this user may not read by himself
        assert any(line.startswith("memory:") for line in session.hello.host["config"])
    # the host as a place of its own is the user's
    host = Place(as_me(lab).host)
    with open_session(host) as session:
        assert session.root == "/home/me/.local/share/orch"
    report = judge(read(as_me(lab)))
    assert {row.check: row for row in report.findings}["container"].text == "running"


def test_what_sudo_refuses(lab):
    with pytest.raises(Unreachable, match="does not let me enter the container 201") as caught:
        open_session(as_me(lab, "201"))
    assert caught.value.hint == "ssh -t me@pve sudo -l"
    with pytest.raises(Unreachable, match="needs root"):
        open_session(as_me(lab, sudo=False))

    def refused(words: str, sudoers: str) -> None:
        lab.run("sh", "-c", "cat >/etc/sudoers.d/orch", input=sudoers)
        try:
            with pytest.raises(Unreachable, match=words):
                open_session(as_me(lab))
            status, _, said = run(as_me(lab), "true")
            assert status == 255 and "orch: sudo on pve" in said
        finally:
            lab.run("sh", "-c", "cat >/etc/sudoers.d/orch", input=SUDOERS)

    refused("without a password", "me ALL=(root) ALL\n")
    if lab.run("sudo", "-V").stdout.startswith("Sudo version"):  # there is another sudo, which has no such setting
        refused("wants a terminal", f"Defaults requiretty\n{SUDOERS}")
    lab.run("mv", "/usr/bin/sudo", "/usr/bin/sudo.away")
    try:
        with pytest.raises(UsageError, match="pve has no sudo"):
            open_session(as_me(lab))
    finally:
        lab.run("mv", "/usr/bin/sudo.away", "/usr/bin/sudo")


@pytest.fixture(scope="module")
def inner(lab) -> dict[str, str]:
    """A second sshd, in container 200, where no route leads but through the lab's host: its address and its key."""
    words = ["sh", "-c", "mkdir -p /root/ssh /run/sshd && ssh-keygen -q -t ed25519 -N '' -f /root/ssh/key"]
    lab.run(*words, vmid="200")
    for name, text in (("authorized_keys", (lab.dir / "ssh/id.pub").read_text()), ("config", SSHD)):
        lab.run("sh", "-c", f"cat >/root/ssh/{name}", vmid="200", input=text)
    lab.run("/usr/sbin/sshd", "-f", "/root/ssh/config", vmid="200")
    return {"address": lab.info["addresses"]["200"], "key": lab.run("cat", "/root/ssh/key.pub", vmid="200").stdout}


@pytest.mark.parametrize("reader", ["ssh -G", "without OpenSSH"])
def test_a_bare_host_behind_another(lab, inner, reader, tmp_path, monkeypatch):
    """Both keys are judged, and the words for the configuration are the same whoever reads it."""
    if reader == "without OpenSSH":
        monkeypatch.setattr(ssh_config.shutil, "which", lambda _: None)
    known = tmp_path / "known_hosts"
    config = tmp_path / "config"
    config.write_text(
        f"{lab.ssh_config.read_text()}\nHost inner\n  HostName {inner['address']}\n  User root\n  ProxyJump pve\n"
        f"  IdentityFile {lab.info['key']}\n  IdentitiesOnly yes\n  UserKnownHostsFile {known}\n"
    )
    place = Place(Host(name="inner", ssh=Ssh(host="inner", ssh_config=config, connect_timeout=5)))
    with pytest.raises(Refused, match=f"the host key of root@{inner['address']} is not known"):
        open_session(place)
    known.write_text(f"{inner['address']} {inner['key']}")
    with open_session(place) as session:
        assert session.hello.container["hostname"] == session.hello.host["hostname"] == "train200"
    assert run(place, "cat", stdin=BYTES) == (0, BYTES, "")


def test_a_keyword_that_only_openssh_understands_is_refused_by_name(lab, tmp_path, monkeypatch):
    config = tmp_path / "config"
    config.write_text(f"{lab.ssh_config.read_text()}  KnownHostsCommand /bin/echo\n")
    place = Place(Host(name="pve", ssh=Ssh(host="pve", ssh_config=config)))
    with open_session(place):
        pass
    monkeypatch.setattr(ssh_config.shutil, "which", lambda _: None)
    with pytest.raises(UsageError, match=f"{config}:.*KnownHostsCommand") as caught:
        open_session(place)
    assert "openssh-client" in caught.value.hint
