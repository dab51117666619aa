"""Connections to real places: what they are made of, and what the host sees."""

from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path

import pytest

from orchestrator.errors import ConnectionLost, Unreachable
from orchestrator.place import connection as bounds
from orchestrator.place import ssh, ssh_channel
from orchestrator.place.container import wrap
from orchestrator.place.session import connect, open_session

from .conftest import until


@pytest.fixture
def host(lab):
    it = ssh.connect(lab.place(None).host)
    yield it
    it.close()


def everything(channel):
    return b"".join(iter(lambda: channel.read(20.0), b""))


def test_nagle_is_off_and_no_key_store_is_filled(host):
    transport = host._transport
    assert transport.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    client = next(thing for thing in host._closing if hasattr(thing, "client")).client
    assert len(client.get_host_keys()) == 0 and len(client._system_host_keys) == 0


def test_a_channel_has_no_terminal(host):
    channel = host.open(["sh", "-c", "test -t 0 || test -t 1 || test -t 2 || echo none"])
    assert everything(channel) == b"none\n" and channel.wait(5.0) == 0


def test_arguments_pass_one_shell_and_no_more(host, lab):
    arguments = ["a b", "'", '"', "$HOME", "*", "\\", "-x", "", "new\nline", ";true", "~"]
    argv = ["sh", "-c", 'printf "%s|" "$@"', "sh", *arguments]
    expected = "".join(f"{a}|" for a in arguments).encode()
    assert everything(host.open(argv)) == expected
    for name in ("200", "lxc"):
        assert everything(host.open(wrap(lab.place(name), argv))) == expected


def test_much_input_while_nothing_is_read(host):
    """Both ways are full at times, and neither stops the other for good."""
    data = bytes(range(256)) * 40_000
    channel = host.open(["cat"])
    sender = threading.Thread(target=lambda: (channel.send(data), channel.close_stdin()))
    sender.start()
    time.sleep(0.5)
    assert everything(channel) == data
    sender.join(5.0)
    assert channel.wait(5.0) == 0


def test_input_that_nobody_takes(host, monkeypatch):
    monkeypatch.setattr(ssh_channel, "SEND_TIMEOUT", 0.5)
    channel = host.open(["sleep", "20"])
    with pytest.raises(ConnectionLost, match="takes no data"):
        channel.send(bytes(20_000_000))


def test_a_command_that_reads_no_more(host):
    channel = host.open(["true"])
    channel.wait(5.0)
    with pytest.raises(ConnectionLost):
        for _ in range(200):
            channel.send(bytes(1_000_000))


def test_silence_is_a_timeout(host):
    channel = host.open(["sleep", "20"])
    for seconds in (0.0, 0.3):
        start = time.monotonic()
        with pytest.raises(TimeoutError):
            channel.read(seconds)
        assert time.monotonic() - start < 2.0
    assert channel.wait(0.1) is None


def test_only_the_end_of_much_stderr_is_kept(host):
    channel = host.open(["sh", "-c", "head -c 5000000 /dev/zero >&2; echo the end >&2"])
    assert channel.wait(20.0) == 0
    assert channel.stderr().endswith(b"\0the end\n") and len(channel.stderr()) == bounds.STDERR_KEPT


def test_a_closed_connection_says_so(lab):
    it = connect(lab.place(None))
    channel = it.open(["cat"])
    it.close()
    it.close()
    assert until(lambda: channel.wait(0.1) is None)
    assert channel.read(5.0) == b""
    with pytest.raises(ConnectionLost):
        channel.send(b"x")
    with pytest.raises(Unreachable):
        it.open(["true"])


def test_threads_end_with_their_connection(lab):
    before = set(threading.enumerate())
    for _ in range(3):
        with open_session(lab.place("200")):
            pass
    assert until(lambda: not [t for t in threading.enumerate() if t not in before and t.is_alive()], 120)


def test_the_host_tells_whose_processes_are_on_the_gpus(lab):
    pid = int(lab.run("lxc-info", "-n", "200", "-p", "-H").stdout)
    knob = Path(lab.info["knobs"]) / "gpus.json"
    kept = knob.read_text()
    knob.write_text(json.dumps({"gpus": 2, "apps": [{"gpu": 0, "pid": pid, "name": "python3", "memory": 1000}]}))
    try:
        with open_session(lab.place("200")) as it:
            found = it.hello.host["gpu_processes"]
        assert [process["pid"] for process in found] == [pid] and found[0]["command"]
        knob.write_text(json.dumps({"gpus": 2, "timeline": [{"at": 0, "fault": "no-driver"}]}))
        with open_session(lab.place("200")) as it:
            assert it.hello.host["gpu_processes"] is None
        knob.write_text(json.dumps({"gpus": 2, "timeline": [{"at": 0, "fault": "hang"}]}))
        with open_session(lab.place("200")) as it:
            assert it.hello.host["gpu_processes"] is None
    finally:
        knob.write_text(kept)


def test_eight_places_at_once(lab):
    names = []

    def one(vmid):
        with open_session(lab.place(vmid)) as it:
            names.append(it.hello.container["hostname"])

    threads = [threading.Thread(target=one, args=(vmid,)) for vmid in ("200", "201") * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(names) == ["train200"] * 4 + ["train201"] * 4
