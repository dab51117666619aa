"""Connections over SSH: fabric's Connection with everything set that must be set, and bounds on every wait.

Fabric as it comes adds any host key and loads none; here each key is checked by `known_hosts`, and nothing else of
its configuration (files, environment variables, SSH configuration) is read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Any

import fabric
import paramiko
import tenacity

from orchestrator.config.models import Host
from orchestrator.errors import OrchError, Unreachable
from orchestrator.place import known_hosts
from orchestrator.place.connection import ChannelRefused, OnStderr, command_line
from orchestrator.place.ssh_auth import Keys
from orchestrator.place.ssh_channel import SshChannel
from orchestrator.place.ssh_config import Route, resolve

# Seconds. A banner may wait for a slow login machine; an agent may ask its user.
BANNER, AUTH, CHANNEL = 20.0, 60.0, 30.0
# Every KEEPALIVE seconds an answer is asked for, and the peer is dead when DEAD_AFTER seconds bring none.
KEEPALIVE, DEAD_AFTER = 15.0, 15.0
ATTEMPTS = 3


class Transient(Exception):
    """A failure before anything was done, which may not happen again at once."""


class CheckedKeys(paramiko.MissingHostKeyPolicy):
    """Judges the key that a machine offers. paramiko's own stores stay empty, so that every key comes here."""

    def __init__(self, route: Route, host: str) -> None:
        self._route = route
        self._host = host

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        route = self._route
        offered = known_hosts.HostKey(key.get_name(), key.asbytes())
        files = (*route.known_hosts, *route.global_known_hosts)
        known_hosts.check(offered, files, route.recorded_as, self._host, route.address)


class SshConnection:
    """One connection to a host; each `open` is a channel on it, without a terminal."""

    def __init__(self, name: str, route: Route, connection: fabric.Connection, closing: list[Any]) -> None:
        # Sockets, proxy commands, and connections on the way, last first.
        self.name = name
        self.route = route
        self.channels = 0
        self.dead = threading.Event()
        self._closing = closing
        self._transport: paramiko.Transport = connection.transport
        self._closed = threading.Event()
        threading.Thread(target=self._watch, daemon=True, name=f"keepalive {name}").start()

    def open(self, argv: Sequence[str], on_stderr: OnStderr | None = None) -> SshChannel:
        line = command_line(argv)
        try:
            channel = self._transport.open_session(timeout=CHANNEL)
            channel.settimeout(CHANNEL)
            channel.exec_command(line)
        except paramiko.ChannelException as error:
            raise ChannelRefused(
                f"{self.name} opens no further channel on this connection ({error.text or error.args[-1]}): "
                "MaxSessions of its sshd is reached"
            ) from None
        except (paramiko.SSHException, OSError, EOFError) as error:
            raise Unreachable(f"{self.name} does not start a command: {_words(error)}") from None
        self.channels += 1
        return SshChannel(channel, self.name, self.dead, on_stderr)

    @property
    def alive(self) -> bool:
        return self._transport.is_active() and not self.dead.is_set() and not self._closed.is_set()

    def _watch(self) -> None:
        """Asks the peer for an answer now and then: TCP alone takes a stopped or unplugged machine for a quiet one,
        and paramiko's keepalive waits for no answer."""
        while not self._closed.wait(KEEPALIVE):
            if not self._transport.is_active():
                return
            timer = threading.Timer(DEAD_AFTER, self._give_up)
            timer.daemon = True
            timer.start()
            try:
                self._transport.global_request("keepalive@openssh.com", wait=True)
            except (paramiko.SSHException, OSError, EOFError):
                return
            finally:
                timer.cancel()

    def _give_up(self) -> None:
        self.dead.set()
        self.close()

    def close(self) -> None:
        self._closed.set()
        shut(self._closing)


def shut(closing: list[Any]) -> None:
    """Closes what a connection consists of. The sockets come first: a farewell to a peer that is dead would wait."""
    for thing in closing:
        if isinstance(thing, socket.socket):
            with contextlib.suppress(OSError):
                thing.shutdown(socket.SHUT_RDWR)
    for thing in closing:
        if isinstance(thing, subprocess.Popen):
            thing.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                thing.wait(2.0)
        elif isinstance(thing, fabric.Connection):
            with contextlib.suppress(Exception):
                thing.client.close()


