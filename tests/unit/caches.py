"""What the tests of compile caches share: small caches, a call with an upload, a stream as it travels."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import subprocess
import tarfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from orchestrator.remote import cache_send, cache_store, caches
from orchestrator.remote.cache_files import key_of, make_manifest

PARTS: dict[str, Any] = {
    "torch": "2.13.0+cpu", "torch_files": "1" * 16, "triton": "none", "triton_files": "", "cuda": "cpu", "gpu": [],
    "config": {}, "shapes": {"digest": "s1", "settings": {}}, "environment_path": "/envs/a",
    "instruction_set": ["avx2"],
}  # fmt: skip
KEY = key_of(PARTS)
LABEL = {"recipe": "demo", "code": "c1"}
# what a cache holds: contents that several paths have, an empty file, one beyond a piece, programs
FILES: dict[str, bytes] = {
    "inductor/ab/kernel.py": b"print('kernel')\n" * 40,
    "inductor/ab/again.py": b"print('kernel')\n" * 40,
    "inductor/cd/tool": b"#!/bin/sh\nexit 0\n",
    "inductor/cd/tool.txt": b"#!/bin/sh\nexit 0\n",
    "inductor/empty": b"",
    "inductor/fxgraph/x/y/entry": bytes(range(256)) * 8193,
    "triton/ABC/kernel.cubin": b"cubin" * 1000,
}
PROGRAMS = frozenset({"inductor/cd/tool"})


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def manifest_of(files: dict[str, bytes], programs: Iterable[str] = PROGRAMS, **about: Any) -> dict[str, Any]:
    rows = [[path, len(data), sha(data), path in set(programs)] for path, data in files.items()]
    return make_manifest(rows, **{"from": "push", "parent": None, "made": 1000.0, "cold_seconds": 60.0, **about})


def tar_of(contents: Iterable[bytes], end: bool = True) -> bytes:
    """As any tar would make it: the other end's own writer is not asked."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for data in dict.fromkeys(contents):
            info = tarfile.TarInfo(sha(data))
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        size = archive.offset
    return packed.getvalue() if end else packed.getvalue()[:size]


def packed(data: bytes, encoding: str) -> bytes:
    """Two frames or members, one after the other."""
    half = len(data) // 2
    if encoding == "gzip":
        return gzip.compress(data[:half], 1) + gzip.compress(data[half:], 1)
    if encoding == "zstd":
        return b"".join(
            subprocess.run(["zstd", "-q", "-c"], input=piece, capture_output=True, check=True).stdout
            for piece in (data[:half], data[half:])
        )
    return data


class Call:
    """What the server gives an operation; `sent` are the parts of its streamed answer."""

    def __init__(self, root: Path | str, payload: bytes = b"", parts: Iterable[bytes] = ()) -> None:
        self.root = str(root)
        self.payload = payload
        self.children: list[Any] = []
        self.events: list[dict[str, Any]] = []
        self.sent: list[bytes] = []
        self.finished = threading.Event()
        self._parts = parts

    def event(self, data: dict[str, Any]) -> None:
        self.events.append(data)

    def parts(self) -> Iterator[bytes]:
        yield from self._parts

    def part(self, data: bytes) -> None:
        self.sent.append(data)


def stage(
    root: Path,
    files: dict[str, bytes] = FILES,
    stream: bytes | None = None,
    encoding: str = "plain",
    key: str = KEY,
    parts: dict[str, Any] = PARTS,
    size: int = 70_000,
    manifest: dict[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """`cache_stage` with all contents, or with that stream, in parts of `size` bytes."""
    data = packed(tar_of(files.values()), encoding) if stream is None else stream
    told = manifest_of(files) if manifest is None else manifest
    call = Call(root, json.dumps(told).encode(), [data[at : at + size] for at in range(0, len(data), size)])
    answer = caches.cache_stage({"key": key, "parts": parts, "label": LABEL, "encoding": encoding, **more}, call)
    assert call.children == []
    return answer


def send(root: Path, digest: str, encoding: str, wanted: Iterable[str] = (), key: str = KEY) -> tuple[Any, bytes]:
    call = Call(root, b"".join(bytes.fromhex(one) for one in wanted))
    answer = cache_send.cache_send({"key": key, "digest": digest, "encoding": encoding}, call)
    assert call.children == []
    return answer, b"".join(call.sent)


def tree(folder: Path) -> dict[str, tuple[bytes, bool]]:
    """What lies below a folder: content, and whether it is executable."""
    return {
        str(path.relative_to(folder)): (path.read_bytes(), bool(path.stat().st_mode & 0o100))
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def expected(files: dict[str, bytes] = FILES, programs: Iterable[str] = PROGRAMS) -> dict[str, tuple[bytes, bool]]:
    return {path: (data, path in set(programs)) for path, data in sorted(files.items())}


def snapshot(root: Path, digest: str, key: str = KEY) -> Path:
    return Path(cache_store.snapshot_dir(str(root), key, digest))


def nothing_half(root: Path) -> bool:
    """Whether nothing but whole snapshots lies there."""
    for key in cache_store.keys(str(root)):
        for digest in cache_store.snapshots(str(root), key):
            assert cache_store.read_manifest(str(root), key, digest)[0] is not None
    tmp = root / "caches" / "tmp"
    return not tmp.exists() or not list(tmp.iterdir())
