"""The user's pip configuration in the words of uv, which reads none of it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Mapping

# What uv is told by its environment, from a pip setting that may hold several values.
_LISTS = {
    "extra-index-url": ("UV_EXTRA_INDEX_URL", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "constraint": ("UV_CONSTRAINT", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
}


def pip_settings() -> dict[str, str]:
    """pip's own settings by name, as `pip download` would see them; {} where pip cannot say."""
    try:
        answer = subprocess.run(
            [sys.executable, "-m", "pip", "config", "list"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    return parse(answer.stdout)


def parse(listing: str) -> dict[str, str]:
    """The settings in the output of `pip config list`, each from the section that wins for `download`."""
    sections: dict[str, dict[str, str]] = {}
    for line in listing.splitlines():
        key, separator, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if not separator or not section:
            continue
        try:
            text = str(ast.literal_eval(value))
        except (ValueError, SyntaxError):
            text = value
        sections.setdefault(section, {})[name] = text
    merged: dict[str, str] = {}
    for section in ("global", "download", ":env:"):
        merged.update(sections.get(section, {}))
    return merged


def uv_flags(settings: Mapping[str, str]) -> list[str]:
    """What has no environment variable in uv."""
    return ["--no-index"] if settings.get("no-index", "").lower() in ("1", "true", "yes", "on") else []


def uv_environment(settings: Mapping[str, str]) -> dict[str, str]:
    """The user's environment with pip's settings added for uv. Addresses stay out of command lines, which
    everybody on the machine can read, since they may hold credentials."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("UV_")}
    environment.update(
        UV_NO_CONFIG="1",
        UV_PYTHON_DOWNLOADS="never",
        UV_NO_PROGRESS="1",
        UV_HTTP_RETRIES="1",
        UV_HTTP_TIMEOUT="15",
        # pip takes the best version over all its indexes, and so must what stands in for it.
        UV_INDEX_STRATEGY="unsafe-best-match",
        NO_COLOR="1",
    )
    if settings.get("index-url"):
        environment["UV_DEFAULT_INDEX"] = settings["index-url"]
    for name, (variable, separator) in _LISTS.items():
        values = settings.get(name, "").split()
        if values:
            environment[variable] = separator.join(values)
    if settings.get("cert"):
        environment["SSL_CERT_FILE"] = settings["cert"]
    if settings.get("proxy"):
        environment.update(HTTPS_PROXY=settings["proxy"], HTTP_PROXY=settings["proxy"])
    return environment
