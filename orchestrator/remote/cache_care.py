"""Looking after the compile caches of a place: what lies there and what it was good for, damage, and removal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict

if TYPE_CHECKING:
    from .serve import Call


def cache_list(args: Dict[str, Any], call: Call) -> Dict[str, Any]:
    """`{key}` (null: all) -> `{"caches": [{"key", "parts", "label", "made", "current", "bytes", "snapshots", "aside",
    "uses"}], "bytes"}`, the newest used first.

    `snapshots`: `[{"digest", "bytes", "files" (a count), "made", "from", "parent", "cold_seconds", "kept_by": [why]}]`,
    the newest first; one whose manifest cannot be read has `"why"` and nulls. `aside`: `[{"name", "bytes", "why",
    "run", "at"}]`. `uses`: `{"runs", "warm", "cold", "hits", "misses", "rebuilt", "last_at", "last_run",
    "cold_seconds", "warm_seconds", "saved_seconds"}`: runs that began with all graphs there, and with nothing; graphs;
    what the last cold and the last warm compile took; `saved_seconds`: the sum over warm runs of what the cold compile
    before took longer, null where no cold one is known. `bytes` on the disk, shared files counted once.
    """
    raise NotImplementedError


def cache_verify(args: Dict[str, Any], call: Call) -> Dict[str, Any]:
    """`{key}` (null: all) -> `{"snapshots": [{"key", "digest", "files", "bytes", "damaged": [[path, why]], "missing":
    [path], "foreign": [path], "why"}], "sound": n}`. `why`: what is wrong with the manifest, else null. Events:
    `{"step": "verifying", "done", "total"}` in bytes. Nothing is changed."""
    raise NotImplementedError


def cache_gc(args: Dict[str, Any], call: Call) -> Dict[str, Any]:
    """`{older_days, larger_bytes, dry_run}` -> `{"removed": [{"key", "digest", "bytes", "why"}], "kept": [{"key",
    "digest", "bytes", "last_used", "why": [sentence]}], "freed", "bytes", "dry_run"}`.

    Always removed: what was moved aside, copies of runs that have ended, snapshots that another has superseded and
    nobody names. `older_days`: those too that no run used for so long; `larger_bytes`: the longest unused, until all
    take no more than that. Never one that a good generation, a pin or a live run names. digest is null for what is no
    snapshot, and `"name"` says what it is. `bytes`: what is left.
    """
    raise NotImplementedError


OPS = {"cache_list": cache_list, "cache_verify": cache_verify, "cache_gc": cache_gc}
