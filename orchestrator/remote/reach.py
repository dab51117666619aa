"""Whether places reach each other: listeners at one, connections from another. Nothing is left behind.

What is asked here is what gloo and NCCL need: that every place connects to every other one directly, at the address
which that one has itself.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import random
import socket
import struct
import threading
from typing import Any, Dict, List, Optional

from .frames import OpError

BOUND = 5.0  # seconds for one connection
_KEPT = "reach"
_SIOCGIFADDR = 0x8915
# below the range that systems give to connections, so that a port which is free now is free in an hour
_LOW, _HIGH = 20000, 32000
_TRIES = 200


def listen(args: Dict[str, Any], call: Any) -> Dict[str, Any]:
    """`{address, interface, word, fixed, data}` -> `{"interface", "fixed": [port...], "data": [port...]}`.

    Listens on so many ports of each kind, until `reach_close` or this server's end, and answers each connection with
    `word`: `fixed` ones are such as stay free, `data` ones as the system gives them. OpError (refused) where the
    address or the interface is not one of this place.
    """
    address = str(args.get("address"))
    interface = _interface(address, args.get("interface"))
    sockets: List[socket.socket] = call.keep.setdefault(_KEPT, [])
    word = str(args.get("word")).encode("ascii")
    ports: Dict[str, List[int]] = {"fixed": [], "data": []}
    for kind in ports:
        for _ in range(int(args.get(kind) or 0)):
            one = _bound(address, lasting=kind == "fixed")
            one.listen(64)
            sockets.append(one)
            ports[kind].append(one.getsockname()[1])
            threading.Thread(target=_answer, args=(one, word), daemon=True).start()
    return {"interface": interface, **ports}


def connect(args: Dict[str, Any], call: Any) -> Dict[str, Any]:
    """`{targets: [{"address", "port", "word"}...]}` -> `{"why": [null or why not, ...]}`, all at once."""
    from concurrent.futures import ThreadPoolExecutor  # here: every other request would wait for what it imports

    targets = args.get("targets") or []
    if not targets:
        return {"why": []}
    with ThreadPoolExecutor(max_workers=min(32, len(targets))) as pool:
        return {"why": list(pool.map(_try, targets))}


def close(args: Dict[str, Any], call: Any) -> Dict[str, Any]:
    """Ends what `reach_listen` began."""
    for one in call.keep.pop(_KEPT, []):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)  # the thread that accepts wakes up
        one.close()
    return {}


def _try(target: Dict[str, Any]) -> Optional[str]:
    word = str(target["word"]).encode("ascii")
    try:
        with socket.create_connection((str(target["address"]), int(target["port"])), BOUND) as sock:
            said = b""
            while len(said) < len(word):
                part = sock.recv(len(word) - len(said))
                if not part:
                    break
                said += part
    except socket.timeout:
        return "no answer within %g s" % BOUND
    except OSError as e:
        return e.strerror or str(e)
    return None if said == word else "something else answers there"


def _answer(listener: socket.socket, word: bytes) -> None:
    while True:
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        with contextlib.suppress(OSError), sock:
            sock.settimeout(BOUND)
            sock.sendall(word)
            sock.recv(1)  # the other end closes first, so that the port is free at once


def _bound(address: str, lasting: bool) -> socket.socket:
    for _ in range(_TRIES):
        one = socket.socket()
        try:
            one.bind((address, random.randrange(_LOW, _HIGH) if lasting else 0))
            return one
        except OSError as e:
            one.close()
            if e.errno != errno.EADDRINUSE:
                raise OpError("refused", "%s cannot be listened on here: %s" % (address, e.strerror)) from None
    raise OpError("failed", "no free port was found at %s" % address)


def _interface(address: str, wanted: Any) -> str:
    """The interface that has the address; OpError where none has, or another one than is wanted."""
    own = interfaces()
    if wanted is not None and wanted not in own:
        raise OpError("refused", "there is no interface %s here, but %s" % (wanted, ", ".join(sorted(own))))
    having = [name for name, first in own.items() if first == address]
    if wanted in having or (wanted is None and having):
        return str(wanted or having[0])
    if wanted is not None and not having and _is_here(address):
        return str(wanted)  # an interface's further addresses are not listed
    known = ", ".join("%s of %s" % (first, name) for name, first in sorted(own.items()) if first)
    where = "here" if wanted is None else "of %s here" % wanted
    raise OpError("refused", "%s is no address %s (those that are: %s)" % (address, where, known or "none"))


def _is_here(address: str) -> bool:
    with socket.socket() as one:
        try:
            one.bind((address, 0))
        except OSError:
            return False
    return True


def interfaces() -> Dict[str, Optional[str]]:
    """Each interface of this place with its first IPv4 address, None where it has none."""
    found: Dict[str, Optional[str]] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            found[name] = None
            with contextlib.suppress(OSError):
                asked = struct.pack("256s", name.encode()[:15])
                found[name] = socket.inet_ntoa(fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, asked)[20:24])
    return found


OPS = {"reach_listen": listen, "reach_connect": connect, "reach_close": close}
