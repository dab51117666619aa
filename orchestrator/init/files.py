"""The files of `orch init`: written where there are none, never over what is there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from orchestrator import schema_files
from orchestrator.config import LOCAL, Project, load_recipe
from orchestrator.config.project import HOSTS_FILE
from orchestrator.errors import OrchError, UsageError
from orchestrator.init import hosts_text, recipe_text
from orchestrator.init.flow import EXAMPLE, Chosen

# As in the README. It runs without orch too.
PROGRAM = """\
import json, os, random, time

weight = 0.0
for step in range(1, 41):
    x = random.random()
    error = weight * x - 3 * x
    weight -= error * x
    print(f"step {step} loss {error**2:.4f}", flush=True)
    with open(os.environ.get("ORCH_METRICS", os.devnull), "a") as metrics:
        print(json.dumps({"step": step, "loss": error**2, "tokens": 1, "time": time.time()}), file=metrics)
    time.sleep(0.05)
"""

WRITTEN, CHANGED, KEPT = "written", "changed", "kept"


@dataclass(frozen=True)
class File:
    """What became of one file; `note` says more, `paste` is what the user has to put into it."""

    path: Path
    how: str
    note: str = ""
    paste: str = ""


def write(project: Project, chosen: Chosen) -> list[File]:
    """Writes what is missing. Raises UsageError where a file cannot be written."""
    try:
        return [
            *_example(chosen),
            _hosts(project, chosen),
            _recipe(project, chosen),
            *_environment(chosen),
            *_schemas(chosen.root),
        ]
    except OSError as error:
        raise UsageError(f"{error.filename or chosen.root} cannot be written: {error.strerror or error}") from None


def _fresh(path: Path, text: str, note: str = "") -> File:
    """A file that is written only where there is none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        return File(path, KEPT, "it was there already")
    return File(path, WRITTEN, note)


def _example(chosen: Chosen) -> list[File]:
    return [_fresh(chosen.root / EXAMPLE, PROGRAM, "a small program to begin with")] if chosen.example else []


def _hosts(project: Project, chosen: Chosen) -> File:
    entry = chosen.entry
    if project.hosts_bundled:
        path = chosen.root / HOSTS_FILE
        return _fresh(path, hosts_text.new_file(entry, schema_files.pointer(path, chosen.root, "hosts")))
    path = project.hosts_file
    if chosen.known or (entry.name == LOCAL and entry.container is None):
        return File(path, KEPT, f"it has {entry.place} already")
    text = hosts_text.added(project, entry)
    if text is None:
        return File(path, KEPT, f"{entry.place} has to be put in by hand, under hosts:", hosts_text.piece(entry))
    hosts_text.replace_file(path, text)
    return File(path, CHANGED, f"{entry.place} was added")


def _recipe(project: Project, chosen: Chosen) -> File:
    path = chosen.root / "recipes" / f"{chosen.recipe}.yaml"
    other = path.with_suffix(".yml")
    if other.exists():
        return _kept(project, other, chosen)
    text = recipe_text.recipe(
        name=chosen.recipe,
        project=chosen.root.name,
        place=chosen.entry.place,
        environment=chosen.environment,
        command=chosen.command,
        needs=chosen.needs,
        pointer=schema_files.pointer(path, chosen.root, "recipe"),
    )
    found = _fresh(path, text)
    return found if found.how == WRITTEN else _kept(project, path, chosen)


def _kept(project: Project, path: Path, chosen: Chosen) -> File:
    """A recipe that was there, and what of it is not as it would be written now."""
    note = "it was there already; --name NAME makes another"
    try:
        said = load_recipe(project, str(path.absolute()))
    except OrchError:
        return File(path, KEPT, f"{note}; it cannot be read: orch plan {path.stem}")
    wanted = [("place", said.place, chosen.entry.place), ("environment", said.environment, chosen.environment.name)]
    other = [f"{key}: {new}" for key, old, new in wanted if old != new]
    if not other:
        return File(path, KEPT, "it was there already")
    return File(path, KEPT, f"{note}; what was chosen now is not what it says", "\n".join(other))


def _environment(chosen: Chosen) -> list[File]:
    if not chosen.environment.own:
        return []
    folder = environment_folder(chosen)
    spec = folder / "spec.yaml"
    head = schema_files.pointer(spec, chosen.root, "environment")
    return [
        _fresh(spec, f"{head}\n{recipe_text.spec(chosen.environment)}"),
        _fresh(folder / "requirements.in", recipe_text.requirements(chosen.environment)),
    ]


def environment_folder(chosen: Chosen) -> Path:
    """Where an environment of the project's own lies."""
    return chosen.root / "recipes" / "envs" / chosen.environment.name


def _schemas(root: Path) -> list[File]:
    written = schema_files.write(root)
    return [File(root / schema_files.FOLDER, WRITTEN, "for your editor; git ignores them")] if written else []
