"""The user's own tree as code: which files of it travel, which never do, and how much they may be."""

from __future__ import annotations

import fnmatch
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator import git
from orchestrator.config.models import size_of
from orchestrator.errors import UsageError
from orchestrator.snapshot import Entry, Snapshot, pack

# fmt: off
_HEAVY = frozenset([
    ".git", ".hg", ".svn", ".venv", "node_modules", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache",
    ".hypothesis", ".tox", ".nox", ".ipynb_checkpoints", ".eggs", ".terraform", ".direnv",
    ".orch",
])  # and every virtual environment, whatever its name
_SECRET_FOLDERS = frozenset([".ssh", ".aws", ".azure", ".gnupg", ".kube", ".docker", ".gcloud"])
_SECRET_FILES = (
    ".env", ".env.*", "*.env", ".envrc", ".netrc", "_netrc", ".pypirc", ".npmrc", ".git-credentials", ".pgpass",
    "id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", "*.pem", "*.key", "*.p12", "*.pfx", "*.kdbx", "*.keytab",
)
# fmt: on
_NAMED = 5  # of the largest files


@dataclass(frozen=True)
class _Found:
    """Paths below the tree: those to take, and those left behind because their names promise a secret."""

    taken: frozenset[str]
    secret: frozenset[str]

    def below(self, prefix: str) -> _Found:
        return _Found(
            frozenset(f"{prefix}/{name}" for name in self.taken), frozenset(f"{prefix}/{name}" for name in self.secret)
        )

    def __or__(self, other: _Found) -> _Found:
        return _Found(self.taken | other.taken, self.secret | other.secret)


def snapshot_tree(folder: Path, largest: str) -> Snapshot:
    """The tree as it lies there, uncommitted changes included; `origin` says what it was, `left` what stayed behind.

    With git: what it tracks and what it does not ignore, submodules included. Without: everything. In neither case
    heavy folders, and files whose names promise a secret, unless git tracks them.

    Raises:
        UsageError: no such folder, nothing in it, more than `largest`, a link that leads out, an unreadable file.
    """
    if not folder.is_dir():
        raise UsageError(f'there is no folder {folder}, which the recipe names under "code"')
    root = folder.resolve()
    with_git = git.in_work_tree(root)
    found = _with_git(root) if with_git else _without_git(root)
    names = sorted(found.taken, key=lambda name: name.split("/"))
    if not names:
        raise UsageError(f'{root}, which the recipe names under "code", holds no file that would be taken')
    _hold_names(root, names)
    _hold_size(root, names, largest)
    origin: dict[str, Any] = {"path": str(root), **(git.facts(root, found.taken) if with_git else {})}
    return pack(_entries(root, names), origin, tuple(sorted(found.secret)))


def _with_git(folder: Path) -> _Found:
    known = git.listed(folder)
    venvs = tuple(name[: -len("pyvenv.cfg")] for name in known.untracked if name.endswith("/pyvenv.cfg"))
    loose = {name for name in known.untracked if not name.startswith(venvs or ("\0",)) and not _heavy(name)}
    secret = {name for name in loose if _secret(name)}
    # what Python compiled is never taken: the place would not tell it from what it compiled itself
    tracked = {name for name in known.tracked if not _compiled(name) and os.path.lexists(folder / name)}
    found = _Found(frozenset(tracked | {name for name in loose - secret if not _compiled(name)}), frozenset(secret))
    for inner in (*known.submodules, *known.repositories):
        if inner in known.submodules or not _heavy(inner):
            found |= _with_git(folder / inner).below(inner)
    return found


def _without_git(root: Path) -> _Found:
    taken: set[str] = set()
    secret: set[str] = set()
    found = _Found(frozenset(), frozenset())

    def unreadable(error: OSError) -> None:
        raise UsageError(f"{error.filename} cannot be read: {error.strerror}")

    for folder, folders, files in os.walk(root, onerror=unreadable):
        inner = os.path.relpath(folder, root)
        prefix = "" if inner == "." else f"{inner}/"
        for name in list(folders):
            path = Path(folder, name)
            if path.is_symlink():
                files.append(name)
                folders.remove(name)
            elif name in _HEAVY or os.path.lexists(path / "pyvenv.cfg"):
                folders.remove(name)
            elif os.path.lexists(path / ".git") and git.in_work_tree(path):
                folders.remove(name)
                found |= _with_git(path).below(f"{prefix}{name}")
        for name in files:
            inside = f"{prefix}{name}"
            if not _compiled(inside) and name != ".git":
                (secret if _secret(inside) else taken).add(inside)
    return found | _Found(frozenset(taken), frozenset(secret))


def _heavy(name: str) -> bool:
    return not _HEAVY.isdisjoint(name.split("/"))


def _compiled(name: str) -> bool:
    return name.endswith(".pyc") or "__pycache__" in name.split("/")


def _secret(name: str) -> bool:
    *folders, last = name.lower().split("/")
    return not _SECRET_FOLDERS.isdisjoint(folders) or any(fnmatch.fnmatchcase(last, each) for each in _SECRET_FILES)


def _hold_names(root: Path, names: Sequence[str]) -> None:
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            shown = name.encode("utf-8", "backslashreplace").decode()
            raise UsageError(f"the name of {shown} in {root} is not UTF-8 text: rename it") from None


def _hold_size(root: Path, names: Sequence[str], largest: str) -> None:
    sizes = {name: (root / name).lstat().st_size for name in names if os.path.lexists(root / name)}
    total = sum(sizes.values())
    if total <= size_of(largest):
        return
    first = sorted(sizes, key=lambda name: (-sizes[name], name))[:_NAMED]
    first = [name for name in first if sizes[name] >= total / 100]  # what is small is not the reason
    told = ", ".join(f"{name} ({_shown(sizes[name])})" for name in first)
    raise UsageError(
        f"the code in {root} is {_shown(total)} in {len(sizes):,} files, more than the {largest} that code.largest "
        f"allows; mostly {told}; name in .gitignore what is no code, or allow more",
        hint=f"the same with --set code.largest={total // 10**6 + 1}MB"
        if total < 2 * 10**9
        else f"du -ah {root} | sort -h | tail",
    )


def _shown(size: int) -> str:
    return f"{size / 10**6:,.1f} MB" if size >= 10**5 else f"{size:,} bytes"


def _entries(root: Path, names: Sequence[str]) -> Iterator[Entry]:
    out = [name for name in names if (root / name).is_symlink() and _leads_out(root, name)]
    if out:
        told = ", ".join(f"{name} → {os.readlink(root / name)}" for name in out[:_NAMED])  # noqa: PTH115
        raise UsageError(
            f"links in {root} lead out of it, where the place has nothing: {told}; have git ignore them, or write "
            "the path that they stand for at the place into the recipe"
        )
    for name in names:
        path = root / name
        try:
            info = path.lstat()
            if stat.S_ISLNK(info.st_mode):
                yield Entry(name, 0o777, link=os.readlink(path))  # noqa: PTH115
            elif stat.S_ISREG(info.st_mode):
                yield Entry(name, 0o755 if info.st_mode & 0o100 else 0o644, path.read_bytes())
            # pipes, sockets and devices are no code
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error


def _leads_out(root: Path, name: str) -> bool:
    target = os.readlink(root / name)  # noqa: PTH115
    if target.startswith("/"):
        return True
    parent = os.path.dirname(name)  # noqa: PTH120
    lexical = os.path.normpath(os.path.join(parent, target))  # noqa: PTH118
    real = os.path.realpath(root / name)
    return lexical.split("/")[0] == ".." or os.path.commonpath([real, str(root)]) != str(root)
