"""Marks in streams, and arguments in ASCII."""

from __future__ import annotations

import io
import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.config.models import Container, Host, Place
from orchestrator.errors import ConnectionLost, Unreachable, UsageError
from orchestrator.place import exec as execution
from orchestrator.place.connection import command_line
from orchestrator.place.exec import Marked, encode, run_exec

LOCAL = Place(Host(name="local"))


@given(st.binary(max_size=200), st.binary(max_size=200), st.integers(0, 255), st.integers(1, 40))
def test_marks_are_taken_out_whatever_the_pieces(noise, output, status, size):
    stream = noise + b"[n0 begin 77]" + output + b"[n0 end %03d]" % status
    marked = Marked("n0")
    out = b"".join(marked.feed(stream[at : at + size]) for at in range(0, len(stream), size))
    assert (out, marked.status, marked.pid) == (output, status, 77)
    assert marked.rest() == b""
    assert marked.before.get() == noise


@given(st.binary(max_size=60), st.integers(1, 10))
def test_a_stream_that_breaks_off_is_given_whole(output, size):
    stream = b"[n0 begin 1]" + output + b"[n0 en"
    marked = Marked("n0")
    out = b"".join(marked.feed(stream[at : at + size]) for at in range(0, len(stream), size)) + marked.rest()
    assert (out, marked.status) == (output + b"[n0 en", None)


def test_what_follows_the_end_is_passed_on():
    marked = Marked("n0")
    assert marked.feed(b"[n0 begin 1]a[n0 end 003]later") == b"alater"
    assert marked.feed(b"[n0 end 004]") == b"[n0 end 004]" and marked.status == 3


def test_output_is_not_held_back():
    """A prompt without a newline is seen at once."""
    marked = Marked("n0")
    assert marked.feed(b"[n0 begin 1]name: ") == b"name: "
    assert marked.feed(b"[") == b""
    assert marked.feed(b"x") == b"[x"


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))))
def test_arguments_are_ascii_on_the_wire(arguments):
    coding, encoded = encode(arguments)
    command_line(encoded)
    assert coding == ("plain" if encoded == arguments else "octal")


def test_a_nul_is_refused():
    with pytest.raises(UsageError, match="NUL"):
        encode(["a\0b"])
    err = io.BytesIO()
    assert run_exec(LOCAL, ["a\0b"], None, io.BytesIO(), err) == 255
    assert err.getvalue().startswith(b"orch: ")


def test_no_command():
    assert run_exec(LOCAL, [], None, io.BytesIO(), io.BytesIO()) == 255


def test_a_place_that_is_not_reached():
    def connect(_place):
        raise Unreachable("no way", "try another")

    err = io.BytesIO()
    assert run_exec(LOCAL, ["true"], None, io.BytesIO(), err, connect=connect) == 255
    assert err.getvalue() == b"orch: no way\norch: try: try another\n"


class Scripted:
    """A connection whose commands answer as they are told."""

    name = "scripted"

    def __init__(self, *answers):
        self.answers = list(answers)
        self.channels = 0

    def open(self, argv, on_stderr=None):
        self.channels += 1
        nonce = argv[argv.index("orch-exec") + 1].encode()
        out, err, status = self.answers.pop(0)
        on_stderr(err.replace(b"NONCE", nonce))
        return ScriptedChannel([out.replace(b"NONCE", nonce)], status)

    def close(self):
        pass


class ScriptedChannel:
    def __init__(self, out, status):
        self.out, self.status = out, status

    def read(self, timeout):
        return self.out.pop(0) if self.out else b""

    def stderr_ended(self, timeout):
        return True

    def wait(self, timeout):
        return self.status

    def send(self, data):
        raise ConnectionLost("gone")

    def close_stdin(self):
        pass

    close = close_stdin


PCT = Place(Host(name="pve", containers={"200": Container(kind="pct", id="200")}), "200")


def test_a_connection_that_is_lost_in_the_middle():
    out, err = io.BytesIO(), io.BytesIO()
    lost = Scripted((b"[NONCE begin 1]half", b"[NONCE begin 1]", None))
    assert run_exec(PCT, ["x"], None, out, err, connect=lambda _: lost) == 255
    assert out.getvalue() == b"half" and b"orch: the connection to pve/200 is lost" in err.getvalue()


def test_the_text_of_a_pct_that_fails():
    err = io.BytesIO()
    gone = Scripted((b"", b"container '200' not running!\n", 255))
    assert run_exec(PCT, ["x"], None, io.BytesIO(), err, connect=lambda _: gone) == 255
    assert b"not running\n" in err.getvalue() and b"pct start 200" in err.getvalue()


def test_an_older_pct_is_asked_again(monkeypatch):
    monkeypatch.setattr("orchestrator.place.container._without_keep_env", set())
    older = Scripted(
        (b"", b"Unknown option: keep-env\n", 255),
        (b"[NONCE begin 1]out[NONCE end 000]", b"[NONCE begin 1][NONCE end 000]", 0),
    )
    out = io.BytesIO()
    assert run_exec(PCT, ["x"], None, out, io.BytesIO(), connect=lambda _: older) == 0
    assert out.getvalue() == b"out" and older.channels == 2


def test_an_interrupt_is_passed_on():
    """Ctrl-C ends the command there, not only its reader here."""

    class Interrupted(io.BytesIO):
        def write(self, data):
            super().write(data)
            raise KeyboardInterrupt

    out = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        run_exec(LOCAL, ["sh", "-c", "echo $$; exec sleep 60"], None, out, io.BytesIO())
    pid = int(out.getvalue())
    gone = threading.Event()
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            gone.set()
            break
        gone.wait(0.05)
    assert gone.is_set()


def test_stdin_from_a_file_and_a_pipe(tmp_path):
    (tmp_path / "in").write_bytes(b"file")
    with (tmp_path / "in").open("rb") as source:
        out = io.BytesIO()
        assert run_exec(LOCAL, ["cat"], source, out, io.BytesIO()) == 0
    assert out.getvalue() == b"file"
    read, write = os.pipe()
    os.write(write, b"pipe")
    os.close(write)
    with os.fdopen(read, "rb") as source:
        out = io.BytesIO()
        assert run_exec(LOCAL, ["cat"], source, out, io.BytesIO()) == 0
    assert out.getvalue() == b"pipe"


def test_a_terminal_is_not_read():
    primary, terminal = os.openpty()
    try:
        with os.fdopen(terminal, "rb", buffering=0) as source:
            assert run_exec(LOCAL, ["cat"], source, io.BytesIO(), io.BytesIO()) == 0
    finally:
        os.close(primary)


def test_a_stdin_that_stays_open_does_not_hold_it_up():
    read, write = os.pipe()
    try:
        with os.fdopen(read, "rb", buffering=0) as source:
            assert run_exec(LOCAL, ["true"], source, io.BytesIO(), io.BytesIO()) == 0
    finally:
        os.close(write)


def test_a_place_that_says_nothing(monkeypatch):
    monkeypatch.setattr(execution, "BEGIN", 0.0)

    class Silent(ScriptedChannel):
        def read(self, timeout):
            raise TimeoutError

    class Connection(Scripted):
        def open(self, argv, on_stderr=None):
            return Silent([], None)

    err = io.BytesIO()
    assert run_exec(PCT, ["x"], None, io.BytesIO(), err, connect=lambda _: Connection()) == 255
    assert b"pct exec 200 on pve gave no answer" in err.getvalue()
