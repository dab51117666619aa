"""The workstation's own caches: snapshots that were pulled from places, packed as they will travel to others.

`<key>/key.json` tells the parts, `<key>/current` which snapshot is pushed, `<key>/<digest>/` holds one: `about.json`,
`manifest.json`, `index.json` and the `pack`. A snapshot's folder gets its name by one rename. `<key>/aside-<digest>/`
is one that was found damaged on its way to a place.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from platformdirs import user_data_path

from orchestrator.compile_cache.key import KEY, KeyParts
from orchestrator.compile_cache.pack import Pack, Writer, unpacked
from orchestrator.errors import OrchError

_STALE = 86400.0  # seconds after which a half-made snapshot is nobody's any more
_ASIDE = "aside-"
_HELD = re.compile(r"adding-|(?:aside-)?[0-9a-f]{16}\Z")  # what a key's folder is there for


@dataclass(frozen=True)
class Stored:
    """One snapshot in the store."""

    folder: Path
    key: str
    digest: str
    parts: KeyParts
    label: Mapping[str, Any]
    about: Mapping[str, Any]

    @property
    def name(self) -> str:
        return f"{self.key}/{self.digest}"

    @property
    def recipes(self) -> list[str]:
        """Whose it is: of the recipe that made it, and of those that had used it when it came here."""
        others = self.label.get("recipes")
        named = [self.label.get("recipe"), *(others if isinstance(others, list) else [])]
        return list(dict.fromkeys(str(name) for name in named if name))

    @property
    def bytes(self) -> int:
        """Of its files."""
        return int(self.about["bytes"])

    @property
    def packed(self) -> int:
        """Bytes of the pack."""
        return int(self.about["packed"])

    @property
    def at(self) -> float:
        """Unix seconds when it came here."""
        return float(self.about["at"])

    def manifest(self) -> dict[str, Any]:
        """With its table of files. Raises OrchError."""
        return self._read("manifest.json")

    def pack(self) -> Pack:
        """Raises OrchError, also where its file is not as long as it has to be."""
        pack = self.index()
        try:
            size = pack.path.stat().st_size
        except OSError as error:
            raise self._damaged(f"pack: {error.strerror}") from None
        if size != pack.bytes:
            raise self._damaged(f"the pack has {size:,} of {pack.bytes:,} bytes")
        return pack

    def index(self) -> Pack:
        """The pack as its index tells of it, whatever its file is. Raises OrchError."""
        found = self._read("index.json")
        try:
            return Pack.read(self.folder / "pack", found)
        except (ValueError, KeyError, TypeError):
            raise self._damaged("index.json is no index") from None

    def trouble(self) -> str | None:
        """Why it cannot travel, as far as a look at its records and the pack's length shows; None where it can."""
        try:
            self.manifest()
            self.pack()
        except OrchError as error:
            return error.message
        return None

    def _read(self, name: str) -> dict[str, Any]:
        try:
            found = json.loads((self.folder / name).read_text(encoding="utf-8"))
        except OSError as error:
            raise self._damaged(f"{name}: {error.strerror}") from None
        except ValueError as error:
            raise self._damaged(f"{name}: {error}") from None
        if not isinstance(found, dict):
            raise self._damaged(f"{name} is no object")
        return found

    def _damaged(self, why: str) -> OrchError:
        return OrchError(f"the stored cache {self.name} is damaged ({why})", hint=self.again)

    @property
    def again(self) -> str:
        """What takes it anew from the place that it came from."""
        return f"orch cache pull {self.name} {self.about.get('from') or 'PLACE'}"

    def to_json(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "digest": self.digest,
            "bytes": self.bytes,
            "packed": self.packed,
            "files": self.about.get("files"),
            "from": self.about.get("from"),
            "at": self.at,
            "label": dict(self.label),
            "parts": self.parts.to_json(),
        }


