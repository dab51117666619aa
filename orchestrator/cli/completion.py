"""`orch completion`."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from orchestrator.cli.output import console, error_console
from orchestrator.completion.shells import SCRIPTS
from orchestrator.config.project import user_dir
from orchestrator.errors import OrchError, UsageError


def completion_command(shell: str | None, *, show: bool) -> None:
    """Put the shell's script where it reads it at its start, or print it. What is there already is not put twice."""
    name = shell or _this_shell()
    if name not in SCRIPTS:
        raise UsageError(
            f'there is no completion for "{name}": it is there for {", ".join(SCRIPTS)}', hint="orch completion bash"
        )
    if show:
        print(SCRIPTS[name], end="")
        return
    # a shell that reads what is written here, by `source <(orch completion bash)`, is to find no words for people
    told = console() if sys.stdout.isatty() else error_console()
    for line in install(name):
        told.print(line, soft_wrap=True)


def install(shell: str) -> list[str]:
    """Write the script, and the line that reads it where the shell finds none by itself; -> what was done.

    Raises OrchError where a file cannot be written.
    """
    told = []
    try:
        script = _script(shell)
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(SCRIPTS[shell], encoding="utf-8")
        told.append(f"{script} completes orch in {shell}")
        start = _start_file(shell)
        if start is not None:
            path = shlex.quote(str(script))
            line = f"[ -r {path} ] && . {path}"
            before = start.read_text(encoding="utf-8", errors="surrogateescape") if start.exists() else ""
            if line not in before.splitlines():
                gap = "" if not before or before.endswith("\n") else "\n"
                with start.open("a", encoding="utf-8", errors="surrogateescape") as file:
                    file.write(f"{gap}{line}\n")
                told.append(f"{start} reads it, by a line that was added at its end")
            else:
                told.append(f"{start} reads it already")
    except OSError as error:
        raise OrchError(
            f"{error.filename}: {error.strerror}; put the script where {shell} reads it",
            hint=f"orch completion {shell} --show",
        ) from error
    here = "" if start is None else f", and in this one after: . {shlex.quote(str(script))}"
    told.append(f"it is there in each new {shell}{here}")
    return told


def _script(shell: str) -> Path:
    if shell == "fish":  # which looks there by itself
        return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "fish/completions/orch.fish"
    return user_dir() / f"completion.{shell}"


def _start_file(shell: str) -> Path | None:
    if shell == "bash":
        return Path.home() / ".bashrc"
    if shell == "zsh":
        return Path(os.environ.get("ZDOTDIR") or Path.home()) / ".zshrc"
    return None


def _this_shell() -> str:
    """The nearest shell that this runs in, else the user's own."""
    import subprocess

    at = os.getppid()
    for _ in range(4):
        try:
            done = subprocess.run(
                ["ps", "-o", "ppid=,comm=", "-p", str(at)], capture_output=True, text=True, timeout=5, check=True
            )
            parent, command = done.stdout.split(None, 1)
        except (OSError, ValueError, subprocess.SubprocessError):
            break
        name = Path(command.strip().lstrip("-")).name
        if name in SCRIPTS:
            return name
        at = int(parent)
    own = Path(os.environ.get("SHELL", "")).name
    if own in SCRIPTS:
        return own
    raise UsageError("which shell this is could not be told; name it", hint="orch completion bash")
