"""`orch exec` against real containers."""

from __future__ import annotations

import hashlib
import io
import os
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.config.models import Host, Place
from orchestrator.place.exec import run_exec

from .conftest import until

PLACES = ("local", "host", "pct", "lxc")
# Any text an argument can be: no NUL, and only what is a file name's worth of Unicode.
ARGUMENT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
RAW = st.binary(max_size=20).map(lambda b: os.fsdecode(b.replace(b"\0", b"")))
HOSTILE = [
    "", " ", "a b", "'", '"', "'\"'", "$HOME", "$(id)", "`id`", "*", "~", "-n", "--", "-e", "\\", "\\n", "\\0101", "\n",
    "tail\n\n", "\ttab", "a;b", "a&b|c", "#c", "!!",
    "%s%n", "é", "日本", "\x01", "\x7f", "{a,b}", "a\rb", "\udc80\udcff",
]  # fmt: skip


@pytest.fixture(params=PLACES)
def place(request, lab):
    return {
        "local": Place(Host(name="local")),
        "host": lab.place(None),
        "pct": lab.place("200"),
        "lxc": lab.place("lxc"),
    }[request.param]


def run(place, *argv, stdin=None):
    out, err = io.BytesIO(), io.BytesIO()
    source = io.BytesIO(stdin) if stdin is not None else None
    status = run_exec(place, list(argv), source, out, err)
    return status, out.getvalue(), err.getvalue()


def echoed(place, arguments):
    """The arguments as a program there saw them."""
    status, out, err = run(place, "sh", "-c", 'for a; do printf "%s\\0" "$a"; done', "sh", *arguments)
    assert status == 0, err
    return [os.fsdecode(part) for part in out.split(b"\0")[:-1]]


def test_hostile_arguments_arrive_as_they_are(place):
    assert echoed(place, HOSTILE) == HOSTILE


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arguments=st.lists(st.one_of(ARGUMENT, RAW), max_size=5))
def test_any_arguments_arrive_here(arguments):
    assert echoed(Place(Host(name="local")), arguments) == arguments


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arguments=st.lists(st.one_of(ARGUMENT, RAW), min_size=1, max_size=8))
def test_any_arguments_arrive_in_a_container(lab, arguments):
    assert echoed(lab.place("200"), arguments) == arguments


def test_binary_goes_there_and_back(place):
    data = random.Random(1).randbytes(5_000_000)
    status, out, err = run(place, "cat", stdin=data)
    assert (status, err) == (0, b"")
    assert hashlib.sha256(out).digest() == hashlib.sha256(data).digest()


def test_much_stderr_before_any_stdout(place):
    status, out, err = run(place, "sh", "-c", "head -c 10000000 /dev/zero >&2; echo done")
    assert (status, out, len(err)) == (0, b"done\n", 10_000_000)


@pytest.mark.parametrize(
    ("script", "status"),
    [("exit 0", 0), ("exit 7", 7), ("exit 255", 255), ("kill -9 $$", 137), ("kill -TERM $$", 143)],
)
def test_the_status_is_the_commands_own(place, script, status):
    assert run(place, "sh", "-c", script) == (status, b"", b"")


def test_a_command_that_is_not_there_is_127(place):
    status, out, err = run(place, "no-such-command")
    assert (status, out) == (127, b"")
    assert b"no-such-command" in err


def test_builtins_of_the_shell_are_no_commands(place):
    assert run(place, "exit", "3")[0] == 127


def test_streams_stay_apart_and_need_no_newline(place):
    assert run(place, "sh", "-c", "printf out; printf err >&2") == (0, b"out", b"err")


def test_stdin_is_empty_when_none_is_given(place):
    assert run(place, "cat") == (0, b"", b"")


def test_what_the_command_leaves_running_is_not_waited_for(place):
    assert run(place, "sh", "-c", "sleep 30 & echo started") == (0, b"started\n", b"")


def test_a_command_that_does_not_read_its_stdin(place):
    assert run(place, "true", stdin=b"x" * 3_000_000)[0] == 0


def test_it_needs_no_python(lab, make_lab):
    bare = make_lab("--containers", "1", "--net", "empty", "--without", "python3")
    assert run(bare.place("200"), "sh", "-c", "command -v python3 || echo none") == (0, b"none\n", b"")


def test_a_closed_stdout_ends_it(place):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb", buffering=0) as out:
        assert run_exec(place, ["sh", "-c", "yes | head -c 3000000"], None, out, io.BytesIO()) == 141


@pytest.mark.parametrize(
    ("vmid", "words"), [("999", b"has no container 999"), ("202", b"container 202 on pve is not running")]
)
def test_orchs_own_failures_are_255(lab, vmid, words):
    lab.places["999"] = lab.host().containers["200"].model_copy(update={"id": "999"})
    status, out, err = run(lab.place(vmid), "true")
    assert (status, out) == (255, b"")
    assert err.startswith(b"orch: ") and words in err


def test_a_command_may_say_what_pct_says(lab):
    """Only what comes before the command begins is the way's own."""
    status, _, err = run(lab.place("200"), "sh", "-c", "echo \"container '200' not running!\" >&2; exit 255")
    assert (status, err) == (255, b"container '200' not running!\n")


def test_noise_of_a_startup_file_is_not_output(lab):
    lab.run("sh", "-c", "printf 'echo WELCOME; printf half; set -x\\n' >/root/.bashrc")
    try:
        assert run(lab.place("200"), "sh", "-c", "echo out; echo err >&2") == (0, b"out\n", b"err\n")
        assert run(lab.place(None), "cat", stdin=b"\0\1") == (0, b"\0\1", b"")
    finally:
        lab.run("rm", "/root/.bashrc")


def test_one_connection_and_one_pct_call(lab, relay):
    before = len(lab.pct_calls())
    assert run(lab.place("200", ssh_config=relay.config), "true")[0] == 0
    assert relay.connections == 1
    assert lab.pct_calls()[before:] == ["exec 200"]


def test_the_environment_of_the_host_stays_there(lab):
    _, out, _ = run(lab.place("200"), "env")
    names = {line.split(b"=")[0] for line in out.splitlines()}
    assert {b"HOME", b"PATH", b"LANG"} <= names
    assert not names & {b"SSH_CLIENT", b"SSH_CONNECTION", b"MAIL"}


def test_an_interrupt_ends_the_command_there(place, lab):
    class Interrupted(io.BytesIO):
        def write(self, data):
            raise KeyboardInterrupt

    def left():
        vmid = "200" if place.container else None
        words = lab.run("sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '", vmid=vmid, check=False).stdout
        return "sleep 12345" in words

    with pytest.raises(KeyboardInterrupt):
        run_exec(place, ["sh", "-c", "echo started; sleep 12345; echo next"], None, Interrupted(), io.BytesIO())
    assert until(lambda: not left())
