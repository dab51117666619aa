"""Sending a compile cache to the workstation: a stream of frames, each held back until the one before is taken."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Dict, List, Set

from . import cache_pipe
from . import cache_store as store
from .cache_files import FILES, Row
from .cache_stream import ENCODINGS
from .frames import OpError

if TYPE_CHECKING:
    from .serve import Call


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
        cache_pipe.send(call, str(encoding), os.path.join(folder, FILES), rows)
    except OpError as error:
        raise OpError(error.code, "snapshot %s of the compile cache %s: %s" % (digest, key, error.message)) from None
    finally:
        if held is not None:
            os.close(held)
    return {"contents": len(rows), "bytes": sum(row[1] for row in rows), "encoding": encoding}


OPS = {"cache_send": cache_send}
