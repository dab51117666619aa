"""Folders that appear complete or not at all, and the files in them."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainer.errors import TrainerError

CONFIG, WEIGHTS, CODE = "config.json", "model.safetensors", "dflash.py"


@contextlib.contextmanager
def new_folder(final: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A folder beside `final` to be filled. When the block ends it is flushed to the disk and renamed to `final`;
    when the block raises it is removed, and what was at `final` stays.

    Only an exported drafter may be overwritten: a folder with anything else in it, or one that is there without
    `overwrite`, is a TrainerError. While one export replaces another there is a moment without either.
    """
    _may_write(final, overwrite)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{final.name}.", suffix=".part", dir=final.parent))
    except OSError as error:
        raise TrainerError(f"{final}: cannot be written: {error.strerror}") from None
    try:
        part.chmod(0o755)  # mkdtemp's folders are closed to everybody else
        yield part
        for path in [*part.iterdir(), part]:
            _sync(path)
        old = part.with_suffix(".old")
        if final.exists():
            final.rename(old)
        part.rename(final)
        _sync(final.parent)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise TrainerError(f"{final}: cannot be written: {error}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _may_write(final: Path, overwrite: bool) -> None:
    if not final.exists():
        return
    names = {path.name for path in final.iterdir()} if final.is_dir() else {"a file"}
    if names - {CONFIG, WEIGHTS, CODE}:
        raise TrainerError(f"{final}: there is something there that is not an exported drafter; choose another folder")
    if names and not overwrite:
        raise TrainerError(f"{final}: there is an exported drafter already; choose another folder, or use --overwrite")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TrainerError(f"{path}: not readable as an exported drafter's configuration: {error}") from None
    if not isinstance(config, dict):
        raise TrainerError(f"{path}: not a JSON object")
    return config


def write_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})  # transformers insists on the format
    (folder / WEIGHTS).chmod(0o644)  # safetensors closes its files to everybody else


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Of all safetensors files in the folder: weights may be cut into shards."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise TrainerError(f"{folder}: has no {WEIGHTS}")
    tensors: dict[str, Tensor] = {}
    for path in paths:
        try:
            tensors.update(load_file(path))
        except (OSError, SafetensorError) as error:
            raise TrainerError(f"{path}: not readable: {error}") from None
    return tensors
