"""Rules of the user's own: patterns with a cause, from a recipe's `rules:` or from ~/.config/orch/rules.yaml."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from orchestrator.config.models import Expect, Rule
from orchestrator.config.patterns import literal_of
from orchestrator.config.problems import in_order, validate
from orchestrator.config.project import user_dir
from orchestrator.config.yaml_source import Document, read_yaml
from orchestrator.diagnosis.catalogue import BY_ID, CAUSES
from orchestrator.diagnosis.model import Cause, Pattern
from orchestrator.errors import ConfigError

PRECEDENCE = 100  # whoever writes a rule means it


class _Rules(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    rules: Annotated[list[Rule], Expect("a list of mappings with pattern and cause")] = Field(default_factory=list)


def catalogue(recipe_rules: Sequence[Any] = ()) -> tuple[Cause, ...]:
    """The catalogue with the user's own rules, then the recipe's, before it.

    Raises:
        ConfigError: rules.yaml has mistakes; each with its line.
    """
    own = [*from_file(user_dir() / "rules.yaml"), *(cause_of(rule) for rule in recipe_rules)]
    return (*own, *CAUSES)


def from_file(path: Path) -> list[Cause]:
    """The rules of a file; none where there is no file."""
    if not path.is_file():
        return []
    document = read_yaml(path)
    return [cause_of(rule) for rule in check(document)]


def check(document: Document) -> list[Rule]:
    """The rules of a document, or a ConfigError with everything that is wrong with them."""
    problems = list(document.problems)
    found, wrong = validate(_Rules, document)
    rules = found.rules if found is not None else []
    problems += wrong
    if problems:
        raise ConfigError(in_order(problems))
    return rules


def usable(rule: Mapping[str, Any]) -> bool:
    """Whether a rule that another version may have written can be used by this one."""
    try:
        Rule.model_validate(dict(rule))
    except ValueError:
        return False
    return True


def cause_of(rule: Rule | Mapping[str, Any]) -> Cause:
    """The entry that a rule makes. One that names an entry of the catalogue has its words where it has none."""
    if not isinstance(rule, Rule):
        rule = Rule.model_validate(dict(rule))
    known = BY_ID.get(rule.cause)
    return Cause(
        id=rule.cause,
        title=rule.title or (known.title if known else rule.cause.replace("-", " ")),
        theme="own",
        patterns=(Pattern((literal_of(rule.pattern),), rule.pattern),),
        advice=(rule.advice,) if rule.advice else (known.advice if known else ()),
        command=rule.command or (known.command if known else ""),
        retry=rule.retry,
        precedence=PRECEDENCE,
    )
