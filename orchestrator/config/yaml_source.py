"""YAML read with the place of every key and value kept, so that each problem can name its line.

Scalars are *text* outside the keys named in `typed`: `torch: 2.10` stays "2.10", `no` and `on` stay words,
`0200` keeps its zero, and the models turn text into numbers where a number is meant. Under a typed key (a
recipe's `settings`) scalars become values: YAML 1.1's booleans, because the trainer's own YAML has them,
and numbers that include `1e-4`, which YAML 1.1 takes for text; but neither dates, nor sexagesimal numbers,
nor octal ones by a leading zero.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from orchestrator.config.words import quote
from orchestrator.config.words import shown as shown  # also from here
from orchestrator.errors import ConfigError, UsageError

Loc = tuple[str | int, ...]
Where = Callable[[int, int | None], str]

_MAX_BYTES = 4 << 20
_MAX_VALUES = 100_000  # aliases can make a short file expand without end
_TAG = "tag:yaml.org,2002:"
_FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)\Z"
)


class _Loader(yaml.SafeLoader):
    """Only composes nodes; which plain scalars are more than text is decided here, not by YAML 1.1."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  (PyYAML's own class attribute)


class _Dumper(yaml.SafeDumper):
    """Quotes whatever either YAML 1.1 or the loader above would take for something other than text."""


for _kind, _pattern, _first in (
    (
        "bool",
        r"(?:yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF)\Z",
        "yYnNtTfFoO",
    ),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)\Z", "-+0123456789"),
    ("null", r"(?:~|null|Null|NULL|)\Z", ["~", "n", "N", ""]),
    ("merge", r"<<\Z", "<"),
):
    _Loader.add_implicit_resolver(_TAG + _kind, re.compile(_pattern), list(_first))
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(_TAG + "float", _FLOAT, list("-+.0123456789"))


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # PyYAML folds these line breaks in its single-quoted style, and then they are read back as spaces
    style = '"' if any(c in text for c in "\x85\u2028\u2029") else None
    return dumper.represent_scalar(_TAG + "str", text, style=style)


_Dumper.add_representer(str, _represent_text)


@dataclass
class Document:
    """What a YAML text holds: plain data, and where (`file:line`) each key and each value stands."""

    data: Any
    keys: dict[Loc, str] = field(default_factory=dict)
    values: dict[Loc, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)  # duplicate keys, tags, …: the rest was still read

    def where(self, loc: Loc) -> str:
        """Where the value at `loc` stands, or else the nearest thing around it."""
        while loc and loc not in self.values:
            loc = loc[:-1]
        return self.values[loc]

    def where_key(self, loc: Loc) -> str:
        """Where the key at `loc` stands; the whole document has none, so there it is its first line."""
        return self.keys.get(loc) or self.where(loc)


def read_yaml(path: Path, typed: Collection[str] = ()) -> Document:
    """The document in a file; `ConfigError` when it is no YAML at all."""
    name = shown(path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror or error}") from error
    if len(raw) > _MAX_BYTES:
        raise ConfigError([f"{name}: the file is {len(raw)} bytes long, more than the {_MAX_BYTES} that are read"])
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError([f"{name}:{line}: the file is not UTF-8 text; save it as UTF-8"]) from error

    def where(line: int, column: int | None = None) -> str:
        return f"{name}:{line}" if column is None else f"{name}:{line}:{column}"

    return parse_yaml(text, where, typed)


def parse_yaml(text: str, where: Where, typed: Collection[str] = (), at: Loc = ()) -> Document:
    """The document in a text; `at` is where in a larger document it will stand."""
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        # a bracket or quote that stays open is shown where it opens, not where the file ends
        braced = _braced(error, text)
        if braced is not None:
            raise ConfigError([f"{where(*braced[:2])}: {braced[2]}"]) from error
        opens = "flow" in (error.context or "") or "quoted scalar" in (error.context or "")
        mark = (error.context_mark if opens else None) or error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        raise ConfigError([f"{where(line, column)}: {_syntax(error, text, line, column)}"]) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        code = error.character if isinstance(error.character, int) else ord(error.character)
        raise ConfigError([f"{where(line, None)}: the character U+{code:04X} cannot stand in YAML"]) from error
    except RecursionError as error:
        raise ConfigError([f"{where(1, None)}: the values are nested too deeply"]) from error
    builder = _Builder(where, frozenset(typed))
    if node is None:
        return Document(None, values={at: where(1, None)})
    try:
        builder.document.data = builder.build(node, at, None)
    except RecursionError as error:
        raise ConfigError([f"{where(1, None)}: the values are nested too deeply"]) from error
    return builder.document


