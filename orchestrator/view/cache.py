"""Compile caches for people."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

from orchestrator.compile_cache.words import took
from orchestrator.plain import plain
from orchestrator.view.environments import when
from orchestrator.view.text import size

if TYPE_CHECKING:
    from orchestrator.compile_cache.store import Stored

_SHOWN = 20  # files that are named


def print_list(console: Console, place: str, caches: Sequence[Mapping[str, Any]], unknown: str | None = None) -> None:
    """The caches at a place, the newest used first. `unknown`: why nobody can say what is kept by whom."""

    def say(text: str) -> None:
        _say(console, text)

    say(f"{place}: {_count(len(caches), 'compile cache')}")
    if unknown:
        say(f"  who needs them is unknown: {unknown}")
    for one in caches:
        names = ", ".join(recipes(one)) or "(no recipe)"
        say(f"  {one['key']}  {size(one.get('bytes'))}  {names}  {_uses(one.get('uses') or {})}")
        say(f"    {parts_line(one.get('parts') or {})}")
        for snapshot in one.get("snapshots") or ():
            marks = folded(snapshot.get("kept_by") or [])
            if snapshot.get("why"):
                say("  ".join([f"    {snapshot['digest']}", f"cannot be used: {snapshot['why']}", *marks]))
                continue
            marks[:0] = ["launches take it"] if snapshot["digest"] == one.get("current") else []
            cold = snapshot.get("cold_seconds")
            marks += [f"took {took(float(cold))} to compile"] if cold is not None else []
            told = [snapshot["digest"], f"{snapshot.get('files') or '?'} files", size(snapshot.get("bytes"))]
            told += [f"from {snapshot.get('from') or 'somebody'}, {when(snapshot.get('made'))}", *marks]
            say("    " + "  ".join(told))
        for aside in one.get("aside") or ():
            say(f"    {aside['name']}  {size(aside.get('bytes'))}  moved aside: {aside.get('why') or 'no word'}")


def recipes(cache: Mapping[str, Any]) -> list[str]:
    """Whose a cache at a place is: of the recipe that made it, and of those that used it since."""
    label = cache.get("label")
    label = label if isinstance(label, dict) else {}
    names = [label.get("recipe")]
    for more in (label.get("recipes"), (cache.get("uses") or {}).get("recipes")):
        names += more if isinstance(more, list) else []
    return list(dict.fromkeys(str(name) for name in names if name))


_GENERATION = re.compile(r"generation (\d+) of (\S+) is good\Z")


def folded(reasons: Sequence[str]) -> list[str]:
    """Why something is kept, the good generations of a recipe in one: `generations 3, 4 of demo are good`."""
    numbers: dict[str, list[str]] = {}
    others = []
    for one in reasons:
        found = _GENERATION.match(one)
        if found is None:
            others.append(one)
        else:
            numbers.setdefault(found[2], []).append(found[1])
    told = []
    for recipe, each in numbers.items():
        listed = ", ".join(each[-4:]) if len(each) <= 4 else f"… {', '.join(each[-3:])} ({len(each)} in all)"
        are = f"generation {each[0]} of {recipe} is good"
        told.append(are if len(each) == 1 else f"generations {listed} of {recipe} are good")
    return told + others


def _say(console: Console, text: str) -> None:
    """One line; a terminal that is narrower gets it broken between words, and indented. A pipe gets it whole."""
    text = plain(text)
    if console.is_terminal and len(text) > console.width:
        inner = " " * (len(text) - len(text.lstrip()) + 2)
        text = textwrap.fill(
            text, console.width, subsequent_indent=inner, break_long_words=False, break_on_hyphens=False
        )
    console.print(text, soft_wrap=True)


def _uses(uses: Mapping[str, Any]) -> str:
    if not uses.get("runs"):
        return "never used"
    told = [_count(uses["runs"], "run"), f"{uses.get('warm') or 0} warm"]
    told.append(f"{uses.get('hits') or 0} hits, {uses.get('misses') or 0} misses")
    told += [f"{uses['rebuilt']} rebuilt"] if uses.get("rebuilt") else []
    saved = uses.get("saved_seconds")
    told += [f"{took(float(saved))} saved"] if saved else []
    return ", ".join([*told, f"used {when(uses.get('last_at'))}"])


def parts_line(parts: Mapping[str, Any]) -> str:
    """A key's parts in a line, digests and settings left out."""
    if not parts:
        return "what it belongs to is unknown: its key.json is missing or cannot be read"
    gpu = parts.get("gpu")
    told = [f"torch {parts.get('torch')}", f"triton {parts.get('triton')}", f"CUDA {parts.get('cuda')}"]
    told.append(", ".join(map(str, gpu)) if gpu else "CPU")
    if not gpu and parts.get("environment_path"):
        told.append(f"environment {parts['environment_path']}")
    config = parts.get("config")
    told += [f"{name}={value}" for name, value in config.items()] if isinstance(config, dict) else []
    shapes = parts.get("shapes")
    told.append(f"shapes {shapes.get('digest') if isinstance(shapes, dict) else '?'}")
    return "  ".join(told)


def print_stored(console: Console, stored: Sequence[Stored]) -> None:
    """What is kept on this machine."""
    total = sum(one.packed for one in stored)
    console.print(f"here: {_count(len(stored), 'compile cache')}, {size(total)} packed", soft_wrap=True)
    for one in stored:
        about = [one.name, f"{size(one.packed)} ({size(one.bytes)} unpacked)", ", ".join(one.recipes) or "(no recipe)"]
        about.append(f"from {one.about.get('from')}, {when(one.at)}")
        _say(console, "  " + "  ".join(about))
        _say(console, f"    {parts_line(one.parts.to_json())}")


def print_verified(console: Console, place: str, snapshots: Sequence[Mapping[str, Any]]) -> None:
    """Snapshot by snapshot, with the files that are not as they should be."""

    def say(text: str) -> None:
        _say(console, text)

    if not snapshots:
        say(f"{place}: no compile caches")
    for one in snapshots:
        name = f"{place}: {one['key']}/{one['digest']}"
        wrong = [f"{path} {why}" for path, why in one["damaged"]]
        wrong += [f"{path} is missing" for path in one["missing"]]
        wrong += [f"{path} is foreign: no manifest names it" for path in one["foreign"]]
        wrong += [str(one["why"])] if one["why"] else []
        if not wrong:
            say(f"{name}: sound, {one['files']} files, {size(one['bytes'])}")
            continue
        say(f"{name}: DAMAGED")
        for line in wrong[:_SHOWN]:
            say("  " + line.replace("\n", "�"))
        if len(wrong) > _SHOWN:
            say(f"  … and {len(wrong) - _SHOWN} more")


def print_gc(console: Console, place: str, plan: Mapping[str, Any]) -> None:
    """What could go and what stays, with bytes."""
    for item in plan["kept"]:
        _say(console, f"  keep    {_item(item)}: {', '.join(folded(item['why']))}")
    for item in plan["removed"]:
        _say(console, f"  remove  {_item(item)}: {item['why']}")
    freed = int(plan["freed"])
    count = _count(len(plan["removed"]), "cache")
    console.print(f"{place}: {count} to remove, {freed:,} bytes ({size(freed)})", soft_wrap=True)


def _item(item: Mapping[str, Any]) -> str:
    name = item["key"] if item.get("digest") is None else f"{item['key']}/{item['digest']}"
    return f"{item['name'] if item.get('name') else name}  {size(item.get('bytes'))}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
