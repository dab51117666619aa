"""A lab for tests: a real sshd, a real `pct` stand-in, real containers; and faults to put between."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.models import Container, Host, Place, Ssh

HERE = Path(__file__).parent
NEEDED = ("sshd", "ssh", "ssh-keygen", "lxc-start", "lxc-attach", "unshare", "nsenter", "tmux")
DEFAULT = ("--containers", "2", "--dead", "--net", "empty", "--pct-delay", "0")
SYSTEM = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.lab)


def require() -> None:
    """Skips where a lab cannot be, and fails where there has to be one."""
    lacking = [name for name in NEEDED if shutil.which(name, path=f"{os.environ['PATH']}:{SYSTEM}") is None]
    if os.geteuid() != 0:
        lacking.insert(0, "root")
    if not lacking:
        return
    text = f"the lab needs {', '.join(lacking)}"
    if required():
        pytest.fail(text)
    pytest.skip(text)


def required() -> bool:
    """Whether the lab's tests have to run here."""
    return bool(os.environ.get("CI")) or os.environ.get("ORCH_REQUIRE_LAB") == "1"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """Where the lab's tests have to run, one that was skipped has failed, whatever its reason."""
    report = yield
    if report.skipped and required():
        report.outcome = "failed"
        report.longrepr = f"a lab test was skipped: {report.longrepr}"
    return report


@dataclass
class Lab:
    """One lab that is up; `info` is what `up` printed."""

    info: dict[str, Any]
    places: dict[str, Container] = field(default_factory=dict)

    @property
    def dir(self) -> Path:
        return Path(self.info["lab_dir"])

    @property
    def ssh_config(self) -> Path:
        return Path(self.info["ssh_config"])

    @property
    def vmids(self) -> list[str]:
        return [str(vmid) for vmid in self.info["vmids"]]

    @property
    def dead_vmid(self) -> str:
        return str(self.info["dead_vmid"])

    def share(self, vmid: str) -> Path:
        """The folder that the container sees as /lab."""
        return Path(self.info["share"][vmid])

    def host(self, *, ssh_config: Path | None = None, **more: Any) -> Host:
        """The lab's host as hosts.yaml would describe it, every container of the lab by its VMID."""
        vmids = [*self.vmids, *([self.dead_vmid] if self.info.get("dead_vmid") else [])]
        containers = {vmid: Container(kind="pct", id=vmid) for vmid in vmids}
        containers["lxc"] = Container(kind="lxc", id=self.vmids[0])
        containers.update(self.places)
        ssh = Ssh(host="pve", ssh_config=ssh_config or self.ssh_config)
        return Host(name="pve", ssh=ssh, containers=containers, **more)

    def place(self, container: str | None = "200", **more: Any) -> Place:
        """A place in the lab; None is its host."""
        return Place(self.host(**more), container)

    def hosts_yaml(self, folder: Path, *, local_root: Path | None = None) -> Path:
        """A hosts.yaml with this lab's host, for the command line. `local_root`: the root of the place `local`."""
        path = folder / "hosts.yaml"
        containers = {vmid: {"kind": "pct"} for vmid in self.vmids}
        hosts: dict[str, Any] = {
            "pve": {"ssh": {"host": "pve", "ssh_config": str(self.ssh_config)}, "containers": containers}
        }
        if local_root is not None:
            hosts["local"] = {"root": str(local_root)}
        path.write_text(json.dumps({"hosts": hosts}))  # JSON is YAML
        return path

    def members(self) -> list[dict[str, str]]:
        """`places:` of a recipe over every container, by the addresses that a lab of its own network has given them."""
        return [{"place": f"pve/{vmid}", "address": self.info["addresses"][vmid]} for vmid in self.vmids]

    def run(
        self, *argv: str, vmid: str | None = None, check: bool = True, **more: Any
    ) -> subprocess.CompletedProcess[str]:
        """A command on the lab's host, or in a container by lxc-attach: past ssh, pct, and all that is counted."""
        inner = ["lxc-attach", "-n", vmid, "--clear-env", "--", *argv] if vmid else list(argv)
        enter = ["nsenter", "-t", str(self.info["pid"]), "-m", "-u", "-p", "-n", "--wd=/"]
        clean = ["env", "-i", f"PATH={SYSTEM}", "HOME=/root", "LANG=C.UTF-8"]
        return subprocess.run([*enter, *clean, *inner], capture_output=True, text=True, check=check, timeout=60, **more)

    @property
    def calls_file(self) -> Path:
        return Path(self.info["knobs"]) / "pct-calls"

    def pct_calls(self) -> list[str]:
        """The `pct` calls so far, each as "verb vmid"."""
        return self.calls_file.read_text().splitlines() if self.calls_file.exists() else []

    @contextlib.contextmanager
    def fault(self, text: str) -> Iterator[None]:
        """`pct` behaves so meanwhile: "hang", "cfs", or "RC TEXT"."""
        knob = Path(self.info["knobs"]) / "pct-fault"
        knob.write_text(text)
        try:
            yield
        finally:
            knob.unlink()

    def forget(self, vmid: str | None = "200", root: str = "/var/lib/orch") -> None:
        """Removes everything that orch left at a place: what comes next is a first contact."""
        # Environments are write-protected there.
        self.run("sh", "-c", 'chattr -R -f -i "$1/envs" 2>/dev/null; rm -rf "$1"', "sh", root, vmid=vmid)

    def sshd_children(self) -> list[int]:
        """The processes of sshd that serve one connection each, by the pids of this machine."""
        inside = Path(f"/proc/{self.info['pid']}/ns/pid").readlink()
        found = []
        for proc in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if (proc / "ns/pid").readlink() == inside and (proc / "cmdline").read_bytes().startswith(b"sshd: root"):
                    found.append(int(proc.name))
        return found


