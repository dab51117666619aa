"""hosts.yaml, recipes and environments: the models, and how they are found and read."""

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
