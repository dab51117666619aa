"""Secrets: named in a recipe, taken from this workstation's environment, delivered by stdin, never shown."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from orchestrator.errors import UsageError


def values(names: Iterable[str]) -> dict[str, str]:
    """The value of each named secret.

    Raises:
        UsageError: one or more of them are not set here; all are named.
    """
    found = {name: os.environ.get(name, "") for name in names}
    missing = [name for name, value in found.items() if not value]
    if missing:
        raise UsageError(
            f"the recipe needs the secret{'s' if len(missing) > 1 else ''} {', '.join(missing)}, "
            f"which {'are' if len(missing) > 1 else 'is'} not set in this environment",
            hint=f"export {missing[0]}=…",
        )
    return found


def redacted(text: str, secrets: Mapping[str, str]) -> str:
    """`text` with every value of a secret replaced by its name."""
    for name, value in sorted(secrets.items(), key=lambda item: -len(item[1])):
        if len(value) >= 4:  # a shorter one would blot out half the text
            text = text.replace(value, f"<{name}>")
    return text
