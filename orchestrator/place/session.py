"""One kept-open server at a place: everything a command does there goes over it, as framed and bounded requests.

Opening takes one connection and one remote command, also at first contact, when the remote programs are sent along.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from orchestrator.errors import ConnectionLost, NotFound, OrchError, Refused, Unreachable, UsageError
from orchestrator.place import greeting
from orchestrator.place.connection import Channel, Connection, command_line
from orchestrator.place.container import learn_keep_env
from orchestrator.remote import frames, zipapp

if TYPE_CHECKING:
    from orchestrator.config.models import Place

# Seconds of silence until the place has said its first word, and between that and the server's hello.
FIRST_WORD = 30.0
HELLO = 30.0
# Seconds that a command which ended has to tell its exit status, and its last words on stderr.
LAST_WORDS = 2.0
SETTLE = 0.5

ERRORS: dict[str, type[OrchError]] = {
    "failed": OrchError,
    "usage": UsageError,
    "not_found": NotFound,
    "refused": Refused,
}

OnEvent = Callable[[dict[str, Any]], None]
Connect = Callable[["Place"], Connection]


@dataclass(frozen=True)
class Hello:
    """What the place says of itself when a session opens: the host's facts and the container's."""

    host: Mapping[str, Any]
    container: Mapping[str, Any]


@dataclass(frozen=True)
class Reply:
    """An operation's answer."""

    data: dict[str, Any]
    payload: bytes = b""


class Session:
    """One kept-open `serve` at a place. Not for use by several threads at once."""

    def __init__(self, place: Place, connection: Connection, channel: Channel, hello: Hello, decoder: Incoming) -> None:
        self.place = place
        self.hello = hello
        self.root = str(hello.container["root"])
        self.round_trips = 0
        self.bytes_sent = 0
        self.connection = connection
        self._channel = channel
        self._incoming = decoder
        self._number = 0
        self._lost: ConnectionLost | None = None

    def call(
        self,
        op: str,
        args: dict[str, Any],
        payload: bytes = b"",
        timeout: float = 30.0,
        on_event: OnEvent | None = None,
    ) -> Reply:
        """One request and its answer. `timeout` is in seconds, for the whole of it.

        Raises the error that the operation answered with (OrchError, UsageError, NotFound, Refused), and
        ConnectionLost where no answer came: whether it was carried out is then unknown.
        """
        number = self._next()
        self._send({"id": number, "op": op, "args": args}, payload)
        reply = self._answer(number, op, time.monotonic() + timeout, timeout, on_event, idle=False)
        assert reply is not None
        return reply

    def upload(
        self,
        op: str,
        args: dict[str, Any],
        chunks: Iterable[bytes],
        timeout: float = 60.0,
        on_event: OnEvent | None = None,
        payload: bytes = b"",
    ) -> Reply:
        """A request with a stream behind it. `timeout` is seconds of silence. An answer that comes before the end
        of the stream ends the sending. Raises what `call` raises."""
        number = self._next()
        self._send({"id": number, "op": op, "args": args, "upload": True}, payload)
        early: Reply | None = None
        try:
            for chunk in chunks:
                for part in frames.split(chunk):
                    self._send({"id": number, "part": True}, part)
                    early = self._answer(number, op, time.monotonic(), 0.0, on_event, idle=True)
                    if early is not None:
                        return early
        finally:
            # Also where `chunks` raised: the operation is then told that it got too little, and removes it.
            if self._lost is None:
                self._send({"id": number, "end": True})
        reply = self._answer(number, op, time.monotonic() + timeout, timeout, on_event, idle=False)
        assert reply is not None
        return reply

    def download(
        self, op: str, args: dict[str, Any], payload: bytes = b"", timeout: float = 60.0
    ) -> Generator[bytes, None, Reply]:
        """A request that is answered with a stream: its parts as they come, and the answer as the generator's own.
        `timeout` is seconds of silence. Raises what `call` raises. One that is given up before its end closes the
        session: the place would go on sending."""
        number = self._next()
        self._send({"id": number, "op": op, "args": args}, payload)
        over = False
        try:
            while True:
                parts: list[bytes] = []
                reply = self._answer(number, op, time.monotonic() + timeout, timeout, None, idle=False, parts=parts)
                if reply is not None:
                    over = True
                    return reply
                yield parts.pop()
        except OrchError:
            over = True
            raise
        finally:
            if not over:
                self.close()

    def _next(self) -> int:
        if self._lost is not None:
            raise self._lost
        self._number += 1
        self.round_trips += 1
        return self._number

    def _send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        data = frames.encode(header, payload)
        self.bytes_sent += len(data)
        try:
            self._channel.send(data)
        except ConnectionLost as error:
            raise self._lose(f"the connection to {self.place.name} is lost ({error.message})") from None

    def _answer(
        self,
        number: int,
        op: str,
        end: float,
        bound: float,
        on_event: OnEvent | None,
        idle: bool,
        parts: list[bytes] | None = None,
    ) -> Reply | None:
        """The answer to one request. None where it has not come yet: with `idle` at the time `end`, with `parts` when a
        part of its stream was put there."""
        while True:
            try:
                frame = self._incoming.next(max(0.0, end - time.monotonic()))
            except TimeoutError:
                if idle:
                    return None
                raise self._lose(
                    f"{self.place.name} did not answer {op} within {bound:.0f} s: whether it was done is unknown"
                ) from None
            except frames.FrameError as error:
                raise self._lose(f"what came from {self.place.name} is no answer: {error}") from None
            if frame is None:
                raise self._lose(
                    f"the connection to {self.place.name} was lost during {op}: whether it was done is unknown"
                )
            header, payload = frame
            if header.get("id") != number:
                continue  # of a request that was given up
            if "part" in header:
                if parts is not None:
                    parts.append(payload)
                    return None
                continue
            if "event" in header:
                if on_event is not None:
                    on_event(header["event"])
                continue
            if "error" in header:
                error_class = ERRORS.get(str(header["error"].get("code")), OrchError)
                raise error_class(str(header["error"].get("message")))
            return Reply(header.get("result") or {}, payload)

    def _lose(self, message: str) -> ConnectionLost:
        words = last_words(self._channel)
        self._lost = ConnectionLost(message + (f" ({words})" if words else ""))
        self.close()
        return self._lost

    def close(self) -> None:
        """Ends the server, and the connection with it."""
        if self._lost is None:
            self._lost = ConnectionLost(f"the session with {self.place.name} is closed")
        # Not the channel by itself: its farewell could wait for a peer that is dead.
        self.connection.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Incoming:
    """Frames, out of what a channel gives."""

    def __init__(self, channel: Channel, rest: bytes) -> None:
        self._channel = channel
        self._decoder = frames.Decoder()
        self._ready = self._decoder.feed(rest)

    def next(self, timeout: float) -> frames.Frame | None:
        """The next frame, None at the end. Raises TimeoutError after `timeout` seconds, FrameError on noise."""
        end = time.monotonic() + timeout
        while not self._ready:
            data = self._channel.read(max(0.0, end - time.monotonic()))
            if not data:
                return None
            self._ready = self._decoder.feed(data)
        return self._ready.pop(0)


