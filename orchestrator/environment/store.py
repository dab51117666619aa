"""The workstation's wheels, each under the sha256 of its bytes, shared by everything that fetches at once."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.tags import Tag
from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from platformdirs import user_cache_path

from orchestrator.environment.lock import Pin
from orchestrator.environment.target import Target, tags
from orchestrator.errors import OrchError

CHUNK = 1 << 20
_STALE = 86400.0  # seconds


@dataclass(frozen=True)
class Wheel:
    """A wheel in the store."""

    name: str
    version: str
    filename: str
    sha256: str
    size: int  # bytes
    path: Path
    origin: str = "lock"  # who vouches for the hash: "lock", "index", or "nobody"


class WheelStore:
    """`<sha256[:2]>/<sha256>/<filename>`, each file put there by one rename."""

    def __init__(self, root: Path | None = None) -> None:
        """`root` defaults to `wheels` in ORCH_CACHE_DIR, or in the user's cache folder."""
        if root is None:
            given = os.environ.get("ORCH_CACHE_DIR")
            root = (Path(given) if given else user_cache_path("orch")) / "wheels"
        self.root = root.absolute()

    @contextlib.contextmanager
    def workspace(self) -> Iterator[Path]:
        """A folder on the store's file system that is gone afterwards. Raises OrchError."""
        folder = None
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._sweep()
            folder = Path(tempfile.mkdtemp(prefix="fetch-", dir=self.root))
            yield folder
        except OSError as error:
            raise OrchError(
                f"the wheel store {self.root} cannot be written: {error.strerror or error}",
                hint="ORCH_CACHE_DIR names another folder",
            ) from None
        finally:
            if folder:
                shutil.rmtree(folder, ignore_errors=True)

    def _sweep(self) -> None:
        """Removes the workspaces of those who were killed: nobody fetches for so long."""
        for folder in self.root.glob("fetch-*"):
            with contextlib.suppress(OSError):
                if time.time() - folder.stat().st_mtime > _STALE:
                    shutil.rmtree(folder, ignore_errors=True)

    def add(self, path: Path, *, origin: str = "lock") -> Wheel:
        """Takes a wheel in from a workspace, whoever else adds the same at that moment. `origin` vouches for it.

        Raises OrchError for a file whose name is no wheel's.
        """
        try:
            name, version, _, _ = parse_wheel_filename(path.name)
        except InvalidWheelFilename:
            raise OrchError(f"{path.name} is not named like a wheel") from None
        digest = sha256_of(path)
        place = self.root / digest[:2] / digest
        if not (place / path.name).exists():
            beside = Path(tempfile.mkdtemp(prefix="add-", dir=path.parent))
            path.rename(beside / path.name)
            place.parent.mkdir(parents=True, exist_ok=True)
            beside.chmod(0o755)
            # A folder that is there already was filled by somebody else at the same moment, with the same
            # bytes.
            with contextlib.suppress(OSError):
                beside.rename(place)
        if origin != "lock":
            self._remember(path.name, digest, origin)
        kept = place / path.name
        return Wheel(name, str(version), path.name, digest, kept.stat().st_size, kept, origin)

    def find(self, pin: Pin, target: Target) -> Wheel | None:
        """The best wheel in the store for a pin: by the lock's hashes, else by one that an index stated."""
        best: tuple[int, Wheel] | None = None
        ranks = {tag: rank for rank, tag in enumerate(tags(target))}
        stated = {} if pin.hashes and self._any(pin.hashes, ranks) else self._stated(pin)
        for digest in (*pin.hashes, *stated):
            for path in sorted((self.root / digest[:2] / digest).glob("*.whl")):
                rank = _rank(path.name, ranks)
                if rank is not None and (best is None or rank < best[0]):
                    origin = "lock" if digest in pin.hashes else stated[digest]
                    size = path.stat().st_size
                    best = rank, Wheel(pin.name, pin.version, path.name, digest, size, path, origin)
        return best[1] if best else None

    def _any(self, digests: tuple[str, ...], ranks: dict[Tag, int]) -> bool:
        return any(
            _rank(path.name, ranks) is not None
            for digest in digests
            for path in (self.root / digest[:2] / digest).glob("*.whl")
        )

    def _stated(self, pin: Pin) -> dict[str, str]:
        """The digests of files that the lock does not know, and who vouches for each."""
        folder = self.root / "from-index" / f"{pin.name}-{pin.version}"
        found = {}
        for path in sorted(folder.glob("*")) if folder.is_dir() else []:
            try:
                found[path.name] = str(json.loads(path.read_text()).get("origin", "index"))
            except (OSError, ValueError, AttributeError):
                continue
        return found

    def _remember(self, filename: str, digest: str, origin: str) -> None:
        name, version, _, _ = parse_wheel_filename(filename)
        folder = self.root / "from-index" / f"{name}-{version}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / digest).write_text(json.dumps({"file": filename, "origin": origin}))


def _rank(filename: str, ranks: dict[Tag, int]) -> int | None:
    """How well a wheel fits, 0 being best; None where it does not."""
    try:
        found = [ranks[tag] for tag in parse_wheel_filename(filename)[3] if tag in ranks]
    except InvalidWheelFilename:
        return None
    return min(found, default=None)


def fits(filename: str, target: Target) -> bool:
    """Whether a wheel of this name can be installed at the target."""
    return _rank(filename, {tag: rank for rank, tag in enumerate(tags(target))}) is not None


def sha256_of(path: Path) -> str:
    """The sha256 of a file, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(CHUNK):
            digest.update(block)
    return digest.hexdigest()
