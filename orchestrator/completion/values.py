"""What a place, a run, a recipe, an environment, a generation, a cache or a key of `--set` can be.

All of it lies on this machine: in hosts.yaml, in recipes, in the index of runs and launches, in the store of caches.
What cannot be read is left out and nothing is said, since whatever is printed lands in the line that somebody types.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from orchestrator.completion.table import RECIPE_KEYS, SETTINGS
from orchestrator.completion.words import Candidate

Given = dict[str, str]  # what the line says already, by kind

_MOST_READ = 1 << 20  # bytes of a file
_MOST_RUNS = 100
_MOST_KEYS = 2000  # aliases can make a short file expand without end
_DEEPEST = 8  # recipes that build on each other
_DESCRIPTION = re.compile(r"^description:[ \t]*(\S.*)$", re.MULTILINE)
_DIGEST = re.compile(r"[0-9a-f]{16}\Z")


def values(kind: str, current: str, given: Given) -> list[Candidate]:
    """What a value of that kind can be; nothing for a kind that nobody can know. Never raises Exception."""
    known = KINDS.get(kind)
    try:
        return [] if known is None else known(current, given)
    except Exception:
        return []


def _places(current: str, given: Given) -> list[Candidate]:
    found: dict[str, str] = {"local": "this machine"}
    for name, host in _hosts().items():
        containers = host.get("containers") if isinstance(host, dict) else None
        found.setdefault(name, _reached(host))
        if isinstance(containers, dict):
            found.update({f"{name}/{container}": f"a container of {name}" for container in containers})
    return list(found.items())


def _hosts_alone(current: str, given: Given) -> list[Candidate]:
    """Those that have a key to trust."""
    return [(name, how) for name, host in _hosts().items() if name != "local" and (how := _reached(host))]


def _reached(host: Any) -> str:
    ssh = host.get("ssh") if isinstance(host, dict) else None
    if isinstance(ssh, dict):
        ssh = ssh.get("host")
    return f"ssh {ssh.rpartition('@')[2]}" if isinstance(ssh, str) and ssh not in ("", "null", "~") else ""


def _hosts() -> dict[str, Any]:
    from orchestrator.config.project import find_project

    read = _mapping(_read(find_project().hosts_file)).get("hosts")
    return {str(name): host for name, host in read.items()} if isinstance(read, dict) else {}


def _aliases(current: str, given: Given) -> list[Candidate]:
    """Hosts that the user's SSH configuration names, without what it includes."""
    found: dict[str, str] = {}
    for line in _read(Path.home() / ".ssh/config").splitlines():
        key, _, names = line.strip().replace("=", " ", 1).partition(" ")
        if key.lower() == "host":
            found.update({name.strip('"'): "" for name in names.split() if not set(name) & set("*?!")})
    return list(found.items())


def _recipes(current: str, given: Given) -> list[Candidate]:
    return [(name, _description(path)) for name, path in _recipe_files().items()]


def _recipe_files() -> dict[str, Path]:
    from orchestrator.config.project import find_project, list_recipes

    return list_recipes(find_project())


def _description(path: Path) -> str:
    found = _DESCRIPTION.search(_read(path))
    return found[1].strip("'\"| >") if found else ""


def _specifications(current: str, given: Given) -> list[Candidate]:
    from orchestrator.config.project import find_project, list_environments

    return [(name, "") for name in list_environments(find_project())]


def _environments(current: str, given: Given) -> list[Candidate]:
    """By name, and by the ids that launches from here used."""
    from orchestrator import history

    place = given.get("place")
    used = [
        (ident, f"used by {recipe} at {at}")
        for ident, recipe, at in history.environments_at_a_glance()
        if place is None or at == place
    ]
    return [*_quietly(_specifications, current, given), *dict(reversed(used)).items()]


def _runs(current: str, given: Given) -> list[Candidate]:
    """The newest first, then the recipes that have one, each of which means its latest run."""
    from orchestrator import history

    entries = history.at_a_glance(given.get("place"), most=2 * _MOST_RUNS)
    places: dict[str, list[str]] = {}
    for entry in sorted(entries, key=lambda one: (-one.created, one.number)):
        places.setdefault(entry.run, []).append(entry.place)
    by_run = {entry.run: entry for entry in entries}
    runs = [
        (run, f"{by_run[run].recipe} at {', '.join(at)}, {_ago(by_run[run].created)}") for run, at in places.items()
    ]
    recipes = dict.fromkeys(entry.recipe for entry in entries)
    return [*runs[:_MOST_RUNS], *((recipe, "its latest run") for recipe in recipes if recipe)]


def _ago(then: float) -> str:
    seconds = max(0.0, time.time() - then)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit} ago"
    return "just now"


def _generations(current: str, given: Given) -> list[Candidate]:
    from orchestrator import history

    found = history.names_at_a_glance("generation", given.get("place"), given.get("recipe"))
    return [(one.name, one.words) for one in found]


