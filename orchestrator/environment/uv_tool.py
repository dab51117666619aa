"""The uv program for a place: its own, this machine's where it runs there, or one fetched for the place."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uv
from packaging.tags import parse_tag
from packaging.version import InvalidVersion, Version

from orchestrator.environment.pip_download import download
from orchestrator.environment.progress import Progress
from orchestrator.environment.store import WheelStore, sha256_of
from orchestrator.environment.target import Facts, Target, tags
from orchestrator.errors import OrchError

OLDEST = Version("0.9")


@dataclass(frozen=True)
class UvProgram:
    """A uv program. `local` is the file to be sent; None where the place has its own."""

    remote: str  # the path there, relative to the place's root where it is sent
    version: str
    local: Path | None = None
    sha256: str = ""
    size: int = 0  # bytes


def workstation_uv() -> str:
    """The path of this machine's uv. Raises OrchError where there is none."""
    try:
        return str(uv.find_uv_bin())
    except FileNotFoundError:
        found = shutil.which("uv")
        if found:
            return found
        raise OrchError("uv is not installed beside orch", hint="pip install uv") from None


def uv_there(facts: Facts) -> UvProgram | None:
    """The uv that the place has, if it is new enough."""
    tool: Mapping[str, Any] | None = (facts.container.get("tools") or {}).get("uv")
    match = re.search(r"\d+(\.\d+)+", str((tool or {}).get("version", "")))
    try:
        if tool and match and Version(match.group()) >= OLDEST:
            return UvProgram(str(tool["path"]), match.group())
    except InvalidVersion:
        pass
    return None


def uv_to_send(target: Target, store: WheelStore, progress: Progress | None) -> UvProgram | None:
    """A uv program of this machine's version for the target.

    Without `progress` nothing is fetched, and the answer is None where it would have to be. Raises OrchError
    where none can be had.
    """
    version = importlib.metadata.version("uv")
    if _own_fits(target):
        return _described(Path(workstation_uv()), version)
    kept = store.root.parent / "uv" / f"{version}-{target.system}-{target.machine}-{(target.libc or ('', ''))[0]}"
    program = kept / "uv"
    if not program.exists():
        if progress is None:
            return None
        with store.workspace() as folder:
            wheel = download([f"uv=={version}"], target, folder, progress, hashed=False)[0]
            _extract(wheel, folder / "uv")
            kept.mkdir(parents=True, exist_ok=True)
            (folder / "uv").rename(program)
    return _described(program, version)


def _own_fits(target: Target) -> bool:
    """Whether this machine's uv runs at the target: the tags of the wheel it came in say so."""
    try:
        text = importlib.metadata.distribution("uv").read_text("WHEEL") or ""
    except importlib.metadata.PackageNotFoundError:
        return False
    mine = {tag for line in re.findall(r"^Tag: (\S+)", text, re.MULTILINE) for tag in parse_tag(line)}
    return not mine.isdisjoint(tags(target))


def _extract(wheel: Path, to: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(".data/scripts/uv"):
                with archive.open(name) as source, to.open("wb") as sink:
                    shutil.copyfileobj(source, sink)
                to.chmod(0o755)
                return
    raise OrchError(f"{wheel.name} holds no uv program")


def _described(program: Path, version: str) -> UvProgram:
    digest = sha256_of(program)
    return UvProgram(f"bin/uv-{digest[:12]}", version, program, digest, program.stat().st_size)
