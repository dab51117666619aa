"""JSON lines over TCP between two who share a token: each line is bound to the token, the connection, its direction and
its place in the order, so that nobody else can say, repeat or reorder one. They can be read by others."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import select
import socket
import time
from typing import Any, Dict, List

_LONGEST = 64 << 10
_NONCE = 16


class Refused(Exception):
    """The other end does not know the token, or speaks something else."""


class Lines:
    """One connection. Not for use by several threads at once."""

    def __init__(self, sock: socket.socket, token: str, *, first: bool, patience: float) -> None:
        """`first`: this end speaks first in the greeting, which takes at most `patience` seconds. OSError, Refused."""
        sock.settimeout(patience)
        self._sock = sock
        self._rest = b""
        self._sent = self._received = 0
        own = os.urandom(_NONCE)
        sock.sendall(own)
        other = b""
        while len(other) < _NONCE:
            part = sock.recv(_NONCE - len(other))
            if not part:
                raise Refused("it closed the connection")
            other += part
        key = token.encode("utf-8") + (own + other if first else other + own)
        self._out, self._in = (hashlib.sha256(key + (b"1" if first is way else b"2")).digest() for way in (True, False))

    def send(self, message: Dict[str, Any]) -> None:
        """OSError if it cannot be sent within the connection's patience."""
        body = json.dumps(message).encode("utf-8")
        self._sock.sendall(_mark(self._out, self._sent, body) + b" " + body + b"\n")
        self._sent += 1

    def receive(self, wait: float) -> List[Dict[str, Any]]:
        """What came within `wait` seconds, none perhaps. ConnectionError at the end, OSError, Refused."""
        end = time.monotonic() + wait
        while b"\n" not in self._rest:
            if not select.select([self._sock], [], [], max(0.0, end - time.monotonic()))[0]:
                return []
            part = self._sock.recv(_LONGEST)
            if not part:
                raise ConnectionError("the other end closed the connection")
            self._rest += part
            if len(self._rest) > 2 * _LONGEST:
                raise Refused("it sends no lines")
        *whole, self._rest = self._rest.split(b"\n")
        return [self._read(line) for line in whole]

    def _read(self, line: bytes) -> Dict[str, Any]:
        mark, _, body = line.partition(b" ")
        if not hmac.compare_digest(mark, _mark(self._in, self._received, body)):
            raise Refused("it does not know the run's token")
        self._received += 1
        message = json.loads(body.decode("utf-8"))
        if not isinstance(message, dict):
            raise Refused("it sends no objects")
        return message


def _mark(key: bytes, number: int, body: bytes) -> bytes:
    return hmac.new(key, b"%d " % number + body, hashlib.sha256).hexdigest().encode("ascii")
