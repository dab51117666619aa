"""`orch exec`: one command at a place, its streams and its exit status passed on as they are.

Neither a status nor a stream tells a failure of the way from one of the command, so the command's output comes
between marks, on stdout and stderr alike, and the last mark holds the status. Nothing but `sh` is needed there.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, BinaryIO

from orchestrator.errors import ConnectionLost, OrchError, Unreachable, UsageError
from orchestrator.place import greeting
from orchestrator.place.connection import Channel, Connection, Tail
from orchestrator.place.container import learn_keep_env, wrap
from orchestrator.place.session import connect

if TYPE_CHECKING:
    from orchestrator.config.models import Place

# Seconds until the place has begun the command.
BEGIN = 30.0
# orch's own failures, as with ssh.
OWN_FAILURE = 255
# Seconds that interrupting a command may take.
INTERRUPT = 5.0


class Marked:
    """Finds the command's output in a stream: between the two marks, which may come in any pieces."""

    def __init__(self, nonce: str) -> None:
        # Each mark ends with a number: the pid of the shell there, then the status.
        self._begin = f"[{nonce} begin ".encode("ascii")
        self._end = f"[{nonce} end ".encode("ascii")
        self._held = b""
        self.pid: int | None = None
        self.status: int | None = None
        self.before = Tail()

    @property
    def begun(self) -> bool:
        """Whether the command has been reached."""
        return self.pid is not None

    def feed(self, data: bytes) -> bytes:
        """What of `data`, and of what was held back, is the command's own."""
        self._held += data
        if self.pid is None:
            noise, self.pid = self._take(self._begin)
            self.before.add(noise)
            if self.pid is None:
                return b""
        out = b""
        if self.status is None:
            out, self.status = self._take(self._end)
        if self.status is not None:
            # Children that outlive the command may still write.
            out, self._held = out + self._held, b""
        return out

    def _take(self, mark: bytes) -> tuple[bytes, int | None]:
        """What stands before a mark, and its number; None, and what can be no part of the mark, where it is not
        whole yet. Keeps what follows."""
        before, found, after = self._held.partition(mark)
        number, bracket, rest = after.partition(b"]")
        if found and bracket:
            self._held = rest
            return before, int(number)
        keep = len(self._held) - len(before) if found else _overlap(self._held, mark)
        out, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return out, None

    def rest(self) -> bytes:
        """At the end of the stream: what was held back and is no mark."""
        held, self._held = self._held, b""
        if not self.begun:
            self.before.add(held)
            return b""
        return held


def _overlap(data: bytes, mark: bytes) -> int:
    """The length of the longest end of `data` that a mark could begin with."""
    for size in range(min(len(data), len(mark) - 1), 0, -1):
        if data.endswith(mark[:size]):
            return size
    return 0


def encode(argv: Sequence[str]) -> tuple[str, list[str]]:
    """The coding and the arguments in ASCII. pct destroys other bytes under LANG=C, so those travel as octal escapes
    that the script at the place undoes. Raises UsageError on NUL, which no argument can hold."""
    if any("\0" in argument for argument in argv):
        raise UsageError("an argument holds a NUL byte, which no command can be given")
    if all(argument.isascii() for argument in argv):
        return "plain", list(argv)
    return "octal", [_octal(argument) for argument in argv]


def _octal(argument: str) -> str:
    return re.sub(rb"[^A-Za-z0-9_./:=,+@%^-]", lambda m: b"\\0%03o" % m.group(0)[0], os.fsencode(argument)).decode(
        "ascii"
    )


def command(place: Place, argv: Sequence[str], nonce: str) -> list[str]:
    """The argv for the host."""
    coding, arguments = encode(argv)
    # On this very machine a command runs where its user stands, elsewhere at home.
    here = place.host.ssh is None and place.container is None
    line = ["sh", "-c", greeting.script("exec"), "orch-exec", nonce, coding, "." if here else "", *arguments]
    return wrap(place, line)


def run_exec(
    place: Place,
    argv: Sequence[str],
    stdin: BinaryIO | None,
    stdout: BinaryIO,
    stderr: BinaryIO,
    connect: Callable[[Place], Connection] = connect,
) -> int:
    """Runs `argv` at the place and returns its exit status, 128 + n where signal n ended it.

    `stdin` is streamed and then closed; a terminal, or None, is an empty one. orch's own failures are 255, with a
    line `orch: …` on `stderr`; nothing is raised but KeyboardInterrupt.
    """
    if not argv:
        return _own(stderr, UsageError("no command is given"))
    try:
        connection = connect(place)
    except OrchError as error:
        return _own(stderr, error)
    try:
        run = _Run(place, connection, stdin, stdout, stderr)
        status = run.go(argv)
        while status is None:
            status = run.go(argv)
        return status
    except OrchError as error:
        return _own(stderr, error)
    except BrokenPipeError:
        # Nobody reads the output: the command is given up, with the status that a shell would see.
        return 128 + signal.SIGPIPE
    except OSError as error:
        return _own(stderr, OrchError(f"the output cannot be written: {error.strerror or error}"))
    finally:
        connection.close()


