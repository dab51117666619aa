"""What `orch cache` does."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from orchestrator import history
from orchestrator.cli.context import project_and_hosts
from orchestrator.cli.env_commands import meant_place, meant_places
from orchestrator.cli.output import console, print_json
from orchestrator.errors import OrchError, Unreachable, UsageError
from orchestrator.explain import explanation
from orchestrator.place.session import Session, open_session

if TYPE_CHECKING:
    from pathlib import Path

    from orchestrator.compile_cache.store import Checked, Stored
    from orchestrator.config import Place

_CHECK_LIMIT = 900.0  # seconds


def warm_command(
    recipe: str, place: str | None, overrides: list[str], *, detach: bool, explain: bool, json: bool
) -> None:
    """One run after another, at each of the recipe's places. Raises typer.Exit with 1 where one failed."""
    from orchestrator.cli.launch import launch_command
    from orchestrator.config import load_recipe

    project, _ = project_and_hosts()
    loaded = load_recipe(project, recipe, place_override=place, overrides=overrides)
    places = [one.place for one in loaded.places or ()] or [loaded.place]
    if json and len(places) > 1:
        raise UsageError("--json is of one place: say which, with --place")
    for name in places:
        try:
            launch_command(
                recipe, name, overrides, detach=detach, new=False, latest=False, why="", explain=explain, json=json,
                warm=True,
            )  # fmt: skip
        except typer.Exit as end:
            if end.exit_code:
                raise


# --- looking ---------------------------------------------------------------------------------------


def list_command(place: str | None, *, here: bool, explain: bool, json: bool) -> None:
    """Show what is at one place, or at all and here. Raises Unreachable where no place answered."""
    from orchestrator.compile_cache.store import Store
    from orchestrator.view.cache import print_list, print_stored, recipes

    places = _here_or(place, here, all_=True)
    if explain:
        _explain(places, ["the compile caches, and what runs told of them"], here or place is None)
        return
    answers, failed = _asked(places, "cache_list", {"key": None})
    for name, found, _ in answers:
        if found is not None:
            seen = [history.Seen("cache", name, ", ".join(recipes(one)), one["key"]) for one in found["caches"]]
            history.see("cache", name, None, seen)
    stored = Store().all() if here or place is None else []
    if json:
        told = [
            {"place": name, "error": error, "caches": (found or {}).get("caches", [])} for name, found, error in answers
        ]
        print_json({"places": told, "here": [one.to_json() for one in stored]})
    else:
        out = console()
        for name, found, error in answers:
            if found is None:
                out.print(f"{name}: {error}", soft_wrap=True)
            else:
                print_list(out, name, found["caches"], found.get("unknown"))
        if here or place is None:
            print_stored(out, stored)
    _raise(failed, places)


def verify_command(place: str | None, *, here: bool, explain: bool, json: bool) -> None:
    """Check every file. Raises typer.Exit with 1 where something is wrong, Unreachable."""
    from orchestrator.compile_cache.store import Store, verify
    from orchestrator.view.cache import print_verified

    places = _here_or(place, here)
    if explain:
        _explain(places, ["every file of every snapshot, digested and held against its manifest"], here)
        return
    if here:
        store = Store()
        found: list[dict[str, Any]] = [_verified(verify(one)) for one in store.all()]
        found += [
            {"key": key, "digest": digest, "files": None, "bytes": 0, "damaged": [], "missing": [], "foreign": [],
             "why": _unlisted(folder)}
            for key, digest, folder in store.unreadable()
        ]  # fmt: skip
        name = "here"
    else:
        with open_session(places[0]) as session:
            found = session.call("cache_verify", {"key": None}, timeout=_CHECK_LIMIT).data["snapshots"]
        name = places[0].name
    bad = [one for one in found if one["damaged"] or one["missing"] or one["foreign"] or one["why"]]
    if json:
        print_json({"place": name, "snapshots": found, "sound": len(found) - len(bad)})
    else:
        out = console()
        print_verified(out, name, found)
        if bad and here:
            again = {(one.key, one.digest): one.again for one in store.all()}
            for one in bad:
                out.print(f"  {again.get((one['key'], one['digest']), 'orch cache gc --here')}", soft_wrap=True)
    if bad:
        raise typer.Exit(1)


def _verified(one: Checked) -> dict[str, Any]:
    stored = one.stored
    return {
        "key": stored.key,
        "digest": stored.digest,
        "files": stored.about.get("files"),
        "bytes": stored.bytes,
        "damaged": [[path, "is damaged or missing"] for path in one.paths],
        "missing": [],
        "foreign": list(one.foreign),
        "why": "; ".join(one.why) or None,
    }


