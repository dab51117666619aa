"""Reads a YAML file into frozen dataclasses.

Every mistake of the file is reported at once, each with its line; an unknown key comes with the nearest right
one. Relative paths are taken from the file's own directory.
"""

import dataclasses
import difflib
import math
import types
import typing
from dataclasses import field
from pathlib import Path
from typing import Any

import yaml


class ConfigError(Exception):
    """All mistakes of one file, a line of text each."""


def setting(
    default: Any = dataclasses.MISSING,
    *,
    least: float | None = None,
    most: float | None = None,
    among: tuple[str, ...] = (),
) -> Any:
    """A field with inclusive bounds or a choice; for a tuple they hold for each of its items."""
    return field(default=default, metadata={"least": least, "most": most, "among": among})


class Reader:
    """Walks YAML nodes beside dataclass fields and gathers problems as (line, text)."""

    def __init__(self, path: Path):
        self.path = path
        self.problems: list[tuple[int, str]] = []
        self.lines: dict[str, int] = {}

    def root(self, overrides: list[str]) -> yaml.MappingNode:
        """The file's mapping, with `overrides` laid over it. Raises ConfigError when there is none."""
        path = self.path
        try:
            root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"{path}: is not UTF-8 text") from None
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            raise ConfigError(
                f"{path}:{mark.line + 1 if mark else 1}: not YAML: {getattr(error, 'problem', error)}"
            ) from None
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"{path}:1: a configuration is a mapping of settings, beginning with `name: …`")
        for override in overrides:
            self.override(root, override)
        return root

    @staticmethod
    def take(root: yaml.MappingNode, name: str) -> yaml.Node | None:
        """Removes a key, and returns its value."""
        found = next((value for key, value in root.value if key.value == name), None)
        root.value = [pair for pair in root.value if pair[0].value != name]
        return found

    def laid_over(self, under: yaml.MappingNode, changes: list[tuple[yaml.Node, yaml.Node]]) -> yaml.MappingNode:
        """A copy of `under` in which `changes` replace values, and reach into mappings."""
        pairs = {key.value: (key, value) for key, value in under.value}
        for key, value in changes:
            _, old = pairs.get(key.value, (None, None))
            if isinstance(old, yaml.MappingNode) and isinstance(value, yaml.MappingNode):
                value = self.laid_over(old, value.value)
            pairs[key.value] = (key, value)
        return yaml.MappingNode(under.tag, list(pairs.values()), under.start_mark, under.end_mark)

    def raise_problems(self) -> None:
        if self.problems:
            raise ConfigError("\n".join(text for _, text in sorted(self.problems)))

    def problem_of(self, name: str, text: str) -> None:
        """Of the setting with this full name, where the file has it."""
        self.problem(self.lines.get(name, 1), f"`{name}` {text}")

    def problem(self, node: yaml.Node | int, text: str) -> None:
        line = node if isinstance(node, int) else node.start_mark.line + 1
        where = f"{self.path}:{line}" if line else "--set"
        self.problems.append((line, f"{where}: {text}"))

    def override(self, root: yaml.MappingNode, text: str) -> None:
        name, equals, value = text.partition("=")
        if not equals:
            return self.problem(0, f"{text}: expected KEY=VALUE")
        mark = yaml.Mark("--set", 0, -1, 0, None, None)  # line -1 makes line 0, which problem() knows
        try:
            leaf = yaml.compose(value, Loader=yaml.SafeLoader)
        except yaml.YAMLError:
            leaf = None
        if leaf is None:
            return self.problem(0, f"{text}: the value is not YAML")
        _mark(leaf, mark)
        *parents, last = name.split(".")
        node = root
        for part in parents:
            below = next((v for k, v in node.value if k.value == part), None)
            if below is None:
                below = yaml.MappingNode("tag:yaml.org,2002:map", [], mark, mark)
                node.value.append((yaml.ScalarNode("tag:yaml.org,2002:str", part, mark, mark), below))
            if not isinstance(below, yaml.MappingNode):
                return self.problem(0, f"{name}: {part} has no settings below it")
            node = below
        node.value = [(k, v) for k, v in node.value if k.value != last]
        node.value.append((yaml.ScalarNode("tag:yaml.org,2002:str", last, mark, mark), leaf))
        return None

    def section(self, kind: type, node: yaml.Node, prefix: str) -> Any:
        if isinstance(node, yaml.ScalarNode) and node.tag.endswith(":null"):  # as good as left out
            node = yaml.MappingNode("tag:yaml.org,2002:map", [], node.start_mark, node.end_mark)
        if not isinstance(node, yaml.MappingNode):
            return self.problem(node, f"{prefix.rstrip('.')}: expected settings below it, one a line")
        fields = {item.name: item for item in dataclasses.fields(kind) if "key" not in item.metadata}
        values: dict[str, Any] = {}
        for key, value in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else "?"
            if name not in fields:
                near = difflib.get_close_matches(name, fields, n=1, cutoff=0.5)
                hint = f"did you mean `{near[0]}`?" if near else f"known here: {', '.join(fields)}"
                self.problem(key, f"unknown setting `{prefix}{name}`: {hint}")
            elif name in values:
                self.problem(key, f"`{prefix}{name}` is set twice; first on line {self.lines[prefix + name]}")
            else:
                self.lines[prefix + name] = key.start_mark.line + 1
                values[name] = self.value(fields[name], value, prefix + name)
        for name, item in fields.items():
            if name not in values and item.default is item.default_factory is dataclasses.MISSING:
                self.problem(node, f"`{prefix}{name}` is missing")
        return kind(**values) if not self.problems else None

    def value(self, item: dataclasses.Field, node: yaml.Node, name: str) -> Any:
        kind = item.type
        if dataclasses.is_dataclass(kind):
            return self.section(kind, node, f"{name}.")
        if isinstance(kind, types.UnionType):  # `Path | None`: null stands for the default
            kind = typing.get_args(kind)[0]
            if isinstance(node, yaml.ScalarNode) and node.tag.endswith(":null"):
                return None
        if typing.get_origin(kind) is tuple:
            each = typing.get_args(kind)[0]
            if isinstance(node, yaml.ScalarNode) and each is not int:
                return (self.scalar(each, node, name, item.metadata),)
            if not isinstance(node, yaml.SequenceNode) or not node.value:
                example = "whole numbers, such as [1, 3, 4]" if each is int else "paths"
                return self.problem(node, f"`{name}` must be a list of {example}")
            return tuple(self.scalar(each, entry, name, item.metadata) for entry in node.value)
        if typing.get_origin(kind) is dict:
            if not isinstance(node, yaml.MappingNode):
                return self.problem(node, f"`{name}` must be a mapping, such as {{enable_thinking: false}}")
            try:
                return yaml.SafeLoader("").construct_mapping(node, deep=True)
            except yaml.YAMLError as error:
                return self.problem(node, f"`{name}` cannot be read: {error.problem}")
        return self.scalar(kind, node, name, item.metadata)

    def scalar(self, kind: type, node: yaml.Node, name: str, bounds: Any) -> Any:
        wanted = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path"}[kind]
        if not isinstance(node, yaml.ScalarNode) or node.tag.endswith(":null"):
            return self.problem(node, f"`{name}` must be {wanted}")
        if kind is bool:
            words = yaml.SafeLoader.bool_values
            if not node.tag.endswith(":bool"):
                return self.problem(node, f"`{name}` must be {wanted}, not `{node.value}`")
            return words[node.value.lower()]
        if kind is Path:
            return (self.path.parent / Path(node.value).expanduser()).resolve()
        try:
            value = kind(node.value)  # the text itself: YAML reads 1e-2 as text, and 010 as 8
        except ValueError:
            return self.problem(node, f"`{name}` must be {wanted}, not `{node.value}`")
        if isinstance(value, float) and not math.isfinite(value):
            return self.problem(node, f"`{name}` must be a finite number, not `{node.value}`")
        least, most, among = bounds.get("least"), bounds.get("most"), bounds.get("among")
        if among and value not in among:
            return self.problem(node, f"`{name}` must be one of {', '.join(among)}, not `{value}`")
        if least is not None and value < least:
            return self.problem(node, f"`{name}` must be at least {least:g}, not {node.value}")
        if most is not None and value > most:
            return self.problem(node, f"`{name}` must be at most {most:g}, not {node.value}")
        return value


def _mark(node: yaml.Node, mark: yaml.Mark) -> None:
    """Every part of what an override says comes from there."""
    node.start_mark = mark
    for below in node.value if not isinstance(node, yaml.ScalarNode) else ():
        for part in below if isinstance(below, tuple) else (below,):
            _mark(part, mark)
