"""What may happen between here and there: every failure is told for what it is, and leaves nothing half done."""

from __future__ import annotations

import hashlib
import threading
import time

import pytest

from orchestrator.config.models import Container
from orchestrator.errors import ConnectionLost, OrchError, Unreachable
from orchestrator.place import session, ssh
from orchestrator.place.session import open_session

from .conftest import stopped, until


def upload(it, path, data, chunks=None):
    args = {"path": path, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    return it.upload("put", args, chunks or [data])


def test_a_pct_that_hangs(lab, monkeypatch):
    monkeypatch.setattr(session, "FIRST_WORD", 1.0)
    with lab.fault("hang"), pytest.raises(Unreachable, match="pct exec 200 on pve gave no answer for 1 s"):
        open_session(lab.place("200"))
    lab.run("pkill", "-f", "pct.counted", check=False)


def test_a_cluster_file_system_that_is_down(lab):
    with lab.fault("cfs"), pytest.raises(Unreachable, match="cluster file system on pve is down"):
        open_session(lab.place("200"))


def test_a_text_that_nobody_knows_is_passed_on(lab):
    with lab.fault("42 something new"), pytest.raises(Unreachable, match=r"status 42.*something new"):
        open_session(lab.place("200"))


def test_a_cut_in_the_middle_of_an_upload_leaves_nothing(lab, relay):
    lab.run("rm", "-rf", "/var/lib/orch/code/cut", vmid="200")
    data = bytes(20_000_000)
    it = open_session(lab.place("200", ssh_config=relay.config))
    relay.cut_after(5_000_000)
    with pytest.raises(ConnectionLost):
        upload(it, "code/cut", data)
    with pytest.raises(ConnectionLost):
        it.call("have", {"paths": []})

    def left():
        return lab.run("sh", "-c", "ls /var/lib/orch/tmp; ls -d /var/lib/orch/code/cut", vmid="200", check=False).stdout

    assert until(lambda: left() == "", 120), left()
    with open_session(lab.place("200")) as again:
        assert upload(again, "code/cut", data).data["how"] == "new"


def test_a_source_that_fails_leaves_nothing(lab):
    def broken():
        yield b"x" * 100_000
        raise RuntimeError("the source broke")

    with open_session(lab.place("200")) as it:
        with pytest.raises(RuntimeError):
            upload(it, "code/broken", b"x" * 200_000, broken())
        # The session goes on, and nothing is there.
        assert it.call("have", {"paths": ["code/broken"]}).data == {"paths": []}


@pytest.fixture
def small_disk(lab):
    lab.run("sh", "-c", "mkdir -p /srv/small && mount -t tmpfs -o size=8m tmpfs /srv/small", vmid="201")
    lab.places["small"] = Container(kind="pct", id="201", root="/srv/small/orch")
    yield
    lab.run("umount", "-l", "/srv/small", vmid="201")


def test_a_full_disk_is_one_sentence_and_leaves_nothing(lab, small_disk):
    with open_session(lab.place("small")) as it:
        with pytest.raises(OrchError, match="disk is full") as caught:
            upload(it, "code/big", bytes(30_000_000))
        assert "\n" not in caught.value.message
        assert lab.run("ls", "/srv/small/orch/tmp", vmid="201").stdout == ""
        assert it.call("have", {"paths": ["code/big"]}).data == {"paths": []}
        assert upload(it, "code/little", b"fits").data["how"] == "new"


def test_no_room_even_for_the_program(lab, small_disk):
    lab.run("sh", "-c", "head -c 16000000 /dev/zero >/srv/small/filler", vmid="201", check=False)
    with pytest.raises(OrchError, match="/srv/small/orch cannot be written: No space left") as caught:
        open_session(lab.place("small"))
    assert "root:" in caught.value.hint


def test_a_read_only_root(lab, small_disk):
    lab.run("mount", "-o", "remount,ro", "/srv/small", vmid="201")
    with pytest.raises(OrchError, match="Read-only file system"):
        open_session(lab.place("small"))


def test_a_wrong_digest_is_refused(lab):
    with open_session(lab.place("200")) as it:
        with pytest.raises(OrchError, match="is not what was sent"):
            it.upload("put", {"path": "code/wrong", "size": 3, "sha256": "0" * 64}, [b"abc"])
        with pytest.raises(OrchError, match="is not what was sent"):
            upload(it, "code/wrong", b"abcdef", [b"abc"])
        assert it.call("have", {"paths": ["code/wrong"]}).data == {"paths": []}


def test_an_answer_that_does_not_come(lab, relay):
    it = open_session(lab.place("200", ssh_config=relay.config))
    relay.stall()
    start = time.monotonic()
    with pytest.raises(ConnectionLost, match="did not answer have within 1 s"):
        it.call("have", {"paths": []}, timeout=1.0)
    assert time.monotonic() - start < 5


def test_a_stopped_peer_is_noticed(lab, monkeypatch):
    """TCP goes on answering for a process that is stopped; only an unanswered question tells."""
    monkeypatch.setattr(ssh, "KEEPALIVE", 0.5)
    monkeypatch.setattr(ssh, "DEAD_AFTER", 1.0)
    before = set(lab.sshd_children())
    it = open_session(lab.place("200"))
    mine = [pid for pid in lab.sshd_children() if pid not in before]
    assert mine
    start = time.monotonic()
    with stopped(mine), pytest.raises(ConnectionLost):
        it.call("have", {"paths": []}, timeout=60.0)
    assert time.monotonic() - start < 10


def test_a_quiet_peer_is_not_a_dead_one(lab, monkeypatch):
    monkeypatch.setattr(ssh, "KEEPALIVE", 0.2)
    monkeypatch.setattr(ssh, "DEAD_AFTER", 2.0)
    with open_session(lab.place("200")) as it:
        time.sleep(1.5)
        assert it.call("have", {"paths": []}).data == {"paths": []}


def test_a_container_stopped_under_a_session(make_lab):
    own = make_lab("--containers", "1", "--net", "empty")
    it = open_session(own.place("200"))
    own.run("lxc-stop", "-k", "-n", "200")
    with pytest.raises(ConnectionLost):
        it.call("have", {"paths": []}, timeout=20.0)


def test_a_port_where_nobody_speaks_ssh(lab, relay, monkeypatch):
    monkeypatch.setattr(ssh, "BANNER", 1.0)
    relay.stall()
    with pytest.raises(Unreachable, match="does not speak SSH"):
        open_session(lab.place("200", ssh_config=relay.config))


def test_a_connection_cut_at_once_is_tried_again(lab, relay):
    """As a busy sshd does past its MaxStartups."""
    relay.cut_after(0)
    timer = threading.Timer(0.1, lambda: setattr(relay, "_cut_after", None))
    timer.start()
    with open_session(lab.place("200", ssh_config=relay.config)):
        assert 1 < relay.connections <= 3
