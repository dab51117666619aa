"""What git knows of a folder: which files are its own, and what they were when the code was taken."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.errors import UsageError

_PATCH = 1 << 20  # bytes kept of a patch
_NAMED = 200  # untracked files named in the record
_LIMIT = 60.0  # seconds for one call
# set by git for its hooks, these would have it look at another tree
_ELSEWHERE = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_OBJECT_DIRECTORY", "GIT_NAMESPACE")
_SUBMODULE = "160000"


@dataclass(frozen=True)
class Listed:
    """The files of a work tree below a folder, by their paths relative to it."""

    tracked: frozenset[str]
    untracked: frozenset[str]  # and not ignored
    submodules: tuple[str, ...]  # checked out; their files are in neither set
    repositories: tuple[str, ...]  # work trees of their own that are no submodules


def in_work_tree(folder: Path) -> bool:
    """Whether git keeps this folder. A tree that an outer repository ignores is none of its own.

    Raises UsageError where git cannot be asked: taken as a plain folder, what it ignores would travel.
    """
    if not any(_is_repository(parent / ".git") for parent in (folder, *folder.parents)):
        return False
    call(folder, "rev-parse", "--show-toplevel")
    if call(folder, "ls-files", "-z", "--cached", "--", "."):
        return True
    return _is_repository(folder / ".git") or not _succeeds(folder, "check-ignore", "-q", ".")


def listed(folder: Path) -> Listed:
    """Raises UsageError for a submodule that was not checked out."""
    tracked, submodules = set(), []
    for entry in _split(call(folder, "ls-files", "-z", "--stage")):
        about, _, name = entry.partition("\t")
        if not about.startswith(_SUBMODULE):
            tracked.add(name)
        elif _is_repository(folder / name / ".git"):
            submodules.append(name)
        else:
            raise UsageError(
                f"the submodule {name} of {folder} is not checked out, so the code is not whole",
                hint=f"git -C {folder} submodule update --init --recursive",
            )
    others = _split(call(folder, "ls-files", "-z", "--others", "--exclude-standard"))
    untracked = frozenset(name for name in others if not name.endswith("/"))
    repositories = tuple(sorted(name[:-1] for name in others if name.endswith("/")))
    return Listed(frozenset(tracked), untracked, tuple(sorted(set(submodules))), repositories)


def facts(folder: Path, taken: Collection[str], prefix: str = "") -> dict[str, Any]:
    """For the record: commit, branch (None when detached), dirty, patch of what git tracks, untracked files by name.

    Of untracked files only those count that were `taken` (as `prefix` and path); what is in them is in the snapshot,
    not in the patch.
    """
    commit = _word(folder, "rev-parse", "-q", "--verify", "HEAD")
    changes = ("--no-color", "--no-ext-diff", "--no-textconv", "--binary", "--src-prefix=a/", "--dst-prefix=b/")
    patch = call(folder, "diff", *changes, "HEAD", "--", ".") if commit else ""
    known = listed(folder)
    untracked = sorted(name for name in known.untracked if prefix + name in taken)
    found: dict[str, Any] = {
        "commit": commit,
        "branch": _word(folder, "symbolic-ref", "-q", "--short", "HEAD"),
        "dirty": bool(patch or untracked or (not commit and known.tracked)),
        "patch": patch[:_PATCH],
        "untracked": untracked[:_NAMED],
    }
    if len(patch) > _PATCH:
        found["patch_cut"] = True
    repositories = [name for name in known.repositories if any(one.startswith(f"{prefix}{name}/") for one in taken)]
    inner = [
        {"path": name, **facts(folder / name, taken, f"{prefix}{name}/")} for name in (*known.submodules, *repositories)
    ]
    if inner:
        found["submodules"] = inner
        found["dirty"] = found["dirty"] or any(one["dirty"] for one in inner)
    return found


def call(folder: Path, *words: str) -> str:
    """What git prints. Raises UsageError with its own words."""
    done = _run(folder, *words)
    if done.returncode != 0:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise UsageError(f"git cannot read {folder}: {said[0] if said else f'exit status {done.returncode}'}")
    return os.fsdecode(done.stdout)


def _succeeds(folder: Path, *words: str) -> bool:
    return _run(folder, *words).returncode == 0


def _word(folder: Path, *words: str) -> str | None:
    done = _run(folder, *words)
    return done.stdout.decode("utf-8", "replace").strip() or None if done.returncode == 0 else None


def _run(folder: Path, *words: str) -> subprocess.CompletedProcess[bytes]:
    env = {name: value for name, value in os.environ.items() if name not in _ELSEWHERE}
    argv = ["git", "--no-optional-locks", *words]
    try:
        return subprocess.run(
            argv, cwd=folder, env=env, capture_output=True, timeout=_LIMIT, stdin=subprocess.DEVNULL, check=False
        )
    except FileNotFoundError as error:
        raise UsageError(
            f"{folder} is kept in git, and there is no git on this machine to say which files belong to it: install it"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"git {words[0]} in {folder} did not end within {_LIMIT:.0f} seconds") from error


def _split(text: str) -> list[str]:
    return [name for name in text.split("\0") if name]


def _is_repository(path: Path) -> bool:
    """Of `.git`: a folder of git's, or the file that stands for one. An empty folder of that name is neither."""
    try:
        return path.is_file() or os.path.lexists(path / "HEAD")
    except OSError:
        return False
