"""The way to a host, out of hosts.yaml and an SSH configuration."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import pytest

from orchestrator.config.models import Ssh
from orchestrator.errors import UsageError
from orchestrator.place import ssh_config
from orchestrator.place.ssh_config import refuse_unsupported, resolve, settle, split_destination


@pytest.fixture(params=["ssh -G", "without OpenSSH"])
def reader(request, monkeypatch):
    """Both ways of reading; what they have in common they read alike."""
    if request.param == "ssh -G":
        if shutil.which("ssh") is None:
            pytest.skip("OpenSSH is not installed")
    else:
        monkeypatch.setattr(ssh_config.shutil, "which", lambda _: None)
    return request.param


def route(tmp_path, text, **more):
    config = tmp_path / "config"
    config.write_text(text)
    return resolve(Ssh(**{"host": "box", "ssh_config": config, **more}))


def test_an_alias_is_looked_up(reader, tmp_path):
    found = route(
        tmp_path,
        "Host box\n  HostName 192.0.2.7\n  Port 2222\n  User me\n  IdentityFile ~/.ssh/box\n  IdentitiesOnly yes\n"
        "  UserKnownHostsFile ~/.ssh/a ~/.ssh/b\n  HashKnownHosts yes\n  AddressFamily inet\n",
    )
    assert (found.hostname, found.port, found.user) == ("192.0.2.7", 2222, "me")
    assert found.identity_files == (Path.home() / ".ssh/box",) and found.identities_only
    assert found.known_hosts == (Path.home() / ".ssh/a", Path.home() / ".ssh/b") and found.hash_known_hosts
    assert found.recorded_as == "[192.0.2.7]:2222" and found.address == "me@192.0.2.7:2222"
    assert found.family == socket.AF_INET
    assert found.jump is None and found.proxy_command is None


def test_what_hosts_yaml_says_comes_first(reader, tmp_path):
    key = tmp_path / "key"
    key.write_text("")
    found = route(
        tmp_path,
        "Host box\n  HostName 192.0.2.7\n  Port 2222\n  User me\n  IdentityFile /other\n",
        user="you",
        port=22,
        identity_file=key,
        known_hosts=tmp_path / "kh",
        connect_timeout=3,
    )
    assert (found.user, found.port, found.identity_files[0], found.connect_timeout) == ("you", 22, key, 3)
    assert found.known_hosts == (tmp_path / "kh",) and found.global_known_hosts == ()
    assert found.recorded_as == "192.0.2.7"


def test_jumps_are_nested(reader, tmp_path):
    found = route(
        tmp_path,
        "Host box\n  ProxyJump a@one:2022,two\nHost one\n  HostName 192.0.2.1\nHost two\n  User b\n  ProxyJump other\n",
    )
    assert (found.jump.alias, found.jump.user) == ("two", "b")
    first = found.jump.jump
    assert (first.hostname, first.user, first.port, first.jump) == ("192.0.2.1", "a", 2022, None)


def test_jumps_in_circles_are_told(reader, tmp_path):
    with pytest.raises(UsageError, match="circles"):
        route(tmp_path, "Host box\n  ProxyJump other\nHost other\n  ProxyJump box\n")


def test_a_proxy_command_is_filled_in(reader, tmp_path):
    found = route(tmp_path, "Host box\n  HostName h\n  ProxyCommand nc %h %p\n")
    assert found.proxy_command == "nc h 22"
    assert route(tmp_path, "Host box\n  ProxyCommand none\n").proxy_command is None


def test_a_key_alias_is_the_recorded_name(reader, tmp_path):
    assert route(tmp_path, "Host box\n  Port 2222\n  HostKeyAlias Real\n").recorded_as == "real"


@pytest.mark.skipif(shutil.which("ssh") is None, reason="OpenSSH is not installed")
def test_includes_are_read_by_openssh(tmp_path):
    (tmp_path / "more").write_text("Host box\n  HostName 192.0.2.9\n")
    assert route(tmp_path, f"Include {tmp_path}/more\n").hostname == "192.0.2.9"


@pytest.mark.skipif(shutil.which("ssh") is None, reason="OpenSSH is not installed")
def test_a_broken_configuration_is_told_in_openssh_words(tmp_path):
    with pytest.raises(UsageError, match=r"config.* line 2: Bad configuration option: nonsense"):
        route(tmp_path, "Host box\n  Nonsense yes\n")


def test_keywords_that_would_be_passed_over_are_refused_by_name():
    refuse_unsupported("# Include x\nHost a\n  User = b\n\n  ControlMaster auto\n", "config")
    with pytest.raises(UsageError, match="config:2: the keyword Include") as caught:
        refuse_unsupported("Host a\nInclude more\n", "config")
    assert "openssh-client" in caught.value.hint


def test_missing_files_are_told(tmp_path):
    with pytest.raises(UsageError, match="does not exist"):
        resolve(Ssh(host="box", ssh_config=tmp_path / "none"))
    with pytest.raises(UsageError, match="identity_file"):
        route(tmp_path, "", identity_file=tmp_path / "none")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("host", (None, "host", None)),
        ("me@host:22", ("me", "host", 22)),
        ("ssh://me@host:22/", ("me", "host", 22)),
        ("me@dom@host", ("me@dom", "host", None)),
        ("[2001:db8::1]:22", (None, "2001:db8::1", 22)),
        ("2001:db8::1", (None, "2001:db8::1", None)),
    ],
)
def test_destinations(text, parts):
    assert split_destination(text) == parts


@pytest.mark.parametrize("text", ["", "me@", ":22", "host:port"])
def test_wrong_destinations(text):
    with pytest.raises(UsageError):
        split_destination(text)


def test_agents(monkeypatch):
    monkeypatch.setenv("SSH_AUTH_SOCK", "/run/agent")
    monkeypatch.setenv("OTHER", "/run/other")

    def agent(*said):
        return settle({"identityagent": list(said)}, "box", None, None).agent

    assert agent() == agent("SSH_AUTH_SOCK") == "/run/agent"
    assert agent("none") is None
    assert agent("$OTHER") == agent("${OTHER}") == "/run/other"
    assert agent("/run/%h") == "/run/box"


def test_fdpass_is_refused():
    with pytest.raises(UsageError, match="ProxyUseFdpass"):
        settle({"proxyusefdpass": ["yes"]}, "box", None, None)
