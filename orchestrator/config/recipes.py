"""Recipes: found by name, read, overridden from the command line, written out, and told apart by digest."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator.bundled import bundled_dir
from orchestrator.config.extends import base_of, merged
from orchestrator.config.models import RECIPE_NAME, Place, Recipe, code_mapping
from orchestrator.config.problems import dotted, in_order, keys_of, validate
from orchestrator.config.project import Project, list_recipes
from orchestrator.config.words import did_you_mean, listing, nearest, quote
from orchestrator.config.yaml_source import Document, Loc, Where, dump_yaml, parse_yaml, read_yaml, shown
from orchestrator.errors import ConfigError, UsageError

_TYPED = frozenset({"settings"})
# names that promise a secret; TOKEN alone also names special tokens of a vocabulary (short, or <|…|>)
_SECRET_NAME = re.compile(r"(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|SECRET_KEY|PRIVATE_KEY)\Z", re.I)
_SECRET_LENGTH = 16
_DEEPEST = 64  # parts of a dotted key


@dataclass(frozen=True)
class RecipeSource:
    """A recipe as it was read: its name and its document, not yet checked."""

    name: str
    document: Document
    folder: Path | None = None  # that its relative path of code is taken from
    whole: bool = True  # whether all that it builds on was found


def load_recipe(
    project: Project, name: str, place_override: str | None = None, overrides: Sequence[str] = ()
) -> Recipe:
    """The recipe of that name (or in that file), with `--set` overrides and another place if given."""
    source = apply_overrides(read_recipe(project, name), overrides)
    if place_override is not None:
        label = "the place given"
        source = _with(source, ("place",), Document(place_override, values={("place",): label}))
        for key in ("places", "elastic"):
            if source.document.data.get(key) is not None:
                source = _with(source, (key,), Document(None, values={(key,): label}))
    return check_recipe(source)


def read_recipe(project: Project, name: str) -> RecipeSource:
    """The recipe's document; UsageError with the nearest name when there is none."""
    known = list_recipes(project)
    path = known.get(name)
    if path is None and ("/" in name or name.endswith((".yaml", ".yml"))):
        path = project.cwd / name
        if not path.is_file():
            raise UsageError(f"there is no recipe file {quote(name)}", f"recipes: {listing(known)}")
    if path is None:
        own = [shown(folder) for folder in project.recipe_dirs if folder != bundled_dir() / "recipes"]
        looked = " and ".join([*own, "orch's own"])
        raise UsageError(
            f"there is no recipe {quote(name)}{did_you_mean(name, known)}",
            f"recipes: {listing(known)}; looked in {looked}",
        )
    return _built(project, path, ())


def _built(project: Project, path: Path, above: tuple[Path, ...]) -> RecipeSource:
    """The recipe in a file, with what it builds on; `above` are the files that build on it."""
    folder = path.parent.parent if path.parent.name == "recipes" else path.parent
    source = _anchored(RecipeSource(path.stem, read_yaml(path, _TYPED), folder))
    document = copy.deepcopy(source.document)
    if not isinstance(document.data, dict) or document.data.get("extends") is None:
        return source
    if not isinstance(document.data["extends"], str):
        return replace(source, whole=False)  # what it should be is told with all else
    where = document.where(("extends",))
    name = document.data.pop("extends")
    base = None
    try:
        found = base_of(project, path, name)
        chain = (*above, path)
        if found.resolve() in [one.resolve() for one in chain]:
            round_ = " → ".join(shown(one) for one in (*chain, found))
            raise UsageError(f"extends leads back to where it began: {round_}")
        base = _built(project, found, chain)
    except ConfigError as error:
        document.problems += error.problems
    except UsageError as error:
        document.problems.append(f"{where}: {error.message}")
    if base is None:
        return replace(source, document=document, whole=False)
    return replace(source, document=merged(base.document, document), whole=base.whole)


def _anchored(source: RecipeSource) -> RecipeSource:
    """With the whole path of its code, so that the recipe means the same wherever it is read."""
    data, folder = source.document.data, source.folder
    code = code_mapping(data.get("code")) if isinstance(data, dict) else None
    if folder is None or not isinstance(code, dict) or not isinstance(code.get("path"), str) or not code["path"]:
        return source
    try:
        path = Path(code["path"]).expanduser()
    except RuntimeError:  # nobody has that home
        path = Path(code["path"])
    whole = os.path.normpath(folder.absolute() / path)
    document = copy.deepcopy(source.document)
    document.data["code"] = {**code, "path": whole}
    document.values.setdefault(("code", "path"), document.where(("code",)))
    return replace(source, document=document)


