"""Sessions on this machine: the same words as everywhere, without SSH."""

from __future__ import annotations

import hashlib
import os
import stat

import pytest

from orchestrator.config.models import Container, Host, Place, Ssh
from orchestrator.errors import ConnectionLost, NotFound, OrchError, Refused, Unreachable, UsageError
from orchestrator.place import greeting, local, session
from orchestrator.place.greeting import Greeting, config_digest, failed
from orchestrator.place.local import LocalConnection
from orchestrator.place.session import explain, open_session
from orchestrator.remote import frames, zipapp


def place(tmp_path, **more):
    return Place(Host(name="local", root=str(tmp_path / "root"), **more))


def upload(it, path, data, chunks=None):
    args = {"path": path, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    return it.upload("put", args, [data] if chunks is None else chunks)


def test_first_contact_brings_the_program_and_the_second_does_not(tmp_path):
    app, digest = zipapp.build()
    with open_session(place(tmp_path)) as it:
        assert it.bytes_sent == len(app) and it.connection.channels == 1
        assert it.root == str(tmp_path / "root")
    kept = tmp_path / "root/bin" / zipapp.name(digest)
    assert kept.read_bytes() == app
    assert stat.S_IMODE((tmp_path / "root").stat().st_mode) == 0o700
    with open_session(place(tmp_path)) as it:
        assert it.bytes_sent == 0
    kept.write_bytes(app[:100])
    with open_session(place(tmp_path)) as it:
        assert it.bytes_sent == len(app)
    assert kept.read_bytes() == app


def test_requests_and_answers(tmp_path):
    with open_session(place(tmp_path)) as it:
        assert upload(it, "a", b"data").data["how"] == "new"
        assert it.call("get", {"path": "a"}).payload == b"data"
        for kind, args in ((NotFound, {"path": "none"}), (Refused, {"path": "../x"})):
            with pytest.raises(kind):
                it.call("get", args)
        with pytest.raises(UsageError, match="no operation 'nonsense'"):
            it.call("nonsense", {})
        with pytest.raises(OrchError, match="get: unexpected KeyError"):
            it.call("get", {})
        assert it.round_trips == 6


def test_an_early_answer_ends_the_sending(tmp_path):
    sent = []

    def chunks():
        for number in range(1000):
            sent.append(number)
            yield bytes(100_000)

    with open_session(place(tmp_path)) as it:
        with pytest.raises(OrchError, match="more than the announced"):
            upload(it, "a", b"little", chunks())
        assert len(sent) < 1000
        assert it.call("have", {"paths": ["a"]}).data == {"paths": []}


def test_a_closed_session_says_so(tmp_path):
    it = open_session(place(tmp_path))
    it.close()
    it.close()
    with pytest.raises(ConnectionLost, match="is closed"):
        it.call("have", {"paths": []})


def test_a_server_that_dies_is_a_lost_connection(tmp_path):
    it = open_session(place(tmp_path))
    it.connection._open[0]._child.kill()
    with pytest.raises(ConnectionLost, match="lost"):
        it.call("have", {"paths": []})


def test_a_root_that_cannot_be_made(tmp_path):
    (tmp_path / "root").write_text("in the way")
    with pytest.raises(OrchError, match="cannot be written") as caught:
        open_session(place(tmp_path))
    assert "root:" in caught.value.hint


def test_a_root_that_is_not_ascii(tmp_path):
    with pytest.raises(UsageError, match="ASCII"):
        open_session(Place(Host(name="local", root="/srv/é")))


def test_a_python_that_is_not_there(tmp_path):
    with pytest.raises(OrchError, match=r"there is no Python ≥ 3\.8 in local, python: /no/python included"):
        open_session(place(tmp_path, python="/no/python"))


def test_a_python_that_is_asked_for(tmp_path):
    import sys

    with open_session(place(tmp_path, python=sys.executable)) as it:
        assert os.path.realpath(it.hello.container["python"]["path"]) == os.path.realpath(sys.executable)


def test_home_is_found_without_its_variable(tmp_path, monkeypatch):
    monkeypatch.delenv("HOME")
    with open_session(place(tmp_path)) as it:
        import pwd

        assert it.hello.container["home"] == pwd.getpwuid(os.getuid()).pw_dir


def test_the_environment_there_is_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONSTARTUP", "/x")
    (tmp_path / "json.py").write_text("raise SystemExit('polluted')")
    open_session(place(tmp_path)).close()


class Scripted(LocalConnection):
    """A way in that is a script of ours: `NONCE` in it is the nonce."""

    def __init__(self, script):
        super().__init__("pve")
        self.script = script

    def open(self, argv, on_stderr=None):
        nonce = argv[argv.index("orch-host") + 1]
        return super().open(["sh", "-c", self.script.replace("NONCE", nonce)], on_stderr)


PCT = Place(Host(name="pve", ssh=Ssh(host="pve"), containers={"200": Container(kind="pct", id="200")}), "200")


@pytest.mark.parametrize(
    ("script", "kind", "words"),
    [
        (
            "echo; echo 'NONCE host.time 1'; echo \"container '200' not running!\" >&2; exit 255",
            Unreachable,
            "not running",
        ),
        ("echo; echo 'NONCE host.time 1'; echo odd >&2; exit 9", Unreachable, "pve/200 ended with status 9.*odd"),
        ("echo \"Unmatched '''.\" >&2; exit 1", Refused, "POSIX"),
        ("exit 0", Unreachable, "ended with status 0"),
        ("echo; echo 'NONCE error the disk is full'", OrchError, "pve/200: the disk is full"),
        ("echo; echo 'NONCE serve'; echo oops >&2", Unreachable, "ended at once: oops"),
        ("echo; echo 'NONCE serve'; echo 'this is no frame'", ConnectionLost, "did not say hello"),
        ("kill -9 $$", Unreachable, "status 137"),
    ],
)
def test_ways_to_fail_at_the_start(script, kind, words):
    with pytest.raises(kind, match=words):
        open_session(PCT, connect=lambda _: Scripted(script))


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("sleep 30", "said nothing for 0 s"),
        ("echo; echo 'NONCE host.time 1'; sleep 30", "pct exec 200 on pve gave no answer"),
        ("echo; echo 'NONCE enter.root /x'; sleep 30", "stopped answering"),
    ],
)
def test_silence_is_told_by_who_is_silent(script, words, monkeypatch):
    monkeypatch.setattr(session, "FIRST_WORD", 0.3)
    monkeypatch.setattr(local, "GRACE", 0.1)
    with pytest.raises(Unreachable, match=words):
        open_session(PCT, connect=lambda _: Scripted(script))


