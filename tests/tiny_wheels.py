"""Wheels of a few hundred bytes, and environments that need nothing else."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Sequence
from pathlib import Path

from orchestrator.config.models import EnvironmentSpec


def make_wheel(
    folder: Path,
    name: str = "tiny",
    version: str = "1.0",
    tag: str = "py3-none-any",
    padding: int = 0,
    module: str | None = None,
    requires: Sequence[str] = (),
) -> Path:
    """A wheel with one module (of this text), and `padding` bytes that do not compress."""
    path = folder / f"{name}-{version}-{tag}.whl"
    info = f"{name}-{version}.dist-info"
    noise = b"".join(hashlib.sha256(b"%d" % block).digest() for block in range(padding // 32))
    files = {
        f"{name}/__init__.py": (module or f'VERSION = "{version}"\n').encode(),
        f"{info}/METADATA": "\n".join(
            [
                "Metadata-Version: 2.1",
                f"Name: {name}",
                f"Version: {version}",
                *(f"Requires-Dist: {r}" for r in requires),
            ]
        ).encode(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: by-hand\nRoot-Is-Purelib: true\nTag: {tag}\n".encode(),
    }
    if padding:
        files[f"{name}/noise.bin"] = noise
    record = ""
    for inner, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{inner},sha256={digest},{len(data)}\n"
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for inner, data in files.items():
            archive.writestr(inner, data)
    return path


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def lock_text(wheels: Sequence[Path]) -> str:
    lines = []
    for wheel in wheels:
        name, version = wheel.name.split("-")[:2]
        lines.append(f"{name}=={version} \\\n    --hash=sha256:{sha256(wheel)}\n")
    return "".join(lines)


def make_spec(folder: Path, wheels: Sequence[Path], text: str | None = None) -> EnvironmentSpec:
    """An environment of these wheels."""
    return EnvironmentSpec(
        name="tiny",
        directory=folder,
        lock_text=lock_text(wheels) if text is None else text,
        python=">=3.8",
        torch="2.13.0",
        backend="cpu",
    )