def apply_overrides(source: RecipeSource, overrides: Sequence[str]) -> RecipeSource:
    """The recipe with each `KEY=VALUE` of `--set` put in; the key is dotted, the value is YAML."""
    problems: list[str] = []
    for text in overrides:
        key, equals, value = text.partition("=")
        loc: Loc = tuple(key.split("."))
        # the value may be anything, so it is not part of the label
        label = f"--set {key[:60]}"
        if not equals or not all(loc) or len(loc) > _DEEPEST:
            problems.append(f"--set takes KEY=VALUE with a dotted key, such as settings.steps=5, not {quote(key)}")
            continue
        if loc[0] == "extends":
            problems.append(f"{label}: what a recipe builds on stands in its file; set the keys themselves")
            continue
        loc = _numbered(source.document.data, loc)
        try:
            document = parse_yaml(value, _always(label), _TYPED, at=loc)
            problems += document.problems
            if not value:
                document.data = ""  # nothing after the "=" is empty text; `null` takes a key back
            source = _with(source, loc, document)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(in_order(problems))
    return _anchored(source)


def check_recipe(source: RecipeSource) -> Recipe:
    """The recipe, or a ConfigError with everything that is wrong with it."""
    document, name = source.document, source.name
    problems = list(document.problems)
    given = {"name": name}
    if not source.whole and isinstance(document.data, dict) and document.data.get("environment") is None:
        given["environment"] = "unknown"  # what the base says cannot be known, nor complained of
    if not re.fullmatch(RECIPE_NAME, name):
        problems.append(
            f"{document.where(())}: a recipe is named by its file, at most 40 lower-case letters, "
            f"digits, _ and -, not {quote(name)}"
        )
        given["name"] = "unnamed"
    elif isinstance(document.data, dict) and document.data.get("name", name) not in (name, None):
        problems.append(
            f"{document.where(('name',))}: name must be {quote(name)}, as the file is named, "
            f"not {quote(document.data['name'])}; leave it out or rename the file"
        )
    if isinstance(document.data, dict):
        problems += _secret_problems(document)
        problems += _places_problems(document, source.whole)
        problems += _gpus_problems(document)
        own_code = code_mapping(document.data.get("code")) is not None
        misspelt = any(
            key not in keys_of(Recipe) and nearest(key, keys_of(Recipe)) == "command" for key in document.data
        )
        if own_code and document.data.get("command") is None and source.whole and not misspelt:
            problems.append(
                f"{document.where_key(('code',))}: code is a tree of your own, so a command must say what runs; "
                'add "command: [python, train.py]"'
            )
    recipe, wrong = validate(Recipe, document, given=given)
    problems += wrong
    if recipe is None or problems:
        raise ConfigError(in_order(problems))
    return recipe


def parse_recipe(text: str, name: str = "recipe.yaml") -> Recipe:
    """A recipe from what `dump_recipe` wrote, its own name in it; `name` is how a sentence calls the text."""
    document = parse_yaml(text, lambda line, column: f"{name}:{line}" + (f":{column}" if column else ""), _TYPED)
    own = document.data.get("name") if isinstance(document.data, dict) else None
    return check_recipe(RecipeSource(own if isinstance(own, str) else "", document))


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as YAML with every key written out; reading it gives the same recipe."""
    return dump_yaml(_said(recipe))


def _said(recipe: Recipe) -> dict[str, Any]:
    """All keys but that of `place` and `places` which the recipe does not use, and `elastic` and `gpus` where it
    does not."""
    unused = {"place"} if recipe.places else {"places"}
    unused |= set() if recipe.elastic else {"elastic"}
    return recipe.model_dump(exclude=unused if recipe.gpus is not None else unused | {"gpus"})


def recipe_digest(recipe: Recipe, place: Place | str) -> str:
    """SHA-256 (hex) of what the recipe says, at that place; comments and the order of keys do not matter."""
    content = _said(recipe) | {"place": place if isinstance(place, str) else place.name}
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def fill(value: Any, names: Mapping[str, str]) -> Any:
    """A copy of a recipe's `command` or `settings` with each known `{name}` in a text replaced."""
    if isinstance(value, str):
        return re.sub(r"\{(\w+)\}", lambda found: names.get(found[1], found[0]), value)
    if isinstance(value, list):
        return [fill(item, names) for item in value]
    if isinstance(value, dict):
        return {key: fill(item, names) for key, item in value.items()}
    return value


def _always(label: str) -> Where:
    return lambda line, column: label


def _numbered(data: Any, loc: Loc) -> Loc:
    """The dotted key with numbers where the recipe has a list: `command.1`."""
    found: list[str | int] = []
    for part in loc:
        if isinstance(data, list) and re.fullmatch(r"[0-9]{1,6}", str(part)):
            found.append(int(part))
            data = data[int(part)] if int(part) < len(data) else None
        else:
            found.append(part)
            data = data.get(part) if isinstance(data, dict) else None
    return tuple(found)


