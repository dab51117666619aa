"""What a folder's program is and what it imports, guessed from its files: nothing is run."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.config.words import quote
from orchestrator.errors import UsageError

PYTHON = "{python}"
_FILES = ("train.py", "main.py", "run.py", "src/train.py", "src/main.py", "scripts/train.py", "train.sh", "run.sh")
_MOST_FILES = 500  # of Python that are looked into
_LARGEST = 1 << 20

# Modules whose distribution has another name.
_DISTRIBUTIONS = {
    "PIL": "pillow",
    "attr": "attrs",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python-headless",
    "dateutil": "python-dateutil",
    "dotenv": "python-dotenv",
    "flash_attn": "flash-attn",
    "git": "gitpython",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}


@dataclass(frozen=True)
class Needs:
    """What a program wants beyond Python's own library: requirements as pip takes them, and who says so."""

    requirements: tuple[str, ...] = ()
    said_by: str = ""  # "train.py", "requirements.txt", …; empty where no file could be read
    metrics: bool = False  # whether $ORCH_METRICS is spoken of


def candidates(root: Path) -> list[list[str]]:
    """Commands that the folder suggests, the likeliest first; words as a recipe has them."""
    found = [_command(name) for name in _FILES if (root / name).is_file()]
    if not found:
        scripts = sorted(path.name for path in root.glob("*.py") if path.name not in ("setup.py", "conftest.py"))
        found = [_command(scripts[0])] if len(scripts) == 1 else []
    for inner in sorted(root.glob("*/__init__.py")):
        package = inner.parent
        for module in ("__main__", "train"):
            if (package / f"{module}.py").is_file() and package.name.isidentifier():
                name = package.name if module == "__main__" else f"{package.name}.{module}"
                found.append([PYTHON, "-m", name])
    return found


def _command(name: str) -> list[str]:
    return ["sh" if name.endswith(".sh") else PYTHON, name]


def words(text: str) -> list[str]:
    """A command as somebody types it, as a recipe's words: no shell reads them. Raises UsageError."""
    try:
        found = shlex.split(text)
    except ValueError as error:
        raise UsageError(
            f"the command cannot be split into words: {error}", "orch init --command 'python train.py'"
        ) from None
    if not found:
        raise UsageError("the command is empty", "orch init --command 'python train.py'")
    bare = re.sub(r"""\\.|'[^']*'|"(?:\\.|[^"\\])*\"""", "", text, flags=re.DOTALL)
    if of_a_shell := re.search(r"[;&|<>`$]+", bare):
        raise UsageError(
            f"the command has {quote(of_a_shell[0])}, which only a shell understands, and none reads it: put the lines "
            "into a file such as run.sh, or quote what is meant as it stands",
            "orch init --command 'sh run.sh'",
        )
    if re.match(r"[A-Za-z_]\w*=", found[0]):
        raise UsageError(
            f"the command begins with {quote(found[0])}: environment variables stand under env: in the recipe",
            f"orch init --command {shlex.quote(shlex.join(found[1:]) or 'python train.py')}",
        )
    if re.fullmatch(r"python3?(\.\d+)?", found[0]):
        found[0] = PYTHON
    elif found[0].endswith(".py"):
        found.insert(0, PYTHON)
    return found


def script_of(root: Path, command: Sequence[str]) -> Path | None:
    """The file of one's own that the command starts, where it is there."""
    module = next((command[i + 1] for i, word in enumerate(command[:-1]) if word == "-m"), None)
    names = [f"{module.replace('.', '/')}.py", f"{module.replace('.', '/')}/__main__.py"] if module else []
    names += [word for word in command[1:] if word.endswith((".py", ".sh"))]
    return next((root / name for name in names if (root / name).is_file()), None)