def _own(stderr: BinaryIO, error: OrchError) -> int:
    text = f"orch: {error.message}\n" + (f"orch: try: {error.hint}\n" if error.hint else "")
    with contextlib.suppress(OSError, ValueError):
        stderr.write(text.encode("utf-8", "replace"))
        stderr.flush()
    return OWN_FAILURE


class _Run:
    """One attempt after another to run one command; the second only where nothing has begun."""

    def __init__(
        self, place: Place, connection: Connection, stdin: BinaryIO | None, stdout: BinaryIO, stderr: BinaryIO
    ) -> None:
        self._place = place
        self._connection = connection
        self._stdin = stdin
        self._stdout = stdout
        self._stderr = stderr
        self._begun = threading.Event()
        self._over = threading.Event()

    def go(self, argv: Sequence[str]) -> int | None:
        """The status; None where the host's pct turns out to be too old for its option. Raises OrchError, and
        BrokenPipeError where nobody reads our stdout any more."""
        nonce = secrets.token_hex(8)
        out, err = Marked(nonce), Marked(nonce)
        line = command(self._place, argv, nonce)
        self._over.clear()

        def on_stderr(data: bytes) -> None:
            self._write(self._stderr, err.feed(data))

        channel = self._connection.open(line, on_stderr)
        pump = threading.Thread(target=self._pump, args=(channel,), daemon=True)
        try:
            pump.start()
            self._copy(channel, out, err)
            if out.status is not None or err.status is not None:
                return out.status if out.status is not None else err.status
            if self._older_pct(err):
                return None
            raise self._failed(channel, out, err)
        except KeyboardInterrupt:
            self._interrupt(out.pid)
            raise
        finally:
            self._over.set()

    def _copy(self, channel: Channel, out: Marked, err: Marked) -> None:
        """Hands stdout on until its end, or until both marks have come: what still holds the streams then is not the
        command but what it left running."""
        latest = time.monotonic() + BEGIN
        while out.status is None or err.status is None:
            try:
                data = channel.read(0.1 if out.status is not None else 1.0)
            except TimeoutError:
                if not out.begun and time.monotonic() > latest:
                    raise self._silent() from None
                continue
            if not data:
                self._write(self._stdout, out.rest())
                break
            if not self._write(self._stdout, out.feed(data)):
                raise BrokenPipeError
            if out.begun:
                self._begun.set()
        # stderr may be behind, by as much as its reader is slow; on a dead connection it ends.
        while err.status is None and not channel.stderr_ended(0.2):
            pass
        self._write(self._stderr, err.rest())

    def _interrupt(self, pid: int | None) -> None:
        """Passes Ctrl-C on, by a channel of its own: without a terminal there, the command would go on."""
        if pid is None:
            return
        line = wrap(self._place, ["sh", "-c", greeting.script("interrupt"), "orch-interrupt", "INT", str(pid)])
        with contextlib.suppress(OrchError, KeyboardInterrupt):
            self._connection.open(line).wait(INTERRUPT)

    def _older_pct(self, err: Marked) -> bool:
        container, text = self._place.container, err.before.get().decode("utf-8", "replace")
        return not err.begun and container is not None and learn_keep_env(self._place.host.name, text)

    def _failed(self, channel: Channel, out: Marked, err: Marked) -> OrchError:
        if out.begun or err.begun:
            return ConnectionLost(
                f"the connection to {self._place.name} is lost: whether the command there goes on is unknown"
            )
        text = err.before.get().decode("utf-8", "replace")
        greet = self._greeted()
        greet.noise.add(out.before.get())
        return greeting.ended(self._place, greet, channel.wait(1.0), text)

    def _greeted(self) -> greeting.Greeting:
        """As if the host had spoken: what stands on stderr is then the container's way in."""
        greet = greeting.Greeting("")
        greet.lines = 1
        return greet

    def _silent(self) -> Unreachable:
        return greeting.silent(self._place, self._greeted(), BEGIN)

    def _pump(self, channel: Channel) -> None:
        """Streams stdin; it waits for the command to begin, so that a second attempt finds it untouched."""
        try:
            source = self._stdin if self._stdin is not None and not self._stdin.isatty() else None
            while source is not None and not self._over.is_set():
                if not self._begun.wait(0.2):
                    continue
                data = self._some(source)
                if data is None:
                    continue
                if not data:
                    break
                channel.send(data)
        except (OrchError, OSError, ValueError):
            pass  # the command reads no more, which is its right
        finally:
            channel.close_stdin()

    def _some(self, source: BinaryIO) -> bytes | None:
        """Some bytes, b"" at the end, None where there are none yet."""
        try:
            number = source.fileno()
        except (OSError, ValueError):
            return source.read(1 << 16)
        if not select.select([number], [], [], 0.2)[0]:
            return None
        return os.read(number, 1 << 16)

    def _write(self, to: BinaryIO, data: bytes) -> bool:
        """False where nobody reads any more."""
        if not data:
            return True
        try:
            to.write(data)
            to.flush()
        except (BrokenPipeError, ValueError):
            return False
        return True
