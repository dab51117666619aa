"""Code snapshots: source code as one deterministic tar stream, named by its digest."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.bundled import trainer_dir

_SKIPPED_DIRECTORIES = {"__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache"}
LINK = 0o120777  # in a digest, in place of a file's mode


@dataclass(frozen=True)
class Snapshot:
    """Source code as it will lie at the place under `code/<digest>/`.

    `digest` is 16 hex digits over every file's path and content; `tar` is an uncompressed tar stream.
    """

    digest: str
    tar: bytes = field(repr=False)
    files: int
    origin: Mapping[str, Any] = field(default_factory=dict)  # of the user's own tree: where it lies, and what git says
    left: tuple[str, ...] = ()  # files of it that stayed behind, since their names promise a secret

    @property
    def path(self) -> str:
        """Where it lies, relative to the root at the place."""
        return f"code/{self.digest}"


@dataclass(frozen=True)
class Entry:
    """One file, or one link."""

    name: str  # relative, with slashes
    mode: int
    data: bytes = b""
    link: str | None = None  # where it leads


def snapshot_bundled() -> Snapshot:
    """The bundled trainer, its assets included."""
    package = trainer_dir()
    return snapshot(package, package.name)


def snapshot(directory: Path, prefix: str) -> Snapshot:
    """Every file under `directory`, stored as `prefix/…`."""
    return pack(_read(directory, prefix))


def pack(entries: Iterable[Entry], origin: Mapping[str, Any] | None = None, left: tuple[str, ...] = ()) -> Snapshot:
    """Entries, in the order of the parts of their names; times and owners are left out, so that equal sources give
    equal bytes. `remote/codetree` digests what was unpacked by the same rule."""
    digest = hashlib.sha256()
    buffer = io.BytesIO()
    count = 0
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for entry in entries:
            info = tarfile.TarInfo(entry.name)
            info.mode = entry.mode
            kind, data = entry.mode, entry.data
            if entry.link is not None:
                info.type, info.linkname = tarfile.SYMTYPE, entry.link
                kind, data = LINK, os.fsencode(entry.link)
            else:
                info.size = len(data)
            digest.update(f"{info.name}\0{kind:o}\0{len(data)}\0".encode())
            digest.update(data)
            tar.addfile(info, io.BytesIO(entry.data))
            count += 1
    return Snapshot(digest.hexdigest()[:16], buffer.getvalue(), count, origin or {}, left)


def _read(directory: Path, prefix: str) -> Iterator[Entry]:
    for path in _source_files(directory):
        mode = 0o755 if path.stat().st_mode & 0o100 else 0o644
        yield Entry(f"{prefix}/{path.relative_to(directory).as_posix()}", mode, path.read_bytes())


def _source_files(directory: Path) -> list[Path]:
    found = []
    for path in sorted(directory.rglob("*")):
        inner = path.relative_to(directory).parts
        if path.is_file() and not _SKIPPED_DIRECTORIES.intersection(inner) and path.suffix != ".pyc":
            found.append(path)
    return found
