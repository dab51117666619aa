"""Builds an environment at the place: beside, digested and compared with what its wheels promise, then renamed.

An environment is never changed once it has its name. While it is built it is `envs/<id>.tmp-<nonce>`, and
whoever builds holds the lock of the id, so that others wait for it and what a dead builder left can be told
from a live one's.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import shutil
import threading
import time
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Set

from . import environment_files as files
from . import environment_state as state
from .environment_files import MANIFEST, Row
from .environment_make import Maker, named
from .environment_protect import protect, set_immutable
from .environment_verify import start_files
from .files import fsync_folder
from .frames import OpError

if TYPE_CHECKING:
    from .serve import Call

MANIFEST_VERSION = 2


def build(path: str, args: Dict[str, Any], call: Call, lock: int) -> Dict[str, Any]:
    """Makes the environment and gives it its name; what had the name before is set aside. The caller holds `lock`.

    Answers the manifest. Raises OpError: nothing of it is left then.
    """
    began = time.time()
    temporary = "%s.tmp-%s" % (path, secrets.token_hex(4))
    work = temporary + ".work"
    maker = Maker(call, lock, work, temporary, args)
    try:
        _lay_out(work, args, call)
        seconds = maker.install()
        # Its thousands of links are removed while the check runs, which waits for other things.
        cache = threading.Thread(target=shutil.rmtree, args=(os.path.join(work, "cache"), True))
        cache.start()
        try:
            found = maker.check()
        finally:
            cache.join()
        about = args.get("about") or {}
        maker.stub_pip(str(about.get("name") or "NAME"))
        step = time.monotonic()
        distributions, table = _inventory(temporary, call)
        seconds["verify"] = round(time.monotonic() - step, 2)
        manifest: Dict[str, Any] = dict(about)
        manifest.update(
            version=MANIFEST_VERSION,
            id=os.path.basename(path),
            built=began,
            python={
                "path": args["python"],
                "version": found["python"],
                "base": found["base"],
                "stdlib": found["stdlib"],
                "start_files": start_files(found["stdlib"]),
            },
            torch=found["torch"],
            triton=next((d["version"] for d in distributions if files.plain(d["name"]) == "triton"), None),
            distributions=distributions,
            bytes=sum(row[0] for row in table.values() if isinstance(row[0], int)),
            requirements=args["requirements"],
            expect=args.get("expect") or {},
            source=_without_credentials(args.get("source") or {}),
            wheels=[
                {key: wheel.get(key) for key in ("filename", "sha256", "origin", "path")} for wheel in args["wheels"]
            ],
            protected=protect(temporary) if args.get("protect") else {"how": "none", "why": "hosts.yaml says so"},
        )
        manifest["seconds"] = dict(seconds, total=round(time.time() - began, 2))
        manifest["files"] = table
        _write_manifest(temporary, manifest)
        maker.tell("writing to disk", 0.0)
        _sync(temporary)
        state.remove(work)  # before it has its name: nobody cleans up beside an environment that is there
        _take_place(temporary, path, manifest, call)
        return manifest
    except OSError as error:
        raise named(error, path) from None
    finally:
        state.remove(work)
        state.remove(temporary)


def _lay_out(work: str, args: Dict[str, Any], call: Call) -> None:
    os.makedirs(os.path.join(work, "wheels"), 0o700)
    os.mkdir(os.path.join(work, "home"), 0o700)
    for wheel in args["wheels"]:
        source = os.path.join(call.root, wheel["path"])
        if not os.path.isfile(source):
            raise OpError("failed", "the wheel %s is gone from the place: run it again" % wheel["filename"])
        os.symlink(source, os.path.join(work, "wheels", wheel["filename"]))


def _inventory(root: str, call: Call) -> Any:
    """The distributions and the table of files, every file digested and held against its RECORD. Raises OpError."""
    table: Dict[str, Row] = files.scan(root)
    regular = [name for name, row in table.items() if row[0] != files.LINK]

    def tick(done: int, total: int) -> None:
        call.event({"step": "digesting", "done": done, "total": total, "unit": "files"})

    for name, digest in files.digests(root, regular, tick).items():
        table[name][2] = digest
    promised: Dict[str, Set[str]] = {}
    distributions, missing = [], []
    for distribution in files.distributions(root):
        digest, listed = files.record(root, distribution)
        count = size = 0
        for name, sha256 in listed.items():
            row = table.get(name)
            if row is None:
                if sha256 is not None:
                    missing.append(name)
                continue
            row[3] = distribution.name
            count += 1
            size += row[0] if isinstance(row[0], int) else 0
            if sha256 is not None:
                promised.setdefault(name, set()).add(sha256)
        entry: Dict[str, Any] = {"name": _own_name(root, distribution), "version": distribution.version}
        entry.update(record=digest, files=count, bytes=size)
        distributions.append(entry)
    for name, row in table.items():
        source = files.source_of(name)
        if source in table and not row[3]:
            row[3] = table[source][3]
    # Two distributions may bring the same file; the one that came last has it as its own RECORD says.
    wrong = [name for name, digests in promised.items() if table[name][2] not in digests]
    if wrong or missing:
        raise OpError(
            "failed",
            "the new environment is not what its wheels promise: %d files differ from their RECORD and %d are missing "
            "(%s); nothing was kept" % (len(wrong), len(missing), ", ".join(sorted(wrong + missing)[:3])),
        )
    return distributions, table


def _own_name(root: str, distribution: files.Distribution) -> str:
    """The name as METADATA has it; the folder's where that cannot be read."""
    try:
        with open(os.path.join(root, distribution.folder, "METADATA"), encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("Name:"):
                    return line[5:].strip()
                if not line.strip():
                    break
    except OSError:
        pass
    return distribution.name


def _without_credentials(source: Dict[str, Any]) -> Dict[str, Any]:
    return {key: value for key, value in source.items() if key != "where" or "://" not in str(value)}


def _write_manifest(folder: str, manifest: Dict[str, Any]) -> None:
    """For people too: one line a file of the table, everything else as JSON usually is."""
    table = manifest["files"]
    head = json.dumps(dict(manifest, files={}), indent=1, sort_keys=True)
    rows = ",\n".join("  %s: %s" % (json.dumps(name), json.dumps(table[name])) for name in sorted(table))
    text = head.replace('\n "files": {}', '\n "files": {\n%s\n }' % rows, 1)
    with open(os.path.join(folder, MANIFEST), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _take_place(temporary: str, path: str, manifest: Dict[str, Any], call: Call) -> None:
    """The one moment at which the environment is there. What was there, polluted, steps aside just before."""
    if os.path.lexists(path):
        state.set_aside(path)
    os.rename(temporary, path)
    fsync_folder(os.path.dirname(path))
    if manifest["protected"]["how"] == "immutable":
        for late in (os.path.join(path, MANIFEST), path):
            set_immutable(late, True)
    state.digested(call.root, os.path.basename(path))


def _sync(path: str) -> None:
    """Has the file system of `path` written out: a name that survives a power cut has its contents then."""
    folder = os.open(path, os.O_RDONLY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if not hasattr(libc, "syncfs") or libc.syncfs(folder) != 0:
            os.sync()
    finally:
        os.close(folder)


def arguments_of(manifest: Optional[Dict[str, Any]]) -> Dict[str, Any]:
    """What `build` was given for an environment that was here, to make it once more. Raises OpError."""
    if manifest is None or not manifest.get("requirements"):
        raise OpError("not_found", "nothing here says how this environment was built")
    kept: List[str] = ["requirements", "expect", "wheels", "source"]
    args: Dict[str, Any] = {key: manifest.get(key) for key in kept}
    args["python"] = manifest["python"]["path"]
    own = set(kept) | {"version", "id", "built", "python", "torch", "triton", "distributions", "bytes", "protected"}
    args["about"] = {key: value for key, value in manifest.items() if key not in own | {"seconds", "files"}}
    return args
