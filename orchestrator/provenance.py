"""What a run was made of: enough to say later what changed since it last worked."""

from __future__ import annotations

import importlib.metadata
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.bundled import trainer_dir
from orchestrator.config import Place, Recipe, recipe_digest
from orchestrator.snapshot import Snapshot

if TYPE_CHECKING:
    from orchestrator.compile_cache.key import Prediction
    from orchestrator.environment.build import BuiltEnvironment
    from orchestrator.generations import Pinned
    from orchestrator.place.session import Hello

_HOST = ("hostname", "kernel", "boot_id", "driver", "config", "config_digest")
_CONTAINER = ("hostname", "machine", "system", "libc", "kernel", "boot_id", "cpus", "memory_limit")


def provenance(
    recipe: Recipe,
    place: Place,
    hello: Hello,
    environment: BuiltEnvironment,
    snapshot: Snapshot,
    pin: Pinned | None = None,
    cache: Prediction | None = None,
    gpus: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The record kept as `provenance.json` in the run's directory. With a `pin` the code is what that says of it."""
    manifest = environment.manifest
    container = hello.container
    return {
        "version": 1,
        "at": time.time(),
        "orch": importlib.metadata.version("orch"),
        "recipe": {"name": recipe.name, "digest": recipe_digest(recipe, place)},
        "place": place.name,
        "environment": {
            "id": environment.id,
            "python": manifest.get("python"),
            "torch": manifest.get("torch"),
        },
        "code": {"digest": snapshot.digest, **(_origin(snapshot) if pin is None else pin.code)},
        "pinned_to": None if pin is None else pin.generation,
        "compile_cache": None if cache is None else cache.to_json(),
        "gpus": None if gpus is None else dict(gpus),
        "host": {name: hello.host.get(name) for name in _HOST},
        "container": {name: container.get(name) for name in _CONTAINER},
        "secrets": sorted(recipe.secrets),
    }


def _origin(snapshot: Snapshot) -> Mapping[str, Any]:
    return snapshot.origin or _git(trainer_dir())


def _git(directory: Path) -> dict[str, Any]:
    """Commit and dirty patch where the code lies in a git work tree; nothing elsewhere."""
    try:
        if not _output(["git", "ls-files", "--", "__init__.py"], directory):
            return {}  # an installed package that happens to lie below somebody's work tree
        commit = _output(["git", "rev-parse", "HEAD"], directory)
        patch = _output(["git", "diff", "HEAD", "--", "."], directory)
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"commit": commit.strip(), "patch": patch if len(patch) <= 1 << 20 else patch[: 1 << 20]}


def _output(argv: list[str], directory: Path) -> str:
    done = subprocess.run(argv, cwd=directory, capture_output=True, check=True, timeout=10, stdin=subprocess.DEVNULL)
    return done.stdout.decode("utf-8", "replace")