def last_words(channel: Channel) -> str:
    """The last line of stderr, for a message; it may come a little later than the end of stdout."""
    channel.stderr_ended(SETTLE)
    lines = channel.stderr().decode("utf-8", "replace").strip().splitlines()
    return lines[-1].strip()[:300] if lines else ""


def connect(place: Place) -> Connection:
    """A connection to the place's host. Raises Unreachable, Refused, UsageError."""
    if place.host.ssh is None:
        from orchestrator.place.local import LocalConnection

        return LocalConnection(place.host.name)
    # Imported here: paramiko takes 0.2 s that commands without a remote place need not pay.
    from orchestrator.place.shared import Share
    from orchestrator.place.ssh import connect as connect_ssh

    return Share(place.host.name, (place.host.name, place.host.ssh), lambda: connect_ssh(place.host))


def open_session(place: Place, connect: Connect = connect) -> Session:
    """Connects and starts the server at the place: one connection, one remote command.

    Raises Unreachable (the host, or the container), Refused (host keys), UsageError (no such container),
    OrchError (no Python there, no room for the programs).
    """
    app, digest = zipapp.build()
    line(place, "0" * 16, digest, len(app))  # refuses a bad root or Python before anything is connected
    connection = connect(place)
    try:
        while True:
            nonce = secrets.token_hex(8)
            channel = connection.open(line(place, nonce, digest, len(app)))
            session = _greet(place, connection, channel, nonce, app)
            if session is not None:
                return session
            channel.close()
    except BaseException:
        connection.close()
        raise


def _greet(place: Place, connection: Connection, channel: Channel, nonce: str, app: bytes) -> Session | None:
    """Reads up to the hello. None: to be tried again, in the words that an older pct understands."""
    greet = greeting.Greeting(nonce)
    end = time.monotonic() + FIRST_WORD
    heard = 0
    while not greet.serving:
        try:
            data = channel.read(max(0.0, end - time.monotonic()))
        except TimeoutError:
            raise greeting.silent(place, greet, FIRST_WORD) from None
        if not data:
            status = channel.wait(LAST_WORDS)
            stderr = channel.stderr().decode("utf-8", "replace")
            if place.container is not None and learn_keep_env(place.host.name, stderr):
                return None
            raise greeting.ended(place, greet, status, stderr)
        greet.feed(data)
        if greet.error or greet.no_python:
            raise greeting.failed(place, greet)
        if greet.take_need():
            _send_app(place, channel, app)
        if greet.lines != heard:
            heard = greet.lines
            end = time.monotonic() + FIRST_WORD
    try:
        incoming = Incoming(channel, greet.rest)
        frame = incoming.next(HELLO)
    except (TimeoutError, frames.FrameError) as error:
        raise ConnectionLost(
            f"the server at {place.name} started but did not say hello ({error or 'silence'})"
        ) from None
    if frame is None or "hello" not in frame[0]:
        raise Unreachable(f"the server at {place.name} ended at once: {last_words(channel) or 'no reason given'}")
    hello = Hello(greet.host_facts(), frame[0]["hello"]["container"])
    session = Session(place, connection, channel, hello, incoming)
    session.bytes_sent = greet.sent and len(app)
    return session


def _send_app(place: Place, channel: Channel, app: bytes) -> None:
    try:
        channel.send(app)
    except ConnectionLost as error:
        raise ConnectionLost(f"the connection to {place.name} was lost at the start: {error.message}") from None


def line(place: Place, nonce: str, digest: str, size: int) -> list[str]:
    """The one remote command. Raises UsageError where a setting does not survive the way."""
    try:
        argv = greeting.command(place, nonce, digest, size)
        command_line(argv)
    except ValueError as error:
        raise UsageError(f"{place.name}: root and python must be plain ASCII ({error})") from None
    return argv


def explain(place: Place) -> list[str]:
    """What opening a session would run, without running it; the scripts are shown by name."""
    app, digest = zipapp.build()
    argv = line(place, "NONCE", digest, len(app))
    return greeting.explain(place, _shown(argv), len(app), digest)


def _shown(argv: Sequence[str]) -> str:
    names = {greeting.script("host"): "$HOST_SH", greeting.script("enter"): "$ENTER_SH"}
    return " ".join(names.get(argument) or command_line([argument]) for argument in argv)
