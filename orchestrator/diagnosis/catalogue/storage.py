"""Disks, files, checkpoints and data."""

from __future__ import annotations

from orchestrator.diagnosis.catalogue.words import line, raised, said
from orchestrator.diagnosis.model import Cause

_ANY = r"[A-Za-z_]\w*(?:Error|Exception)"

_SHM = r"shared memory|/dev/shm|</torch_"

CAUSES = (
    Cause(
        "disk-full",
        "the disk is full",
        "storage",
        (
            raised(_ANY, "No space left on device", "os error 28", "ENOSPC", without=_SHM),
            line("No space left on device", r"^(?:\S+: )*.*: No space left on device", without=_SHM),
            raised("RuntimeError", "PytorchStreamWriter failed writing file"),
            line(
                "enforce fail at inline_container.cc",
                r"enforce fail at inline_container\.cc",
                after="unexpected pos|file write failed",
                without="the checkpoint could not be written",  # whatever forbade it: see checkpoint-not-written
            ),
            said("a checkpoint takes"),
            said("the checkpoint could not be written", after="No space left|Errno 28"),
        ),
        (
            "The newest checkpoint is incomplete; the one before it is whole. Make room on the volume that the run "
            "writes to (inodes count too), then launch again.",
        ),
        "orch exec {place} -- df -h {root}",
        structured=("no_room",),
        precedence=84,
    ),
    Cause(
        "disk-quota",
        "the quota is used up",
        "storage",
        (raised(_ANY, "Disk quota exceeded"), line("Disk quota exceeded", r"Disk quota exceeded")),
        ("The disk has room, but this user or project may not use it. Remove something, or have the quota raised.",),
        "orch exec {place} -- quota -s",
        precedence=84,
    ),
    Cause(
        "read-only-file-system",
        "the file system is read-only",
        "storage",
        (raised(_ANY, "Read-only file system"), line("Read-only file system", r": Read-only file system")),
        (
            "Mounted so, or remounted by the kernel after an error of the disk (see the host's kernel log). Choose a "
            "folder that can be written, or repair the file system on the host.",
        ),
        "orch exec {place} -- dmesg --level=err,warn",
        precedence=84,
    ),
    Cause(
        "too-many-open-files",
        "too many open files",
        "storage",
        (raised(_ANY, "Too many open files"), line("Too many open files", r"(?:^|: )Too many open files")),
        (
            "Data loaders share tensors by file descriptor. Use fewer workers, "
            "torch.multiprocessing.set_sharing_strategy('file_system'), or raise the container's hard limit.",
        ),
        precedence=80,
    ),
    Cause(
        "permission-denied",
        "a file or folder may not be used by this user",
        "storage",
        (raised("PermissionError", "Permission denied", "Operation not permitted"),),
        (
            "The message names the path. In an unprivileged container, files of the host's root belong to nobody: "
            "map the ids, or change the owner.",
        ),
        precedence=52,
    ),
    Cause(
        "checkpoint-corrupt",
        "a checkpoint is broken or cut short",
        "storage",
        (
            raised(
                "RuntimeError",
                "PytorchStreamReader failed",
                "failed finding central directory",
                "invalid header or archive is corrupted",
            ),
            raised("OSError", "Invalid argument", frames=r"torch/serialization\.py"),
            raised("SafetensorError", literals=("SafetensorError",)),
            raised(
                "UnpicklingError|EOFError",
                "pickle data was truncated",
                "invalid load key",
                "Ran out of input",
                frames=r"in (?:load|_legacy_load|_load|load_checkpoint|resume)\b",
            ),
            said("not a readable checkpoint"),
        ),
        ("It was being written when something ended, or was copied incompletely. Go on from the one before it.",),
        "orch exec {place} -- ls -l {run_dir}/checkpoints",
        precedence=76,
    ),
    Cause(
        "checkpoint-not-written",
        "checkpoints cannot be written: a stop would lose the work since the last one",
        "storage",
        (
            line(
                ("no checkpoint of step", "the checkpoint could not be written"),
                r"^warning: (?:no checkpoint of step \d+|\S+: the checkpoint could not be written): ",
                role="warning",
            ),
            said("the checkpoint could not be written"),
        ),
        (
            "The message names the folder and what failed. The last complete checkpoint still stands, and the run goes "
            "on where it can. Make room, or mend what forbids writing there; the next checkpoint is tried as usual.",
        ),
        "orch exec {place} -- df -h {run_dir}",
        precedence=72,
    ),
    Cause(
        "checkpoint-mismatch",
        "a checkpoint does not fit the model",
        "storage",
        (
            raised("RuntimeError", "Error(s) in loading state_dict for"),
            raised(
                "ValueError",
                "loaded state dict contains a parameter group that doesn't match",
                "loaded state dict has a different number of parameter groups",
            ),
            raised("RuntimeError|ValueError", "size mismatch for"),
            said("cannot be loaded", "the configuration says"),
        ),
        (
            "It is of another model or of other settings (layers, widths, vocabulary). The message names what differs. "
            "Load the right one, or start without it.",
        ),
        precedence=76,
    ),
    Cause(
        "data-missing",
        "a file that the program needs is not there",
        "storage",
        (
            raised(
                "FileNotFoundError|NotADirectoryError|IsADirectoryError",
                "No such file or directory",
                "Not a directory",
                "Is a directory",
                "Couldn't find any data file",
                "Unable to find",
                literals=("FileNotFoundError", "NotADirectoryError", "IsADirectoryError"),
            ),
            raised(
                "OSError|EnvironmentError",
                "is not a local folder and is not a valid model identifier",
                "does not appear to have a file named",
            ),
            said("holds no documents", "holds no prompts", "names no file", "No such file or directory"),
        ),
        (
            "The message names the path. Paths in a recipe are of the place, not of this machine; a relative one is "
            "taken from the run's directory.",
        ),
        precedence=54,
    ),
    Cause(
        "data-malformed",
        "a data file is not what the program expects",
        "storage",
        (
            raised(
                "JSONDecodeError|UnicodeDecodeError|ParserError|ArrowInvalid|DatasetGenerationError|DataFilesNotFoundError",
                literals=(
                    "JSONDecodeError",
                    "UnicodeDecodeError",
                    "ParserError",
                    "ArrowInvalid",
                    "DatasetGenerationError",
                ),
                without=r"(?:torchinductor|inductor|triton|autotune_cache|codecache|compile_cache|huggingface_hub/utils/_http)",
            ),
            said(
                "cannot be used, more than data.broken_share",
                "not a readable safetensors file",
                "the data was made with another tokenizer",
                "so there is nothing to learn",
                "no document with a token that bears loss",
            ),
        ),
        (
            "The message and the frames say which file and where in it: cut short, another encoding, or an error page "
            "saved in its place. Check its size and its first lines.",
        ),
        precedence=56,
    ),
)
