"""The schemas that editors are given take what the loaders take, refuse a key that is misspelt, and explain each."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import jsonschema
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.bundled import bundled_dir
from orchestrator.config import find_project, load_environment, load_hosts, load_recipe
from orchestrator.errors import OrchError
from orchestrator.schema import KINDS, schema

few = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
CHECKS = {kind: jsonschema.Draft202012Validator(schema(kind)) for kind in KINDS}


def agrees(kind, data):
    return CHECKS[kind].is_valid(data)


def core(text):
    """A document as an editor has it: numbers, booleans and nothing of YAML 1.2, all else text."""

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers = {}  # noqa: RUF012

    for kind, pattern, begins in (
        ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
        ("int", r"^[-+]?(?:0|[1-9][0-9]*)$", "-+0123456789"),
        ("float", r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$", "-+.0123456789"),
        ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ):
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{kind}", re.compile(pattern), list(begins))
    # `200:` is a key like any other
    return json.loads(json.dumps(yaml.load(text, Loader)))


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_a_schema_of_its_dialect_and_explains_every_key(kind):
    made = schema(kind)
    assert made["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    jsonschema.Draft202012Validator.check_schema(made)
    for model in (made, *made["$defs"].values()):
        for key, value in model["properties"].items():
            assert len(value["description"]) > 5, key
    assert not re.findall(r'\]\(|\\\\z"', json.dumps(made))


def test_what_comes_with_orch_is_taken():
    found = sorted((bundled_dir() / "recipes").glob("*.yaml"))
    assert len(found) >= 5
    for path in found:
        CHECKS["recipe"].validate(core(path.read_text()))
    for path in (bundled_dir() / "recipes" / "envs").glob("*/spec.yaml"):
        CHECKS["environment"].validate(core(path.read_text()))
    hosts = (bundled_dir() / "hosts.yaml").read_text()
    CHECKS["hosts"].validate(core(hosts))
    whole = re.sub(r"(?m)^  # ", "  ", hosts[hosts.index("  # pve:") :])
    CHECKS["hosts"].validate(core("hosts:\n" + re.sub(r"(?m)^  #$", "", whole)))
    docs = bundled_dir() / "docs"
    [example] = re.findall(r"```yaml\n(.*?)```", (docs / "hosts.md").read_text(), re.S)
    CHECKS["hosts"].validate(core(example))
    CHECKS["recipe"].validate(core(re.findall(r"```yaml\n(.*?)```", (docs / "recipes.md").read_text(), re.S)[0]))


# -- what a loader takes, its schema takes: documents of right, odd and wrong values --

SCALARS = st.sampled_from(
    ["", "a", "demo", "pve/200", "~/x", "-1", "0", "5", "1e3", "2.10", "yes", "True", "on", "64MiB", "x y", "A_B", "é"]
) | st.sampled_from([0, 1, 5, 200, -3, 2.5, 0.25, True, False, None])
NAMES = st.sampled_from(["A", "B_2", "x", "9", "ORCH_X", "a.b", ""])
VALUES = st.one_of(
    SCALARS, st.lists(SCALARS, max_size=3), st.dictionaries(NAMES, SCALARS, max_size=2), st.just({}), st.just([])
)


def mostly(right, wrong=VALUES):
    return st.one_of(right, right, right, right, right, wrong)


def keys(**kinds):
    return st.fixed_dictionaries({}, optional=kinds)


def changed(*whole, **kinds):
    """A document that is right, with one or two of its keys changed."""
    one = st.one_of([st.fixed_dictionaries({key: value}) for key, value in kinds.items()])
    return st.builds(lambda base, *more: {**base, **more[0], **more[1]}, st.sampled_from(whole), one, one)


PLACES = mostly(
    st.lists(
        keys(
            place=st.sampled_from(["local", "pve/200", "b"]),
            address=mostly(st.sampled_from(["192.0.2.1", None])),
            ranks=mostly(st.sampled_from([1, "2", None])),
        ),
        min_size=1,
        max_size=3,
    )
)
RECIPES = changed(
    {"environment": "demo"},
    {"extends": "base"},
    {"environment": "demo", "code": ".", "command": ["x"]},
    {"environment": "demo", "places": [{"place": "a"}, {"place": "b"}], "elastic": {"least": 1}},
    name=mostly(st.sampled_from(["x", None])),
    extends=mostly(st.sampled_from(["base", "./base.yaml", None])),
    description=SCALARS,
    place=mostly(st.sampled_from(["local", "pve/200", None])),
    places=PLACES,
    elastic=mostly(keys(least=mostly(st.just(1)))),
    environment=mostly(st.sampled_from(["demo", 3.11])),
    code=mostly(
        st.one_of(
            st.sampled_from(["bundled", ".", 5, None]),
            keys(path=mostly(st.just(".")), largest=mostly(st.sampled_from(["1MB", 5000, None]))),
        )
    ),
    command=mostly(st.lists(mostly(SCALARS, VALUES), max_size=3)),
    settings=st.dictionaries(NAMES, VALUES, max_size=3),
    env=st.dictionaries(NAMES, mostly(SCALARS, VALUES), max_size=3),
    gpus=mostly(st.one_of(st.sampled_from(["all", "none", 2, "4", None]), st.lists(st.sampled_from([0, "1", 2])))),
    secrets=st.lists(mostly(st.sampled_from(["A", "HF_TOKEN", True])), max_size=2),
    metrics=mostly(st.sampled_from([True, False, "yes", "OFF", "t", 1, 0, "n", None])),
    health=mostly(keys(step=mostly(st.sampled_from([1, "5", "1_0", " 3 "])), tokens_per_second=SCALARS)),
    stop_grace=mostly(st.sampled_from([0, 1.5, "2", "1e3", None])),
    sample_seconds=SCALARS,
    rules=mostly(st.lists(keys(pattern=mostly(st.just("some text")), cause=SCALARS, title=SCALARS, retry=SCALARS))),
)
SSH = st.one_of(
    st.sampled_from(["pve", "root@192.0.2.1:22", "ssh://a@b", 5, True, None, ""]),
    keys(host=mostly(st.sampled_from(["pve", 7])), user=SCALARS, port=mostly(st.sampled_from([22, "22", "+22", 0]))),
)
PLACED = {"root": SCALARS, "wheels": mostly(st.sampled_from(["auto", "/srv/w", None])), "protect": SCALARS}
CONTAINERS = st.dictionaries(
    st.sampled_from(["200", "train", "99", ".x"]),
    mostly(st.one_of(st.none(), keys(kind=mostly(st.sampled_from(["pct", "lxc", None])), id=SCALARS, **PLACED))),
    max_size=2,
)
HOST = changed(
    {"ssh": "pve"},
    {"ssh": {"host": "pve"}, "containers": {"200": None, "b": {"id": "x"}}},
    ssh=mostly(SSH),
    python=SCALARS,
    containers=mostly(CONTAINERS),
    address=SCALARS,
    **PLACED,
)
NAMED = st.dictionaries(st.sampled_from(["pve", "b.2", "b-3", "B"]), mostly(HOST), max_size=2)
LOCAL = keys(containers=mostly(CONTAINERS), ssh=st.sampled_from([None, None, "x"]), **PLACED)
HOSTS = keys(hosts=st.one_of(NAMED, keys(local=LOCAL), SCALARS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("project")
    (made / "recipes").mkdir()
    base = {
        "environment": "demo",
        "env": {"A": 1},
        "places": [{"place": "a"}, {"place": "b"}],
        "code": ".",
        "command": ["x"],
    }
    (made / "recipes/base.yaml").write_text(json.dumps(base))
    return made


def recipe_taken(folder, data):
    # JSON is YAML: every number, and every text in quotes
    (folder / "recipes/x.yaml").write_text(json.dumps(data))
    try:
        load_recipe(find_project(folder), "x")
    except OrchError:
        return False
    return True


def hosts_taken(folder, data):
    (folder / "hosts.yaml").write_text(json.dumps(data))
    try:
        load_hosts(find_project(folder))
    except OrchError:
        return False
    return True


TAKEN = {"recipe": recipe_taken, "hosts": hosts_taken}
DOCUMENTS = {"recipe": RECIPES, "hosts": HOSTS}


@pytest.mark.parametrize("kind", ["recipe", "hosts"])
def test_what_the_loader_takes_the_schema_takes(folder, kind):
    taken = []

    @few
    @given(DOCUMENTS[kind])
    def check(data):
        if TAKEN[kind](folder, data):
            taken.append(data)
            CHECKS[kind].validate(data)

    check()
    assert len(taken) > 10  # not all were nonsense


WHOLE = {
    "recipe": {
        "environment": "demo",
        "code": {"path": "."},
        "command": ["x"],
        "health": {"step": 5},
        "rules": [{"pattern": "text", "cause": "c"}],
    },
    "hosts": {"hosts": {"local": {}, "pve": {"ssh": {"host": "pve"}, "containers": {"200": {"kind": "pct"}}}}},
}


def mappings(data):
    """Every mapping within whose keys are named by a model."""
    if isinstance(data, dict):
        yield data
    for value in data.values() if isinstance(data, dict) else data if isinstance(data, list) else ():
        yield from mappings(value)


@pytest.mark.parametrize("kind", ["recipe", "hosts"])
def test_a_misspelt_key_is_refused_by_both(folder, kind):
    assert TAKEN[kind](folder, WHOLE[kind])
    CHECKS[kind].validate(WHOLE[kind])
    named = 0
    for number, one in enumerate(mappings(WHOLE[kind])):
        for key in one:
            data = json.loads(json.dumps(WHOLE[kind]))
            found = list(mappings(data))[number]
            found[f"{key}e"] = found.pop(key)
            if key in ("local", "pve", "200"):
                continue  # names of one's own
            named += 1
            assert not TAKEN[kind](folder, data), data
            assert not agrees(kind, data), data
    assert named >= 5


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("recipe", {}),
        ("recipe", {"environment": None}),
        ("recipe", {"environment": "demo", "code": {"largest": "1MB"}}),
        ("recipe", {"environment": "demo", "place": "pve 200"}),
        ("recipe", {"environment": "demo", "metrics": "maybe"}),
        ("recipe", {"environment": "demo", "command": "python train.py"}),
        ("recipe", {"environment": "demo", "stop_grace": -1}),
        ("recipe", {"environment": "demo", "gpus": True}),
        ("recipe", {"environment": "demo", "gpus": {"least": 1}}),
        ("recipe", {"environment": "demo", "code": ["."]}),
        ("hosts", {"hosts": {"local": {"ssh": "pve"}}}),
        ("hosts", {"hosts": {"pve": {}}}),
        ("hosts", {"hosts": {"pve": {"ssh": "pve", "containers": {"200": {"kind": "qemu"}}}}}),
        ("hosts", {"hosts": {"Pve": {"ssh": "pve"}}}),
    ],
)
def test_what_is_plainly_wrong_is_refused_by_both(folder, kind, data):
    assert not agrees(kind, data) and not TAKEN[kind](folder, data)


@pytest.mark.parametrize("data", [{}, {"code": {"largest": "1MB"}}, {"env": {"A": None}}])
def test_what_a_base_says_need_not_be_said(folder, data):
    assert recipe_taken(folder, {"extends": "base", **data})
    CHECKS["recipe"].validate({"extends": "base", **data})
    assert not agrees("recipe", {"environment": "demo", **data}) or not data


def test_the_environments_that_come_with_orch_load(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in ("plain", "torch"):
        assert load_environment(find_project(tmp_path), name).backend == "auto"


def orch(*words, cwd=None):
    argv = [sys.executable, "-c", "from orchestrator.cli import main; main()", *words]
    return subprocess.run(argv, capture_output=True, text=True, cwd=cwd, stdin=subprocess.DEVNULL, timeout=60)


def test_the_command_prints_it_and_refuses_other_words():
    for kind in KINDS:
        assert json.loads(orch("schema", kind).stdout) == schema(kind)
    wrong = orch("schema", "recipes")
    assert wrong.returncode == 2 and 'did you mean "recipe"' in wrong.stderr
