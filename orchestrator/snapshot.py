"""Code snapshots: the bundled trainer as one deterministic tar stream, named by its digest."""

from __future__ import annotations

import hashlib
import io
import tarfile
from dataclasses import dataclass
from pathlib import Path

from orchestrator.bundled import trainer_dir

_SKIPPED_DIRECTORIES = {"__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache"}


@dataclass(frozen=True)
class Snapshot:
    """Source code as it will lie at the place under `code/<digest>/`.

    `digest` is 16 hex digits over every file's path and content; `tar` is an uncompressed tar stream.
    """

    digest: str
    tar: bytes
    files: int

    @property
    def path(self) -> str:
        """Where it lies, relative to the root at the place."""
        return f"code/{self.digest}"


def snapshot_bundled() -> Snapshot:
    """The bundled trainer, its assets included."""
    package = trainer_dir()
    return snapshot(package, package.name)


def snapshot(directory: Path, prefix: str) -> Snapshot:
    """Every file under `directory`, stored as `prefix/…`; times and owners are left out, so that equal
    sources give equal bytes."""
    digest = hashlib.sha256()
    buffer = io.BytesIO()
    files = _source_files(directory)
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in files:
            data = path.read_bytes()
            info = tarfile.TarInfo(f"{prefix}/{path.relative_to(directory).as_posix()}")
            info.size = len(data)
            info.mode = 0o755 if path.stat().st_mode & 0o100 else 0o644
            digest.update(f"{info.name}\0{info.mode:o}\0{len(data)}\0".encode())
            digest.update(data)
            tar.addfile(info, io.BytesIO(data))
    return Snapshot(digest=digest.hexdigest()[:16], tar=buffer.getvalue(), files=len(files))


def _source_files(directory: Path) -> list[Path]:
    found = []
    for path in sorted(directory.rglob("*")):
        inner = path.relative_to(directory).parts
        if path.is_file() and not _SKIPPED_DIRECTORIES.intersection(inner) and path.suffix != ".pyc":
            found.append(path)
    return found
