"""Sending a compile cache to the workstation: a stream of frames, each held back until the one before is taken."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict

if TYPE_CHECKING:
    from .serve import Call


def cache_send(args: Dict[str, Any], call: Call) -> Dict[str, Any]:
    """`{key, digest, encoding}` + payload: the raw 32-byte digests wanted (empty: all) -> frames `{"part": true}` with
    the bytes of a tar of contents (see `cache_stream`), then `{"contents", "bytes", "encoding"}`: contents and their
    bytes. A content that is damaged here ends it with an error that names the file."""
    raise NotImplementedError


OPS = {"cache_send": cache_send}