# `pct` is replaced by this in the lab's own overlay: it keeps count and becomes the one that was there.
COUNTER = """\
#!/bin/sh
printf '%s %s\\n' "$1" "$2" >>/etc/lab/pct-calls
exec /usr/sbin/pct.counted "$@"
"""


def start(*options: str) -> Lab:
    require()
    # Short, since the names of LXC's sockets hold it.
    folder = Path(tempfile.mkdtemp(prefix="lab."))
    done = subprocess.run(
        [str(HERE / "shared/up"), "--lab-dir", str(folder), *(options or DEFAULT)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    if done.returncode:
        stop(folder)
        pytest.fail(f"the lab does not start:\n{done.stdout}{done.stderr}")
    lab = Lab(json.loads(done.stdout))
    # The program ends on its own `exec`, so that a caller sees no difference.
    lab.run(
        "sh",
        "-c",
        "mv /usr/sbin/pct /usr/sbin/pct.counted && cat >/usr/sbin/pct && chmod 755 /usr/sbin/pct",
        input=COUNTER,
    )
    return lab


def stop(folder: Path) -> None:
    subprocess.run([str(HERE / "shared/down"), "--lab-dir", str(folder)], capture_output=True, check=False, timeout=120)


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """One lab for all tests: two containers (200, 201), a stopped one (202), no network."""
    it = start()
    try:
        yield it
    finally:
        stop(it.dir)


def _making() -> Iterator[Callable[..., Lab]]:
    made: list[Lab] = []

    def make(*options: str) -> Lab:
        made.append(start(*options))
        return made[-1]

    try:
        yield make
    finally:
        for it in made:
            stop(it.dir)


@pytest.fixture
def make_lab() -> Iterator[Callable[..., Lab]]:
    """Makes labs of one's own, with the options of `up`."""
    yield from _making()


@pytest.fixture(scope="module")
def make_module_lab() -> Iterator[Callable[..., Lab]]:
    """The same, for labs that a module's tests share."""
    yield from _making()


class Relay:
    """A TCP relay before the lab's sshd: counts, stalls, cuts."""

    def __init__(self, lab: Lab, config: Path) -> None:
        self.connections = 0
        self.up = 0  # bytes from the client
        self.down = 0  # bytes to the client
        self._to = int(lab.info["port"])
        self._flowing = threading.Event()
        self._flowing.set()
        self._sockets: list[socket.socket] = []
        self._cut_after: int | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        # An SSH configuration whose host `pve` is reached through the relay.
        self.config = config
        config.write_text(
            f"Host pve\n  HostName 127.0.0.1\n  Port {self.port}\n  User root\n  IdentityFile {lab.info['key']}\n"
            f"  IdentitiesOnly yes\n  UserKnownHostsFile {lab.info['known_hosts']}\n"
            f"  HostKeyAlias [127.0.0.1]:{self._to}\n"
        )
        threading.Thread(target=self._accept, daemon=True).start()

    def stall(self) -> None:
        """Nothing passes any more, and nobody is told."""
        self._flowing.clear()

    def resume(self) -> None:
        self._flowing.set()

    def cut(self) -> None:
        """Every connection is reset."""
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sock.shutdown(socket.SHUT_RDWR)

    def cut_after(self, up: int) -> None:
        """Cuts by itself when the client has sent so many bytes, from now on."""
        self._cut_after = self.up + up

    def close(self) -> None:
        self._flowing.set()
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._to))
            for sock in (client, server):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.connections += 1
            self._sockets += [client, server]
            threading.Thread(target=self._pump, args=(client, server, "up"), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, "down"), daemon=True).start()

    def _pump(self, source: socket.socket, to: socket.socket, way: str) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._flowing.wait()
                setattr(self, way, getattr(self, way) + len(data))
                if self._cut_after is not None and self.up >= self._cut_after:
                    self.cut()
                    return
                to.sendall(data)
        with contextlib.suppress(OSError):
            to.shutdown(socket.SHUT_WR)


@pytest.fixture
def make_relay(tmp_path: Path) -> Iterator[Callable[[Lab], Relay]]:
    """Makes relays before labs; each one's `config` is an SSH configuration that goes through it."""
    made: list[Relay] = []

    def make(lab: Lab) -> Relay:
        made.append(Relay(lab, tmp_path / f"relay_ssh_config_{len(made)}"))
        return made[-1]

    try:
        yield make
    finally:
        for it in made:
            it.close()


@pytest.fixture
def relay(lab: Lab, make_relay: Callable[[Lab], Relay]) -> Relay:
    """A relay before the lab that all tests share."""
    return make_relay(lab)


@contextlib.contextmanager
def stopped(pids: list[int]) -> Iterator[None]:
    """These processes neither run nor end meanwhile."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def until(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Waits for something that follows soon."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
