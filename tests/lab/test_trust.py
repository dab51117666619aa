"""Host keys: what is not known, or has changed, is refused, and `trust` records it."""

from __future__ import annotations

import subprocess

import pytest

from orchestrator.config.models import Host, Place, Ssh
from orchestrator.errors import Refused, Unreachable, UsageError
from orchestrator.place import hostkeys, ssh
from orchestrator.place.session import connect, open_session
from orchestrator.place.ssh_config import resolve


@pytest.fixture
def stranger(lab, tmp_path):
    """The lab's host, with a known_hosts file of its own that does not exist yet."""

    def make(**more):
        ssh = Ssh(host="pve", ssh_config=lab.ssh_config, known_hosts=tmp_path / "own" / "known_hosts", **more)
        return Host(name="pve", ssh=ssh)

    return make


def test_an_unknown_key_is_refused_with_its_fingerprint(lab, stranger):
    host = stranger()
    shown = subprocess.run(
        ["ssh-keygen", "-lf", str(lab.dir / "ssh/host_key.pub")], capture_output=True, text=True, check=True
    ).stdout.split()[1]
    with pytest.raises(Refused) as caught:
        connect(Place(host))
    assert shown in caught.value.message and "ssh-ed25519" in caught.value.message
    assert caught.value.hint == "orch trust pve"
    assert caught.value.exit_code == 5
    assert hostkeys.offered_key(host).fingerprint == shown


def test_trust_records_it_and_then_it_is_known(lab, stranger):
    host = stranger()
    file = host.ssh.known_hosts
    done = hostkeys.trust(host)
    assert (done.how, done.path) == ("recorded", file)
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.read_text().startswith(f"[127.0.0.1]:{lab.info['port']} ssh-ed25519 ")
    open_session(Place(host)).close()
    assert hostkeys.trust(host).how == "known"
    assert len(file.read_text().splitlines()) == 1


def test_trust_looks_at_the_fingerprint(stranger):
    host = stranger()
    good = hostkeys.offered_key(host).fingerprint
    with pytest.raises(Refused, match="nothing is recorded"):
        hostkeys.trust(host, fingerprint="SHA256:AAAA")
    assert not host.ssh.known_hosts.exists()
    assert hostkeys.trust(host, fingerprint=good).how == "recorded"


def test_trust_asks(stranger):
    host = stranger()
    with pytest.raises(Refused, match="is not recorded"):
        hostkeys.trust(host, confirm=lambda address, key, old: False)
    assert not host.ssh.known_hosts.exists()


def test_a_changed_key_is_refused_and_replaced_only_when_asked(lab, stranger, tmp_path):
    host = stranger()
    file = host.ssh.known_hosts
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other")], check=True)
    other = " ".join((tmp_path / "other.pub").read_text().split()[:2])
    file.parent.mkdir()
    kept = "# a comment\nelsewhere.example ssh-ed25519 AAAA\nnonsense\n"
    file.write_text(f"{kept}[127.0.0.1]:{lab.info['port']} {other}\n")
    with pytest.raises(Refused, match="has changed") as caught:
        connect(Place(host))
    assert f"{file}:4" in caught.value.message
    assert "ssh-keygen -R" in caught.value.hint and "orch trust pve" in caught.value.hint
    with pytest.raises(Refused, match="has changed"):
        hostkeys.trust(host)
    assert other in file.read_text()
    done = hostkeys.trust(host, replace=True)
    assert done.how == "replaced" and other not in file.read_text()
    assert file.read_text().startswith(kept)
    open_session(Place(host)).close()


def test_a_hashed_file_is_read(lab, stranger):
    host = stranger()
    hostkeys.trust(host)
    file = host.ssh.known_hosts
    subprocess.run(["ssh-keygen", "-H", "-f", str(file)], check=True, capture_output=True)
    assert file.read_text().startswith("|1|")
    open_session(Place(host)).close()


def test_hash_known_hosts_is_honoured(lab, tmp_path, stranger):
    config = tmp_path / "config"
    config.write_text(f"HashKnownHosts yes\n{lab.ssh_config.read_text()}")
    host = stranger()
    host = host.model_copy(update={"ssh": host.ssh.model_copy(update={"ssh_config": config})})
    hostkeys.trust(host)
    assert host.ssh.known_hosts.read_text().startswith("|1|")
    found = subprocess.run(
        ["ssh-keygen", "-F", f"[127.0.0.1]:{lab.info['port']}", "-f", str(host.ssh.known_hosts)], check=False
    )
    assert found.returncode == 0
    connect(Place(host)).close()


def test_a_jump_host_is_gone_through_and_judged(lab, tmp_path):
    config = tmp_path / "config"
    config.write_text(
        lab.ssh_config.read_text()
        + f"Host inner\n  HostName 127.0.0.1\n  Port {lab.info['port']}\n  User root\n  ProxyJump pve\n"
        f"  IdentityFile {lab.info['key']}\n  UserKnownHostsFile {lab.info['known_hosts']}\n"
    )
    host = Host(name="inner", ssh=Ssh(host="inner", ssh_config=config))
    assert resolve(host.ssh).jump.alias == "pve"
    with open_session(Place(host)) as it:
        assert it.hello.host["hostname"] == "pve"
    text = config.read_text().replace(str(lab.info["known_hosts"]), str(tmp_path / "none"), 1)
    config.write_text(text)
    with pytest.raises(Refused, match="not known"):
        connect(Place(host))


