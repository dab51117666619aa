"""What comes with the package, from a source tree and from an installed wheel."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from orchestrator import bundled
from orchestrator.config import (
    Container,
    EnvironmentSpec,
    Health,
    Host,
    OneOfPlaces,
    Recipe,
    Ssh,
    dump_recipe,
    fill,
    find_project,
    load_hosts,
    load_recipe,
    parse_recipe,
    resolve_place,
)
from orchestrator.config.models import Elastic, OwnCode
from orchestrator.config.problems import keys_of
from orchestrator.config.yaml_source import parse_yaml
from orchestrator.errors import OrchError
from trainer.config import ConfigError
from trainer.config import load as load_settings


def test_in_a_source_tree() -> None:
    root = Path(__file__).resolve().parents[2]
    assert bundled.bundled_dir() == root
    assert bundled.trainer_dir() == root / "trainer"


def test_in_an_installed_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site-packages" / "orchestrator"
    (package / "_bundled" / "recipes").mkdir(parents=True)
    (tmp_path / "site-packages" / "trainer").mkdir()
    monkeypatch.setattr(bundled, "_PACKAGE", package)
    assert bundled.bundled_dir() == package / "_bundled"
    assert bundled.trainer_dir() == tmp_path / "site-packages" / "trainer"


def test_a_broken_installation_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundled, "_PACKAGE", tmp_path / "orchestrator")
    with pytest.raises(OrchError, match="install orch again"):
        bundled.bundled_dir()
    with pytest.raises(OrchError, match="install orch again"):
        bundled.trainer_dir()


def test_the_bundled_files_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    project = find_project(tmp_path)
    assert project.recipe_dirs == (bundled.bundled_dir() / "recipes",)
    hosts = load_hosts(project)
    assert set(hosts) == {"local"}
    demo = load_recipe(project, "demo")
    assert resolve_place(hosts, demo.place).name == "local"
    assert demo.command is None
    assert parse_recipe(dump_recipe(demo)) == demo


def test_the_commented_host_is_right_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taking the comment signs away, as the file says, gives a file that loads."""
    lines = (bundled.bundled_dir() / "hosts.yaml").read_text().splitlines()
    start = lines.index("  # pve:")
    lines[start:] = [line.replace("# ", "", 1) for line in lines[start:]]
    (tmp_path / "hosts.yaml").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    hosts = load_hosts(find_project())
    place = resolve_place(hosts, "pve/200")
    assert place.container is not None
    assert place.container.kind == "pct"
    assert hosts["pve"].ssh is not None
    assert (hosts["pve"].ssh.host, hosts["pve"].ssh.user, hosts["pve"].ssh.port) == ("192.0.2.10", "root", 22)


def test_the_demo_is_the_trainers_own(tmp_path: Path) -> None:
    """The recipe holds the trainer's demo configuration, with its paths as they are at a place."""
    settings = load_recipe(find_project(tmp_path), "demo").settings
    trainers = (bundled.trainer_dir() / "configs" / "demo.yaml").read_text()
    own = parse_yaml(trainers, lambda line, column: f"demo.yaml:{line}", {"settings"}, at=("settings",))
    assert fill(settings, {"code": "C"}) == fill_relative(own.data)
    assert settings["optimizer"]["adam_rate"] == 1e-2


def fill_relative(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: fill_relative(item) for key, item in value.items()}
    return value.replace("../assets/", "C/trainer/assets/") if isinstance(value, str) else value


@pytest.mark.parametrize(
    ("page", "models"),
    [
        ("recipes.md", (Recipe, Health, Elastic, OwnCode, EnvironmentSpec)),
        ("hosts.md", (Host, Ssh, Container)),
        ("places.md", (OneOfPlaces,)),
    ],
)
def test_the_documentation_has_every_key(page: str, models: tuple[type[BaseModel], ...]) -> None:
    text = (bundled.bundled_dir() / "docs" / page).read_text()
    first = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    rows = {key for cell in first for key in re.findall(r"`(?:(?:health|elastic|code)\.)?([a-z_]+)`", cell)}
    keys = {key for model in models for key in keys_of(model)} - {"health", "elastic"}
    assert rows == keys


def test_the_documented_examples_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docs = bundled.bundled_dir() / "docs"
    [hosts] = re.findall(r"```yaml\n(.*?)```", (docs / "hosts.md").read_text(), re.S)
    recipe, settings, own = re.findall(r"```yaml\n(.*?)```", (docs / "recipes.md").read_text(), re.S)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "hosts.yaml").write_text(hosts)
    (tmp_path / "recipes" / "big.yaml").write_text(recipe)
    (tmp_path / "recipes" / "own.yaml").write_text(own)
    project = find_project(tmp_path)
    code = load_recipe(project, "own").code
    assert code is not None and code.path == str(tmp_path)
    loaded = load_recipe(project, "big")
    assert resolve_place(load_hosts(project), loaded.place).name == "pve/200"
    assert (loaded.env, loaded.secrets, loaded.settings) == (
        {"OMP_NUM_THREADS": "8"},
        ["HF_TOKEN"],
        {"steps": 2000},
    )
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(yaml.safe_load(settings)["settings"]))
    with pytest.raises(ConfigError) as error:
        load_settings(tmp_path / "settings.yaml")
    assert all(
        re.search("has no config.json|names no file|is not a file", line) for line in str(error.value).split("\n")
    )


def test_the_configuration_is_light_to_import() -> None:
    heavy = {"torch", "trainer", "paramiko", "fabric", "rich", "packaging", "typer"}
    code = f"import sys, orchestrator.config; print(*sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
