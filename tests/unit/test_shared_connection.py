"""One connection a host: who shares it, and when it ends."""

import sys
import threading
import time

import pytest

from orchestrator.errors import Unreachable
from orchestrator.place import shared
from orchestrator.place.connection import ChannelRefused
from orchestrator.place.shared import Share


class Wire:
    """A connection that opens so many channels, as a server with that MaxSessions."""

    name = "pve"

    def __init__(self, most=10):
        self.channels = 0
        self.alive = True
        self.most = most
        self.ended = []

    def open(self, argv, on_stderr=None):
        if self.channels >= self.most:
            raise ChannelRefused("MaxSessions of its sshd is reached")
        self.channels += 1
        return End(self, argv[0])

    def close(self):
        self.alive = False


class End:
    def __init__(self, wire, word):
        self.wire, self.word = wire, word

    def close(self):
        self.wire.ended.append(self.word)


@pytest.fixture
def wires():
    made = []
    yield made
    assert not shared._open and not shared._coming  # nothing is kept of those that are gone


def connecting(wires, most=10):
    def connect():
        wires.append(Wire(most))
        return wires[-1]

    return connect


def test_the_connection_ends_with_the_last_share_and_what_a_share_started_with_it(wires):
    connect = connecting(wires)
    one, other = Share("pve", "pve", connect), Share("pve", "pve", connect)
    one.open(["a"])
    other.open(["b"])
    assert len(wires) == 1 and (one.channels, other.channels) == (1, 1)
    one.close()
    one.close()
    assert wires[0].alive and wires[0].ended == ["a"]
    with pytest.raises(Unreachable, match="closed"):
        one.open(["c"])
    other.close()
    assert not wires[0].alive


def test_another_host_and_a_dead_connection_are_not_shared(wires):
    connect = connecting(wires)
    shares = [Share("pve", "pve", connect), Share("other", "other", connect)]
    wires[0].alive = False
    shares.append(Share("pve", "pve", connect))
    assert len(wires) == 3
    for share in shares:
        share.close()


def test_a_full_connection_gets_a_second_beside_it(wires):
    shares = [Share("pve", "pve", connecting(wires, most=3)) for _ in range(4)]
    for share in shares:
        share.open(["a"])
        share.open(["b"])
    assert [wire.channels for wire in wires] == [3, 3, 2]
    for share in shares:
        share.close()
    assert not any(wire.alive for wire in wires)


def test_a_host_that_opens_no_channel_at_all_is_told(wires):
    share = Share("pve", "pve", connecting(wires, most=0))
    with pytest.raises(ChannelRefused):
        share.open(["a"])
    assert len(wires) == 1
    share.close()


def test_those_that_ask_at_once_wait_for_one_connection_and_share_its_failure(wires):
    begun, go_on, failing = threading.Event(), threading.Event(), [True]
    calls, said, shares = [], [], []

    def connect():
        calls.append(1)
        begun.set()
        assert go_on.wait(60)
        if failing[0]:
            raise Unreachable("pve refuses the connection")
        return connecting(wires)()

    def ask():
        try:
            shares.append(Share("pve", "pve", connect))
        except Unreachable as error:
            said.append(error.message)

    for failing[0] in (True, False):
        begun.clear(), go_on.clear(), calls.clear()
        threads = [threading.Thread(target=ask) for _ in range(4)]
        threads[0].start()
        assert begun.wait(60)
        for thread in threads[1:]:
            thread.start()
        while any(not _waits(thread) for thread in threads[1:]):
            time.sleep(0.01)
        go_on.set()
        for thread in threads:
            thread.join(60)
        assert len(calls) == 1
    assert said == ["pve refuses the connection"] * 4 and len(shares) == 4 and len(wires) == 1
    for share in shares:
        share.close()


def _waits(thread: threading.Thread) -> bool:
    """Whether it stands in the wait for somebody else's connection."""
    frame = sys._current_frames().get(thread.ident)
    while frame is not None:
        if frame.f_code.co_name == "result":
            return True
        frame = frame.f_back
    return False
