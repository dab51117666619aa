"""Rules of the user's own: patterns with a cause, from a recipe's `rules:` or from ~/.config/orch/rules.yaml."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from orchestrator.config.models import Expect
from orchestrator.config.problems import in_order, validate
from orchestrator.config.project import user_dir
from orchestrator.config.yaml_source import Document, read_yaml
from orchestrator.diagnosis.catalogue import BY_ID, CAUSES
from orchestrator.diagnosis.model import HEALTHY, UNKNOWN, Cause, Pattern
from orchestrator.errors import ConfigError

PRECEDENCE = 100  # whoever writes a rule means it
_NAME = r"[a-z0-9][a-z0-9-]{0,39}"


class Rule(BaseModel):
    """One rule: lines that match it have that cause."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    pattern: Annotated[
        str, StringConstraints(min_length=1), Expect("a regular expression", "pattern: 'text of the line'")
    ]
    cause: Annotated[
        str,
        StringConstraints(pattern=rf"^(?:{_NAME})\z"),
        Expect("a name of lower-case letters, digits and -", "cause: NAME"),
    ]
    title: Annotated[str, Expect("text")] = ""
    advice: Annotated[str, Expect("text")] = ""
    command: Annotated[str, Expect("text")] = ""
    retry: Annotated[bool, Expect("true or false")] = False


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
    problems += wrong
    rules = found.rules if found is not None else []
    for index, rule in enumerate(rules):
        problem = pattern_problem(rule.pattern)
        if problem:
            problems.append(f"{document.where(('rules', index, 'pattern'))}: rules[{index}].pattern: {problem}")
        if rule.cause in (HEALTHY, UNKNOWN):
            problems.append(f"{document.where(('rules', index, 'cause'))}: rules[{index}].cause: that name is taken")
    if problems:
        raise ConfigError(in_order(problems))
    return rules


def pattern_problem(pattern: str) -> str | None:
    """Why a pattern cannot be used, None if it can."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        return f"not a regular expression ({error})"
    if compiled.search(""):
        return "it matches an empty line, and so every line"
    if not literal_of(pattern):
        return "it has no plain text of three characters or more to look for; write some words of the line"
    return None


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


def literal_of(pattern: str) -> str:
    """The longest text that every line that matches must hold, as far as that is plain to see; "" if too short.

    A log of any size is searched for it first. Alternatives and what may be left out do not count.
    """
    import re._parser as parser  # type: ignore[import-not-found,unused-ignore]

    try:
        tree = parser.parse(pattern)
    except re.error:
        return ""
    if tree.state.flags & re.IGNORECASE:
        return ""
    best = max(_runs(tree), key=len, default="")
    return best if len(best) >= 3 else ""


def _runs(tree: Any) -> list[str]:
    runs, now = [], ""
    for op, value in tree:
        name = str(op)
        if name == "LITERAL":
            now += chr(value)
            continue
        runs.append(now)
        now = ""
        if name == "SUBPATTERN" and not (value[1] or value[2]):
            runs += _runs(value[-1])
        elif name in ("MAX_REPEAT", "MIN_REPEAT") and value[0] >= 1:
            runs += _runs(value[2])
    return [*runs, now]
