"""JSON Schema (2020-12) of hosts.yaml, recipes and environments, made from the models that read them.

The models see text, since the loaders take every scalar as such; an editor sees YAML's numbers and booleans. So a key
takes each kind of scalar whose text its model takes. What the loaders write out before the models see it (a host's
`ssh` as text, a container without `kind`) is said here too. What a schema refuses the loaders refuse; they refuse more:
what several keys mean together, and what only code can tell of a text.
"""

from __future__ import annotations

import functools
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel, BeforeValidator, StringConstraints, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from orchestrator.config.models import (
    CONTAINER_NAME,
    HOST_NAME,
    Container,
    EnvironmentSpec,
    Expect,
    Given,
    Host,
    Recipe,
    Ssh,
)
from orchestrator.schema_words import Table, table

KINDS = ("recipe", "hosts", "environment")
DIALECT = "https://json-schema.org/draft/2020-12/schema"

Schema = dict[str, Any]

# Texts of scalars that an editor's YAML takes for something else than text.
_OTHER_SCALARS = {
    "integer": ("0", "1", "7", "12", "200", "1024", "-1"),
    "number": ("0.5", "1.5", "3.11", "-1.5", "1e5"),
    "boolean": ("true", "false"),
}
_WORDS = {"true": ("true", "yes", "on", "t", "y", "1"), "false": ("false", "no", "off", "f", "n", "0")}
_ANY_SCALAR = ["string", "integer", "number", "boolean"]


def schema(kind: str) -> Schema:
    """The schema of a kind of file: "recipe", "hosts" or "environment" (its spec.yaml)."""
    made = {"recipe": _recipe, "hosts": _hosts, "environment": _environment}[kind]()
    return {"$schema": DIALECT, "title": {"hosts": "orch: hosts.yaml"}.get(kind, f"orch: {kind}"), **made}


class _Definitions:
    """One definition a model, each made once."""

    def __init__(self) -> None:
        self.made: dict[str, Schema] = {}

    def refer(self, model: type[BaseModel], words: Table) -> Schema:
        if model.__name__ not in self.made:
            self.made[model.__name__] = {}  # a model within itself
            self.made[model.__name__] = _mapping(model, words, self)
        return {"$ref": f"#/$defs/{model.__name__}"}


def _recipe() -> Schema:
    inner = _Definitions()
    made = _mapping(Recipe, table("recipe"), inner)
    # what a recipe builds on may say the rest, also of a mapping within
    whole: Schema = {"required": made.pop("required")}
    whole["required"].remove("name")  # the file's
    made["properties"]["name"] = _or_null(made["properties"]["name"])
    parts: dict[str, Schema] = {}
    for name, field in Recipe.model_fields.items():
        model = _plain(field.annotation)[0]
        needed = _required(model) if _is_model(model) else []
        if needed:
            inner.made[model.__name__].pop("required")
            parts[name] = {"if": {"type": "object"}, "then": {"required": needed}}
    # a variable with nothing after it takes the base's away
    variables = made["properties"]["env"]
    variables["additionalProperties"] = _or_null(variables["additionalProperties"])
    parts["env"] = {"additionalProperties": {"not": {"type": "null"}}}
    whole["properties"] = parts
    extending = {"required": ["extends"], "properties": {"extends": {"not": {"type": "null"}}}}
    return {**made, "if": extending, "then": True, "else": whole, "$defs": inner.made}


def _environment() -> Schema:
    inner = _Definitions()
    return {**_mapping(EnvironmentSpec, table("environment"), inner), "$defs": inner.made}


