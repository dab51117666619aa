"""Where hosts, recipes and environments are looked for.

The project around the current directory goes first, then the user's own folder, then what
the package brings along.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from orchestrator.bundled import bundled_dir
from orchestrator.config.yaml_source import shown

HOSTS_FILE = "hosts.yaml"


@dataclass(frozen=True)
class Project:
    """The files that a command reads; earlier folders go before later ones."""

    cwd: Path
    hosts_file: Path  # the nearest one; the bundled one, which holds `local` alone, when there is no other
    recipe_dirs: tuple[Path, ...]  # each with its envs/ beside the recipes
    hosts_looked: tuple[str, ...]  # where a hosts.yaml was looked for, as a sentence shows it


def user_dir() -> Path:
    """The user's own folder of hosts, recipes and environments."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "orch"


def find_project(cwd: Path | None = None) -> Project:
    """The project around `cwd`: hosts.yaml and recipes/ are each the nearest upwards."""
    cwd = Path(cwd or Path.cwd()).absolute()
    upwards = [cwd, *cwd.parents]
    hosts = [
        *(folder / HOSTS_FILE for folder in upwards),
        user_dir() / HOSTS_FILE,
        bundled_dir() / HOSTS_FILE,
    ]
    recipes = [*(folder / "recipes" for folder in upwards if _holds_recipes(folder / "recipes"))][:1]
    every = [*recipes, user_dir() / "recipes", bundled_dir() / "recipes"]
    hosts_file = next((path for path in hosts if path.is_file()), hosts[-1])
    if hosts_file == hosts[-1] and hosts_file not in hosts[:-2]:
        looked: tuple[str, ...] = (
            f"{HOSTS_FILE} here and in every folder above",
            shown(user_dir() / HOSTS_FILE),
        )
    else:
        looked = (shown(hosts_file),)
    return Project(cwd, hosts_file, tuple(dict.fromkeys(path for path in every if path.is_dir())), looked)


def list_recipes(project: Project) -> dict[str, Path]:
    """Every recipe by name; a name found twice is the one in the nearer folder."""
    found: dict[str, Path] = {}
    for folder in project.recipe_dirs:
        for path in _files(folder):
            found.setdefault(path.stem, path)
    return dict(sorted(found.items()))


def list_environments(project: Project) -> dict[str, Path]:
    """Every environment's folder by name; a name found twice is the one in the nearer folder."""
    found: dict[str, Path] = {}
    for folder in project.recipe_dirs:
        envs = folder / "envs"
        for path in sorted(envs.iterdir()) if envs.is_dir() else []:
            if (path / "spec.yaml").is_file():
                found.setdefault(path.name, path)
    return dict(sorted(found.items()))


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.suffix in (".yaml", ".yml") and path.is_file() and not path.name.startswith("."):
            yield path


def _holds_recipes(folder: Path) -> bool:
    """Whether it is ours: a folder of that name may hold anything (and may not be readable)."""
    try:
        return folder.is_dir() and ((folder / "envs").is_dir() or any(_files(folder)))
    except OSError:
        return False
