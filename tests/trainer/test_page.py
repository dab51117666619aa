"""docs/trainer.md lists every setting with its default, and no other."""

import dataclasses
import re
from pathlib import Path

import yaml

from trainer.config import Config

PAGE = Path(__file__).parents[2] / "docs" / "trainer.md"
ROW = re.compile(r"^\| `([a-z_0-9.]+)` \| ([^|]+) \|", re.MULTILINE)


def settings(kind: type, prefix: str = "") -> dict[str, object]:
    """Full names and defaults; MISSING where there is none."""
    found = {}
    for item in dataclasses.fields(kind):
        if "key" in item.metadata and item.metadata["key"] is None:
            continue  # not read from the file under that name
        if dataclasses.is_dataclass(item.type):
            found |= settings(item.type, f"{item.name}.")
        else:
            made = item.default_factory is not dataclasses.MISSING
            found[prefix + item.name] = item.default_factory() if made else item.default
    return found


def written(default: object) -> object:
    if default is dataclasses.MISSING:
        return "must be there"
    return "none" if default is None else list(default) if isinstance(default, tuple) else default


def test_the_page_has_every_setting_with_its_default_and_no_other():
    configuration = PAGE.read_text().split("\n## Configuration\n")[1].split("\n## ")[0]
    rows = ROW.findall(configuration)
    page = {name: "off" if text.strip() == "off" else yaml.safe_load(text) for name, text in rows}
    assert len(page) == len(rows), "a setting is listed twice"
    assert page == {name: written(default) for name, default in settings(Config).items()}
