"""A recipe that builds on another: what it says itself goes over what the other says."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

from orchestrator.config.project import Project, list_recipes
from orchestrator.config.words import did_you_mean, listing, quote
from orchestrator.config.yaml_source import Document, Loc, shown
from orchestrator.errors import UsageError


def base_of(project: Project, path: Path, name: str) -> Path:
    """The file of the recipe that the one in `path` builds on: by name, or by a path relative to that file.

    A recipe that builds on one of its own name means that of a farther folder. Raises UsageError.
    """
    if "/" in name or name.endswith((".yaml", ".yml")):
        found = Path(os.path.normpath(path.parent / name))
        if not found.is_file():
            raise UsageError(f"there is no recipe file {shown(found)} to build on")
        return found
    same = path.resolve()
    for folder in project.recipe_dirs:
        for found in (folder / f"{name}.yaml", folder / f"{name}.yml"):
            if found.is_file() and (name != path.stem or found.resolve() != same):
                return found
    if name == path.stem:
        raise UsageError(f"a recipe cannot build on itself, and no other folder has a recipe {quote(name)}")
    known = [one for one in list_recipes(project) if one != path.stem]
    raise UsageError(
        f"there is no recipe {quote(name)} to build on{did_you_mean(name, known) or f' (there are: {listing(known)})'}"
    )


def merged(base: Document, own: Document) -> Document:
    """Mappings key by key, anything else as `own` has it; a key with nothing after it takes the base's away.

    `place` and `places` take each other's place, and a base's name is its own.
    """
    if not isinstance(own.data, (dict, type(None))) or not isinstance(base.data, dict):
        return own
    said: dict[str, Any] = own.data or {}
    document = Document(
        copy.deepcopy(base.data), dict(base.keys), {**base.values, (): own.values[()]}, [*own.problems, *base.problems]
    )
    dropped = ["name"]
    if said.get("place") is not None:
        dropped += ["places", "elastic"]
    if said.get("places") is not None:
        dropped += ["place"]
    for key in dropped:
        document.data.pop(key, None)
        _forget(document, (key,))
    _lay(document, document.data, own, said, ())
    return document


def _lay(document: Document, onto: dict[str, Any], own: Document, said: dict[str, Any], at: Loc) -> None:
    for key, value in said.items():
        loc = (*at, key)
        if isinstance(value, dict) and isinstance(onto.get(key), dict):
            for marks, new in ((document.keys, own.keys), (document.values, own.values)):
                if loc in new:
                    marks[loc] = new[loc]
            _lay(document, onto[key], own, value, loc)
            continue
        _forget(document, loc)
        if value is None and at == ("env",) and onto.pop(key, None) is not None:
            continue  # a variable of the base's is taken away; no other has the value nothing
        onto[key] = copy.deepcopy(value)
        for marks, new in ((document.keys, own.keys), (document.values, own.values)):
            marks.update({mark: where for mark, where in new.items() if mark[: len(loc)] == loc})


def _forget(document: Document, loc: Loc) -> None:
    for marks in (document.keys, document.values):
        for old in [mark for mark in marks if mark[: len(loc)] == loc]:
            del marks[old]
