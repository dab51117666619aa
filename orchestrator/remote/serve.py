"""The kept-open server at the place: requests come as frames on stdin, answers go as frames on stdout.

A reader thread takes frames, operations run one after another in the main thread. When stdin ends the client
is gone: the children of a running operation are killed, uploads are given up, and the process ends.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple, Union

from . import (
    cache_care,
    cache_send,
    caches,
    codetree,
    continued,
    doctor,
    environment,
    environment_gc,
    evidence,
    facts,
    files,
    frames,
    generations,
    probe,
    reach,
    runs,
    torch_probe,
)
from .frames import OpError

Answer = Union[Dict[str, Any], Tuple[Dict[str, Any], bytes]]
Op = Callable[[Dict[str, Any], "Call"], Answer]

# Seconds that an operation has to clean up after the client has gone.
GRACE = 3.0
# Parts of an upload held in memory before the client is made to wait.
PARTS_AHEAD = 8


class ClientGone(Exception):
    """Stdin ended in the middle of an upload, or stdout in the middle of a streamed answer."""


class Call:
    """What an operation may use of its request and of the server."""

    def __init__(self, server: "Server", number: int, payload: bytes) -> None:
        self.payload = payload
        self.number = number
        self.finished = threading.Event()
        self.incoming: queue.Queue[Optional[bytes]] = queue.Queue(maxsize=PARTS_AHEAD)
        self._server = server

    @property
    def root(self) -> str:
        """The folder of everything at this place."""
        return self._server.root

    @property
    def keep(self) -> Dict[str, Any]:
        """Lives as long as this server does: locks are kept here."""
        return self._server.keep

    @property
    def children(self) -> List[subprocess.Popen[bytes]]:
        """Processes that end with the client."""
        return self._server.children

    def event(self, data: Dict[str, Any]) -> None:
        """Tells the client how it goes, ahead of the answer."""
        self._server.write({"id": self.number, "event": data})

    def part(self, data: bytes) -> None:
        """Sends a piece of a streamed answer, ahead of the answer itself. It returns when the channel has taken it, so
        that no more than the channel holds is ever under way. Raises ClientGone."""
        self._server.write({"id": self.number, "part": True}, data)
        if self._server.gone.is_set():
            raise ClientGone()

    def parts(self) -> Iterator[bytes]:
        """The upload, piece by piece. Raises ClientGone where the client goes before its end."""
        while True:
            part = self.incoming.get()
            if part is None:
                if self._server.gone.is_set():
                    raise ClientGone()
                return
            yield part


class Server:
    """One client, one root. `ops` maps the names of operations to functions."""

    def __init__(self, root: str, ops: Dict[str, Op], read_fd: int, write_fd: int) -> None:
        self.root = root
        self.keep: Dict[str, Any] = {}
        self.children: List[subprocess.Popen[bytes]] = []
        self.gone = threading.Event()
        self._ops = ops
        self._read_fd = read_fd
        self._write_fd = write_fd
        self._write_lock = threading.Lock()
        self._requests: queue.Queue[Optional[Tuple[Dict[str, Any], Call]]] = queue.Queue()
        self._uploads: Dict[int, Call] = {}

    def write(self, header: Dict[str, Any], payload: bytes = b"") -> None:
        """Sends one frame whole. Whoever no longer reads has gone, which the reader notices too."""
        data = memoryview(frames.encode(header, payload))
        with self._write_lock:
            while data:
                try:
                    data = data[os.write(self._write_fd, data) :]
                except OSError:
                    self.gone.set()
                    return

    def run(self) -> None:
        """Serves until stdin ends."""
        threading.Thread(target=self._read, daemon=True).start()
        while True:
            request = self._requests.get()
            if request is None:
                return
            header, call = request
            try:
                self._answer(header, call)
            except ClientGone:
                return
            finally:
                call.finished.set()
                self._uploads.pop(call.number, None)

    def _answer(self, header: Dict[str, Any], call: Call) -> None:
        name = header.get("op")
        try:
            op = self._ops.get(str(name))
            if op is None:
                raise OpError("usage", "this place's program has no operation %r" % (name,))
            answer = op(header.get("args") or {}, call)
        except OpError as error:
            self._fail(call, error.code, error.message)
        except ClientGone:
            raise
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            self._fail(call, "failed", sentence(error, str(name), self.root))
        else:
            data, payload = answer if isinstance(answer, tuple) else (answer, b"")
            self.write({"id": call.number, "result": data}, payload)

    def _fail(self, call: Call, code: str, message: str) -> None:
        self.write({"id": call.number, "error": {"code": code, "message": message}})

    def _read(self) -> None:
        decoder = frames.Decoder()
        try:
            while True:
                data = os.read(self._read_fd, 1 << 20)
                if not data:
                    break
                for header, payload in decoder.feed(data):
                    self._take(header, payload)
        except (OSError, frames.FrameError):
            traceback.print_exc(file=sys.stderr)
        self._leave()

    def _take(self, header: Dict[str, Any], payload: bytes) -> None:
        number = int(header.get("id", 0))
        if "op" in header:
            call = Call(self, number, payload)
            if header.get("upload"):
                self._uploads[number] = call
            else:
                call.incoming.put(None)
            self._requests.put((header, call))
            return
        upload = self._uploads.get(number)
        if upload is None:
            return  # the rest of an upload that was answered already
        part = None if header.get("end") else payload
        while not upload.finished.is_set():
            try:
                upload.incoming.put(part, timeout=0.1)
                return
            except queue.Full:
                continue

    def _leave(self) -> None:
        self.gone.set()
        for child in list(self.children):
            kill(child)
        for upload in list(self._uploads.values()):
            with contextlib.suppress(queue.Full):
                upload.incoming.put(None, timeout=GRACE)
        self._requests.put(None)
        # The main thread ends by itself unless an operation does not: its locks are not to outlive the client.
        time.sleep(GRACE)
        os._exit(0)


def kill(child: subprocess.Popen[bytes]) -> None:
    """Ends a child, and its whole group where it leads one."""
    if child.poll() is not None:
        return
    try:
        if os.getpgid(child.pid) == child.pid:
            os.killpg(child.pid, signal.SIGKILL)
        else:
            child.kill()
    except OSError:
        pass


def sentence(error: BaseException, op: str, root: str) -> str:
    """An unforeseen error in one sentence."""
    if isinstance(error, OSError):
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            where = error.filename or root
            return "the disk at %s is full (%s)" % (where, os.strerror(error.errno))
        if error.errno == errno.EROFS:
            return "%s is on a read-only file system" % (error.filename or root)
        return "%s: %s" % (op, error)
    return "%s: unexpected %s: %s" % (op, type(error).__name__, error)


def tables() -> Dict[str, Op]:
    """Every operation that this program has."""
    ops: Dict[str, Op] = {}
    modules = (codetree, environment, environment_gc, evidence, facts, files, generations, probe, reach, runs)
    for module in (*modules, continued, doctor, torch_probe, caches, cache_send, cache_care):
        for name, op in module.OPS.items():
            if name in ops:
                raise RuntimeError("two operations are called %r" % name)
            ops[name] = op
    return ops


def private_descriptors() -> Tuple[int, int]:
    """Stdin and stdout under other numbers, so that no child or stray print touches the frames."""
    read_fd, write_fd = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return read_fd, write_fd


def main(argv: List[str]) -> int:
    """`serve NONCE ROOT`: greets with a line that holds the nonce, then the hello frame, then serves."""
    nonce, root = argv
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    read_fd, write_fd = private_descriptors()
    server = Server(root, tables(), read_fd, write_fd)
    os.write(write_fd, ("\n%s serve\n" % nonce).encode("ascii"))
    server.write({"hello": {"container": facts.gather(root)}})
    server.run()
    for child in list(server.children):
        kill(child)
    return 0
