"""The schemas as files in a project, and the line by which its YAML files point editors to them.

They lie in `.orch/schema/` beside hosts.yaml and recipes/, and the line holds a relative path: no address is asked, and
a clone of the project elsewhere works too. They are made by orch alone, so git is told to ignore them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path

from orchestrator.config import Project

FOLDER = ".orch/schema"
_POINTER = re.compile(r"^# yaml-language-server: \$schema=(\S*" + re.escape(FOLDER) + r")/\w+\.json\s*$", re.MULTILINE)
_HEAD = 2000  # characters of a file in which the line is looked for


def text_of(kind: str) -> str:
    """The schema as `orch schema` prints it."""
    from orchestrator.schema import schema  # here, since most commands only look whether there is a pointer

    return json.dumps(schema(kind), indent=2, ensure_ascii=False) + "\n"


def pointer(file: Path, root: Path, kind: str) -> str:
    """The first line of a YAML file of the project at `root`, without its end."""
    path = Path(os.path.relpath(root / FOLDER / f"{kind}.json", file.parent)).as_posix()
    return f"# yaml-language-server: $schema={path}"


def write(root: Path) -> list[Path]:
    """Has the schemas in the project as this version of orch makes them; those that were written. Raises OSError."""
    from orchestrator.schema import KINDS

    folder = root / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    ignored = folder.parent / ".gitignore"
    if not ignored.exists():
        ignored.write_text("# made by orch, which makes it again where it is missing\n*\n")
    written = []
    for kind in KINDS:
        path, text = folder / f"{kind}.json", text_of(kind)
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            beside = path.with_name(f"{path.name}.tmp-{os.getpid()}")
            beside.write_text(text, encoding="utf-8")
            beside.replace(path)
            written.append(path)
    return written


def refresh(project: Project) -> None:
    """Makes the schemas anew that the project's files point to, where they are missing or another version's.

    What cannot be written is left: only an editor misses it.
    """
    files = [] if project.hosts_bundled else [project.hosts_file]
    with contextlib.suppress(OSError):
        files += sorted((project.own_root / "recipes").glob("*.yaml")) if project.own_root else []
        for root in dict.fromkeys(filter(None, map(_root, files))):
            write(root)


def _root(file: Path) -> Path | None:
    """The project whose schemas a file points to."""
    with contextlib.suppress(OSError, UnicodeDecodeError), file.open(encoding="utf-8") as opened:
        found = _POINTER.search(opened.read(_HEAD))
        if found and not found[1].startswith("/"):
            return Path(os.path.normpath(file.parent / found[1])).parents[1]
    return None