def test_a_late_answer_is_not_taken_for_another(tmp_path):
    """An answer to a request that was given up may still come."""
    with open_session(place(tmp_path)) as it:
        it._send({"id": 99, "op": "have", "args": {"paths": []}})
        upload(it, "a", b"x")
        assert it.call("have", {"paths": ["a"]}).data == {"paths": ["a"]}


def test_lines_of_a_greeting_in_any_pieces():
    stream = b"motd\n\nn0 host.config a: 1\nn0 host.config b: 2\nxn0 error no\nn0 need 5\r\nn0 serve\n\0\0rest"
    for size in (1, 3, 100):
        greet = Greeting("n0")
        for at in range(0, len(stream), size):
            if greet.serving:
                greet.rest += stream[at : at + size]
            else:
                greet.feed(stream[at : at + size])
        assert greet.serving and greet.rest == b"\0\0rest" and greet.error is None
        assert greet.host_facts()["config"] == ["a: 1", "b: 2"]
        assert greet.take_need() and not greet.take_need()


def test_a_flood_is_ended(monkeypatch):
    monkeypatch.setattr(greeting, "NOISE", 1000)
    with pytest.raises(ConnectionLost, match="floods"):
        Greeting("n0").feed(b"x" * 2000)


def test_host_facts_are_null_by_themselves():
    facts = Greeting("n0").host_facts()
    assert facts["config"] is None and facts["config_digest"] is None and facts["time"] is None
    assert facts["kernel_log"] == [] and facts["gpu_processes"] is None
    greet = Greeting("n0")
    greet.feed(
        b"n0 host.time 1.5N\nn0 host.uptime 7.25 9\nn0 host.gpus 1\nn0 host.gpu_process 7 200 python3 x\n"
        b"n0 host.gpu_process 8 host init\n"
    )
    facts = greet.host_facts()
    assert facts["time"] is None and facts["uptime"] == 7.25
    assert facts["gpu_processes"] == [
        {"pid": 7, "container": "200", "command": "python3 x"},
        {"pid": 8, "container": None, "command": "init"},
    ]


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.57.02  Tue Jul 13 16:14:05 UTC 2021", "470.57.02"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build", "580.159.04"),
        ("NVRM version: something else", None),
        (None, None),
    ],
)
def test_the_version_of_the_driver(line, version):
    assert greeting.driver_version(line) == version


def test_the_digest_of_a_configuration():
    assert config_digest(["a: 1", "#note", "lock: backup"]) == config_digest(["a: 1"]) != config_digest(["a: 2"])


def test_what_to_install_is_said():
    greet = Greeting("n0")
    greet.feed(b'n0 python.seen 3.6.8 2.7.5 3.6.8\nn0 enter.system "Rocky 8"\nn0 enter.manager dnf\nn0 nopython 1\n')
    error = failed(PCT, greet)
    assert error.message == "there is no Python ≥ 3.8 in pve/200 (found 3.6.8, 2.7.5); it runs Rocky 8"
    assert "dnf install" in error.hint


def test_explain_shows_one_line_and_what_it_costs():
    lines = explain(PCT)
    assert "pct exec 200 --keep-env 0 -- sh -c $ENTER_SH" in lines[1]
    assert "1 connection, 1 pct call" in lines[-1]
    assert "0 connections, 0 pct calls" in explain(Place(Host(name="local")))[-1]


def test_answers_larger_than_a_pipe(tmp_path):
    data = os.urandom(3 * frames.PART_SIZE)
    with open_session(place(tmp_path)) as it:
        upload(it, "a", data)
        assert it.call("get", {"path": "a"}).payload == data
