"""A recipe that builds on another: what is merged, what is refused, and that what is left stands for itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.config import dump_recipe, find_project, load_hosts, load_recipe, parse_recipe, recipe_digest
from orchestrator.config.extends import merged
from orchestrator.config.yaml_source import Document, dump_yaml, parse_yaml
from orchestrator.errors import ConfigError, UsageError


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "recipes").mkdir()
    return tmp_path


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def problems(name: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_recipe(find_project(), name, overrides=overrides)
    return list(caught.value.problems)


BASE = """\
name: base
environment: demo
place: pve/200
command: [python, train.py, --long]
env: {A: 1, B: 2}
settings:
  steps: 10
  optimizer: {rate: 1e-3, betas: [0.9, 0.99]}
health: {step: 5, tokens_per_second: 100}
"""


def test_mappings_are_merged_and_all_else_is_replaced(project: Path) -> None:
    write(project / "recipes", base=BASE, mid="extends: base\nenv: {B: 3}\nsettings: {optimizer: {betas: [0.5]}}\n")
    write(project / "recipes", top="extends: mid\ncommand: [sh]\nhealth: {tokens_per_second: }\nplace: local\n")
    recipe = load_recipe(find_project(), "top")
    assert (recipe.name, recipe.environment, recipe.place, recipe.command) == ("top", "demo", "local", ["sh"])
    assert recipe.env == {"A": "1", "B": "3"}
    assert recipe.settings == {"steps": 10, "optimizer": {"rate": 1e-3, "betas": [0.5]}}
    assert (recipe.health.step, recipe.health.tokens_per_second) == (5, None)

    # what a run records says all of it, and nothing of where it came from
    written = dump_recipe(recipe)
    assert "extends" not in written and parse_recipe(written) == recipe
    write(project / "recipes", whole=written.replace("name: top", "name: whole"))
    same = load_recipe(find_project(), "whole").model_copy(update={"name": "top"})
    assert recipe_digest(same, "local") == recipe_digest(recipe, "local")


def test_a_farther_recipe_of_the_same_name_and_one_by_its_path(project: Path) -> None:
    write(project / "recipes", demo="extends: demo\nsettings: {steps: 7}\n", parts="extends: ../other/x.yaml\n")
    assert load_recipe(find_project(), "demo").settings["steps"] == 7
    assert load_recipe(find_project(), "demo").settings["name"] == "demo"
    write(project / "other", x="environment: demo\ncode: .\ncommand: [sh]\n")
    code = load_recipe(find_project(), "parts").code
    assert code is not None and code.path == str(project / "other")  # where the one that says it lies


def test_place_and_places_take_each_others_place(project: Path) -> None:
    many = "environment: demo\nplaces: [{place: a, address: 192.0.2.1}, {place: b, address: 192.0.2.2}]\n"
    write(project / "recipes", many=many + "elastic: {least: 1}\n", one="extends: many\nplace: local\n")
    write(project / "recipes", again="extends: one\nplaces: [{place: c}, {place: d}]\n")
    one, again = (load_recipe(find_project(), name) for name in ("one", "again"))
    assert (one.place, one.places, one.elastic) == ("local", None, None)
    assert again.places is not None and [each.place for each in again.places] == ["c", "d"]


def test_each_problem_stands_in_the_file_and_line_that_has_it(project: Path) -> None:
    write(
        project / "recipes", base=BASE + "stop_grace: long\nmetrics: 7\n", top="extends: base\n\nmetrics: 8\nplac: x\n"
    )
    found = problems("top", "sample_seconds=never")
    assert [one.split(" must")[0].split(" (")[0] for one in found] == [
        "--set sample_seconds: sample_seconds",
        "recipes/top.yaml:3: metrics",
        'recipes/top.yaml:4: unknown key "plac"',
        "recipes/base.yaml:10: stop_grace",
    ]


def test_missing_bases_and_rounds(project: Path) -> None:
    write(project / "recipes", a="metrics: 8\nextends: b\n", b="extends: c\n", c="# round\nextends: a\nstop_grace: x\n")
    assert problems("a") == [
        "recipes/c.yaml:2: extends leads back to where it began: "
        "recipes/a.yaml → recipes/b.yaml → recipes/c.yaml → recipes/a.yaml",
        'recipes/c.yaml:3: stop_grace must be a number of seconds from 0 to 86400, not "x"',
        'recipes/a.yaml:1: metrics must be true or false, not "8"',
    ]
    write(project / "recipes", base=BASE, near="extends: bose\nmetrics: 8\n", self="extends: self\n")
    write(project / "recipes", path="code: .\nextends: ./no.yaml\n", wrong="extends: [base]\n")
    assert problems("near") == [
        'recipes/near.yaml:1: there is no recipe "bose" to build on (did you mean "base"?)',
        'recipes/near.yaml:2: metrics must be true or false, not "8"',
    ]
    assert problems("self") == [
        'recipes/self.yaml:1: a recipe cannot build on itself, and no other folder has a recipe "self"'
    ]
    assert problems("path") == ["recipes/path.yaml:2: there is no recipe file recipes/no.yaml to build on"]
    assert problems("wrong") == [
        "recipes/wrong.yaml:1: extends must be the name of a recipe, or the path of its file, not a list"
    ]
    write(project / "recipes", broken="a: [\n", on="extends: broken\nmetrics: 8\n")
    assert [one.split(": ")[0] for one in problems("on")] == ["recipes/broken.yaml:2:1", "recipes/on.yaml:2"]


def test_set_reaches_into_what_was_merged_and_into_lists(project: Path) -> None:
    write(project / "recipes", base=BASE, top="extends: base\n")
    overrides = ["command.1=other.py", "settings.optimizer.betas.0=0.8", "settings.steps=null", "env.C=x"]
    recipe = load_recipe(find_project(), "top", overrides=overrides)
    assert recipe.command == ["python", "other.py", "--long"] and recipe.env["C"] == "x"
    assert recipe.settings == {"steps": None, "optimizer": {"rate": 1e-3, "betas": [0.8, 0.99]}}
    assert problems("top", "command.3=x", "command.x=y", "extends=base", "command.0.z=1", "command.1=[x]") == [
        '--set command.3: command is a list, and its entries are 0 to 2, not "3"',
        '--set command.x: command is a list, and its entries are 0 to 2, not "x"',
        "--set extends: what a recipe builds on stands in its file; set the keys themselves",
        "--set command.0.z: command[0] is not a mapping, so no key can be set in it",
    ]
    (wrong,) = problems("top", "command.1=[x]")
    assert wrong.startswith("--set command.1: command[1] must be text")


def test_a_base_that_cannot_be_read(project: Path) -> None:
    write(project / "recipes", top="extends: nothing\n")
    with pytest.raises(UsageError, match="no recipe"):
        load_recipe(find_project(), "top")


keys = st.sampled_from("abc")
trees = st.recursive(
    st.none() | st.integers(0, 9) | st.lists(st.integers(0, 9), max_size=2),
    lambda inner: st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)
mappings = st.dictionaries(keys, trees, max_size=3)


def plain(base: dict, own: dict) -> dict:
    both = {key: plain(base[key], own[key]) if isinstance(own.get(key), dict) and isinstance(base[key], dict)
            else own.get(key, base[key]) for key in base}  # fmt: skip
    return both | {key: value for key, value in own.items() if key not in base}


def document(data: dict, name: str) -> Document:
    return parse_yaml(dump_yaml({"settings": data}), lambda line, column: f"{name}:{line}", {"settings"})


@given(mappings, mappings)
@settings(max_examples=100, deadline=None)
def test_merging_is_plain_merging_and_every_value_has_its_place(base: dict, own: dict) -> None:
    made = merged(document(base, "base"), document(own, "own"))
    assert made.data == {"settings": plain(base, own)}

    def walk(value: object, loc: tuple) -> None:
        assert loc in made.values
        for key, inner in value.items() if isinstance(value, dict) else ():
            assert made.keys[(*loc, key)].startswith(("base:", "own:"))
            walk(inner, (*loc, key))

    walk(made.data, ())
    assert all(loc[:1] in ((), ("settings",)) for loc in made.values)


def test_a_variable_with_nothing_after_it_takes_the_bases_away(project: Path) -> None:
    write(project / "recipes", base="environment: demo\nenv: {A: 1, B: 2}\n", own="extends: base\nenv: {A: }\n")
    assert load_recipe(find_project(), "own").env == {"B": "2"}
    write(project / "recipes", own="extends: base\nenv: {C: }\n")
    assert problems("own") == ['recipes/own.yaml:2: env.C must be text (write "" for an empty one), not nothing']


def test_a_misspelt_key_is_one_problem(project: Path) -> None:
    write(project / "recipes", own="environment: demo\ncode: .\ncomand: [x]\n")
    assert problems("own") == ['recipes/own.yaml:3: unknown key "comand" (did you mean "command"?)']
    write(project, hosts="hosts:\n  pve:\n    shs: pve\n")
    with pytest.raises(ConfigError) as caught:
        load_hosts(find_project())
    assert list(caught.value.problems) == ['hosts.yaml:3: unknown key "shs" (did you mean "ssh"?)']
