"""Errors that a user can cause or meet, each with its exit code.

A message is one clear sentence: what is wrong, where, and what to do. `hint` is the next command to type.
"""

from __future__ import annotations

from collections.abc import Sequence


class OrchError(Exception):
    """A run or a check failed."""

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(OrchError):
    """The command line or the configuration is wrong, an unknown recipe or host included."""

    exit_code = 2


class ConfigError(UsageError):
    """All that is wrong with one file, each problem with its place in it."""

    def __init__(self, problems: Sequence[str], hint: str = "") -> None:
        super().__init__("\n".join(problems), hint)
        self.problems = tuple(problems)


class Unreachable(OrchError):
    """The place could not be reached, or stopped answering: what happens there is unknown."""

    exit_code = 3


class ConnectionLost(Unreachable):
    """The connection was there and is gone; a request in flight may or may not have been carried out."""


class NotFound(OrchError):
    """No such run, environment or generation."""

    exit_code = 4


class Refused(OrchError):
    """Refused for safety."""

    exit_code = 5
