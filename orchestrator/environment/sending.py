"""Files that an environment needs at a place: which are there, and bringing the others."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from orchestrator.environment.progress import Progress
from orchestrator.environment.store import CHUNK, Wheel, WheelStore
from orchestrator.environment.target import Target
from orchestrator.environment.uv_tool import UvProgram, uv_there, uv_to_send
from orchestrator.errors import OrchError
from orchestrator.place.session import Session


def on_this_machine(session: Session) -> bool:
    """Whether the place sees the workstation's files under their own paths."""
    return session.place.host.ssh is None and session.place.container_name is None


def wheel_path(wheel: Wheel) -> str:
    """Where a wheel lies at a place, below its root."""
    return f"wheels/{wheel.sha256[:2]}/{wheel.sha256}/{wheel.filename}"


def there(session: Session, wheels: Sequence[Wheel], program: UvProgram | None) -> set[str]:
    """Which of these files need not be sent, as paths below the root."""
    paths = [wheel_path(wheel) for wheel in wheels]
    if program and program.local:
        paths.append(program.remote)
    if on_this_machine(session):
        return set(paths)
    return set(session.call("have", {"paths": paths}).data["paths"])


def ensure_uv(session: Session, target: Target, store: WheelStore, progress: Progress) -> tuple[str, int]:
    """The path of a uv program at the place, and the bytes sent to have it there. Raises OrchError."""
    program, sent = uv_there(session.hello), 0
    if program is None:
        program = uv_to_send(target, store, progress)
        assert program is not None and program.local is not None
        if on_this_machine(session):
            return str(program.local), 0
        if not there(session, (), program):
            sent = send(session, program.remote, program.local, program.sha256, 0o755, progress)
    return program.remote, sent


def send_wheels(session: Session, wheels: Sequence[Wheel], progress: Progress) -> tuple[list[str], int]:
    """Sends the wheels that the place lacks: where each lies there, absolute or below the root, and the bytes."""
    if on_this_machine(session):
        return [str(wheel.path) for wheel in wheels], 0
    known = there(session, wheels, None)
    missing = [wheel for wheel in wheels if wheel_path(wheel) not in known]
    total, sent = sum(wheel.size for wheel in missing), 0
    for count, wheel in enumerate(missing):
        progress("sending wheels", count, len(missing), "wheels")
        sent += send(session, wheel_path(wheel), wheel.path, wheel.sha256, 0o644, progress, (sent, total))
    return [wheel_path(wheel) for wheel in wheels], sent


def send(
    session: Session,
    remote: str,
    local: Path,
    sha256: str,
    mode: int,
    progress: Progress,
    part_of: tuple[int, int] | None = None,  # bytes sent before, and of all
    *,
    unpack: bool = False,
) -> int:
    """Sends one file (`unpack`: a tar, which becomes a folder) and answers how many bytes of it went: fewer where
    somebody else had brought it meanwhile. Raises OrchError for a file that is not what it was."""
    size = local.stat().st_size
    before, total = part_of or (0, size)
    sent, digest = 0, hashlib.sha256()

    def chunks() -> Iterator[bytes]:
        nonlocal sent
        with local.open("rb") as file:
            while block := file.read(CHUNK):
                yield block
                sent += len(block)
                digest.update(block)
                progress(f"sending {local.name}", before + sent, total, "B")
        if digest.hexdigest() != sha256:
            local.unlink(missing_ok=True)
            raise OrchError(f"{local} is damaged, and is removed: run it again, and it is fetched anew")

    args = {"path": remote, "size": size, "sha256": sha256, "mode": mode, "unpack": "tar" if unpack else None}
    session.upload("put", args, chunks())
    return sent
