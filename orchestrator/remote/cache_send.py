"""Sending a compile cache to the workstation: a stream of frames, each held back until the one before is taken."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import zlib
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Set

from . import cache_store as store
from . import facts
from .cache_files import FILES, Damaged, Row, read_checked, write_all
from .cache_stream import ENCODINGS, TAR_END, padding, tar_header
from .frames import PART_SIZE, OpError

if TYPE_CHECKING:
    from .serve import Call

Write = Callable[[bytes], Any]


def cache_send(args: Dict[str, Any], call: Call) -> Dict[str, Any]:
    """`{key, digest, encoding}` + payload: the raw 32-byte digests wanted (empty: all) -> frames `{"part": true}` with
    the bytes of a tar of contents (see `cache_stream`), then `{"contents", "bytes", "encoding"}`: contents and their
    bytes. A content that is damaged here ends it with an error that names the file."""
    key, digest, encoding = args.get("key"), args.get("digest"), args.get("encoding")
    if encoding not in ENCODINGS:
        raise OpError("usage", "%r is no encoding: %s" % (encoding, ", ".join(ENCODINGS)))
    folder = store.snapshot_dir(call.root, key, digest)
    manifest, why = store.read_manifest(call.root, str(key), str(digest))
    if manifest is None:
        raise OpError("not_found", "there is no snapshot %s of the compile cache %s here (%s)" % (digest, key, why))
    wanted = {call.payload[at : at + 32].hex() for at in range(0, len(call.payload), 32)}
    rows: List[Row] = []
    chosen: Set[str] = set()
    for row in manifest["files"]:
        if row[2] not in chosen and (not call.payload or row[2] in wanted):
            chosen.add(row[2])
            rows.append(row)
    if wanted - chosen:
        raise OpError("usage", "%d of the contents asked for are not in snapshot %s" % (len(wanted - chosen), digest))
    # held, so that nobody removes it meanwhile
    held = store.hold(folder, shared=True)
    try:
        files = os.open(os.path.join(folder, FILES), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            encoded(call, str(encoding), lambda write: _tar(rows, files, write))
        finally:
            os.close(files)
    except Damaged as error:
        raise OpError(
            "failed", "the snapshot %s of the compile cache %s is damaged: %s" % (digest, key, error)
        ) from None
    finally:
        if held is not None:
            os.close(held)
    return {"contents": len(rows), "bytes": sum(row[1] for row in rows), "encoding": encoding}


def _tar(rows: List[Row], files: int, write: Write) -> None:
    for row in rows:
        write(tar_header(row[2], row[1]))
        os.close(read_checked(row, files, write))
        write(padding(row[1]))
    write(TAR_END)


def encoded(call: Call, encoding: str, produce: Callable[[Write], None]) -> None:
    """Sends what `produce` writes, packed. Raises what it raises, and what `call.part` does."""
    if encoding == "zstd":
        _zstd(call, produce)
        return
    pending = bytearray()
    packer = zlib.compressobj(1, zlib.DEFLATED, 31) if encoding == "gzip" else None

    def write(data: bytes) -> None:
        pending.extend(data if packer is None else packer.compress(data))
        while len(pending) >= PART_SIZE:
            call.part(bytes(pending[:PART_SIZE]))
            del pending[:PART_SIZE]

    produce(write)
    if packer is not None:
        pending.extend(packer.flush())
    if pending:
        call.part(bytes(pending))


def _zstd(call: Call, produce: Callable[[Write], None]) -> None:
    """zstd in a process of its own: a thread feeds it, this one sends what comes out."""
    program = facts.find_tool("zstd", call.root)
    if program is None:
        raise OpError("usage", "there is no zstd here to pack with")
    child = subprocess.Popen(
        [program, "-3", "-c", "-q"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
    )
    assert child.stdin and child.stdout
    stdin, stdout = child.stdin, child.stdout
    failed: List[BaseException] = []

    def feed() -> None:
        try:
            # in pieces: a write for each small file would wake zstd 5,000 times
            pending = bytearray()

            def write(data: bytes) -> None:
                pending.extend(data)
                if len(pending) >= PART_SIZE:
                    write_all(stdin.fileno(), bytes(pending))
                    pending.clear()

            produce(write)
            write_all(stdin.fileno(), bytes(pending))
        except BaseException as error:
            failed.append(error)
            child.kill()  # or what came out would look like a whole stream
        finally:
            with contextlib.suppress(OSError):
                stdin.close()

    call.children.append(child)
    feeder = threading.Thread(target=feed, name="cache", daemon=True)
    feeder.start()
    sent: Optional[bool] = False
    try:
        while True:
            block = os.read(stdout.fileno(), PART_SIZE)
            if not block:
                break
            call.part(block)
        sent = True
    finally:
        if not sent:
            child.kill()
        feeder.join()
        status = child.wait()
        stdout.close()
        call.children.remove(child)
    if failed:
        raise failed[0]
    if status:
        raise OpError("failed", "zstd ended with status %d while it packed" % status)


OPS = {"cache_send": cache_send}
