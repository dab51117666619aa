"""Environments and generations for people."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from orchestrator.generations import Change
from orchestrator.view.text import duration, size

_FILES = _FINDINGS = 20  # that are named of a polluted environment


def print_list(console: Console, place: str, found: Mapping[str, Any], recipes: Sequence[Mapping[str, Any]]) -> None:
    """The environments at a place, then each recipe's generations, the newest last."""

    def say(text: str) -> None:
        console.print(text, soft_wrap=True)

    environments = found["environments"]
    say(f"{place}: {_count(len(environments), 'environment')}")
    for one in environments:
        manifest = one["manifest"] or {}
        torch = (manifest.get("torch") or {}).get("version")
        parts = [one["entry"], str(manifest.get("name") or "(no manifest)")]
        parts.append(f"Python {(manifest.get('python') or {}).get('version', '?')}")
        parts += [f"torch {torch}"] if torch else []
        parts += [size(manifest.get("bytes")), f"built {when(manifest.get('built'))}"]
        if one["entry"] == one["id"]:
            parts.append(f"used {when(one['last_used'])}" if one["last_used"] else "never launched")
            protected = (manifest.get("protected") or {}).get("how")
            parts += ["write-protected"] if protected == "immutable" else []
        say("  " + "  ".join(parts))
        if one["polluted"]:
            say(f"    polluted: {one['polluted']['summary']}")
        for user in (*one["runs"], *(f"process {process}" for process in one["processes"])):
            say(f"    in use by {user}")
    for recipe in recipes:
        pin = recipe["pin"]
        held = f", pinned to generation {pin['generation']} by {pin['by']}" if pin else ""
        say(f"{recipe['recipe']} at {place}: {_count(len(recipe['generations']), 'generation')}{held}")
        for one in recipe["generations"][-8:]:
            say(f"  {generation_line(one)}")


def generation_line(one: Mapping[str, Any]) -> str:
    """One generation in one line."""
    lacking = [what for what in ("environment", "cache", "code") if one.get(f"{what}_here") is False]
    parts = [f"{one['generation']:>3}", f"{one['standing']:<4}", str(one.get("run"))]
    parts += [f"environment {one['environment']}", f"cache {one.get('cache') or 'none yet'}"]
    parts += [f"code {(one.get('code') or {}).get('digest')}", f"{one.get('who')}, {when(one.get('at'))}"]
    parts.append(str(one.get("why") or ""))
    if one.get("mark_why"):
        parts.append(f"[{one['standing']}: {one['mark_why']}, by {one['marked_by']}]")
    if lacking:
        parts.append(f"({' and '.join(lacking)} gone)")
    return "  ".join(part for part in parts if part)


def _found(findings: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is wrong, and in which files: of both the first, and how many more."""
    lines, left = [], _FILES
    if len(findings) > _FINDINGS:  # so many are packages; what else there is comes first
        findings = sorted(findings, key=lambda finding: bool(finding["kind"] == "distribution"))
    for finding in findings[:_FINDINGS]:
        names = finding["files"][:left]
        left -= len(names)
        lines += [f"  {finding['text']}", *(f"    {name}" for name in names)]
        if finding["count"] > len(names) and names:
            lines.append(f"    … and {finding['count'] - len(names):,} more")
    more = len(findings) - _FINDINGS
    if more > 0:
        count = sum(finding["count"] for finding in findings[_FINDINGS:])
        lines.append(f"  … and {more:,} more like these, in {_count(count, 'file')}: --json names them")
    return lines


def print_checked(console: Console, place: str, reports: Sequence[Mapping[str, Any]]) -> None:
    """What a check found, environment by environment."""
    if not reports:
        console.print(f"{place}: no environments", soft_wrap=True)
    for one in reports:
        name = f"{place}: {one['name'] or 'environment'} {one['id']}"
        if one["clean"]:
            checked = one["checked"] or {}
            how = "digested" if checked.get("deep") else "compared by size and time"
            count, seconds = checked.get("files"), checked.get("seconds")
            console.print(f"{name}: clean, {count:,} files {how} in {seconds:.2f} s", soft_wrap=True)
        else:
            console.print(f"{name}: POLLUTED: {one['summary']}", soft_wrap=True)
            for line in _found(one["findings"]):
                console.print(line, soft_wrap=True)
            console.print(f"  it lies in {one['path']}", soft_wrap=True)
            for user in (*one["runs"], *(f"process {process}" for process in one["processes"])):
                console.print(f"  still used by {user}", soft_wrap=True)
        for note in one["notes"]:
            console.print(f"  note: {note}", soft_wrap=True)


def print_change(
    console: Console, recipe: str, place: str, one: Mapping[str, Any], change: Change, ignored: Sequence[str] = ()
) -> None:
    """What going to a generation changes against what launches take now."""
    console.print(f"{recipe} at {place}, back to generation {one['generation']}:", soft_wrap=True)
    console.print(f"  {generation_line(one).strip()}", soft_wrap=True)
    for what, lines in (("packages", change.packages), ("cache", change.cache), ("code", change.code)):
        if not lines:
            console.print(f"  {what}: no change", soft_wrap=True)
            continue
        console.print(f"  {what}: {lines[0]}", soft_wrap=True)
        for line in lines[1 : 1 + _FILES]:
            console.print(f"    {line}", soft_wrap=True)
        if len(lines) > 1 + _FILES:
            console.print(f"    … and {len(lines) - 1 - _FILES:,} more: --json names them", soft_wrap=True)


def print_gc(console: Console, place: str, found: Mapping[str, Any]) -> None:
    """What could go and what stays, with bytes on the disk."""
    for item in found["kept"]:
        console.print(f"  keep    {_gc_line(item)}: {', '.join(item['why'])}", soft_wrap=True)
    for item in found["candidates"]:
        console.print(f"  remove  {_gc_line(item)}: {item['why']}", soft_wrap=True)
    total = sum(item["bytes"] for item in found["candidates"])
    count = _count(len(found["candidates"]), "environment")
    console.print(f"{place}: {count} to remove, {total:,} bytes ({size(total)})", soft_wrap=True)


def _gc_line(item: Mapping[str, Any]) -> str:
    return f"{item['entry']}  {item['name'] or '(no manifest)'}  {size(item['bytes'])}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def when(at: float | None) -> str:
    """How long ago, by the clock here."""
    return "-" if at is None else f"{duration(max(0.0, time.time() - float(at)))} ago"
