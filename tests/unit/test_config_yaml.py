"""YAML as it is read: values, places, and what is no YAML at all."""

from pathlib import Path

import pytest
import yaml

from orchestrator.config.words import listing, nearest, quote
from orchestrator.config.yaml_source import Document, dump_yaml, parse_yaml, read_yaml
from orchestrator.errors import ConfigError, UsageError


def where(line: int, column: int | None) -> str:
    return f"f:{line}" if column is None else f"f:{line}:{column}"


def parse(text: str, typed: tuple[str, ...] = ("settings",)) -> Document:
    return parse_yaml(text, where, typed)


def problems(text: str) -> list[str]:
    try:
        return parse(text).problems
    except ConfigError as error:
        return list(error.problems)


def test_scalars_outside_typed_keys_are_text() -> None:
    text = "a: 2.10\nb: 0200\nno: on\nd: 2026-01-02\ne: 1:30\n200: x\nf: true\ng:\nh: ''\n"
    assert parse(text).data == {
        "a": "2.10", "b": "0200", "no": "on", "d": "2026-01-02", "e": "1:30", "200": "x", "f": "true", "g": None,
        "h": "",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5), ("1_000_000", 1_000_000), ("0x10", 16), ("-3", -3), ("1e-4", 1e-4), ("1.5E+3", 1500.0), (".5", 0.5),
        ("3.", 3.0), ("yes", True), ("Off", False), ("true", True), ("~", None), ("null", None), ("", None),
        ("010", "010"), ("1:30", "1:30"), ("2026-01-02", "2026-01-02"), (".inf", ".inf"), (".nan", ".nan"),
        ('"5"', "5"), ("'no'", "no"), ("!!str 5", "5"), ("!!int '7'", 7), ("[1, a, 2.0]", [1, "a", 2.0]),
    ],
)  # fmt: skip
def test_scalars_below_typed_keys_are_values(text: str, value: object) -> None:
    found = parse(f"settings:\n  x: {text}\n").data["settings"]["x"]
    assert found == value
    assert type(found) is type(value)


def test_places_of_keys_and_values() -> None:
    document = parse("# c\na:\n  b:\n    - x\n    - y\nc: >\n  text\n")
    assert document.keys == {("a",): "f:2", ("a", "b"): "f:3", ("c",): "f:6"}
    assert document.values[("a", "b", 1)] == "f:5"
    assert document.values[("a", "b")] == "f:3"  # a collection stands where its key does
    assert document.where(("a", "b", 1, "deeper")) == "f:5"
    assert document.where_key(()) == "f:2"


