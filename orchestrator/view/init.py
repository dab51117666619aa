"""What `orch init` shows at its end: each file, why this environment, and what to type next."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.console import Console

from orchestrator.config.yaml_source import shown
from orchestrator.init.files import File
from orchestrator.init.flow import Chosen
from orchestrator.init.flow import shown as command_shown

_WIDTH = 80


def print_choice(console: Console, chosen: Chosen) -> None:
    """The command and the environment, with the reason for it."""
    absent = [
        word for word in chosen.command[1:] if word.endswith((".py", ".sh")) and not (chosen.root / word).exists()
    ]
    note = f" ({absent[0]} is not here yet)" if absent and not chosen.example else ""
    _wrapped(console, f"  {'runs':<13}", command_shown(list(chosen.command)) + note)
    made = "a new environment, " if chosen.environment.own else ""
    _wrapped(console, f"  {'environment':<13}", f"{made}{chosen.environment.name}: {chosen.environment.why}")


def print_files(console: Console, files: Sequence[File]) -> None:
    """A line a file, and what has to be pasted into one."""
    for file in files:
        note = f" ({file.note})" if file.note else ""
        console.print(f"  {file.how:<13}{shown(file.path)}{note}", soft_wrap=True)
        if file.paste:
            console.print(textwrap.indent(file.paste.rstrip("\n"), " " * 15), soft_wrap=True)


def print_next(console: Console, commands: Sequence[tuple[str, str]]) -> None:
    """The commands to type now, each with what it does."""
    width = max(len(command) for command, _ in commands)
    console.print("next:")
    for command, what in commands:
        console.print(f"  {command.ljust(width)}  {what}".rstrip(), soft_wrap=True)


def _wrapped(console: Console, head: str, text: str) -> None:
    lines = textwrap.wrap(text, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False)
    console.print("\n".join(lines) or head, soft_wrap=True)