def _caches(current: str, given: Given) -> list[Candidate]:
    from orchestrator import history

    here = [(key, "kept on this machine") for key in _stored()]
    seen = history.names_at_a_glance("cache", given.get("place"), None)
    there = [(one.name, f"{one.recipe} at {one.place}" if one.recipe else f"at {one.place}") for one in seen]
    return [*_quietly(_recipes, current, given), *{**dict(there), **dict(here)}.items()]


def _stored() -> list[str]:
    """Keys in this machine's store: its folders, as compile_cache/store names them."""
    given = os.environ.get("ORCH_DATA_DIR")
    if given is None:
        from platformdirs import user_data_path

        given = str(user_data_path("orch"))
    folder = Path(given) / "caches"
    return sorted(one.name for one in folder.iterdir() if _DIGEST.match(one.name)) if folder.is_dir() else []


def _quietly(of: Callable[[str, Given], list[Candidate]], current: str, given: Given) -> list[Candidate]:
    try:
        return of(current, given)
    except Exception:
        return []


# --- --set -----------------------------------------------------------------------------------------


def _overrides(current: str, given: Given) -> list[Candidate]:
    """KEY=, one part of a dotted key at a time, as paths are completed; and its value where few are possible."""
    key, equals, _ = current.partition("=")
    keys = _keys(given)
    if equals:
        return [(f"{key}={value}", help_) for value, help_ in _values_of(key, given)]
    found: dict[str, str] = {}
    for known, help_ in keys.items():
        if known.startswith(key) and not (known == key and key.endswith(".")):
            dot = known.find(".", len(key))
            if dot >= 0 and dot + 1 < len(known):  # further parts, for another keystroke
                found.setdefault(known[: dot + 1], keys.get(known[: dot + 1], ""))
            elif known.endswith("."):
                found.setdefault(known, help_)
            else:
                found[f"{known}="] = help_
    return list(found.items())


def _keys(given: Given) -> dict[str, str]:
    """Every key that the recipe can have, as far as it is known, with its value in the recipe."""
    found = dict(RECIPE_KEYS)
    recipe = _recipe(given)
    if not recipe.get("command"):
        found.update({key: f"default {default}" if default else "" for key, default, _ in SETTINGS})
    found.update(islice(_flat("", recipe), _MOST_KEYS))
    return {key: help_ for key, help_ in found.items() if key.rstrip(".") not in ("name", "extends")}


def _flat(prefix: str, value: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for key, item in value.items():
        if isinstance(item, dict) and item:
            yield from _flat(f"{prefix}{key}.", item)
        elif isinstance(item, str):
            yield f"{prefix}{key}", f"now {item[:60]}" if item else ""


def _values_of(key: str, given: Given) -> list[Candidate]:
    if key == "place":
        return _places("", given)
    if key == "environment":
        return _specifications("", given)
    if "true or false" in dict(RECIPE_KEYS).get(key, ""):
        return [("true", ""), ("false", "")]
    return [(value, "") for name, _, choices in SETTINGS if name == key for value in choices]


def _recipe(given: Given) -> dict[str, Any]:
    """The recipe on the line over those that it builds on, as far as they can be read."""
    name = given.get("recipe")
    if name is None:
        return {}
    files = _recipe_files()
    path = files.get(name, Path(name))
    chain: list[dict[str, Any]] = []
    while len(chain) < _DEEPEST:
        chain.append(_mapping(_read(path)))
        base = chain[-1].get("extends")
        if not isinstance(base, str):
            break
        path = files.get(base, path.parent / base)
    whole: dict[str, Any] = {}
    for one in reversed(chain):
        whole = _over(whole, one)
    return whole


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    whole = dict(below)
    for key, value in above.items():
        old = whole.get(key)
        whole[key] = _over(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return whole


def _read(path: Path) -> str:
    """The beginning of a file, or nothing."""
    try:
        with path.open("rb") as file:
            return file.read(_MOST_READ).decode("utf-8", "replace")
    except OSError:
        return ""


def _mapping(text: str) -> dict[str, Any]:
    """A YAML mapping, every scalar as text; of one that is broken what comes before the fault."""
    import yaml

    loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
    for _ in range(8):
        try:
            found = yaml.load(text, Loader=loader)
            return found if isinstance(found, dict) else {}
        except yaml.MarkedYAMLError as error:
            # a bracket that is not closed is found wrong far below where it stands
            mark = error.context_mark if "flow" in (error.context or "") else error.problem_mark
            lines = text.splitlines(keepends=True)
            if mark is None or not lines:
                return {}
            text = "".join(lines[: min(mark.line, len(lines) - 1)])
        except (yaml.YAMLError, ValueError, RecursionError):
            return {}
    return {}


KINDS: dict[str, Callable[[str, Given], list[Candidate]]] = {
    "place": _places,
    "host": _hosts_alone,
    "alias": _aliases,
    "recipe": _recipes,
    "specification": _specifications,
    "environment": _environments,
    "run": _runs,
    "generation": _generations,
    "cache": _caches,
    "set": _overrides,
}