def dump_yaml(data: Any) -> str:
    """YAML that `read_yaml` (and any YAML 1.1 reader) takes back to equal data, in the order given."""
    return str(yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100))


def _braced(error: yaml.MarkedYAMLError, text: str) -> tuple[int, int, str] | None:
    """Line, column and sentence where `{run_dir}/x` stands without quotes: a mapping to YAML, with text after it."""
    mark = error.problem_mark
    lines = text.splitlines()
    if mark is None or mark.line >= len(lines) or "'<scalar>'" not in (error.problem or ""):
        return None
    line = lines[mark.line]
    found = re.search(r"\{[^{}]*\}\s*\Z", line[: mark.column])
    if found is None:
        return None
    whole = re.split(r"[,\]}]|\s+#", line[found.end() :])[0].rstrip()
    sentence = f'text that begins with "{{" needs quotes: "{line[found.start() : found.end()]}{whole}"'
    return mark.line + 1, found.start() + 1, sentence


def _syntax(error: yaml.MarkedYAMLError, text: str, line: int, column: int) -> str:
    problem = error.problem or error.context or "it cannot be parsed"
    lines = text.splitlines()
    rest = lines[line - 1][column - 1 :] if line <= len(lines) else ""
    if "'\\t'" in problem or rest.startswith("\t"):
        return "a tab cannot indent YAML; use spaces"
    if "but found another document" in problem:
        return 'only one YAML document may stand in the file; remove the line "---"'
    if "mapping values are not allowed here" in problem:
        return 'a ":" is not expected here; quote the text if it belongs to it, or check the indentation'
    if "quoted scalar" in (error.context or "") and "end of stream" in problem:
        return "this quote is never closed"
    if "flow" in (error.context or "") and rest[:1] in ("[", "{"):
        return f"this {quote(rest[0])} is not closed, or a comma is missing between its values"
    if "expected <block end>" in problem:
        return "the indentation does not fit the lines above"
    if "found undefined alias" in problem:
        return "this alias (*name) has no anchor (&name) before it"
    if rest[:1] in ("@", "`", "%") and "cannot start any token" in problem:
        return f"text cannot begin with {quote(rest[0])}; quote it"
    return f"this is not valid YAML: {problem.replace('<', '').replace('>', '')}"


def _only_word(node: yaml.MappingNode) -> str | None:
    """The word of `{word}`: nobody means a mapping with one key and no value by it."""
    if not node.flow_style or len(node.value) != 1:
        return None
    key, value = node.value[0]
    # nothing at all after the word, not even the ":" of a value that was left out
    bare = isinstance(value, yaml.ScalarNode) and key.end_mark.index == value.start_mark.index == value.end_mark.index
    plain = isinstance(key, yaml.ScalarNode) and key.style is None and re.fullmatch(r"\w+", key.value)
    return str(key.value) if bare and plain else None


