"""What a recipe says of places that it can do without."""

import pytest

from orchestrator.config import dump_recipe, find_project, load_recipe, recipe_digest
from orchestrator.errors import ConfigError

PLACES = """environment: demo
places:
  - {place: pve/200, address: 192.0.2.11}
  - {place: pve/201, address: 192.0.2.12}
"""


@pytest.fixture
def load(tmp_path):
    (tmp_path / "recipes").mkdir()

    def load(text, **more):
        (tmp_path / "recipes/some.yaml").write_text(text)
        return load_recipe(find_project(tmp_path), "some", **more)

    return load


def test_so_many_places_are_enough(load):
    assert load(PLACES + "elastic: {least: 1}").elastic.least == 1
    assert load(PLACES + "elastic: {least: 1}", place_override="local").elastic is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (PLACES + "elastic: {least: 2}", "some.yaml:5: elastic.least must be below the number of places, 2"),
        (PLACES + "elastic: {least: 0}", "some.yaml:5: elastic.least must be a whole number from 1"),
        (PLACES + "elastic: {}", 'the key "least" is missing in elastic'),
        ("environment: demo\nelastic: {least: 1}", "some.yaml:2: elastic needs places"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(load, text, problem):
    with pytest.raises(ConfigError) as caught:
        load(text)
    assert problem in str(caught.value)


def test_without_it_a_recipe_is_as_it_was(load):
    plain, elastic = load(PLACES), load(PLACES + "elastic: {least: 1}")
    assert "elastic" not in dump_recipe(plain) and "elastic" in dump_recipe(elastic)
    assert recipe_digest(plain, "pve/200") != recipe_digest(elastic, "pve/200")
