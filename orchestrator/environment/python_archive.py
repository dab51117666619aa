"""Pythons that are brought along: standalone builds at hand on this machine, for places that lack one that fits.

They are looked for in `pythons/` beside an environment's lock and in `pythons/` of the cache folder (ORCH_CACHE_DIR),
as archives named like `cpython-3.12.8+20250106-x86_64-unknown-linux-gnu-install_only.tar.gz`, and among those that uv
has installed on this machine. Nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import os
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from orchestrator.environment.progress import Progress
from orchestrator.environment.sending import on_this_machine, send
from orchestrator.environment.store import WheelStore, sha256_of
from orchestrator.environment.target import Facts, PythonAtPlace
from orchestrator.errors import OrchError
from orchestrator.place.session import Session

_NAME = re.compile(
    r"cpython-(?P<version>3\.\d+\.\d+)(?:\+\w+)?-(?P<machine>[a-z0-9_]+)-(?:unknown-)?(?P<system>linux|apple-darwin|macos)"
    r"(?:-(?P<libc>gnu|musl))?(?:-install_only(?:_stripped)?)?(?P<end>\.tar\.gz|\.tgz|\.tar)?\Z"
)
_SYSTEMS = {"linux": "Linux", "apple-darwin": "Darwin", "macos": "Darwin"}


class Wanted(Protocol):
    """The part of an environment's spec that this module reads."""

    @property
    def directory(self) -> Path: ...

    @property
    def python(self) -> str: ...


@dataclass(frozen=True)
class PythonArchive:
    """A standalone Python on this machine: an archive, or the folder of an installed one."""

    path: Path
    version: str

    @property
    def remote(self) -> str:
        """Where it lies at a place, below its root."""
        stamp = f"{self.path.name}\0{self.path.stat().st_size}\0{self.path.stat().st_mtime_ns}"
        return f"python/{self.version}-{hashlib.sha256(stamp.encode()).hexdigest()[:12]}"

    def at(self, root: str) -> PythonAtPlace:
        """The interpreter as it will be at a place with that root."""
        minor = ".".join(self.version.split(".")[:2])
        return PythonAtPlace(f"{root}/{self.remote}/bin/python{minor}", self.version)


def at_hand(spec: Wanted, facts: Facts) -> PythonArchive | None:
    """The newest standalone Python on this machine that fits the spec and runs at the place."""
    container = facts.container
    libc = (container.get("libc") or [""])[0]
    fitting = []
    for path in _candidates(spec):
        match = _NAME.match(path.name)
        if (
            match is None
            or (path.is_dir() and match["end"])
            or Version(match["version"]) not in SpecifierSet(spec.python)
        ):
            continue
        machine = {"aarch64": "arm64"}.get(match["machine"], match["machine"])
        wanted = {"aarch64": "arm64"}.get(str(container.get("machine")), str(container.get("machine")))
        if machine != wanted or _SYSTEMS[match["system"]] != container.get("system"):
            continue
        if match["libc"] and match["libc"] != {"glibc": "gnu"}.get(libc, libc):
            continue
        fitting.append(PythonArchive(path, match["version"]))
    return max(fitting, key=lambda found: Version(found.version), default=None)


def folders(spec: Wanted) -> list[Path]:
    """Where archives are looked for."""
    return [spec.directory / "pythons", WheelStore().root.parent / "pythons"]


def _candidates(spec: Wanted) -> Iterator[Path]:
    installed = Path(os.environ.get("UV_PYTHON_INSTALL_DIR") or Path.home() / ".local/share/uv/python")
    for folder in (*folders(spec), installed):
        if folder.is_dir():
            yield from sorted(path for path in folder.iterdir() if not path.is_symlink())


def bring(session: Session, archive: PythonArchive, progress: Progress) -> int:
    """Has the Python at the place, and answers the bytes that were sent. Raises OrchError."""
    if session.call("have", {"paths": [archive.remote]}).data["paths"]:
        return 0
    store = WheelStore()
    with store.workspace() as folder:
        progress(f"packing Python {archive.version}", 0, None, "s")
        packed = folder / f"python-{archive.version}.tar"
        try:
            _repack(archive.path, packed)
        except (tarfile.TarError, EOFError, OSError) as error:
            raise OrchError(f"{archive.path} cannot be read as a standalone Python: {error}") from None
        sent = send(session, archive.remote, packed, sha256_of(packed), 0o755, progress, unpack=True)
    return 0 if on_this_machine(session) else sent


def _repack(source: Path, target: Path) -> None:
    """The tree of a standalone Python as a plain tar whose top holds bin/ and lib/, without what only tests need."""
    with tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as out:
        if source.is_dir():
            for path in sorted(source.rglob("*")):
                inner = path.relative_to(source).as_posix()
                if _wanted(inner):
                    out.add(path, inner, recursive=False)
            return
        with tarfile.open(source, "r:*") as archive:
            members = archive.getmembers()
            top = "python/" if any(member.name.startswith("python/bin/") for member in members) else ""
            for member in members:
                inner = member.name.removeprefix("./")
                if not inner.startswith(top) or not _wanted(inner := inner[len(top) :]):
                    continue
                if member.islnk():  # a second name of a file, which not every receiver takes: the file once more
                    real = archive.getmember(member.linkname)
                    member = tarfile.TarInfo(inner)
                    member.size, member.mode, member.mtime = real.size, real.mode, real.mtime
                    out.addfile(member, archive.extractfile(real))
                    continue
                data = archive.extractfile(member) if member.isreg() else None
                member.name = inner
                out.addfile(member, data)


def _wanted(inner: str) -> bool:
    parts = inner.split("/")
    if not inner or "__pycache__" in parts or parts[0] not in ("bin", "lib", "share", "include"):
        return False
    return not (len(parts) > 3 and parts[2] in ("test", "idlelib", "turtledemo")) or parts[2:4] == [
        "test",
        "__init__.py",
    ]