def test_trust_goes_through_jump_hosts(lab, tmp_path):
    config = tmp_path / "config"
    config.write_text(
        lab.ssh_config.read_text()
        + f"Host inner\n  HostName localhost\n  Port {lab.info['port']}\n  User root\n  ProxyJump pve\n"
        f"  IdentityFile {lab.info['key']}\n"
    )
    host = Host(name="inner", ssh=Ssh(host="inner", ssh_config=config, known_hosts=tmp_path / "known_hosts"))
    with pytest.raises(Refused, match=r"root@127\.0\.0\.1:\d+ is not known"):
        hostkeys.trust(host)
    with pytest.raises(Refused, match="is not known"):
        hostkeys.trust(host, fingerprint="SHA256:of-the-inner-host", confirm=lambda *_: True)
    asked = []
    done = hostkeys.trust(host, confirm=lambda address, key, old: asked.append(address) or True)
    assert asked == [f"root@127.0.0.1:{lab.info['port']}", f"root@localhost:{lab.info['port']}"]
    assert [hop.how for hop in done.hops] == ["recorded"] and done.how == "recorded"
    connect(Place(host)).close()


def test_without_openssh(lab, monkeypatch):
    from orchestrator.place import ssh_config

    monkeypatch.setattr(ssh_config.shutil, "which", lambda _: None)
    with open_session(lab.place("200")) as it:
        assert it.hello.host["hostname"] == "pve"


def test_compression_is_honoured(lab, tmp_path):
    config = tmp_path / "config"
    config.write_text(f"{lab.ssh_config.read_text()}  Compression yes\n")
    it = ssh.connect(lab.place(None, ssh_config=config).host)
    assert it._transport.local_compression != "none"
    it.close()


def test_a_proxy_command_is_run(lab, tmp_path):
    relay = tmp_path / "relay.py"
    relay.write_text(
        "import os, select, socket, sys\n"
        "s = socket.create_connection((sys.argv[1], int(sys.argv[2])))\n"
        "while True:\n"
        "    for f in select.select([0, s], [], [])[0]:\n"
        "        data = os.read(0, 65536) if f == 0 else s.recv(65536)\n"
        "        if not data: sys.exit()\n"
        "        s.sendall(data) if f == 0 else os.write(1, data)\n"
    )
    config = tmp_path / "config"
    config.write_text(f"{lab.ssh_config.read_text()}  ProxyCommand /usr/bin/python3 {relay} %h %p\n")
    with open_session(lab.place("200", ssh_config=config)) as it:
        assert it.hello.host["hostname"] == "pve"
    config.write_text(f"{lab.ssh_config.read_text()}  ProxyCommand sh -c 'exit 3'\n")
    with pytest.raises(Unreachable, match=r"ProxyCommand .* ended with status 3"):
        connect(lab.place(None, ssh_config=config))


def test_no_key_is_accepted(lab, tmp_path, monkeypatch):
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "wrong")], check=True)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", str(tmp_path / "locked")], check=True)
    config = tmp_path / "config"
    for name, words in (("wrong", "none of 1 key is accepted"), ("locked", "needs a passphrase"), ("gone", "no key")):
        config.write_text(lab.ssh_config.read_text().replace(lab.info["key"], str(tmp_path / name)))
        with pytest.raises(Unreachable, match=words) as caught:
            connect(lab.place(None, ssh_config=config))
        assert caught.value.exit_code == 3 and "cannot log in as root@127.0.0.1" in caught.value.message


def test_an_agent_holds_the_key(lab, tmp_path, monkeypatch):
    agent = subprocess.Popen(
        ["ssh-agent", "-D", "-a", str(tmp_path / "agent")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        from .conftest import until

        assert until((tmp_path / "agent").exists)
        monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "agent"))
        subprocess.run(["ssh-add", "-q", lab.info["key"]], check=True, capture_output=True)
        config = tmp_path / "config"
        # Only the public half is at hand, as with a key on a card.
        public = tmp_path / "id.pub"
        public.write_text((lab.dir / "ssh/id.pub").read_text())
        config.write_text(lab.ssh_config.read_text().replace(lab.info["key"], str(public)))
        connect(lab.place(None, ssh_config=config)).close()
        # With IdentitiesOnly the agent's other keys are not offered.
        config.write_text(lab.ssh_config.read_text().replace(lab.info["key"], str(tmp_path / "none")))
        with pytest.raises(Unreachable, match="no key"):
            connect(lab.place(None, ssh_config=config))
        config.write_text(config.read_text().replace("IdentitiesOnly yes", "IdentitiesOnly no"))
        connect(lab.place(None, ssh_config=config)).close()
    finally:
        agent.terminate()
        agent.wait()


def test_where_nobody_listens(lab, free_port):
    host = Host(name="x", ssh=Ssh(host="127.0.0.1", port=free_port, user="root"))
    with pytest.raises(Unreachable, match="refuses the connection"):
        connect(Place(host))


def test_a_name_that_is_not_known(lab):
    host = Host(name="x", ssh=Ssh(host="no-such-host.invalid"))
    with pytest.raises(Unreachable, match=r"no-such-host.invalid"):
        connect(Place(host))


def test_this_machine_has_no_host_key():
    with pytest.raises(UsageError, match="this machine"):
        hostkeys.trust(Host(name="local"))


@pytest.fixture
def free_port():
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]
