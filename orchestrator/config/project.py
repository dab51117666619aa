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
from orchestrator.config.words import shown
from orchestrator.errors import UsageError

HOSTS_FILE = "hosts.yaml"


@dataclass(frozen=True)
class Project:
    """The files that a command reads; earlier folders go before later ones."""

    cwd: Path
    hosts_file: Path  # the nearest one; the bundled one, which holds `local` alone, when there is no other
    recipe_dirs: tuple[Path, ...]  # each with its envs/ beside the recipes
    hosts_looked: tuple[str, ...]  # where a hosts.yaml was looked for, as a sentence shows it
    hosts_bundled: bool = False  # the one that comes with orch, since no other was found
    own_root: Path | None = None  # the folder that holds the nearest recipes/ upwards, where there is one

    @property
    def own_hosts_file(self) -> Path | None:
        """The hosts.yaml that counts, where it is not the one that comes with orch."""
        return None if self.hosts_bundled else self.hosts_file


def user_dir() -> Path:
    """The user's own folder of hosts, recipes and environments."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "orch"


def find_project(cwd: Path | None = None) -> Project:
    """The project around `cwd`: hosts.yaml and recipes/ are each the nearest upwards."""
    try:
        cwd = Path(cwd or Path.cwd()).absolute()
    except OSError as error:
        raise UsageError("the current directory is not there any more; change to another one") from error
    upwards = [cwd, *cwd.parents]
    hosts = [
        *(folder / HOSTS_FILE for folder in upwards),
        user_dir() / HOSTS_FILE,
        bundled_dir() / HOSTS_FILE,
    ]
    nearest = next((folder / "recipes" for folder in upwards if _holds_recipes(folder / "recipes")), None)
    others = [folder / "recipes" for folder in (user_dir(), bundled_dir()) if _is_dir(folder / "recipes")]
    recipes = tuple(dict.fromkeys([*([nearest] if nearest else []), *others]))
    hosts_file = next((path for path in hosts if _is_file(path)), hosts[-1])
    bundled = hosts_file not in hosts[:-1]
    if bundled:
        looked: tuple[str, ...] = (
            f"{HOSTS_FILE} here and in every folder above",
            shown(user_dir() / HOSTS_FILE),
        )
    else:
        looked = (shown(hosts_file),)
    root = nearest.parent if nearest else None
    return Project(cwd, hosts_file, recipes, looked, bundled, root)


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
        for path in _entries(envs) if _is_dir(envs) else []:
            if _is_file(path / "spec.yaml"):
                found.setdefault(path.name, path)
    return dict(sorted(found.items()))


def _files(folder: Path) -> Iterator[Path]:
    for path in _entries(folder):
        if path.suffix in (".yaml", ".yml") and _is_file(path) and not path.name.startswith("."):
            yield path


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise UsageError(f"{shown(folder)} cannot be read: {error.strerror or error}") from error


# os.path in place of pathlib: what may not be looked at counts as not there


def _is_file(path: Path) -> bool:
    return os.path.isfile(path)  # noqa: PTH113


def _is_dir(path: Path) -> bool:
    return os.path.isdir(path)  # noqa: PTH112


def _holds_recipes(folder: Path) -> bool:
    """Whether it is ours: a folder of that name may hold anything (and may not be readable)."""
    try:
        return _is_dir(folder) and (_is_dir(folder / "envs") or any(_files(folder)))
    except UsageError:
        return False
