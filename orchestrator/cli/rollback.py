"""`orch rollback-env`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from orchestrator.cli.context import project_and_hosts
from orchestrator.cli.output import console, print_json
from orchestrator.explain import explanation

if TYPE_CHECKING:
    from orchestrator.config import Host, Place, Project
    from orchestrator.generations import Change, WorkingTree


def meant_recipe(recipe: str | None, place: str | None) -> tuple[str, Place]:
    """The recipe's name and its place: as given, else those of the latest launch, else the recipe's own place.

    Raises NotFound where nothing was launched yet, UsageError for an unknown place.
    """
    from orchestrator import history
    from orchestrator.config import list_recipes, resolve_place
    from orchestrator.errors import NotFound
    from orchestrator.survey import is_place

    project, hosts = project_and_hosts()
    if recipe is not None and place is None and is_place(hosts, recipe) and recipe not in list_recipes(project):
        recipe, place = None, recipe
    known = [entry for entry in history.known(place) if recipe in (None, entry.recipe)]
    latest = max(known, key=lambda entry: entry.created, default=None)
    if recipe is None and latest is None:
        raise NotFound("nothing was launched from here yet, so the recipe has to be named", hint="orch env list")
    name = recipe or (latest.recipe if latest else "")
    where = place or _own_place(project, hosts, name) or (latest.place if latest else "local")
    return name, resolve_place(hosts, where, project)


def _own_place(project: Project, hosts: Mapping[str, Host], recipe: str) -> str | None:
    """Where the recipe says that it runs; None where it cannot be read, which is no matter here."""
    from orchestrator.config import load_recipe
    from orchestrator.errors import OrchError

    try:
        return load_recipe(project, recipe).place
    except OrchError:
        return None


def agreed(question: str, yes: bool, hint: str) -> bool:
    """A yes, from the option or from a terminal. Raises Refused where there is neither."""
    from orchestrator.errors import Refused

    if yes:
        return True
    if not sys.stdin.isatty():
        raise Refused("this is done only after a yes, and there is no terminal to ask at", hint=hint)
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:  # Ctrl-D is no yes
        print()
        return False


def _working_tree(recipe: str) -> WorkingTree:
    """What a launch would take from here without a pin. What cannot be read is no hindrance to going back."""
    from orchestrator.config import load_environment, load_recipe
    from orchestrator.errors import OrchError
    from orchestrator.generations import WorkingTree
    from orchestrator.launch import working_code

    project, _ = project_and_hosts()
    spec = code = None
    with contextlib.suppress(OrchError, OSError):
        loaded = load_recipe(project, recipe)
        with contextlib.suppress(OrchError, OSError):
            spec = load_environment(project, loaded.environment)
        code = working_code(loaded)
    return WorkingTree(spec, code)


def rollback_command(
    recipe: str | None, place: str | None, *, to: int | None, yes: bool, explain: bool, json: bool
) -> None:
    """Pin a recipe at a place to a generation that worked.

    Raises:
        NotFound: no such generation, or none that is good.
        Refused: its environment is polluted, its code was changed, or there was nobody to ask.
    """
    name, where = meant_recipe(recipe, place)
    if explain:
        asked = f"generation {to}" if to is not None else "the last good one"
        requests = [
            f"the generations of {name}: {asked}, and the one that launches take now",
            "is its environment there, and clean?",
            "is its code there, and intact?",
            "the packages of the environment in use now, and the files of both codes",
            "the keys of both compile caches, where they are others",
            f"after a yes: pin {name} to it, by one rename; nothing is removed and no run touched",
        ]
        print(explanation(where, requests))
        return
    from orchestrator.generations import rollback
    from orchestrator.place.session import open_session
    from orchestrator.view.environments import print_change

    out = console()
    changes: dict[str, Any] = {}

    def confirm(one: Mapping[str, Any], change: Change) -> bool:
        changes.update(packages=list(change.packages), cache=list(change.cache), code=list(change.code))
        if not json:
            print_change(out, name, where.name, one, change)
        to_say = "" if to is None else f" --to {to}"
        return agreed("go back to it?", yes, f"orch rollback-env {name} {where.name}{to_say} --yes")

    with open_session(where) as session:
        chosen, done = rollback(session, name, to, confirm, _working_tree(name))
    if json:
        pinned = chosen["generation"] if done else None
        print_json(
            {"recipe": name, "place": where.name, "pinned": pinned, "generation": dict(chosen), "change": changes}
        )
    elif done:
        out.print(
            f"{name} at {where.name} is pinned to generation {chosen['generation']}: launches take its environment, "
            f"cache and code until it is lifted\n  orch launch {name} --place {where.name}\n"
            f"  orch env use {name} {where.name}    (lifts the pin)",
            soft_wrap=True,
        )
    else:
        out.print("nothing was changed", soft_wrap=True)