def needs(root: Path, command: Sequence[str]) -> Needs:
    """What the command's own file, and what it imports of the folder, want; with what the folder's lists name."""
    script = script_of(root, command)
    modules, texts = _imported(root, script) if script else (set(), [])
    declared, source = _declared(root)
    named = {_key(requirement) for requirement in declared}
    own = {_DISTRIBUTIONS.get(module, module.replace("_", "-")) for module in modules}
    more = sorted(name for name in own if _key(name) not in named)
    said_by = [source] if declared else []
    if script and (more or not declared):
        said_by.append(script.relative_to(root).as_posix())
    return Needs(
        (*declared, *more),
        " and ".join(said_by),
        any("ORCH_METRICS" in text for text in texts),
    )


def _key(requirement: str) -> str:
    return re.split(r"[\s<>=!~;@\[(]", requirement, maxsplit=1)[0].lower().replace("_", "-").replace(".", "-")


def _imported(root: Path, script: Path) -> tuple[set[str], list[str]]:
    """Modules that are neither Python's nor the folder's own, and the texts that were read."""
    outside: set[str] = set()
    texts: list[str] = []
    todo, seen = [script], {script}
    while todo and len(seen) <= _MOST_FILES:
        path = todo.pop()
        try:
            text = path.read_text("utf-8", "replace") if path.stat().st_size <= _LARGEST else ""
            tree = ast.parse(text) if path.suffix == ".py" else None
        except (OSError, SyntaxError, ValueError):
            continue
        texts.append(text)
        for name in _names(tree) if tree else ():
            top = name.partition(".")[0]  # empty where the import is relative
            folders = (path.parent, root, root / "src") if top else (path.parent, path.parent.parent)
            inner = _own(name.lstrip("."), folders)
            if inner:
                todo += [one for one in inner if one not in seen]
                seen |= set(inner)
            elif top and top not in sys.stdlib_module_names:
                outside.add(top)
    return outside, texts


def _names(tree: ast.AST) -> list[str]:
    """What is imported, a relative import with its dots; not what may be missing: whose ImportError is caught."""
    found: list[str] = []
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            dots = "." * node.level
            found += [f"{dots}{base}", *(f"{dots}{base}.{alias.name}" for alias in node.names)] if base else []
            found += [f"{dots}{alias.name}" for alias in node.names] if not base else []
        optional = isinstance(node, ast.Try) and any("ImportError" in ast.dump(h) for h in node.handlers)
        todo += [*node.handlers, *node.orelse] if isinstance(node, ast.Try) and optional else ast.iter_child_nodes(node)
    return found


def _own(name: str, folders: Sequence[Path]) -> list[Path]:
    """The files of the folder's own that an import of this name reads."""
    parts = name.split(".")
    for folder in folders:
        base = folder / parts[0]
        if base.with_name(f"{parts[0]}.py").is_file():
            return [base.with_name(f"{parts[0]}.py")]
        if base.is_dir() and any(base.glob("*.py")):
            inner = folder.joinpath(*parts)
            files = [base / "__init__.py", inner.with_name(f"{inner.name}.py"), inner / "__init__.py"]
            return [path for path in files if path.is_file()] or sorted(base.glob("*.py"))[:20]
    return []


def _declared(root: Path) -> tuple[list[str], str]:
    """Requirements of requirements.txt or pyproject.toml, and which file has them."""
    from packaging.requirements import InvalidRequirement, Requirement

    lines: list[str] = []
    source = "requirements.txt"
    try:
        text = (root / source).read_text("utf-8")
        lines = [re.sub(r"(^|\s)#.*$", "", line).strip() for line in text.splitlines()]
    except (OSError, UnicodeDecodeError):
        source = "pyproject.toml"
        lines = _dependencies(root / source)
    found = []
    for line in lines:
        try:
            found.append(str(Requirement(line)))
        except InvalidRequirement:
            continue  # an option of pip's, or an empty line
    return found, source


def _dependencies(path: Path) -> list[str]:
    try:
        # since Python 3.11; pip brings the same along for 3.10
        reader: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "pip._vendor.tomli")
        data = reader.loads(path.read_text("utf-8"))
    except (ImportError, OSError, ValueError):
        return []
    project = data.get("project")
    listed = project.get("dependencies") if isinstance(project, dict) else None
    return [line for line in listed if isinstance(line, str)] if isinstance(listed, list) else []