def _index(inner: Any, loc: Loc, label: str) -> Any:
    """By what the last part of `loc` is found in a mapping or a list."""
    part = loc[-1]
    if isinstance(inner, list) and (not isinstance(part, int) or part >= len(inner)):
        ends = f"its entries are 0 to {len(inner) - 1}" if inner else "it is empty"
        raise ConfigError([f"{label}: {dotted(loc[:-1])} is a list, and {ends}, not {quote(part)}"])
    return part


def _with(source: RecipeSource, loc: Loc, new: Document) -> RecipeSource:
    """The recipe with one value replaced, and its place in the sentences with it."""
    document = copy.deepcopy(source.document)
    if document.data is None:
        document.data = {}
    label = new.values[loc]
    inner: Any = document.data
    if not isinstance(inner, dict):
        raise ConfigError([f"{document.where(())}: the file must be a mapping (key: value), not {quote(inner)}"])
    for depth, part in enumerate(loc[:-1], start=1):
        if isinstance(inner, dict) and inner.get(str(part)) is None:
            inner[str(part)] = {}
            document.keys[loc[:depth]] = document.values[loc[:depth]] = label
        inner = inner[_index(inner, loc[:depth], label)]
        if not isinstance(inner, (dict, list)):
            raise ConfigError([f"{label}: {dotted(loc[:depth])} is not a mapping, so no key can be set in it"])
    inner[_index(inner, loc, label)] = new.data
    for marks in (document.keys, document.values):
        for old in [mark for mark in marks if mark[: len(loc)] == loc]:
            del marks[old]
    document.keys |= {loc: label, **new.keys}
    document.values |= new.values
    return replace(source, document=document)


def _secret_problems(document: Document) -> list[str]:
    """Secrets are named in a recipe, never written there; the sentences do not repeat them."""
    env, secrets = document.data.get("env"), document.data.get("secrets")
    names = [name for name in secrets if isinstance(name, str)] if isinstance(secrets, list) else []
    problems = [
        f"{document.where(('secrets', index))}: {quote(name)} is named twice in secrets"
        for index, name in enumerate(names)
        if name in names[:index]
    ]
    for name, value in env.items() if isinstance(env, dict) else ():
        where = document.where_key(("env", name))
        if name in names:
            problems.append(f"{where}: {quote(name)} stands in env and in secrets; keep one of them")
        elif _SECRET_NAME.search(name) and _like_a_secret(value):
            problems.append(
                f"{where}: env.{name} looks like a secret, which a recipe only names; "
                f'write its name under "secrets" in place of its value'
            )
        elif name.startswith("ORCH_"):
            problems.append(f"{where}: env.{name} cannot be set: names that begin with ORCH_ are orch's own")
    return problems


def _gpus_problems(document: Document) -> list[str]:
    """Two that say which GPUs could say different ones."""
    env = document.data.get("env")
    if document.data.get("gpus") is None or not isinstance(env, dict) or "CUDA_VISIBLE_DEVICES" not in env:
        return []
    return [f"{document.where_key(('gpus',))}: gpus and env.CUDA_VISIBLE_DEVICES exclude each other; keep one of them"]


def _places_problems(document: Document, whole: bool) -> list[str]:
    """What only the list of places as a whole can show."""
    places, elastic = document.data.get("places"), document.data.get("elastic")
    if places is None and elastic is not None and whole:
        return [f"{document.where_key(('elastic',))}: elastic needs places, of which some may be missing"]
    if places is None:
        return []
    problems = []
    least = elastic.get("least") if isinstance(elastic, dict) else None
    if isinstance(least, str) and least.isdigit() and isinstance(places, list) and int(least) >= len(places):
        problems.append(
            f"{document.where(('elastic', 'least'))}: elastic.least must be below the number of places, {len(places)}"
        )
    if document.data.get("place") is not None:
        problems.append(f"{document.where_key(('places',))}: place and places exclude each other; keep one of them")
    entries = [entry if isinstance(entry, dict) else {} for entry in places] if isinstance(places, list) else []
    for key in ("place", "address"):
        said = [entry.get(key) for entry in entries]
        problems += [
            f"{document.where(('places', index, key))}: places[{index}].{key} stands there twice: {quote(value)}"
            for index, value in enumerate(said)
            if isinstance(value, str) and value in said[:index]
        ]
    silent = [index for index, entry in enumerate(entries) if entry.get("ranks") is None]
    if 0 < len(silent) < len(entries):
        problems.append(
            f"{document.where(('places', silent[0]))}: places[{silent[0]}] says no ranks, and others do; "
            "all say them, or none"
        )
    return problems


def _like_a_secret(value: Any) -> bool:
    return isinstance(value, str) and len(value) >= _SECRET_LENGTH and not value.startswith("<")