def connect(host: Host, route: Route | None = None) -> SshConnection:
    """Connects to a host, in at most three attempts where the network gave way before anything was done.

    Raises Unreachable, Refused (host keys), UsageError (SSH configuration).
    """
    assert host.ssh is not None
    quiet_paramiko()
    way = route or resolve(host.ssh)
    retrying = tenacity.Retrying(
        stop=tenacity.stop_after_attempt(ATTEMPTS),
        wait=tenacity.wait_random_exponential(multiplier=0.5, max=3.0, min=0.2),
        retry=tenacity.retry_if_exception_type(Transient),
        reraise=True,
    )
    try:
        return retrying(_connect_once, host.name, way)
    except Transient as error:
        raise Unreachable(str(error)) from None


def offered_key(name: str, route: Route) -> known_hosts.HostKey:
    """The host key at the end of a route, unjudged; hops on the way are judged. Raises what `connect` raises."""
    quiet_paramiko()
    closing: list[Any] = []
    transport: paramiko.Transport | None = None
    started = time.monotonic()
    try:
        transport = _transport(_socket(name, route, closing), route, {})
        transport.banner_timeout = BANNER
        transport.start_client(timeout=AUTH)
        key = transport.get_remote_server_key()
        return known_hosts.HostKey(key.get_name(), key.asbytes())
    except (paramiko.SSHException, OSError, EOFError) as error:
        failure = _no_session(route, Keys(route), error, closing, time.monotonic() - started)
        raise failure if isinstance(failure, OrchError) else Unreachable(str(failure)) from None
    except Transient as error:
        raise Unreachable(str(error)) from None
    finally:
        if transport is not None:
            transport.close()
        shut(closing)


def quiet_paramiko() -> None:
    """What paramiko logs of itself are tracebacks, for failures that are told here in a sentence."""
    logging.getLogger("paramiko").setLevel(logging.CRITICAL)


def _connect_once(name: str, route: Route) -> SshConnection:
    closing: list[Any] = []
    try:
        connection = _fabric(name, route, closing)
    except BaseException:
        shut(closing)
        raise
    return SshConnection(name, route, connection, closing)


def _fabric(name: str, route: Route, closing: list[Any]) -> fabric.Connection:
    """An open fabric connection along a route; what has to be closed after it is put into `closing`, last first."""
    sock = _socket(name, route, closing)
    keys = Keys(route)
    connection = fabric.Connection(
        host=route.hostname,
        user=route.user,
        port=route.port,
        forward_agent=False,
        connect_timeout=int(max(1.0, route.connect_timeout)),
        config=_config(),
        connect_kwargs={
            "sock": sock,
            "transport_factory": lambda sock, **options: _transport(sock, route, options),
            "auth_strategy": keys,
            "banner_timeout": BANNER,
            "auth_timeout": AUTH,
            "channel_timeout": CHANNEL,
            "compress": route.compress,
        },
    )
    connection.client.set_missing_host_key_policy(CheckedKeys(route, name))
    closing.insert(0, connection)
    started = time.monotonic()
    try:
        connection.open()
    except OrchError:
        raise
    except paramiko.AuthenticationException as error:
        raise _no_entry(route, keys, error) from None
    except (paramiko.SSHException, OSError, EOFError) as error:
        raise _no_session(route, keys, error, closing, time.monotonic() - started) from None
    return connection


def _socket(name: str, route: Route, closing: list[Any]) -> Any:
    """What SSH to the end of a route is spoken over."""
    if route.jump is not None:
        # A hop is given the time that its target is given.
        hop = dataclasses.replace(route.jump, connect_timeout=route.connect_timeout)
        return _forward(_fabric(name, hop, closing), route)
    if route.proxy_command is not None:
        return _proxy(route.proxy_command, closing)
    sock = _dial(route)
    closing.append(sock)
    return sock


def _config() -> fabric.Config:
    """Fabric's settings without its files, its environment variables, and its reading of SSH configuration."""
    config = fabric.Config(lazy=True, ssh_config=paramiko.SSHConfig())
    config.authentication.strategy_class = None
    return config


def _transport(sock: Any, route: Route, options: dict[str, Any]) -> paramiko.Transport:
    transport = paramiko.Transport(sock, **options)
    entries = []
    for name in known_hosts.names_for(route.recorded_as):
        entries += known_hosts.recorded((*route.known_hosts, *route.global_known_hosts), name)
    security = transport.get_security_options()
    security.key_types = known_hosts.types_first(entries, security.key_types)
    return transport