def _unlisted(folder: Path) -> str:
    aside = folder.name.startswith("aside-")
    return "it was found damaged, and set aside" if aside else "its records cannot be read"


def gc_command(
    place: str | None,
    *,
    here: bool,
    older: float | None,
    larger: str | None,
    yes: bool,
    explain: bool,
    json: bool,
) -> None:
    """Remove what is old or too much, after a yes. Raises UsageError for a size that is none, Refused without a yes."""
    from orchestrator.cli.rollback import agreed
    from orchestrator.view.cache import print_gc

    most = None if larger is None else _bytes(larger)
    places = _here_or(place, here)
    if explain:
        _explain(places, ["which compile caches may go?", "after a yes: remove those"], here)
        return
    words = ["--here"] if here else [places[0].name]
    words += [] if older is None else [f"--older-than {older:g}"]
    words += [] if larger is None else [f"--larger-than {shlex.quote(larger)}"]
    hint = f"orch cache gc {' '.join(words)} --yes"
    out = console()
    if here:
        plan = _gc_here(older, most, dry_run=True)
        done = None
        if not json:
            print_gc(out, "here", plan)
        if plan["removed"] and (yes or not json) and agreed("remove them?", yes, hint):
            done = _gc_here(older, most, dry_run=False)
    else:
        asked = {"older_days": older, "larger_bytes": most}
        with open_session(places[0]) as session:
            plan = session.call("cache_gc", {**asked, "dry_run": True}, timeout=_CHECK_LIMIT).data
            done = None
            if not json:
                print_gc(out, places[0].name, plan)
            if plan["removed"] and (yes or not json) and agreed("remove them?", yes, hint):
                done = session.call("cache_gc", {**asked, "dry_run": False}, timeout=_CHECK_LIMIT).data
    if json:
        print_json({"place": "here" if here else places[0].name, **(done or plan)})
    elif done is not None:
        out.print(f"removed {len(done['removed'])}, {done['freed']:,} bytes", soft_wrap=True)
    elif plan["removed"]:
        out.print("nothing was removed", soft_wrap=True)


def _bytes(text: str) -> int:
    found = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([KMGT]?)(I?)B?", text.strip(), re.IGNORECASE)
    if found is None or (found[3] and not found[2]):
        raise UsageError(f"--larger-than takes a size such as 500MB, 1.5GB or 20GiB, not {text!r}")
    power = " KMGT".index(found[2].upper() or " ")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** power)


def _gc_here(older: float | None, most: int | None, *, dry_run: bool) -> dict[str, Any]:
    """Of this machine's store: no generation names what lies here, and each can be pulled again while its place has
    it. So nothing goes but by age or size."""
    from orchestrator.compile_cache.store import Store
    from orchestrator.view.text import duration

    store, now = Store(), time.time()
    kept: list[dict[str, Any]] = []
    removed: list[dict[str, Any]] = []
    left = sum(one.packed for one in store.all())
    for key, digest, folder in store.unreadable():
        size = sum(path.lstat().st_size for path in folder.rglob("*")) if folder.is_dir() else 0
        removed.append({"key": key, "digest": digest, "bytes": size, "why": _unlisted(folder)})
        if not dry_run:
            store.remove(folder)
    for one in reversed(store.all()):  # the oldest first
        why = ""
        if older is not None and now - one.at > older * 86400:
            why = f"came here {duration(now - one.at)} ago"
        elif most is not None and left > most:
            why = f"all together take more than {most:,} bytes"
        told: dict[str, Any] = {"key": one.key, "digest": one.digest, "bytes": one.packed}
        if not why:
            kept.append({**told, "last_used": one.at, "why": ["neither old nor too much"]})
            continue
        left -= one.packed
        removed.append({**told, "why": why})
        if not dry_run:
            store.remove(one.folder)
    freed = sum(int(item["bytes"]) for item in removed)
    return {"removed": removed, "kept": kept, "freed": freed, "bytes": left, "dry_run": dry_run}


# --- moving ----------------------------------------------------------------------------------------


