"""Commands on this machine."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from orchestrator.errors import ConnectionLost, Unreachable
from orchestrator.place import local
from orchestrator.place.connection import STDERR_KEPT, Tail, command_line
from orchestrator.place.local import LocalConnection


@pytest.fixture
def here():
    connection = LocalConnection()
    yield connection
    connection.close()


def everything(channel):
    return b"".join(iter(lambda: channel.read(10.0), b""))


def test_streams_and_status(here):
    channel = here.open(["sh", "-c", "cat; echo err >&2; exit 7"])
    channel.send(b"in")
    channel.close_stdin()
    channel.close_stdin()
    assert everything(channel) == b"in"
    assert channel.wait(5.0) == 7 and channel.stderr() == b"err\n" and channel.stderr_ended(1.0)
    assert here.channels == 1


def test_a_signal_is_128_and_its_number(here):
    assert here.open(["sh", "-c", "kill -9 $$"]).wait(5.0) == 137


def test_silence_is_a_timeout(here):
    channel = here.open(["sleep", "30"])
    with pytest.raises(TimeoutError):
        channel.read(0.05)
    with pytest.raises(TimeoutError):
        channel.read(0.0)
    assert channel.wait(0.05) is None


def test_stderr_does_not_stop_stdout(here):
    channel = here.open(["sh", "-c", "head -c 3000000 /dev/zero >&2; echo done"])
    assert everything(channel) == b"done\n"
    channel.wait(5.0)
    assert len(channel.stderr()) == STDERR_KEPT


def test_a_command_that_reads_no_more(here, monkeypatch):
    channel = here.open(["true"])
    channel.wait(5.0)
    with pytest.raises(ConnectionLost, match="reads no more"):
        channel.send(b"x" * 1_000_000)
    monkeypatch.setattr(local, "SEND_TIMEOUT", 0.2)
    with pytest.raises(ConnectionLost, match="takes no input"):
        here.open(["sleep", "30"]).send(b"x" * 1_000_000)


def test_what_does_not_start(here):
    with pytest.raises(Unreachable, match="no-such-command cannot be started"):
        here.open(["no-such-command"])
    assert here.channels == 0


def test_closing_ends_what_does_not_end_by_itself(monkeypatch):
    monkeypatch.setattr(local, "GRACE", 0.1)
    connection = LocalConnection()
    channel = connection.open(["sleep", "30"])
    start = time.monotonic()
    connection.close()
    assert time.monotonic() - start < 3 and channel.wait(1.0) == 137


def test_the_line_is_plain_ascii():
    assert command_line(["a", "b c", "$x"]) == "a 'b c' '$x'"
    for bad in ("é", "a\0b"):
        with pytest.raises(ValueError, match="ASCII"):
            command_line([bad])


def test_the_tail_of_a_stream():
    tail = Tail(10)
    for number in range(100):
        tail.add(b"%02d" % number)
    assert tail.get() == b"9596979899"


def test_ssh_is_imported_only_where_it_is_used():
    code = (
        "import sys; import orchestrator.place.session, orchestrator.place.exec, orchestrator.place.hostkeys;"
        "sys.exit(any(m in sys.modules for m in ('paramiko', 'fabric', 'cryptography')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