def _look_up(route: Route) -> list[Any]:
    """The addresses of a host. Raises Unreachable, and Transient for what may pass."""
    answer: list[Any] = []

    def ask() -> None:
        try:
            answer.extend(socket.getaddrinfo(route.hostname, route.port, route.family, socket.SOCK_STREAM))
        except OSError as error:
            answer.append(error)

    # The resolver has bounds of its own, of minutes.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(max(route.connect_timeout, 5.0))
    if not answer:
        raise Unreachable(f"the name {route.hostname} is still being looked up: does name resolution work here?")
    if isinstance(answer[0], OSError):
        if answer[0].errno == socket.EAI_AGAIN:
            raise Transient(f"the name {route.hostname} cannot be looked up just now ({answer[0].strerror})")
        raise Unreachable(f"the name {route.hostname} is not known ({answer[0].strerror}): check host: in hosts.yaml")
    return answer


def _dial(route: Route) -> socket.socket:
    """A TCP connection. Raises Unreachable, and Transient for what may pass."""
    to = f"{route.hostname} port {route.port}"
    found = _look_up(route)
    last: OSError = OSError("no address")
    for family, kind, protocol, _, address in found:
        sock = socket.socket(family, kind, protocol)
        sock.settimeout(route.connect_timeout)
        try:
            sock.connect(address)
        except OSError as error:
            sock.close()
            last = error
            continue
        # Nagle's algorithm costs 40 ms of every exchange.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return sock
    if isinstance(last, ConnectionRefusedError):
        raise Unreachable(f"{to} refuses the connection: no SSH server listens there")
    if isinstance(last, TimeoutError):
        raise Unreachable(f"{to} does not answer within {route.connect_timeout:.0f} s")
    raise Transient(f"{to} cannot be reached: {last.strerror or last}")


def _proxy(command: str, closing: list[Any]) -> socket.socket:
    """The near end of a ProxyCommand. A socket pair, so that its end is noticed, which paramiko's own does not."""
    ours, theirs = socket.socketpair()
    with theirs:
        child = subprocess.Popen(
            ["sh", "-c", f"exec {command}"], stdin=theirs.fileno(), stdout=theirs.fileno(), start_new_session=True
        )
    closing += [child, ours]
    return ours


def _forward(through: fabric.Connection, route: Route) -> paramiko.Channel:
    transport: paramiko.Transport = through.transport
    to = (route.hostname, route.port)
    try:
        return transport.open_channel("direct-tcpip", to, ("127.0.0.1", 0), timeout=CHANNEL)
    except (paramiko.SSHException, OSError, EOFError) as error:
        raise Unreachable(
            f"the jump host {through.host} does not reach {to[0]} port {to[1]}: {_words(error)}"
        ) from None


def _no_entry(route: Route, keys: Keys, error: Exception) -> Unreachable:
    notes = "; ".join(keys.notes)
    if keys.tried == 0:
        what = "there is no key to log in with"
    else:
        what = f"none of {keys.tried} key{'s' if keys.tried > 1 else ''} is accepted"
    return Unreachable(
        f"cannot log in as {route.address}: {what}" + (f" ({notes})" if notes else ""),
        f"ssh-copy-id {route.user}@{route.alias}, or identity_file: in hosts.yaml",
    )


def _no_session(
    route: Route, keys: Keys, error: Exception, closing: list[Any], seconds: float
) -> Unreachable | Transient:
    """What it means that no session came about; paramiko words a timeout and an early end alike."""
    to = route.address
    words = _words(error)
    if keys.tried:
        return Unreachable(
            f"{to} ended the connection after {keys.tried} key{'s' if keys.tried > 1 else ''} ({words}): "
            "with many keys in the agent, name the right one",
            "identity_file: in hosts.yaml, or IdentitiesOnly yes in the SSH configuration",
        )
    children = [thing for thing in closing if isinstance(thing, subprocess.Popen) and thing.poll() is not None]
    if children:
        return Unreachable(f"the ProxyCommand to {to} ended with status {children[0].returncode}")
    if seconds >= min(BANNER, AUTH, route.connect_timeout):
        return Unreachable(f"{to} accepts the connection but does not speak SSH within {seconds:.0f} s ({words})")
    if "no acceptable" in words.lower() or "incompatible" in words.lower():
        return Unreachable(f"{to} and this machine have no SSH algorithm in common: {words}")
    return Transient(f"{to} ends the connection before a login: {words}")


def _words(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split()) or type(error).__name__