def _hosts() -> Schema:
    inner = _Definitions()
    host = _mapping(Host, table("host"), inner)
    ssh = inner.refer(Ssh, table("ssh"))
    text = {"type": _ANY_SCALAR, "minLength": 1}
    said = {key: value for key, value in host["properties"]["ssh"].items() if key == "description"}
    here: Schema = {**host, "type": ["object", "null"], "properties": dict(host["properties"])}
    here["properties"]["ssh"] = {"type": "null", "description": "local is this machine and takes no ssh"}
    host = {**host, "required": ["ssh"]}
    host["properties"]["ssh"] = {**said, "anyOf": [text, ssh, {"type": "null"}]}
    # kind and id follow from the container's name, and nothing after the name is as good as an empty mapping
    container = inner.made["Container"]
    container.pop("required", None)
    container["type"] = ["object", "null"]
    for key in ("kind", "id"):
        container["properties"][key] = _or_null(container["properties"][key])
    inner.made.update(Host=host, LocalHost=here)
    hosts: Schema = {
        "description": "the machines, each by a name of its own; local, this machine, is always there",
        "type": ["object", "null"],
        "propertyNames": {"pattern": f"^(?:{HOST_NAME})$"},
        "properties": {"local": {"$ref": "#/$defs/LocalHost"}},
        "additionalProperties": {"$ref": "#/$defs/Host"},
    }
    containers = host["properties"]["containers"]
    kinds = {"enum": list(get_args(_plain(Container.model_fields["kind"].annotation)[0]))}
    containers["additionalProperties"] = {"anyOf": [kinds, {"$ref": "#/$defs/Container"}]}
    containers["propertyNames"] = {"pattern": f"^(?:{CONTAINER_NAME})$"}
    return {
        "type": ["object", "null"],
        "properties": {"hosts": hosts},
        "additionalProperties": False,
        "$defs": inner.made,
    }


# -- from models to schemas --


def _mapping(model: type[BaseModel], words: Table, inner: _Definitions) -> Schema:
    properties = {}
    for name, field in model.model_fields.items():
        if _marks(field.metadata, Given):
            continue
        made = _value(field.annotation, list(field.metadata), words.below(name), inner)
        if not field.is_required():
            made = _or_null(made)
        expect = _marks(_plain(field.annotation)[1] + list(field.metadata), Expect)
        text = words.text(name) or (expect[0].words if expect else "")
        if text:
            made = {**made, "description": text}
        properties[name] = {**made, **_default(field)}
    made = {"type": "object", "properties": properties, "additionalProperties": False}
    needed = _required(model)
    return {**made, "required": needed} if needed else made


def _required(model: type[BaseModel]) -> list[str]:
    fields = model.model_fields.items()
    return [name for name, field in fields if field.is_required() and not _marks(field.metadata, Given)]


def _default(field: FieldInfo) -> Schema:
    value = field.get_default(call_default_factory=False)
    known = value is not PydanticUndefined and isinstance(value, (str, int, float)) and value != ""
    return {"default": value} if known else {}


def _value(annotation: Any, metadata: list[Any], words: Table, inner: _Definitions) -> Schema:
    """What may stand for a value of this type, as YAML has it."""
    plain, more = _plain(annotation)
    metadata = [*metadata, *more]
    if _marks(metadata, BeforeValidator):
        # a shorthand that the model itself writes out: such scalars as it takes, beside the types that it is of
        is_union = get_origin(plain) in (Union, types.UnionType)
        others = [part for part in (get_args(plain) if is_union else [plain]) if part not in (str, type(None))]
        scalars: Schema = {"type": _scalars(plain, metadata)}
        return {"anyOf": [scalars, *(_of_type(part, [], words, inner) for part in others)]}
    made = _of_type(plain, metadata, words, inner)
    expect = _marks(metadata, Expect)
    if "pattern" in made and expect:
        made["patternErrorMessage"] = f"must be {expect[0].words}"
    return made


def _of_type(plain: Any, metadata: list[Any], words: Table, inner: _Definitions) -> Schema:
    origin = get_origin(plain)
    if origin in (Union, types.UnionType):
        return {"anyOf": [_value(part, metadata, words, inner) for part in get_args(plain) if part is not type(None)]}
    if origin is Literal:
        return {"enum": list(get_args(plain))}
    if origin is list:
        made: Schema = {"type": "array", "items": _value(get_args(plain)[0], [], words, inner)}
        least = [mark.min_length for mark in _every(metadata) if isinstance(mark, annotated_types.MinLen)]
        return {**made, "minItems": least[0]} if least else made
    if origin is dict:
        key, value = get_args(plain)
        made = {"type": "object", "additionalProperties": _value(value, [], words, inner)}
        names = _text(*_plain(key))
        return made | ({"propertyNames": {"pattern": names["pattern"]}} if "pattern" in names else {})
    if _is_model(plain):
        return inner.refer(plain, words)
    if plain is bool:
        return {"anyOf": [{"enum": [True, False]}, {"enum": [0, 1]}, {"pattern": _any_case(), "type": "string"}]}
    if plain in (int, float):
        kind = "integer" if plain is int else "number"
        # a number in quotes is one too
        return {"type": [kind, "string"], "pattern": r"^[\s0-9.eE_+-]+$", **_bounds(metadata)}
    if plain in (str, Path):
        return _text(plain, metadata)
    return {}  # Any, and what nobody thought of here