def test_anchors_and_merges() -> None:
    document = parse(
        "base: &b {x: 1, y: 2}\nother: &o {y: 3, z: 4}\none:\n  <<: *b\n  x: 9\ntwo:\n  <<: [*b, *o]\nsame: *b\n"
    )
    assert document.problems == []
    assert document.data["one"] == {"x": "9", "y": "2"}
    assert document.data["two"] == {"x": "1", "y": "2", "z": "4"}
    assert document.data["same"] == document.data["base"]
    assert document.keys[("one", "y")] == "f:1"  # where it is written


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1\nb: 2\na: 3\n", ['f:3: the key "a" is there already, in line 1; keep one of them']),
        (
            "a:\n  200: 1\n  '200': 2\n",
            ['f:3: the key "a.200" is there already, in line 2; keep one of them'],
        ),
        ("a: [1\n", ['f:1:4: this "[" is not closed, or a comma is missing between its values']),
        ("a: {b: 1\nc: 2\n", ['f:1:4: this "{" is not closed, or a comma is missing between its values']),
        ("a: 'x\nb: 2\n", ["f:1:4: this quote is never closed"]),
        (
            "a: b: c\n",
            ['f:1:5: a ":" is not expected here; quote the text if it belongs to it, or check the indentation'],
        ),
        ("a:\n\t- b\n", ["f:2:1: a tab cannot indent YAML; use spaces"]),
        ("a:\n  - b\n c: d\n", ["f:3:2: the indentation does not fit the lines above"]),
        ("a: 1\n---\nb: 2\n", ['f:2:1: only one YAML document may stand in the file; remove the line "---"']),
        ("a: *x\n", ["f:1:4: this alias (*name) has no anchor (&name) before it"]),
        ("a: @x\n", ['f:1:4: text cannot begin with "@"; quote it']),
        ("a: \x07\n", ["f:1: the character U+0007 cannot stand in YAML"]),
        ("a: &x [*x]\n", ["f:1: this value contains itself through an alias"]),
        ("a: &x\n  <<: *x\n", ["f:2: this merge (<<) contains itself"]),
        ("<<: 3\n", ["f:1: a merge key (<<) takes a mapping or a list of mappings"]),
        ("[a]: b\n", ["f:1: a key must be plain text, not a list or a mapping"]),
        ("a: !!python/object:x {}\n", ['f:1: the tag "!!python/object:x" is not used here; remove it']),
        ("a: !x 1\n", ['f:1: the tag "!x" is not used here; remove it']),
        ("a: !!timestamp 2026-01-01\n", ['f:1: the tag "!!timestamp" is not used here; remove it']),
        ("settings: {a: !!int x}\n", ['f:1: "x" is not a whole number']),
        ("settings: {a: !!bool x}\n", ['f:1: "x" is neither true nor false']),
        ("settings: {a: 1e999}\n", ['f:1: "1e999" is not a finite number']),
        ("a: " + "[" * 5000, ["f:1: the values are nested too deeply"]),
    ],
)
def test_what_is_wrong_is_one_sentence(text: str, expected: list[str]) -> None:
    assert problems(text) == expected


def test_aliases_cannot_expand_without_end() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    assert [p.split(": ", 1)[1] for p in problems("\n".join(lines))] == ["aliases make this more than 100000 values"]
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}" for i in range(1, 9)]
    assert [p.split(": ", 1)[1] for p in problems("\n".join(lines))] == ["aliases make this more than 100000 values"]


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "f.yaml"
    with pytest.raises(UsageError, match=r"^f\.yaml cannot be read: No such file or directory$"):
        read_yaml(path)
    path.write_bytes(b"a: 1\nb: \xff\n")
    with pytest.raises(ConfigError, match=r"^f\.yaml:2: the file is not UTF-8 text; save it as UTF-8$"):
        read_yaml(path)
    path.write_bytes("\ufeffa: ü\r\nb: 2\r\n".encode())
    document = read_yaml(path)
    assert document.data == {"a": "ü", "b": "2"}
    assert document.keys[("b",)] == "f.yaml:2"
    path.write_text("# nothing\n")
    assert read_yaml(path).data is None
    path.write_text("#" * (5 << 20))
    with pytest.raises(ConfigError, match=r"more than the 4194304 that are read"):
        read_yaml(path)


def test_dump_is_read_back_by_any_yaml_reader() -> None:
    data = {
        "a": [
            "1e-4",
            "no",
            "0200",
            "2026-01-02",
            1e-5,
            1e22,
            True,
            None,
            "1:30",
            "",
            "~",
            "<<",
            "a: b",
            "\x85",
        ]
    }
    assert parse(dump_yaml({"settings": data})).data == {"settings": data}
    assert yaml.safe_load(dump_yaml(data)) == data


def test_words() -> None:
    assert quote('a"b\\c\n\x1b[0m') == '"a\\"b\\\\c\\n\\x1b[0m"'
    assert quote("x" * 100) == '"' + "x" * 39 + '…"'
    assert [quote(v) for v in (None, [1], {}, 5)] == ["nothing", "a list", "a mapping", '"5"']
    assert nearest("EXP_ddtree-fersh", ["demo", "exp-ddtree-fresh"]) == "exp-ddtree-fresh"
    assert nearest("zzz", ["demo"]) is None
    assert listing(["b", "a"]) == "a, b"
    assert listing([]) == "none"
    assert listing([f"{i:02}" for i in range(22)]).endswith("19 and 2 more")
