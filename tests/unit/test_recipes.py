"""Recipes and environments: found, read, refused, overridden, written out."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.config import (
    Health,
    Host,
    Place,
    Recipe,
    dump_recipe,
    fill,
    find_project,
    list_environments,
    list_recipes,
    load_environment,
    load_recipe,
    parse_recipe,
    recipe_digest,
)
from orchestrator.config.problems import keys_of
from orchestrator.errors import ConfigError, UsageError

# -- properties --

text = st.text(st.characters(exclude_categories=["Cs", "Cc"], include_characters="\n\t\x85"), max_size=12)
variables = st.from_regex(r"[A-Z_][A-Z0-9_]{0,8}", fullmatch=True).filter(
    lambda name: not name.startswith("ORCH_") and not name.endswith(("TOKEN", "SECRET", "KEY", "PASSWORD", "PASSWD"))
)
words = [
    "1e-4",
    "no",
    "On",
    "0200",
    "~",
    "null",
    "1:30",
    "2026-01-02",
    ".5",
    "0x1F",
    "<<",
    "=",
    "1_000",
    ".inf",
]
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text
    | st.sampled_from(words),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text | st.sampled_from(words), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    names = draw(st.lists(variables, max_size=4, unique=True))
    split = draw(st.integers(0, len(names)))
    some_text = text | st.sampled_from(words)
    return Recipe(
        name=draw(st.from_regex(r"[a-z0-9][a-z0-9_-]{0,39}", fullmatch=True)),
        description=draw(some_text),
        place=draw(st.sampled_from(["local", "pve", "pve/200", "no", "0", "1e3"])),
        environment=draw(st.from_regex(r"[a-z0-9][a-z0-9._-]{0,5}", fullmatch=True)),
        command=draw(st.none() | st.lists(some_text, min_size=1, max_size=3)),
        settings=draw(st.dictionaries(text | st.sampled_from(words), values, max_size=4)),
        env={name: draw(some_text) for name in names[:split]},
        secrets=names[split:],
        metrics=draw(st.booleans()),
        health=Health(
            step=draw(st.none() | st.integers(1, 10**9)),
            tokens_per_second=draw(st.none() | st.floats(1e-6, 1e9)),
        ),
        stop_grace=draw(st.floats(0, 86400)),
        sample_seconds=draw(st.floats(0.1, 3600)),
    )


@given(recipes())
@settings(max_examples=300, deadline=None)
def test_a_recipe_written_and_read_is_the_same(recipe: Recipe) -> None:
    written = dump_recipe(recipe)
    read = parse_recipe(written)
    assert read == recipe
    assert dump_recipe(read) == written
    assert recipe_digest(read, recipe.place) == recipe_digest(recipe, recipe.place)
    # the trainer reads its part with a plain YAML 1.1 reader
    assert yaml.safe_load(written)["settings"] == recipe.settings


@given(st.from_regex(r"[a-z_]{1,12}", fullmatch=True), st.integers(0, 4), st.booleans())
@settings(max_examples=200, deadline=None)
def test_one_unknown_key_is_one_problem_in_its_line(key: str, position: int, nested: bool) -> None:
    known = {*keys_of(Recipe), *keys_of(Health), "null", "y", "n"}
    if key in known:
        return
    lines = ["place: local", "environment: demo", "metrics: no", "stop_grace: 5"]
    if nested:
        lines += ["health:", "  step: 1", f"  {key}: 1"]
        line, inside = 7, " in health"
    else:
        lines.insert(position, f"{key}: 1")
        line, inside = position + 1, ""
    with pytest.raises(ConfigError) as caught:
        parse_recipe("\n".join(["name: x", *lines]))
    [problem] = caught.value.problems
    assert problem.startswith(f'recipe.yaml:{line + 1}: unknown key "{key}"{inside} (')


# -- a table of bad recipes --


@pytest.fixture
def project_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    folder = tmp_path / "home" / "work"
    (folder / "recipes" / "envs").mkdir(parents=True)
    monkeypatch.chdir(folder)
    return folder


def load(content: str, name: str = "r", overrides: tuple[str, ...] = ()) -> Recipe:
    Path(f"recipes/{name}.yaml").write_text(content)
    return load_recipe(find_project(), name, overrides=overrides)


def problems(content: str, name: str = "r", overrides: tuple[str, ...] = ()) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(content, name, overrides)
    return list(caught.value.problems)


VARIABLE = "the name of an environment variable (letters, digits and _, no digit first)"
ALL = (
    "name, extends, description, place, places, elastic, environment, code, command, settings, env, gpus, "
    "secrets, metrics, health, stop_grace, sample_seconds, rules"
)


@pytest.mark.parametrize("cause", ["healthy", "unknown"])
def test_a_rule_names_no_verdict_as_its_cause(project_dir, cause):
    content = "environment: demo\nrules:\n  - pattern: 'some words'\n    cause: flux\n"
    content += f"  - pattern: 'other words'\n    cause: {cause}\n"
    (said,) = problems(content)
    assert said == (
        "recipes/r.yaml:6: rules[1].cause must be a name of lower-case letters, digits and -, "
        f'and neither healthy nor unknown, not "{cause}"'
    )


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", ['r:1: the key "environment" is missing; add "environment: NAME" '
              "(the name of an environment, such as demo)"]),
        ("# c\n\nplace: local\n", ['r:3: the key "environment" is missing; add "environment: NAME" '
                                   "(the name of an environment, such as demo)"]),
        ("environment:\n", ["r:1: environment has no value: it must be the name of an environment, such as demo"]),
        ("place: local\nenviroment: demo\n", ['r:2: unknown key "enviroment" (did you mean "environment"?)']),
        ("environment: demo\nqqq: 1\n", [f'r:2: unknown key "qqq" (there are: {ALL})']),
        ("environment: demo\nHealth: {step: 1}\n", ['r:2: unknown key "Health" (did you mean "health"?)']),
        ("environment: demo\nhealth:\n  stp: 1\n", ['r:3: unknown key "stp" in health (did you mean "step"?)']),
        ("environment: demo\nhealth:\n  step: 1.5\n", ['r:3: health.step must be a whole number from 1, not "1.5"']),
        ("environment: demo\nhealth: 5\n",
         ['r:2: health must be a mapping with step and tokens_per_second, not "5"']),
        ("environment: demo\nhealth: {tokens_per_second: .nan}\n",
         ['r:2: health.tokens_per_second must be a number above 0, not ".nan"']),
        ("environment: demo\nname: other\n",
         ['r:2: name must be "r", as the file is named, not "other"; leave it out or rename the file']),
        ("environment: Demo\n", ['r:1: environment must be the name of an environment, such as demo, not "Demo"']),
        ("environment: ../x\n", ['r:1: environment must be the name of an environment, such as demo, not "../x"']),
        ("environment: demo\nplace: pve/200/1\n",
         ['r:2: place must be a host or HOST/CONTAINER, such as pve/200, not "pve/200/1"']),
        ("environment: demo\ncommand: [a]\ncode: [git]\n",
         ['r:3: code must be "bundled", the path of a folder, or a mapping with path and largest, not a list']),
        ("environment: demo\ncommand: python train.py\n",
         ['r:2: command must be a list of words, such as [python, train.py], not "python train.py"']),
        ("environment: demo\ncommand: []\n",
         ["r:2: command must be a list of words, such as [python, train.py], not an empty list"]),
        ("environment: demo\ncommand:\n  - a\n  - [b]\n",
         ['r:4: command[1] must be text (write "" for an empty one), not a list']),
        ('environment: demo\ncommand: ["a\\0b"]\n',
         ['r:2: command[0] must be text (write "" for an empty one), not "a\\x00b"']),
        ("environment: demo\nsettings: [1]\n",
         ["r:2: settings must be a mapping: the trainer's configuration, not a list"]),
        ("environment: demo\nenv: {A-B: 1}\n", [f'r:2: a key of env must be {VARIABLE}, not "A-B"']),
        ("environment: demo\nenv:\n  A:\n", ['r:3: env.A must be text (write "" for an empty one), not nothing']),
        ("environment: demo\nenv:\n  ORCH_X: 1\n",
         ["r:3: env.ORCH_X cannot be set: names that begin with ORCH_ are orch's own"]),
        ("environment: demo\nenv:\n  HF_TOKEN: hf_abcdefghijklmnop\n",
         ["r:3: env.HF_TOKEN looks like a secret, which a recipe only names; "
          'write its name under "secrets" in place of its value']),
        ("environment: demo\nenv:\n  A: 1\nsecrets: [A]\n",
         ['r:3: "A" stands in env and in secrets; keep one of them']),
        ("environment: demo\nsecrets: [A, B, A]\n", ['r:2: "A" is named twice in secrets']),
        ("environment: demo\nsecrets:\n  - A\n  - HF_TOKEN=hf_abcdefghijklmnop\n",
         ["r:4: secrets[1] must be the name alone of a secret, such as HF_TOKEN, without its value"]),
        ("environment: demo\nsecrets: {HF_TOKEN: hf_abcdefghijklmnop}\n",
         ["r:2: secrets must be a list of names of environment variables, not a mapping"]),
        ("environment: demo\nmetrics: flase\n", ['r:2: metrics must be true or false, not "flase"']),
        ("environment: demo\nstop_grace: -1\n",
         ['r:2: stop_grace must be a number of seconds from 0 to 86400, not "-1"']),
        ("environment: demo\nsample_seconds: .inf\n",
         ['r:2: sample_seconds must be a number of seconds from 0.1 to 3600, not ".inf"']),
        ("environment: demo\nsettings:\n  a: 1\n  a: 2\n",
         ['r:4: the key "settings.a" is there already, in line 3; keep one of them']),
        ("environment: demo\nsettings: {x: 1e999}\n", ['r:2: "1e999" is not a finite number']),
        ("[a\n", ['r:1:1: this "[" is not closed, or a comma is missing between its values']),
        ("text\n", ['r:1: the file must be a mapping (key: value), not "text"']),
        ("description: " + "x" * 60 + "\nplace: " + "Y" * 60 + "\nenv: [1]\nmetrics: 2\nhealt: {}\n",
         ['r:1: the key "environment" is missing; add "environment: NAME" '
          "(the name of an environment, such as demo)",
          f'r:2: place must be a host or HOST/CONTAINER, such as pve/200, not "{"Y" * 39}…"',
          "r:3: env must be a mapping of names to text, not a list",
          'r:4: metrics must be true or false, not "2"',
          'r:5: unknown key "healt" (did you mean "health"?)']),
    ],
)  # fmt: skip
def test_every_problem_is_one_sentence(project_dir: Path, content: str, expected: list[str]) -> None:
    assert problems(content) == [sentence.replace("r:", "recipes/r.yaml:", 1) for sentence in expected]


def test_a_file_with_an_impossible_name(project_dir: Path) -> None:
    assert problems("environment: demo\n", name="My Recipe") == [
        "recipes/My Recipe.yaml:1: a recipe is named by its file, at most 40 lower-case letters, digits, _ and -, "
        'not "My Recipe"'
    ]


# -- what is accepted --


def test_text_numbers_and_empty_keys(project_dir: Path) -> None:
    recipe = load(
        "name: r\nenvironment: 2.10\nplace: no\ndescription:\nenv: {A: 010, B: on, C: 1.10, D: ''}\n"
        "command: [python, -c, 3]\nsettings:\nhealth:\n  step: '7'\nsecrets:\nmetrics: off\nstop_grace: 5\n"
    )
    assert recipe == Recipe(
        name="r", environment="2.10", place="no", env={"A": "010", "B": "on", "C": "1.10", "D": ""},
        command=["python", "-c", "3"], health=Health(step=7), metrics=False, stop_grace=5.0,
    )  # fmt: skip


def test_special_tokens_are_no_secrets(project_dir: Path) -> None:
    recipe = load("environment: demo\nenv: {PAD_TOKEN: <|reserved_special_0|>, EOS_TOKEN: </s>, SORT_KEY: aaaaaaaa}\n")
    assert recipe.env["EOS_TOKEN"] == "</s>"


def test_the_digest_knows_content_and_place_alone(project_dir: Path) -> None:
    one = load("environment: demo\nsettings: {a: 1, b: {c: 1e-4}}\n")
    two = load("# comment\nsettings:\n  b: {c: 0.0001}\n  a: 1\nenvironment: demo\n")
    assert recipe_digest(one, "local") == recipe_digest(two, Place(Host(name="local")))
    assert recipe_digest(one, "local") != recipe_digest(one, "pve")
    assert recipe_digest(one, "pve") == recipe_digest(one.model_copy(update={"place": "x"}), "pve")
    assert recipe_digest(one, "local") != recipe_digest(one.model_copy(update={"metrics": False}), "local")
    assert len(recipe_digest(one, "local")) == 64


# -- --set and another place --

BASE = "environment: demo\nsettings: {steps: 10, model: {width: 64}}\nenv: {A: x}\n"


def test_overrides(project_dir: Path) -> None:
    recipe = load(
        BASE,
        overrides=(
            "settings.steps=5", "settings.model.width=128", "settings.new.rate=1e-4", "settings.on=yes",
            "settings.list=[1, a]", "env.FOO=bar=baz", "env.A=", "env.N=010", "health.step=3", "place=pve/200",
            "settings.none=null", "metrics=false", "settings.steps=6",
        ),
    )  # fmt: skip
    assert recipe.settings == {
        "steps": 6, "model": {"width": 128}, "new": {"rate": 1e-4}, "on": True, "list": [1, "a"], "none": None,
    }  # fmt: skip
    assert recipe.env == {"A": "", "FOO": "bar=baz", "N": "010"}
    assert (recipe.health.step, recipe.place, recipe.metrics) == (3, "pve/200", False)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["enviroment=x"], ['--set enviroment: unknown key "enviroment" (did you mean "environment"?)']),
        (["health.stp=1"], ['--set health.stp: unknown key "stp" in health (did you mean "step"?)']),
        (["health.step=x"], ['--set health.step: health.step must be a whole number from 1, not "x"']),
        (["health={step: x}"], ['--set health: health.step must be a whole number from 1, not "x"']),
        (["environment="], ["--set environment: environment must be the name of an environment, such as demo, "
                            'not ""']),
        (["environment.x=1"], ["--set environment.x: environment is not a mapping, so no key can be set in it"]),
        (["steps"], ["--set takes KEY=VALUE with a dotted key, such as settings.steps=5, not \"steps\""]),
        (["=5", "a..b=1", "settings.x=[1"],
         ['--set takes KEY=VALUE with a dotted key, such as settings.steps=5, not ""',
          '--set takes KEY=VALUE with a dotted key, such as settings.steps=5, not "a..b"',
          '--set settings.x: this "[" is not closed, or a comma is missing between its values']),
        (["env.HF_TOKEN=hf_abcdefghijklmnop"],
         ["--set env.HF_TOKEN: env.HF_TOKEN looks like a secret, which a recipe only names; "
          'write its name under "secrets" in place of its value']),
        (["name=x"], ['--set name: name must be "r", as the file is named, not "x"; leave it out or rename the file']),
    ],
)  # fmt: skip
def test_override_problems(project_dir: Path, overrides: list[str], expected: list[str]) -> None:
    assert problems(BASE, overrides=tuple(overrides)) == expected


def test_another_place(project_dir: Path) -> None:
    Path("recipes/r.yaml").write_text("environment: demo\nplace: [broken]\n")
    project = find_project()
    assert load_recipe(project, "r", "pve/200").place == "pve/200"
    with pytest.raises(ConfigError) as caught:
        load_recipe(project, "r", "a b")
    assert caught.value.problems == (
        'the place given: place must be a host or HOST/CONTAINER, such as pve/200, not "a b"',
    )


def test_words_for_what_is_known_at_launch() -> None:
    before = {"a": "{code}/x", "b": ["{run_dir}{code}", 1, None, True], "c": {"d": '{"json": "{other}"}'}}
    after = {"a": "/c/x", "b": ["/r/c", 1, None, True], "c": {"d": '{"json": "{other}"}'}}
    assert fill(before, {"code": "/c", "run_dir": "/r"}) == after
    assert before["a"] == "{code}/x"


# -- finding --


def test_nearer_recipes_go_first_and_bundled_ones_are_always_there(project_dir: Path) -> None:
    assert load_recipe(find_project(), "demo").environment == "demo"
    user = Path.home() / ".config/orch/recipes"
    user.mkdir(parents=True)
    (user / "demo.yaml").write_text("environment: users\n")
    (user / "mine.yml").write_text("environment: users\n")
    project = find_project()
    assert load_recipe(project, "demo").environment == "users"
    assert load_recipe(project, "mine").environment == "users"
    Path("recipes/demo.yaml").write_text("environment: nearest\n")
    assert load_recipe(project, "demo").environment == "nearest"
    inner = project_dir / "a" / "b"
    (inner / "recipes").mkdir(parents=True)  # an empty folder of that name is none of ours
    assert load_recipe(find_project(inner), "demo").environment == "nearest"
    assert set(list_recipes(project)) >= {"demo", "mine"}


def test_a_recipe_by_its_file(project_dir: Path) -> None:
    Path("other").mkdir()
    Path("other/x.yaml").write_text("environment: demo\n")
    assert load_recipe(find_project(), "other/x.yaml").name == "x"
    assert load_recipe(find_project(), "recipes/../other/x.yaml").name == "x"
    with pytest.raises(UsageError, match=r'^there is no recipe file "other/y\.yaml"$'):
        load_recipe(find_project(), "other/y.yaml")


def test_unknown_recipe(project_dir: Path) -> None:
    Path("recipes/train-big.yaml").write_text("environment: demo\n")
    with pytest.raises(UsageError) as caught:
        load_recipe(find_project(), "train_bg")
    assert caught.value.message == 'there is no recipe "train_bg" (did you mean "train-big"?)'
    assert caught.value.hint.startswith("recipes: demo")
    assert "train-big; looked in recipes and orch's own" in caught.value.hint


def environment(name: str, spec: str, lock: str | None = "torch==2.11.0\n") -> None:
    folder = Path("recipes/envs") / name
    folder.mkdir(parents=True)
    (folder / "spec.yaml").write_text(spec)
    if lock is not None:
        (folder / "requirements.lock").write_text(lock)


def test_environments(project_dir: Path) -> None:
    environment("a", "python: '>=3.10,<3.14'\ntorch: 2.10\nbackend: cu128\n")
    environment("b", "python: 3.11\ntorch: '>=2.11'\nbackend: auto\n")
    environment("c", "python: 3.11.7\ntorch: 2.11.0+cpu\nbackend: cpu\n")
    project = find_project()
    spec = load_environment(project, "a")
    assert (spec.name, spec.python, spec.torch, spec.backend) == ("a", ">=3.10,<3.14", "2.10", "cu128")
    assert (spec.directory, spec.lock_text) == (project_dir / "recipes/envs/a", "torch==2.11.0\n")
    assert load_environment(project, "b").python == "==3.11.*"
    assert load_environment(project, "c").python == "==3.11.7"
    assert {"a", "b", "c"} <= set(list_environments(project))
    with pytest.raises(UsageError) as caught:
        load_environment(project, "A")
    assert caught.value.message == 'there is no environment "A" (did you mean "a"?)'
    assert "looked for NAME/spec.yaml in recipes/envs and " in caught.value.hint


@pytest.mark.parametrize(
    ("spec", "lock", "expected"),
    [
        ("python: x y\ntorch: '>=,'\nbackend: cuda\n", "",
         ['spec.yaml:1: python must be a version or a range of versions, such as >=3.10,<3.14, not "x y"',
          'spec.yaml:2: torch must be a version or a range of versions, such as 2.11.0, not ">=,"',
          'spec.yaml:3: backend must be cpu, cu126, cu128, cu130 or auto, not "cuda"']),
        ("torch: 2.11\nbackend: cpu\nlock_text: x\n", "",
         ["spec.yaml:1: the key \"python\" is missing; add \"python: '>=3.10,<3.14'\" "
          "(a version or a range of versions, such as >=3.10,<3.14)",
          'spec.yaml:3: unknown key "lock_text" (there are: python, torch, backend, index_hashes)']),
        ("python: 3.11\ntorch: 2.11\nbackend: cpu\n", None,
         ["requirements.lock is missing: an environment is built from its lock alone"]),
    ],
)  # fmt: skip
def test_environment_problems(project_dir: Path, spec: str, lock: str | None, expected: list[str]) -> None:
    environment("e", spec, lock)
    with pytest.raises(ConfigError) as caught:
        load_environment(find_project(), "e")
    assert list(caught.value.problems) == [f"recipes/envs/e/{sentence}" for sentence in expected]


# -- several places --


def test_several_places_are_written_and_read_and_left_for_one(project_dir: Path) -> None:
    (project_dir / "recipes/m.yaml").write_text(
        "places:\n"
        "  - {place: pve/200, address: 192.0.2.11, ranks: 5}\n"
        "  - {place: pve/201, interface: eth1, ranks: 3}\n"
        "environment: demo\n"
    )
    recipe = load_recipe(find_project(project_dir), "m")
    assert recipe.places is not None
    assert [(one.place, one.address, one.interface, one.ranks) for one in recipe.places] == [
        ("pve/200", "192.0.2.11", None, 5),
        ("pve/201", None, "eth1", 3),
    ]
    assert parse_recipe(dump_recipe(recipe)) == recipe
    alone = load_recipe(find_project(project_dir), "m", place_override="local")
    assert (alone.place, alone.places) == ("local", None)
    assert recipe_digest(alone, "local") != recipe_digest(recipe, "local")


def test_everything_wrong_with_several_places_is_said(project_dir: Path) -> None:
    content = (
        "place: pve/200\n"
        "places:\n"
        "  - {place: pve/200, address: 192.0.2.300, ranks: 0}\n"
        "  - place: pve/200\n"
        "    adress: 192.0.2.12\n"
        "    interface: eth 1\n"
        "environment: demo\n"
    )
    at = "recipes/r.yaml"
    assert problems(content) == [
        f"{at}:2: place and places exclude each other; keep one of them",
        f'{at}:3: places[0].address must be an IPv4 address, such as 192.0.2.11, not "192.0.2.300"',
        f'{at}:3: places[0].ranks must be a whole number from 1, not "0"',
        f'{at}:4: places[1].place stands there twice: "pve/200"',
        f"{at}:4: places[1] says no ranks, and others do; all say them, or none",
        f'{at}:5: unknown key "adress" in places[1] (did you mean "address"?)',
        f'{at}:6: places[1].interface must be the name of a network interface, such as eth0, not "eth 1"',
    ]
    one = problems("places: [{place: local}]\nenvironment: demo\n")
    several = "a list of two or more mappings with place, address, interface and ranks"
    assert one == [f"{at}:1: places must be {several}, not a list of 1"]