class _Builder:
    """Turns nodes into data, with aliases followed, merge keys applied and every place noted."""

    def __init__(self, where: Where, typed: frozenset[str]) -> None:
        self.document = Document(None)
        self._where = where
        self._typed = typed
        self._open: set[int] = set()
        self._count = 0

    def _at(self, node: yaml.Node) -> str:
        return self._where(node.start_mark.line + 1, None)

    def _problem(self, node: yaml.Node, text: str) -> None:
        # the same node can be met again through an alias
        sentence = f"{self._at(node)}: {text}"
        if sentence not in self.document.problems:
            self.document.problems.append(sentence)

    def _bound(self, node: yaml.Node) -> None:
        self._count += 1
        if self._count > _MAX_VALUES:
            raise ConfigError([f"{self._at(node)}: aliases make this more than {_MAX_VALUES} values"])

    def build(self, node: yaml.Node, loc: Loc, key_at: str | None) -> Any:
        self._bound(node)
        scalar = isinstance(node, yaml.ScalarNode)
        self.document.values[loc] = self._at(node) if scalar or key_at is None else key_at
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, bool(loc) and loc[0] in self._typed)
        if id(node) in self._open:
            self._problem(node, "this value contains itself through an alias")
            return None
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
                return [self.build(item, (*loc, index), None) for index, item in enumerate(node.value)]
            if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
                word = _only_word(node)
                if word is not None:
                    self._problem(node, f'{{{word}}} without quotes is a mapping; for the text write "{{{word}}}"')
                    return f"{{{word}}}"
                return self._mapping(node, loc)
        finally:
            self._open.discard(id(node))
        self._problem(node, f"the tag {quote(node.tag.replace(_TAG, '!!'))} is not used here; remove it")
        return None

    def _mapping(self, node: yaml.MappingNode, loc: Loc) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, (key_node, value_node) in self._pairs(node, loc, set()).items():
            at = self._at(key_node)
            inner: Loc = (*loc, key)
            self.document.keys[inner] = at
            found[key] = self.build(value_node, inner, at)
        return found

    def _pairs(
        self, node: yaml.MappingNode, loc: Loc, merging: set[int]
    ) -> dict[str, tuple[yaml.ScalarNode, yaml.Node]]:
        """Keys to nodes; what is written here goes before what is merged, an earlier merge before a later."""
        self._bound(node)
        own: dict[str, tuple[yaml.ScalarNode, yaml.Node]] = {}
        merged: dict[str, tuple[yaml.ScalarNode, yaml.Node]] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._problem(key_node, "a key must be plain text, not a list or a mapping")
            elif key_node.tag == _TAG + "merge":
                for base in self._bases(value_node):
                    if id(base) in merging | {id(node)}:
                        self._problem(key_node, "this merge (<<) contains itself")
                        continue
                    for key, pair in self._pairs(base, loc, merging | {id(node)}).items():
                        merged.setdefault(key, pair)
            elif key_node.value in own:
                first = own[key_node.value][0].start_mark.line + 1
                name = ".".join(str(part) for part in (*loc, key_node.value))
                self._problem(key_node, f"the key {quote(name)} is there already, in line {first}; keep one of them")
            else:
                own[key_node.value] = (key_node, value_node)
        return own | {key: pair for key, pair in merged.items() if key not in own}

    def _bases(self, node: yaml.Node) -> Iterator[yaml.MappingNode]:
        for base in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            if isinstance(base, yaml.MappingNode):
                yield base
            else:
                self._problem(base, "a merge key (<<) takes a mapping or a list of mappings")

    def _scalar(self, node: yaml.ScalarNode, typed: bool) -> Any:
        text: str = node.value
        kind = node.tag.removeprefix(_TAG)
        if kind == "null":
            return None
        if kind not in ("str", "int", "float", "bool", "merge"):
            self._problem(node, f"the tag {quote(node.tag.replace(_TAG, '!!'))} is not used here; remove it")
            return text
        if not typed or kind in ("str", "merge"):
            return text
        try:
            if kind == "bool":
                return {"yes": True, "true": True, "on": True, "no": False, "false": False, "off": False}[text.lower()]
            if kind == "int":
                return int(text.replace("_", ""), 16 if "x" in text else 10)
            number = float(text.replace("_", ""))
        except (ValueError, KeyError):
            wanted = {"int": "not a whole number", "float": "not a number", "bool": "neither true nor false"}
            self._problem(node, f"{quote(text)} is {wanted[kind]}")
            return text
        if number in (float("inf"), float("-inf")) or number != number:
            self._problem(node, f"{quote(text)} is not a finite number")
        return number