class Store:
    """Snapshots by key and digest. What cannot be read is left out of lists; `verify` names it."""

    def __init__(self, root: Path | None = None) -> None:
        """`root` defaults to `caches` in ORCH_DATA_DIR, or in the user's data folder."""
        if root is None:
            given = os.environ.get("ORCH_DATA_DIR")
            root = (Path(given) if given else user_data_path("orch")) / "caches"
        self.root = root.absolute()
        self.left_out: set[str] = set()  # names of snapshots that were found damaged and may still lie there

    def all(self) -> list[Stored]:
        """Every snapshot, the newest first."""
        found = [one for key in self._keys() for one in self._of(key)]
        return sorted(found, key=lambda one: one.at, reverse=True)

    def find(self, key: str, digest: str | None = None) -> Stored | None:
        """A snapshot of a key: the one that is named; else the current one, or the newest."""
        known = self._of(key) if KEY.match(key) else []
        if digest is not None:
            return next((one for one in known if one.digest == digest), None)
        with contextlib.suppress(OSError):
            current = (self.root / key / "current").read_text().strip()
            known.sort(key=lambda one: one.digest != current)
        return known[0] if known else None

    def unreadable(self) -> list[tuple[str, str, Path]]:
        """(key, digest, folder) of every snapshot whose records cannot be read, so that no list has it, and of what was
        set aside."""
        known = {one.folder for one in self.all()}
        found = []
        for key in self._keys():
            with contextlib.suppress(OSError):
                for path in sorted((self.root / key).iterdir()):
                    digest = path.name.removeprefix(_ASIDE)
                    if KEY.match(digest) and path not in known:
                        found.append((key, digest, path))
        return found

    def current(self) -> list[Stored]:
        """One snapshot of each key: what is pushed, the newest first."""
        found = [one for key in self._keys() if (one := self.find(key)) is not None]
        return sorted(found, key=lambda one: one.at, reverse=True)

    def _keys(self) -> list[str]:
        with contextlib.suppress(OSError):
            return sorted(path.name for path in self.root.iterdir() if KEY.match(path.name))
        return []

    def _of(self, key: str) -> list[Stored]:
        folder, found = self.root / key, []
        with contextlib.suppress(OSError, ValueError, AttributeError):
            known = json.loads((folder / "key.json").read_text(encoding="utf-8"))
            parts, label = KeyParts.read(known["parts"]), dict(known.get("label") or {})
            for path in sorted(folder.iterdir()):
                if KEY.match(path.name):
                    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                        about = json.loads((path / "about.json").read_text(encoding="utf-8"))
                        one = Stored(path, key, path.name, parts, {**label, **(about.get("label") or {})}, about)
                        if one.at and one.bytes >= 0 and one.packed >= 0 and one.name not in self.left_out:
                            found.append(one)
        return sorted(found, key=lambda one: one.at, reverse=True)

    @contextlib.contextmanager
    def adding(self, key: str, parts: KeyParts) -> Iterator[Adding]:
        """Takes a snapshot in; nothing of it is left unless `Adding.keep` was called. Raises OrchError."""
        folder = None
        try:
            home = self.root / key
            home.mkdir(parents=True, exist_ok=True)
            self._sweep(home)
            folder = Path(tempfile.mkdtemp(prefix="adding-", dir=home))
            yield Adding(key, parts, folder)
        except OSError as error:
            raise self._unwritable(error) from None
        finally:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)

    def _sweep(self, home: Path) -> None:
        for folder in home.glob("adding-*"):
            with contextlib.suppress(OSError):
                if time.time() - folder.stat().st_mtime > _STALE:
                    shutil.rmtree(folder, ignore_errors=True)

    def remove(self, folder: Path) -> None:
        """Removes a snapshot's folder, and its key with the last one. Raises OrchError."""
        home = folder.parent
        try:
            with _locked(home):
                gone = Path(tempfile.mkdtemp(prefix="adding-gone-", dir=home))
                folder.rename(gone / folder.name)
                shutil.rmtree(gone)
                with contextlib.suppress(FileNotFoundError):
                    if (home / "current").read_text(errors="replace").strip() == folder.name:
                        (home / "current").unlink()
                if not any(_HELD.match(path.name) for path in home.iterdir()):
                    shutil.rmtree(home)
        except OSError as error:
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> OrchError:
        return OrchError(
            f"the cache store {self.root} cannot be written: {error.strerror or error}",
            hint="ORCH_DATA_DIR names another folder",
        )


