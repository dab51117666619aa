"""What lies in an environment: its files with sizes, times and digests, its distributions and their RECORDs.

A *row* tells one file: `[size, mtime_ns, sha256, owner]`, or for a link `["->", target, null, owner]`. The owner is
the distribution whose RECORD lists the file, "" for what the builder itself put there. Paths are relative to the
environment's folder.
"""

from __future__ import annotations

import base64
import concurrent.futures
import csv
import hashlib
import io
import os
import re
import time
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Tuple

Row = List[Any]
Tick = Callable[[int, int], None]  # files done, of all

MANIFEST = "manifest.json"
LINK, OTHER = "->", "?"
_BYTECODE = re.compile(r"(.*?)__pycache__/([^/]+?)\.cpython-\d+(?:\.opt-\d)?\.pyc\Z")
_BLOCK = 1 << 20
_JOBS = 8
_TELL = 0.5  # seconds between two words of progress


class Distribution(NamedTuple):
    """An installed distribution: `folder` is its .dist-info, relative to the environment."""

    name: str
    version: str
    folder: str

    @property
    def key(self) -> str:
        return plain(self.name)


def plain(name: str) -> str:
    """A distribution's name as comparisons take it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def scan(root: str) -> Dict[str, Row]:
    """Every file below `root` but the manifest: rows without digest and owner. Raises OSError."""
    found: Dict[str, Row] = {}
    pending = [("", root)]
    while pending:
        before, folder = pending.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                name = before + entry.name
                if entry.is_symlink():
                    found[name] = [LINK, os.readlink(entry.path), None, ""]
                elif entry.is_dir():
                    pending.append((name + "/", entry.path))
                elif name != MANIFEST:
                    info = entry.stat(follow_symlinks=False)
                    plainly = entry.is_file()
                    found[name] = [info.st_size if plainly else OTHER, info.st_mtime_ns, None, ""]
    return found


def sha256(path: str) -> str:
    """A file's digest in hex. Raises OSError."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(_BLOCK), b""):
            digest.update(block)
    return digest.hexdigest()


def digests(root: str, names: Iterable[str], tick: Optional[Tick] = None) -> Dict[str, Optional[str]]:
    """The digests of many files, several at a time; None for one that is gone. Raises OSError for others."""
    wanted = list(names)
    found: Dict[str, Optional[str]] = {}
    told = time.monotonic()
    # Digesting lets go of the interpreter's lock. Pieces, since a task for each small file costs more than the file.
    pieces = [wanted[start : start + 64] for start in range(0, len(wanted), 64)]
    with concurrent.futures.ThreadPoolExecutor(min(_JOBS, os.cpu_count() or 1)) as pool:
        for piece in pool.map(lambda piece: [(name, _digest(root, name)) for name in piece], pieces):
            found.update(piece)
            if tick is not None and time.monotonic() - told >= _TELL:
                told = time.monotonic()
                tick(len(found), len(wanted))
    return found


def _digest(root: str, name: str) -> Optional[str]:
    try:
        return sha256(os.path.join(root, name))
    except FileNotFoundError:
        return None


def site_packages(root: str) -> List[str]:
    """The folders of packages, relative to the environment; links to another one are left out."""
    found = []
    for base in ("lib", "lib64"):
        folder = os.path.join(root, base)
        if os.path.islink(folder) or not os.path.isdir(folder):
            continue
        for python in sorted(os.listdir(folder)):
            if os.path.isdir(os.path.join(folder, python, "site-packages")):
                found.append("%s/%s/site-packages" % (base, python))
    return found


def distributions(root: str) -> List[Distribution]:
    """What is installed, by the names of its .dist-info folders, sorted. Raises OSError."""
    found = []
    for site in site_packages(root):
        for entry in os.listdir(os.path.join(root, site)):
            stem, separator, rest = entry.rpartition(".dist-info")
            name, dash, version = stem.partition("-")
            if separator and not rest and dash:
                found.append(Distribution(name, version, "%s/%s" % (site, entry)))
    return sorted(found, key=lambda it: it.key)


def record(root: str, distribution: Distribution) -> Tuple[str, Dict[str, Optional[str]]]:
    """The RECORD's own digest, and what it lists: path -> sha256 in hex, None where it gives none.

    A RECORD that is not there or no RECORD is empty. Paths that lead out of the environment are left out.
    """
    try:
        with open(os.path.join(root, distribution.folder, "RECORD"), "rb") as file:
            data = file.read()
    except OSError:
        return "", {}
    listed: Dict[str, Optional[str]] = {}
    site = os.path.dirname(distribution.folder)
    try:
        for fields in csv.reader(io.StringIO(data.decode("utf-8", "replace"), newline="")):
            if not fields or not fields[0]:
                continue
            name = os.path.normpath(os.path.join(site, fields[0]))
            if os.path.isabs(name) or name.startswith(".."):
                continue
            listed[name] = _hex(fields[1] if len(fields) > 1 else "")
    except csv.Error:
        pass
    return hashlib.sha256(data).hexdigest(), listed


def _hex(said: str) -> Optional[str]:
    """`sha256=…` of a RECORD in hex; None for another algorithm, which is then not compared."""
    kind, _, text = said.partition("=")
    if kind != "sha256":
        return None
    try:
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).hex()
    except ValueError:
        return None


def source_of(name: str) -> Optional[str]:
    """The module that a file in `__pycache__` was compiled from; None for any other file."""
    match = _BYTECODE.match(name)
    return match.group(1) + match.group(2) + ".py" if match else None


def is_bytecode_of(path: str, source: Row) -> bool:
    """Whether a compiled module says that it was made from just this source, so that Python would take it."""
    try:
        with open(path, "rb") as file:
            head = file.read(16)
    except OSError:
        return False
    if len(head) < 16 or head[4:8] != b"\0\0\0\0" or not isinstance(source[0], int):
        return False
    seconds = (source[1] // 10**9) & 0xFFFFFFFF
    size: int = source[0] & 0xFFFFFFFF
    return bool(head[8:16] == seconds.to_bytes(4, "little") + size.to_bytes(4, "little"))
