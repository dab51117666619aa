"""hosts.yaml, recipes and environments: the models, and how they are found and read.

What is taken from here is imported when it is asked for: to know a recipe's name, nobody has to wait for the models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.config.environments import load_environment
    from orchestrator.config.hosts import LOCAL, load_hosts, parse_ssh, resolve_place
    from orchestrator.config.models import Container, EnvironmentSpec, Health, Host, OneOfPlaces, Place, Recipe, Ssh
    from orchestrator.config.project import Project, find_project, list_environments, list_recipes
    from orchestrator.config.recipes import (
        RecipeSource,
        apply_overrides,
        check_recipe,
        dump_recipe,
        fill,
        load_recipe,
        parse_recipe,
        read_recipe,
        recipe_digest,
    )
    from orchestrator.config.yaml_source import dump_yaml

__all__ = [
    "LOCAL",
    "Container",
    "EnvironmentSpec",
    "Health",
    "Host",
    "OneOfPlaces",
    "Place",
    "Project",
    "Recipe",
    "RecipeSource",
    "Ssh",
    "apply_overrides",
    "check_recipe",
    "dump_recipe",
    "dump_yaml",
    "fill",
    "find_project",
    "list_environments",
    "list_recipes",
    "load_environment",
    "load_hosts",
    "load_recipe",
    "parse_recipe",
    "parse_ssh",
    "read_recipe",
    "recipe_digest",
    "resolve_place",
]

_MODULES = ("project", "yaml_source", "models", "environments", "hosts", "recipes")  # the light ones first


def __getattr__(name: str) -> Any:
    import importlib

    if name in __all__:
        for module in _MODULES:
            found = getattr(importlib.import_module(f"{__name__}.{module}"), name, None)
            if found is not None:
                globals()[name] = found
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
