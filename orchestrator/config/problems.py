"""From a document to a model, or to one sentence for each thing that is wrong with it."""

from __future__ import annotations

import re
import types
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from orchestrator.config.models import Expect, Given
from orchestrator.config.words import did_you_mean, nearest, quote
from orchestrator.config.yaml_source import Document, Loc

Model = TypeVar("Model", bound=BaseModel)

_ANYTHING = Expect("a value of another kind")


def validate(
    model: type[Model], document: Document, at: Loc = (), given: Mapping[str, Any] | None = None
) -> tuple[Model | None, list[str]]:
    """The model of what stands at `at` in the document, or None with every problem of it.

    `given` fills the fields that are no keys of the file. The names in the sentences begin below `at`: the
    line says the rest.
    """
    data: Any = document.data
    for part in at:
        data = data[part]
    if data is None:
        data = {}  # a file or key with nothing below it yet
    if not isinstance(data, dict):
        subject = dotted(at) if at else "the file"
        return None, [f"{document.where_key(at)}: {subject} must be a mapping (key: value), not {quote(data)}"]
    given = given or {}
    problems = [
        (document.where_key((*at, name)), _unknown(model, (name,)))
        for name, field in model.model_fields.items()
        if name in data and _mark(field.metadata, Given)
    ]
    try:
        found = model.model_validate(_without_empty(model, data) | dict(given))
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False)
        meant = {_meant(model, item["loc"]) for item in errors if item["type"] == "extra_forbidden"}
        for item in errors:
            # a mistyped key is one problem, not an unknown key and a missing one
            if item["type"] != "missing" or item["loc"] not in meant:
                problems.append(_sentence(model, document, at, item["type"], item["loc"], item["input"]))
        found = None
    return (None if problems else found), [f"{where}: {text}" for where, text in problems]


def dotted(loc: Sequence[str | int]) -> str:
    """`ssh.port`, `secrets[0]`."""
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f"{'.' if text else ''}{part}"
    return text


def in_order(problems: Sequence[str]) -> list[str]:
    """By line, as one walks through each file; what has no line goes first."""
    files: dict[str, int] = {}

    def line(problem: str) -> tuple[int, int]:
        found = re.match(r"([^:\n]*):(\d+)", problem)
        return (files.setdefault(found[1], len(files) + 1), int(found[2])) if found else (0, 0)

    return sorted(problems, key=line)


def keys_of(model: type[BaseModel]) -> list[str]:
    """The keys that a file may use for this model."""
    return [name for name, field in model.model_fields.items() if not _mark(field.metadata, Given)]


def _sentence(model: type[BaseModel], document: Document, at: Loc, kind: str, loc: Loc, value: Any) -> tuple[str, str]:
    """Where, and what is wrong there."""
    if loc and loc[-1] == "[key]":
        loc, around = loc[:-1], dotted(loc[:-2])
        expect = _expect(model, loc, of_key=True)
        return document.where_key((*at, *loc)), f"a key of {around} must be {expect.words}, not {quote(loc[-1])}"
    if kind == "extra_forbidden":
        return document.where_key((*at, *loc)), _unknown(model, loc)
    expect = _expect(model, loc)
    if kind == "missing":
        advice = f'; add "{expect.add}"' if expect.add else ""
        inside = f" in {dotted(loc[:-1])}" if len(loc) > 1 else ""
        if (*at, *loc) in document.keys:
            return document.where_key((*at, *loc)), f"{dotted(loc)} has no value: it must be {expect.words}"
        return (
            document.where_key((*at, *loc[:-1])),
            f'the key "{loc[-1]}" is missing{inside}{advice} ({expect.words})',
        )
    found = "" if expect.private else f", not {_found(kind, value)}"
    if kind == "literal_error" and isinstance(value, str):
        found += did_you_mean(value, map(str, get_args(_walk(model, loc)[0])))
    return document.where((*at, *loc)), f"{dotted(loc)} must be {expect.words}{found}"


def _found(kind: str, value: Any) -> str:
    if kind == "too_short" and value:
        return f"a list of {len(value)}"
    return "an empty list" if value == [] else quote(value)


def _meant(model: type[BaseModel], loc: Loc) -> Loc:
    """The key that an unknown one was most likely meant to be."""
    owner = _model_at(model, loc[:-1]) or model
    return (*loc[:-1], nearest(str(loc[-1]), keys_of(owner)) or "")


def _unknown(model: type[BaseModel], loc: Loc) -> str:
    owner = _model_at(model, loc[:-1]) or model
    name, known = str(loc[-1]), keys_of(owner)
    inside = f" in {dotted(loc[:-1])}" if len(loc) > 1 else ""
    advice = did_you_mean(name, known) or f" (there are: {', '.join(known)})"
    return f"unknown key {quote(name)}{inside}{advice}"


# -- what the annotations say about a place in the data --


def _mark(metadata: Sequence[Any], kind: type[Any]) -> Any:
    return next((item for item in metadata if isinstance(item, kind)), None)


def _plain(annotation: Any) -> tuple[Any, list[Any]]:
    """The type below `Annotated` and `… | None`, and the metadata met on the way."""
    metadata: list[Any] = []
    while True:
        if get_origin(annotation) is Annotated:
            annotation, *more = get_args(annotation)
            metadata += more
        elif get_origin(annotation) in (Union, types.UnionType):
            annotation = next(part for part in get_args(annotation) if part is not type(None))
        else:
            return annotation, metadata


def _walk(model: type[BaseModel], loc: Loc, of_key: bool = False) -> tuple[Any, list[Any]]:
    """The type and the metadata of what stands at `loc` in the model."""
    annotation: Any = model
    metadata: list[Any] = []
    for index, part in enumerate(loc):
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            field: FieldInfo | None = annotation.model_fields.get(str(part))
            if field is None:
                return None, []
            annotation, inner = _plain(field.annotation)
            metadata = [*field.metadata, *inner]
        else:
            arguments = get_args(annotation)
            if not arguments:
                return None, []
            wanted = arguments[0] if of_key and index == len(loc) - 1 else arguments[-1]
            annotation, metadata = _plain(wanted)
    return annotation, metadata


def _model_at(model: type[BaseModel], loc: Loc) -> type[BaseModel] | None:
    found, _ = _walk(model, loc)
    return found if isinstance(found, type) and issubclass(found, BaseModel) else None


def _expect(model: type[BaseModel], loc: Loc, of_key: bool = False) -> Expect:
    return _mark(_walk(model, loc, of_key)[1], Expect) or _ANYTHING


def _without_empty(model: type[BaseModel], data: dict[str, Any]) -> dict[str, Any]:
    """Without the keys that have nothing after them: `env:` whose lines are commented out means no `env`."""
    kept: dict[str, Any] = {}
    for name, value in data.items():
        inner = _model_at(model, (name,))
        if inner is not None and isinstance(value, dict):
            kept[name] = _without_empty(inner, value)
        elif value is not None or name not in model.model_fields:
            kept[name] = value
    return kept
