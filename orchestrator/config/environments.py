"""Environments: recipes/envs/NAME/spec.yaml and the lock that lies beside it."""

from __future__ import annotations

import re

from orchestrator.config.models import ENVIRONMENT_NAME, EnvironmentSpec
from orchestrator.config.problems import in_order, validate
from orchestrator.config.project import Project, list_environments
from orchestrator.config.words import did_you_mean, listing, quote
from orchestrator.config.yaml_source import read_yaml, shown
from orchestrator.errors import ConfigError, UsageError

LOCK = "requirements.lock"


def load_environment(project: Project, name: str) -> EnvironmentSpec:
    """The environment of that name with its lock; UsageError with the nearest name when there is none."""
    known = list_environments(project)
    directory = known.get(name)
    if directory is None or not re.fullmatch(ENVIRONMENT_NAME, name):
        looked = " and ".join(shown(folder / "envs") for folder in project.recipe_dirs)
        raise UsageError(
            f"there is no environment {quote(name)}{did_you_mean(name, known)}",
            f"environments: {listing(known)}; looked for NAME/spec.yaml in {looked}",
        )
    document = read_yaml(directory / "spec.yaml")
    problems = list(document.problems)
    lock_text = ""
    try:
        lock_text = (directory / LOCK).read_text(encoding="utf-8")
    except FileNotFoundError:
        problems.append(f"{shown(directory / LOCK)} is missing: an environment is built from its lock alone")
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"{shown(directory / LOCK)} cannot be read: {error}")
    given = {"name": name, "directory": directory, "lock_text": lock_text}
    spec, wrong = validate(EnvironmentSpec, document, given=given)
    problems += wrong
    if spec is None or problems:
        raise ConfigError(in_order(problems))
    return spec
