"""Makes `table.py` from the app: `python -m orchestrator.completion.make`, after a command or an option has changed."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

TABLE = Path(__file__).with_name("table.py")

# what completes an option's or an argument's value, by its name in the app: see values.KINDS
_KINDS = {
    "recipe": "recipe",
    "place": "place",
    "run": "run",
    "host": "host",
    "set_": "set",
    "env": "environment",
    "environment": "specification",
    "machine": "alias",
    "cache": "cache",
    "generation": "generation",
    "to": "generation",
    "log": "file",
    "shell": "bash|zsh|fish",
}
# where a name means something else in one command
_ELSEWHERE = {("env lock", "name"): "specification", ("env build", "name"): "environment"}
_CHOICE = re.compile(r"[a-z]+(\|[a-z]+)+")


def text() -> str:
    """The whole of table.py."""
    lines = [
        '"""Made by `python -m orchestrator.completion.make` from the app, its models and the trainer\'s: not to be',
        'edited."""',
        "",
        "# fmt: off",
        "# ruff: noqa: E501, RUF100",
        "",
        "# command: its help; its options (names, what the value is, None for a switch, help); what its arguments are",
        "COMMANDS: dict[str, tuple[str, tuple[tuple[tuple[str, ...], str | None, str], ...], tuple[str, ...]]] = {",
    ]
    for path, help_, options, arguments in _commands():
        lines.append(f"    {path!r}: ({help_!r}, (")
        lines += [f"        {option!r}," for option in options]
        lines.append(f"    ), {arguments!r}),")
    lines += ["}", "", "# a recipe's keys for --set, and what each must be; one that ends in a dot has keys below it"]
    lines.append("RECIPE_KEYS: tuple[tuple[str, str], ...] = (")
    lines += [f"    {key!r}," for key in _recipe_keys()]
    lines += [
        ")",
        "",
        "# the bundled trainer's settings: key, default, and the values that it can have where these are few",
    ]
    lines.append("SETTINGS: tuple[tuple[str, str, tuple[str, ...]], ...] = (")
    lines += [f"    {one!r}," for one in _settings()]
    lines += [")", ""]
    return "\n".join(lines)


def _commands() -> Iterator[tuple[str, str, list[Any], tuple[str, ...]]]:
    import typer.main

    from orchestrator.cli.app import app

    yield from _below("", typer.main.get_command(app))


def _below(path: str, command: Any) -> Iterator[tuple[str, str, list[Any], tuple[str, ...]]]:
    options, arguments = [], []
    for parameter in command.params:
        kind = _kind(path, parameter)
        if parameter.param_type_name == "argument":
            arguments.append(kind)
        elif not getattr(parameter, "hidden", False):
            switch = parameter.is_flag or getattr(parameter, "count", False)
            names = (*parameter.opts, *parameter.secondary_opts)
            options.append((names, None if switch else kind, _sentence(parameter.help)))
    options.append((("--help", "-h"), None, "Show what there is"))
    if getattr(command, "hidden", False):
        return
    yield path, _sentence(command.short_help or command.help), options, tuple(arguments)
    for name, below in sorted(getattr(command, "commands", {}).items()):
        yield from _below(f"{path} {name}".strip(), below)


def _kind(path: str, parameter: Any) -> str:
    choices = getattr(getattr(parameter, "type", None), "choices", None)  # as older versions of typer have it
    annotation = getattr(getattr(parameter, "type_descriptor", None), "annotation", None)
    choices = choices or [getattr(one, "value", one) for one in getattr(annotation, "__members__", {}).values()]
    choices = choices or (get_args(annotation) if get_origin(annotation) is Literal else ())
    if choices:
        return "|".join(str(one) for one in choices)
    if _CHOICE.fullmatch(parameter.metavar or ""):
        return str(parameter.metavar)
    return _ELSEWHERE.get((path, parameter.name)) or _KINDS.get(parameter.name, "")


def _sentence(help_: str | None) -> str:
    """The first sentence, without its full stop."""
    return re.split(r"\.\s|\.$", " ".join((help_ or "").split()), maxsplit=1)[0]


def _recipe_keys() -> Iterator[tuple[str, str]]:
    from pydantic import BaseModel

    from orchestrator.config.models import Expect, Given, Recipe

    for name, field in Recipe.model_fields.items():
        if name in ("name", "extends") or any(isinstance(one, Given) for one in field.metadata):
            continue
        words = next((one.words for one in field.metadata if isinstance(one, Expect)), "")
        below = field.annotation if isinstance(field.annotation, type) else None
        if below is not None and issubclass(below, BaseModel):
            yield f"{name}.", words
            yield from ((f"{name}.{key}", "") for key in below.model_fields)
        else:
            yield f"{name}{'.' if 'dict' in str(field.annotation) else ''}", words


def _settings() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    from trainer.config import Config

    yield from _fields("settings", Config)


def _fields(prefix: str, config: Any) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    import typing

    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        if field.metadata.get("key", "") is None or field.name == "name":
            continue
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            yield from _fields(f"{prefix}.{field.name}", kind)
            continue
        default = "" if field.default is dataclasses.MISSING or field.default is None else _written(field.default)
        yield f"{prefix}.{field.name}", default, ("true", "false") if kind is bool else field.metadata.get("among", ())


def _written(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if isinstance(value, tuple) else str(value)


if __name__ == "__main__":
    TABLE.write_text(text(), encoding="utf-8")
    print(TABLE)