class Adding:
    """A snapshot that is being taken in."""

    def __init__(self, key: str, parts: KeyParts, folder: Path) -> None:
        self._key = key
        self._parts = parts
        self._folder = folder
        self.writer = Writer(folder / "pack")

    def keep(self, manifest: Mapping[str, Any], label: Mapping[str, Any], origin: str) -> Stored:
        """Gives it its name, and makes it the one that is pushed. `origin`: the place it came from.

        Raises OrchError where contents are missing that the manifest names, OSError.
        """
        pack = self.writer.finish()
        missing = {file[2] for file in manifest["files"]} - {content.sha256 for content in pack.contents}
        if missing:
            raise OrchError(f"{len(missing)} contents of {self._key}/{manifest['digest']} did not arrive")
        digest, home = str(manifest["digest"]), self._folder.parent
        about = {"version": 1, "bytes": manifest["bytes"], "files": len(manifest["files"]), "packed": pack.bytes}
        about |= {"from": origin, "at": time.time(), "label": dict(label)}
        for name, value in (("manifest", manifest), ("index", pack.to_json()), ("about", about)):
            _write(self._folder / f"{name}.json", json.dumps(value))
        with (self._folder / "pack").open("rb") as file:
            os.fsync(file.fileno())
        key_json = {"version": 1, "parts": self._parts.to_json(), "label": dict(label)}
        target = home / digest
        with _locked(home):
            _write(home / "key.json", json.dumps(key_json, indent=1))
            if target.exists():  # the same bytes, but perhaps damaged since
                old = Path(tempfile.mkdtemp(prefix="adding-old-", dir=home))
                target.rename(old / digest)
                shutil.rmtree(old, ignore_errors=True)
            self._folder.rename(target)
            _write(home / "current", digest)
        return Stored(target, self._key, digest, self._parts, dict(label), about)


def set_aside(one: Stored) -> None:
    """Takes one that was found damaged out of use. Raises OSError."""
    home = one.folder.parent
    with _locked(home):
        target = home / f"{_ASIDE}{one.digest}"
        shutil.rmtree(target, ignore_errors=True)
        one.folder.rename(target)


@contextlib.contextmanager
def _locked(home: Path) -> Iterator[None]:
    """One at a time changes what a key has; the kernel frees the lock of whoever dies."""
    with (home / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write(path: Path, text: str) -> None:
    handle, beside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    Path(beside).replace(path)


@dataclass(frozen=True)
class Checked:
    """What a look at every byte of a stored snapshot found; nothing where it is whole."""

    stored: Stored
    paths: tuple[str, ...]  # of the files whose content is damaged or missing
    foreign: tuple[str, ...]  # contents that its manifest does not name, by their sha256
    why: tuple[str, ...]  # what else is wrong, each a sentence

    @property
    def sound(self) -> bool:
        return not (self.paths or self.foreign or self.why)


def verify(one: Stored) -> Checked:
    """Unpacks a stored snapshot and holds every content against its digest, and all against the manifest."""
    import hashlib

    from orchestrator.remote import cache_files
    from orchestrator.remote.frames import OpError

    foreign: set[str] = set()
    why: dict[str, None] = {}  # in order, each once
    paths: dict[str, list[str]] = {}
    seen = set()
    try:
        manifest, pack = one.manifest(), one.index()
        cache_files.check_manifest(manifest)
        for path, _, sha256, _ in manifest["files"]:
            paths.setdefault(sha256, []).append(path)
        with pack.path.open("rb") as file:
            for frame in pack.frames:
                try:
                    for name, _, chunks in unpacked(pack, frame, file):
                        digest = hashlib.sha256()
                        for chunk in chunks:
                            digest.update(chunk)
                        if name not in paths:
                            foreign.add(name)
                        elif digest.hexdigest() == name:
                            seen.add(name)
                except OrchError as error:
                    why[error.message] = None
        missing = tuple(sorted(path for sha256 in paths.keys() - seen for path in paths[sha256]))
    except (OrchError, OpError) as error:
        missing, why = (), {error.message: None}
    except OSError as error:
        missing, why = (), {f"{error.filename or one.folder}: {error.strerror or error}": None}
    except (KeyError, TypeError, ValueError) as error:
        missing, why = (), {f"its records cannot be read: {error!r}": None}
    return Checked(one, missing, tuple(sorted(foreign)), tuple(why))