def pull_command(reference: str, place: str | None, *, explain: bool, json: bool) -> None:
    """From a place to here. Raises NotFound, OrchError."""
    from orchestrator.compile_cache.staging import pull
    from orchestrator.compile_cache.store import Store
    from orchestrator.view.follow import LaunchDisplay

    where = meant_place(place)
    if explain:
        requests = [
            f"which caches are there? (for {reference})",
            "the snapshot's manifest",
            "its contents, as one stream",
        ]
        print(explanation(where, requests))
        return
    out = console()
    with LaunchDisplay(out) as display, open_session(where) as session:
        if not json:
            display.begin("pull")

        def progress(done: int, total: int) -> None:
            if not json:
                display.progress("pull", f"from {where.name}", done, total, "B")

        key, digest = _meant(session, reference)
        stored, received = pull(session, key, digest, Store(), progress)
        if not json:
            how = f"{received:,} bytes received" if received else "here already"
            display.end("pull", f"{stored.name}, {how}, kept as {stored.packed:,} bytes")
    if json:
        print_json({"place": where.name, "received": received, **stored.to_json()})
    else:
        out.print(f"  orch cache push {stored.key} PLACE", soft_wrap=True)


def _meant(session: Session, reference: str) -> tuple[str, str | None]:
    """The key, and the digest where one is named, of a cache at a place. Raises NotFound."""
    from orchestrator.compile_cache.staging import meant
    from orchestrator.view.cache import recipes

    caches: Sequence[Mapping[str, Any]] = session.call("cache_list", {"key": None}, timeout=60.0).data["caches"]
    # without a digest it is the one that launches take
    known = [
        (str(one["key"]), str(snapshot["digest"]), recipes(one))
        for one in caches
        for snapshot in one["snapshots"]
        if "/" in reference or snapshot["digest"] == one.get("current")
    ]
    name = session.place.name
    return meant(reference, known, f"at {name}", f"orch cache list {name}")


def push_command(reference: str, place: str | None, *, explain: bool, json: bool) -> None:
    """From here to a place. Raises NotFound, OrchError."""
    from orchestrator.compile_cache.staging import named, push
    from orchestrator.compile_cache.store import Store
    from orchestrator.view.follow import LaunchDisplay

    where = meant_place(place)
    stored: Stored = named(Store(), reference)
    if explain:
        requests = [
            "what can be unpacked there?",
            "which of its files are there?",
            f"stage {stored.name}, in one stream",
        ]
        print(explanation(where, requests))
        print(
            f"{stored.name}: {stored.packed:,} bytes packed, {stored.bytes:,} unpacked; what is there does not travel"
        )
        return
    with LaunchDisplay(console()) as display, open_session(where) as session:
        if not json:
            display.begin("push")

        def progress(done: int, total: int) -> None:
            if not json:
                display.progress("push", f"to {where.name}", done, total, "B")

        sent = push(session, stored, progress)
        if not json:
            how = f"{sent.bytes:,} bytes sent as {sent.encoding} ({sent.why})"
            display.end("push", f"{stored.name}, {'there already' if sent.how == 'there' else how}")
    if json:
        told = {"bytes": sent.bytes, "contents": sent.contents, "how": sent.how, "encoding": sent.encoding}
        print_json({"place": where.name, "key": stored.key, "digest": stored.digest, **told, "why": sent.why})


# --- places ----------------------------------------------------------------------------------------


def _here_or(place: str | None, here: bool, all_: bool = False) -> list[Place]:
    """The places that are asked: none where this machine's store is meant; `all_` where none is named."""
    if here and place is not None:
        raise UsageError("--here means the store of this machine: it goes without PLACE")
    if here:
        return []
    return meant_places(place, place is None) if all_ else [meant_place(place)]


def _asked(
    places: Sequence[Place], op: str, args: dict[str, Any]
) -> tuple[list[tuple[str, dict[str, Any] | None, str | None]], list[OrchError]]:
    """Each place's answer, or why there is none."""
    answers: list[tuple[str, dict[str, Any] | None, str | None]] = []
    failed: list[OrchError] = []
    for place in places:
        try:
            with open_session(place) as session:
                answers.append((place.name, session.call(op, args, timeout=60.0).data, None))
        except OrchError as error:
            failed.append(error)
            answers.append((place.name, None, error.message))
    return answers, failed


def _raise(failed: Sequence[OrchError], places: Sequence[Place]) -> None:
    if failed and len(failed) == len(places):
        raise failed[0] if len(failed) == 1 else Unreachable("no place answered")


def _explain(places: Sequence[Place], requests: list[str], here: bool) -> None:
    for place in places:
        print(explanation(place, requests))
    if here:
        print("The caches kept on this machine are read where they lie; no place is asked for them.")
