"""Where the files that come with the package lie, in an installed wheel and in a source tree alike."""

from __future__ import annotations

from pathlib import Path

from orchestrator.errors import OrchError

_PACKAGE = Path(__file__).resolve().parent


def bundled_dir() -> Path:
    """The folder that holds the bundled `recipes/` and `hosts.yaml`."""
    for folder in (_PACKAGE / "_bundled", _PACKAGE.parent):
        if (folder / "recipes").is_dir():
            return folder
    raise OrchError(f"the bundled recipes are missing beside {_PACKAGE}; install orch again")


def trainer_dir() -> Path:
    """The bundled `trainer` package, found by its place: importing it would import torch."""
    folder = _PACKAGE.parent / "trainer"
    if folder.is_dir():
        return folder
    raise OrchError(f"the bundled trainer is missing at {folder}; install orch again")
