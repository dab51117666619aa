"""One SSH connection a host: the containers of a host, and all else that this process does there, share it.

A share is a Connection like any other. What was started through it ends with it; the connection itself ends with the
last one that shares it. A server opens so many channels on one connection and no more (MaxSessions of OpenSSH's sshd,
10 by default): then another connection is made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from orchestrator.errors import OrchError, Unreachable
from orchestrator.place.connection import Channel, ChannelRefused, Connection, OnStderr

FAREWELL = 2.0  # seconds that ending what runs may take: the other end may be dead


class Shareable(Connection, Protocol):
    """A connection of which it is known whether it still carries anything."""

    @property
    def alive(self) -> bool: ...


@dataclass(eq=False)
class _Open:
    connection: Shareable
    users: int = 0


_lock = threading.Lock()
_open: dict[Hashable, list[_Open]] = {}
_coming: dict[Hashable, Future[None]] = {}


class Share:
    """One user's part of a host's connection."""

    def __init__(self, name: str, key: Hashable, connect: Callable[[], Shareable]) -> None:
        """Connects, or joins. Raises what `connect` raises."""
        self.name = name
        self.channels = 0
        self._key = key
        self._connect = connect
        self._lock = threading.Lock()
        self._closed = False
        self._started: list[Channel] = []
        self._of = [_join(key, connect, ())]

    def open(self, argv: Sequence[str], on_stderr: OnStderr | None = None) -> Channel:
        while True:
            mine = self._of[-1]
            self._refuse_if_closed()
            try:
                channel = mine.connection.open(argv, on_stderr)
                break
            except ChannelRefused:
                if mine.connection.channels == 0:  # not for being full
                    raise
            more = _join(self._key, self._connect, self._of)
            if not self._keep(self._of, more):
                _leave(self._key, more)
        if not self._keep(self._started, channel):
            channel.close()
            self._refuse_if_closed()
        self.channels += 1
        return channel

    def _keep(self, where: list[Any], what: object) -> bool:
        """Whether it is kept for `close`, which may have come meanwhile."""
        with self._lock:
            if not self._closed:
                where.append(what)
            return not self._closed

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise Unreachable(f"the connection to {self.name} is closed")

    def close(self) -> None:
        """Ends what was started through this share; doing so twice is no error."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        still_used = [_leave(self._key, one) for one in self._of]
        if any(still_used):  # then the channels have to be ended by themselves
            farewell = threading.Thread(target=self._end_channels, daemon=True)
            farewell.start()
            farewell.join(FAREWELL)

    def _end_channels(self) -> None:
        for channel in self._started:
            channel.close()


def _join(key: Hashable, connect: Callable[[], Shareable], but: Sequence[_Open]) -> _Open:
    """A live connection beside `but`, counted as used once more. Those that ask at the same time wait for one, and
    share its failure."""
    while True:
        with _lock:
            for one in _open.get(key, ()):
                if one not in but and one.connection.alive:
                    one.users += 1
                    return one
            coming = _coming.get(key)
            if coming is None:
                mine = _coming[key] = Future()
        if coming is not None:
            coming.result()
            continue
        try:
            made = _Open(connect(), users=1)
        except BaseException as error:
            with _lock:
                del _coming[key]
            mine.set_exception(error if isinstance(error, OrchError) else Unreachable("the connection was given up"))
            raise
        with _lock:
            del _coming[key]
            _open.setdefault(key, []).append(made)
        mine.set_result(None)
        return made


def _leave(key: Hashable, one: _Open) -> bool:
    """Whether others still use it; the last one closes it."""
    with _lock:
        one.users -= 1
        if one.users:
            return True
        _open[key].remove(one)
        if not _open[key]:
            del _open[key]
    one.connection.close()
    return False