def _scalars(plain: Any, metadata: list[Any]) -> list[str]:
    """Kinds of scalars that may stand for this: text, and those others of YAML whose text would do as well."""
    adapter: TypeAdapter[Any] = TypeAdapter(functools.reduce(lambda kind, mark: Annotated[kind, mark], metadata, plain))

    def taken(text: str) -> bool:
        try:
            adapter.validate_python(text)
        except ValidationError:
            return False
        return True

    return ["string", *(kind for kind, texts in _OTHER_SCALARS.items() if any(map(taken, texts)))]


def _text(plain: Any, metadata: list[Any]) -> Schema:
    """Text by its pattern, and other scalars."""
    kinds = _scalars(plain, metadata)
    made: Schema = {"type": kinds if len(kinds) > 1 else "string"}
    patterns = [found.pattern for found in _marks(metadata, StringConstraints) if found.pattern]
    if patterns:
        # pydantic's \z is the end of the text, which in a schema is $
        made["pattern"] = str(patterns[0]).removesuffix(r"\z") + "$"
    return made


def _bounds(metadata: list[Any]) -> Schema:
    every = _every(metadata)
    kinds = {"minimum": (annotated_types.Ge, "ge"), "exclusiveMinimum": (annotated_types.Gt, "gt")}
    kinds |= {"maximum": (annotated_types.Le, "le"), "exclusiveMaximum": (annotated_types.Lt, "lt")}
    return {
        word: getattr(item, name) for word, (kind, name) in kinds.items() for item in every if isinstance(item, kind)
    }


def _every(metadata: list[Any]) -> list[Any]:
    """The marks one by one: Field(ge=1) is a FieldInfo when it stands in Annotated by itself."""
    return [one for item in metadata for one in (item.metadata if isinstance(item, FieldInfo) else [item])]


def _any_case() -> str:
    """A pattern of pydantic's words for true and false; a schema's patterns have no flag for upper and lower case."""
    every = [word for words in _WORDS.values() for word in words]
    return f"^(?:{'|'.join(''.join(f'[{c.upper()}{c}]' if c.isalpha() else c for c in word) for word in every)})$"


def _or_null(made: Schema) -> Schema:
    """The same, or nothing after the key."""
    if made == {}:
        return made
    if "anyOf" in made:
        return {**made, "anyOf": [*made["anyOf"], {"type": "null"}]}
    if "type" in made:
        kinds = made["type"] if isinstance(made["type"], list) else [made["type"]]
        return {**made, "type": [*kinds, "null"]}
    if "enum" in made:
        return {**made, "enum": [*made["enum"], None]}
    return {"anyOf": [made, {"type": "null"}]}


def _plain(annotation: Any) -> tuple[Any, list[Any]]:
    """The type below `Annotated` and `… | None`, and the metadata met on the way."""
    metadata: list[Any] = []
    while True:
        if get_origin(annotation) is Annotated:
            annotation, *more = get_args(annotation)
            metadata += more
            continue
        if get_origin(annotation) in (Union, types.UnionType):
            parts = [part for part in get_args(annotation) if part is not type(None)]
            if len(parts) == 1:
                annotation = parts[0]
                continue
        return annotation, metadata


def _is_model(plain: Any) -> bool:
    return isinstance(plain, type) and issubclass(plain, BaseModel)


def _marks(metadata: list[Any], kind: type[Any]) -> list[Any]:
    return [item for item in metadata if isinstance(item, kind)]
