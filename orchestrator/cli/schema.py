"""`orch schema`: what an editor needs to help with hosts.yaml, recipes and environments."""

from __future__ import annotations

from orchestrator.config.words import did_you_mean, quote
from orchestrator.errors import UsageError

_EXAMPLE = "orch schema recipe"


def schema_command(kind: str | None, *, write: bool) -> None:
    """Prints the schema of one kind of file, or writes all of them into the project.

    Raises:
        UsageError: no such kind, or the files cannot be written.
    """
    from orchestrator.config import find_project
    from orchestrator.schema import KINDS
    from orchestrator.schema_files import FOLDER, pointer, text_of
    from orchestrator.schema_files import write as write_files

    if kind is not None and kind not in KINDS:
        raise UsageError(f"there is no schema {quote(kind)}{did_you_mean(kind, KINDS)}: {', '.join(KINDS)}", _EXAMPLE)
    if write:
        project = find_project()
        root = project.own_root or project.cwd
        try:
            written = write_files(root)
        except OSError as error:
            raise UsageError(f"{error.filename or root} cannot be written: {error.strerror}") from None
        print(f"{len(written)} of {len(KINDS)} schemas written to {root / FOLDER}")
        for name, file in (("hosts", root / "hosts.yaml"), ("recipe", root / "recipes" / "NAME.yaml")):
            print(f"the first line of {file.relative_to(root)}: {pointer(file, root, name)}")
        return
    if kind is None:
        raise UsageError(f"which schema: {', '.join(KINDS)}?", _EXAMPLE)
    print(text_of(kind), end="")
