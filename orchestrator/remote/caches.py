"""Finding a compile cache at the place, and receiving one: in one stream, unpacked beside, checked, renamed."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Set, Tuple

from . import cache_files, cache_parts, cache_pipe, facts
from . import cache_store as store
from .cache_files import FILES, Damaged, Place, Row, Writer, read_checked, write_all
from .cache_stream import ENCODINGS
from .files import Incoming
from .frames import OpError

if TYPE_CHECKING:
    from .serve import Call

RELATIVES = 16


def cache_find(args: Dict[str, Any], call: Call) -> Dict[str, Any]:
    """All that a launch has to know of its cache, in one answer.

    `{parts, environment, recipe, want}`: parts that are null are completed here (see `cache_parts`), `environment` an
    id or null, `want` null or the "<key>/<digest>" that a pin names. Answer:

    - `key`, `parts` (complete), `why`: null, or the sentence that says which part could not be read; key is then null
      and nothing is present;
    - `present`: null, or what launches of this key take:
      `{"digest", "bytes", "files" (a count), "made", "cold_seconds"}`;
    - `wanted`: the snapshot of `want`, likewise with `"key"` and `"parts"`; null where it is not here;
    - `relatives`: other keys that have one, likewise with `"key"`, `"parts"`, `"label"`, `"same_recipe"`: those of this
      recipe first, then the newest, RELATIVES at most;
    - `last_cold`: `{"seconds", "at", "key"}` of the newest cold compile of this recipe, else of this key; null;
    - `programs`: `{"zstd": bool, "gzip": true}`, what can be unpacked here; `snapshots`: how many lie here in all;
      `free`: bytes that can be written here.
    """
    root = call.root
    answer: Dict[str, Any] = {"key": None, "parts": args["parts"], "why": None, "present": None}
    answer["wanted"] = None
    if args.get("want"):
        key, digest = store.split_name(args["want"])
        found = _brief(root, key, digest)
        answer["wanted"] = found and dict(found, key=key, parts=store.about(root, key).get("parts"))
    try:
        answer["parts"] = cache_parts.complete(root, args["parts"], args.get("environment"))
        answer["key"] = cache_files.key_of(answer["parts"])
        answer["present"] = _brief(root, answer["key"], store.current(root, answer["key"]))
    except cache_parts.Unknown as error:
        answer["why"] = str(error)
    answer["relatives"] = _relatives(root, answer["key"], args.get("recipe"))
    answer["last_cold"] = _last_cold(root, answer["key"], args.get("recipe"))
    answer["programs"] = {"zstd": facts.find_tool("zstd", root) is not None, "gzip": True}
    answer["snapshots"] = sum(len(store.snapshots(root, key)) for key in store.keys(root))
    answer["free"] = facts.disk_free(root)
    return answer


def _brief(root: str, key: str, digest: Optional[str]) -> Optional[Dict[str, Any]]:
    if digest is None:
        return None
    manifest, _ = store.read_manifest(root, key, digest)
    if manifest is None:
        return None
    found = {name: manifest.get(name) for name in ("digest", "bytes", "made", "cold_seconds")}
    return dict(found, files=len(manifest["files"]))


def _relatives(root: str, key: Optional[str], recipe: Any) -> List[Dict[str, Any]]:
    found = []
    for other in store.keys(root):
        digest = store.current(root, other)
        if other == key or digest is None:
            continue
        about = store.about(root, other)
        label = about.get("label") if isinstance(about.get("label"), dict) else {}
        same = recipe is not None and (label or {}).get("recipe") == recipe
        found.append((not same, -float(about.get("made") or 0.0), other, digest, about))
    answer = []
    for differs, _, other, digest, about in sorted(found, key=lambda one: one[:3])[:RELATIVES]:
        brief = _brief(root, other, digest)
        if brief is not None:
            answer.append(
                dict(brief, key=other, parts=about.get("parts"), label=about.get("label"), same_recipe=not differs)
            )
    return answer


def _last_cold(root: str, key: Optional[str], recipe: Any) -> Optional[Dict[str, Any]]:
    best: Optional[Tuple[bool, float, Dict[str, Any]]] = None
    for one in store.keys(root):
        for line in store.uses(root, one):
            seconds = store.cold_seconds(line)
            same = recipe is not None and line.get("recipe") == recipe
            if seconds is None or not (same or one == key):
                continue
            at = float(line["at"])
            if best is None or (same, at) > best[:2]:
                best = (same, at, {"seconds": seconds, "at": at, "key": one})
    return best and best[2]


def cache_lacking(args: Dict[str, Any], call: Call) -> Tuple[Dict[str, Any], bytes]:
    """`{key}` + payload: raw 32-byte digests -> `{"lacking": n}` + payload: one byte for each, 1 where no snapshot here
    has that content."""
    if len(call.payload) % 32:
        raise OpError("usage", "the payload is not a row of digests")
    known = store.Known(call.root, str(args.get("key")))
    digests = [call.payload[at : at + 32].hex() for at in range(0, len(call.payload), 32)]
    lacking = bytes(digest not in known for digest in digests)
    return {"lacking": sum(lacking)}, lacking


def cache_manifest(args: Dict[str, Any], call: Call) -> Dict[str, Any]:
    """`{key, digest}` (null: the one that launches take) -> `{"key", "digest", "manifest", "parts", "label",
    "recipes"}`, those by whom it was used."""
    key = args.get("key")
    digest = args.get("digest") or store.current(call.root, str(key) if store.key_dir(call.root, key) else "")
    if digest is None:
        raise OpError("not_found", "there is no compile cache %s here" % key)
    manifest, why = store.read_manifest(call.root, str(key), digest)
    if manifest is None:
        raise OpError("not_found", "there is no snapshot %s of the compile cache %s here (%s)" % (digest, key, why))
    about = store.about(call.root, str(key))
    answer: Dict[str, Any] = {"key": key, "digest": digest, "manifest": manifest}
    answer.update(parts=about.get("parts"), label=about.get("label"))
    answer["recipes"] = sorted({str(line["recipe"]) for line in store.uses(call.root, str(key)) if line.get("recipe")})
    return answer


def cache_stage(args: Dict[str, Any], call: Call) -> Dict[str, Any]:
    """Receives a snapshot (an upload). `{key, parts, label, encoding, current}` + payload: the manifest as JSON; the
    stream is a tar of contents (see `cache_stream`), "zstd", "gzip" or "plain". What it does not hold must lie here.

    Answer: `{"digest", "how", "bytes", "linked", "current", "seconds"}`. how: "new", or "there", which is answered
    before the stream; `bytes` of contents received, `linked` contents that were here. Events:
    `{"step": "cache", "done", "total"}` in bytes. `current` (true where left out): whether launches take it from now
    on. Whatever goes wrong, nothing is visible and nothing stays behind.
    """
    began = time.monotonic()
    key, encoding = args.get("key"), args.get("encoding")
    home = store.key_dir(call.root, key)
    if encoding not in ENCODINGS:
        raise OpError("usage", "%r is no encoding: %s" % (encoding, ", ".join(ENCODINGS)))
    try:
        manifest = json.loads(call.payload.decode("utf-8"))
    except ValueError:
        manifest = None
    rows = cache_files.check_manifest(manifest)
    digest = manifest["digest"]
    answer: Dict[str, Any] = {"digest": digest, "how": "there", "bytes": 0, "linked": 0}
    make_current = args.get("current") is not False
    try:
        store.make_key(call.root, str(key), args.get("parts"), args.get("label"))
        if store.read_manifest(call.root, str(key), digest)[0] is not None:
            with store.locked(call.root, str(key)):
                if make_current or store.current(call.root, str(key)) is None:
                    store.set_current(call.root, str(key), digest)
        else:
            with Incoming(store.caches_dir(call.root)) as folder:
                _receive(call, folder, rows, str(encoding), str(key), answer)
                answer["how"] = store.add(call.root, str(key), os.path.join(folder, "new"), manifest, make_current)
    except OSError as error:
        raise cache_files.named(error, home, manifest["bytes"]) from None
    except TimeoutError as error:
        raise OpError("failed", str(error)) from None
    answer.update(current=store.current(call.root, str(key)), seconds=round(time.monotonic() - began, 3))
    return answer


def _receive(call: Call, folder: str, rows: List[Row], encoding: str, key: str, answer: Dict[str, Any]) -> None:
    files, listed = os.path.join(folder, "new", FILES), os.path.join(folder, "rows.json")
    os.makedirs(files, 0o755)
    with open(listed, "w", encoding="utf-8") as file:
        json.dump(rows, file)
    total = sum(size for _, size in cache_files.contents(rows))

    def tell(done: int) -> None:
        call.event({"step": "cache", "done": done, "total": total})

    report = cache_pipe.receive(call, encoding, files, listed, tell)
    if not report["whole"]:
        raise OpError("failed", "the stream ended in the middle of a file: %d bytes came" % report["received"])
    answer["bytes"] = report["received"]
    answer["linked"] = _reuse(call.root, key, files, rows, set(report["missing"]))


def _reuse(root: str, key: str, files: str, rows: List[Row], missing: Set[str]) -> int:
    """What did not come is taken from the snapshots here; their digests are checked once more. How many contents."""
    if not missing:
        return 0
    known = store.Known(root, key)
    places: Dict[str, List[Place]] = {}
    for path, _, sha256, executable in rows:
        if sha256 in missing:
            places.setdefault(sha256, []).append(Place(path, executable))
    writer = Writer(files)
    try:
        lost = [one for one in missing if one not in known or not _take(known, one, places[one], writer)]
    finally:
        writer.close()
    if lost:
        raise OpError(
            "failed",
            "%d of %d contents neither came nor lie here undamaged (%s…): send them all"
            % (len(lost), len(missing), min(lost)[:12]),
        )
    return len(missing)


def _take(known: store.Known, sha256: str, places: List[Place], writer: Writer) -> bool:
    folder, row = known.where(sha256)
    try:
        source = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        for place in places:
            if place.executable == row[3]:
                os.close(read_checked(row, source, lambda piece: None))
                if writer.link(row[0], place.path, source):
                    continue
            target = writer.create(place)
            try:
                os.close(read_checked(row, source, lambda piece, to=target: write_all(to, piece)))  # type: ignore[misc]
            finally:
                os.close(target)
    except Damaged:
        return False
    finally:
        os.close(source)
    return True


OPS = {
    "cache_find": cache_find,
    "cache_lacking": cache_lacking,
    "cache_manifest": cache_manifest,
    "cache_stage": cache_stage,
}
