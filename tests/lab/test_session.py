"""Sessions with real places: what they cost, and what their first contact needs."""

from __future__ import annotations

import hashlib
import threading
import time

import pytest

from orchestrator.config.models import Container
from orchestrator.errors import NotFound, OrchError, Refused, Unreachable, UsageError
from orchestrator.place import container, session
from orchestrator.place.session import explain, open_session
from orchestrator.remote import zipapp

from .conftest import until


def put(channel, path, data, **more):
    args = {"path": path, "size": len(data), "sha256": hashlib.sha256(data).hexdigest(), **more}
    return channel.upload("put", args, [data])


def test_first_contact_is_one_connection_and_one_pct_call(lab, relay):
    lab.forget()
    app, digest = zipapp.build()
    before = len(lab.pct_calls())
    with open_session(lab.place("200", ssh_config=relay.config)) as first:
        assert first.connection.channels == 1
        assert first.bytes_sent == len(app)
    assert relay.connections == 1
    assert lab.pct_calls()[before:] == ["exec 200"]
    assert digest in lab.run("sha256sum", f"/var/lib/orch/bin/{zipapp.name(digest)}", vmid="200").stdout
    sent = relay.up
    with open_session(lab.place("200", ssh_config=relay.config)) as second:
        assert second.bytes_sent == 0
    assert relay.connections == 2
    assert lab.pct_calls()[before:] == ["exec 200"] * 2
    # What is left is the key exchange and the scripts.
    assert relay.up - sent < sent - len(app) / 2


def test_the_hello_tells_of_host_and_container(lab):
    # Where its installer puts it, which is not on pct's PATH. What comes after this test must not take it for one.
    fake = "mkdir -p .local/bin && printf '#!/bin/sh\\necho uv 1.2.3\\n' >.local/bin/uv && chmod 755 .local/bin/uv"
    planted = lab.run("sh", "-c", f"cd /root && test ! -e .local/bin/uv && {{ {fake}; }}", vmid="200", check=False)
    try:
        with open_session(lab.place("200")) as it:
            host, inside = it.hello.host, it.hello.container
    finally:
        if planted.returncode == 0:
            lab.run("rm", "/root/.local/bin/uv", vmid="200")
    assert host["hostname"] == "pve" and inside["hostname"] == "train200"
    assert "hostname: train200" in host["config"]
    assert host["config_digest"] and host["boot_id"] and host["time"] and host["uptime"]
    assert inside["uid"] == 0 and inside["root"] == it.root == "/var/lib/orch"
    assert inside["home"] == "/root"
    assert inside["libc"][0] in ("glibc", "musl")
    assert inside["tools"]["tmux"]["version"] and inside["tools"]["uv"]["version"]
    assert inside["tools"]["uv"]["path"] == "/root/.local/bin/uv"
    assert inside["python"] in inside["pythons"]
    assert abs(inside["time"] - time.time()) < 60


def test_the_digest_of_the_configuration_is_of_its_present_state(lab):
    with open_session(lab.place("201")) as it:
        before = it.hello.host
    file = "/etc/pve/lxc/201.conf"
    lab.run("sh", "-c", f"cp {file} /root/kept && printf '#note\\nlock: backup\\n[snap]\\nmemory: 1\\n' >>{file}")
    try:
        with open_session(lab.place("201")) as it:
            assert it.hello.host["config_digest"] == before["config_digest"]
            assert "memory: 1" not in it.hello.host["config"]
        lab.run("sh", "-c", f"echo 'cores: 99' | cat - /root/kept >{file}")
        with open_session(lab.place("201")) as it:
            assert it.hello.host["config_digest"] != before["config_digest"]
    finally:
        lab.run("cp", "/root/kept", file)


def test_requests_cost_no_pct_call(lab, relay):
    with open_session(lab.place("200", ssh_config=relay.config)) as it:
        before = len(lab.pct_calls())
        put(it, "code/requests-test", b"data")
        assert it.call("have", {"paths": ["code/requests-test", "code/none"]}).data == {"paths": ["code/requests-test"]}
        assert it.call("get", {"path": "code/requests-test"}).payload == b"data"
        assert it.round_trips == 3
        assert len(lab.pct_calls()) == before and relay.connections == 1 and it.connection.channels == 1


def test_bulk_goes_over_the_same_channel(lab):
    data = bytes(range(256)) * 80_000
    with open_session(lab.place("200")) as it:
        lab.run("rm", "-f", "/var/lib/orch/code/bulk", vmid="200")
        assert put(it, "code/bulk", data).data["how"] == "new"
        assert put(it, "code/bulk", data).data["how"] == "there"
        assert it.call("get", {"path": "code/bulk"}).payload == data


def test_errors_of_operations_keep_their_kind(lab):
    with open_session(lab.place("200")) as it:
        with pytest.raises(NotFound):
            it.call("get", {"path": "no/such"})
        with pytest.raises(Refused):
            it.call("get", {"path": "../../etc/passwd"})
        with pytest.raises(UsageError):
            it.call("no such operation", {})
        assert it.call("have", {"paths": []}).data == {"paths": []}


@pytest.mark.parametrize("name", ["lxc", None])
def test_other_ways_in(lab, name):
    with open_session(lab.place(name)) as it:
        assert it.hello.container["hostname"] == ("pve" if name is None else "train200")


