"""Reading the figures in texts of PyTorch: how much was asked for, by whom, and what that amounts to."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from orchestrator.diagnosis.facts import Attention

_UNIT = {"bytes": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "KB": 1000, "MB": 10**6}
_SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB|TiB)"


@dataclass(frozen=True)
class Report:
    """What one out-of-memory message says, in bytes."""

    tried: int | None = None
    total: int | None = None
    free: int | None = None
    unused: int | None = None  # reserved by PyTorch but unallocated
    others: dict[int, int] = field(default_factory=dict)  # pid -> what it holds


def report(text: str) -> Report:
    """The figures of `CUDA out of memory. Tried to allocate …`; older wordings too."""
    allocated, reserved = (
        _size(rf"{_SIZE} already allocated", text),
        _size(rf"{_SIZE} reserved in total by PyTorch", text),
    )
    unused = _size(rf"{_SIZE} is reserved by PyTorch but unallocated", text)
    if unused is None and allocated is not None and reserved is not None:
        unused = max(0, reserved - allocated)
    return Report(
        tried=tried(text),
        total=_size(rf"(?:total capacity of|GPU \d+; ?|GPU \d+ has a total capacity of|\() ?{_SIZE}", text),
        free=_size(rf"(?:of which )?{_SIZE} (?:is )?free", text),
        unused=unused,
        others={
            int(found[1]): _bytes(found[2], found[3])
            for found in re.finditer(rf"Process (\d+) has {_SIZE} memory in use", text)
        },
    )


def tried(text: str) -> int | None:
    """What the failed allocation asked for."""
    return _size(rf"Tried to allocate {_SIZE}", text)


def _size(pattern: str, text: str) -> int | None:
    found = re.search(pattern, text)
    return _bytes(found[1], found[2]) if found else None


def _bytes(number: str, unit: str) -> int:
    return int(float(number.rstrip(".")) * _UNIT[unit])


def human(count: float) -> str:
    """`288.00 GiB`, `512 MiB`."""
    return f"{count / (1 << 30):.2f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"


def product(shape: Attention, width: int, asked: int) -> str:
    """The arithmetic that makes an allocation a score matrix."""
    rows = f"{shape.rows} rows × " if shape.rows > 1 else ""
    return (
        f"{human(asked)} asked for = {rows}{shape.heads} heads × {shape.queries} queries × {shape.keys} keys × "
        f"{width} bytes: the whole score matrix"
    )


def is_compile_deadlock(stacks: str) -> bool:
    """Whether a dump of all threads shows the pair that waits for each other in torch's compiler."""
    threads = re.split(r"(?m)^(?:Thread |Current thread )", stacks)
    compiles = any("compile_fx_backward" in thread for thread in threads)
    waits = any(
        "_engine_run_backward" in thread
        and re.search(r"create_fw_bw_graph|graph_capture|joint_f|joint_helper|dispatch_trace|aot_dispatch", thread)
        for thread in threads
    )
    return compiles and waits