def test_a_root_of_ones_own(lab):
    lab.places["own"] = Container(kind="pct", id="201", root="/srv/own root")
    with open_session(lab.place("own")) as it:
        assert it.root == "/srv/own root"
        put(it, "x", b"1")
    assert lab.run("cat", "/srv/own root/x", vmid="201").stdout == "1"


@pytest.mark.parametrize(
    ("vmid", "kind", "words", "hint"),
    [
        ("999", UsageError, r"pve has no container 999", "pct list"),
        ("202", Unreachable, r"container 202 on pve is not running", "pct start 202"),
        ("none", UsageError, r"pve has no container none", "lxc-ls"),
        ("7", UsageError, r"7 is not a VMID", ""),
    ],
)
def test_a_container_that_cannot_be_entered(lab, vmid, kind, words, hint):
    lab.places["999"] = Container(kind="pct", id="999")
    lab.places["7"] = Container(kind="pct", id="7")
    lab.places["none"] = Container(kind="lxc", id="none")
    with pytest.raises(kind, match=words) as caught:
        open_session(lab.place(vmid))
    assert hint in caught.value.hint


def test_a_place_without_python_says_so(make_lab):
    bare = make_lab("--containers", "1", "--net", "empty", "--without", "python3")
    # The versioned name is still there; a container whose only Python is too old has none for us.
    bare.run("sh", "-c", "rm -f /usr/bin/python3* /usr/local/bin/python3*", vmid="200")
    with pytest.raises(OrchError, match=r"there is no Python ≥ 3\.8 in pve/200") as caught:
        open_session(bare.place("200"))
    assert "apt-get install" in caught.value.hint


def test_an_older_pct_is_asked_again_without_the_option(lab, monkeypatch):
    monkeypatch.setattr(container, "_without_keep_env", set())
    script = (
        "#!/bin/sh\ncase \" $* \" in *' --keep-env '*) echo 'Unknown option: keep-env' >&2; exit 255;; esac\n"
        'exec /usr/sbin/pct.now "$@"\n'
    )
    lab.run(
        "sh", "-c", "mv /usr/sbin/pct /usr/sbin/pct.now && cat >/usr/sbin/pct && chmod 755 /usr/sbin/pct", input=script
    )
    try:
        with open_session(lab.place("200")) as it:
            assert it.connection.channels == 2
        with open_session(lab.place("200")) as it:
            assert it.connection.channels == 1
    finally:
        lab.run("mv", "/usr/sbin/pct.now", "/usr/sbin/pct")


def test_noise_before_the_greeting_is_ignored(lab):
    noise = 'printf "MOTD\\nwithout end"; echo "0123456789abcdef need 5"; set -x; echo warning >&2\n'
    lab.run("sh", "-c", "cat >/root/.bashrc", input=noise)
    try:
        with open_session(lab.place("200")) as it:
            assert it.call("have", {"paths": []}).data == {"paths": []}
    finally:
        lab.run("rm", "/root/.bashrc")


def servers(lab, vmid=None):
    """Of all containers, or of one."""
    words = "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -o '[p]yz serve'"
    return lab.run("sh", "-c", words, vmid=vmid, check=False).stdout


def test_the_server_ends_with_its_client(lab):
    it = open_session(lab.place("200"))
    assert servers(lab)
    it.close()
    assert until(lambda: not servers(lab))


def test_explain_runs_nothing(lab, relay):
    before = len(lab.pct_calls())
    lines = explain(lab.place("200", ssh_config=relay.config))
    assert relay.connections == 0 and len(lab.pct_calls()) == before
    assert any("pct exec 200 --keep-env 0 --" in line for line in lines)
    assert any("1 connection, 1 pct call" in line for line in lines)


def test_containers_of_a_host_share_its_connection(lab, relay):
    places = [lab.place(vmid, ssh_config=relay.config) for vmid in ("200", "201")]
    with open_session(places[0]) as one:
        with open_session(places[1]) as other:
            assert other.call("have", {"paths": []}).data == {"paths": []}
        assert relay.connections == 1
        assert until(lambda: not servers(lab, "201"))  # its server has ended, the connection has not
        assert one.call("have", {"paths": []}).data == {"paths": []}
    with open_session(places[0]):
        assert relay.connections == 2


def test_more_channels_than_the_host_opens_on_one_connection_take_a_second(lab, relay):
    connection = session.connect(lab.place(None, ssh_config=relay.config))
    try:
        for _ in range(10):
            connection.open(["sleep", "5"])
        assert relay.connections == 1
        assert connection.open(["echo", "here"]).read(60) == b"here\n"
        assert relay.connections == 2
    finally:
        connection.close()


def test_sessions_side_by_side(lab):
    """First contacts at the same time leave one good program there."""
    lab.forget()
    failures = []

    def one():
        try:
            with open_session(lab.place("200")) as it:
                it.call("have", {"paths": []})
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    found = lab.run("ls", "/var/lib/orch/bin", vmid="200").stdout.split()
    assert sorted(found) == sorted(
        [zipapp.name(zipapp.build()[1]), zipapp.name(zipapp.build()[1]) + ".modules", "versions.json"]
    )
