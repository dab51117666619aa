"""`orch gpus` for people: a row a GPU, a line a holder, in 80 columns or as many as there are."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.console import Console

from orchestrator.gpus import words
from orchestrator.gpus.decide import holders
from orchestrator.gpus.model import Holder, Reading
from orchestrator.gpus.survey import HostReport
from orchestrator.plain import plain
from orchestrator.run import Gpu

_HEAD = f"  {'GPU':>3} {'name':<8} {'GiB':>11} {'util':>4} {'temp':>4} {'power':>5}  held by"
_PAD = _HEAD.index("held by")
_WIDEST = 120


def print_gpus(console: Console, reports: Sequence[HostReport]) -> None:
    """Each host with its GPUs, and the claims below; a host that did not answer is told."""
    width = max(80, min(console.width, _WIDEST))
    for number, report in enumerate(reports):
        if number:
            console.print()
        for line in lines(report, width):
            console.print(line, soft_wrap=True)


def lines(report: HostReport, width: int = 80) -> list[str]:
    """What is shown of one host, no line longer than `width` but for names that are longer themselves."""
    reading = report.reading
    if report.error is not None:
        return [f"{report.host}: unknown, {plain(report.error.message)}"]
    if reading.problem:
        known = [f"{report.host}: its GPUs are not known: {reading.problem}"]
        return known + _claims(reading, width)
    held = sum(bool(holders(gpu, reading)) for gpu in reading.gpus)
    count = len(reading.gpus)
    unknown = f"; {reading.apps_problem}" if reading.apps_problem else ""
    text = f"{report.host}: {count} GPU{'' if count == 1 else 's'}, {count - held} free{unknown}"
    told = [*textwrap.wrap(text, width, subsequent_indent="  "), _HEAD]
    for gpu in reading.gpus:
        told += _gpu(gpu, reading, width)
    return told + _claims(reading, width)


def _gpu(gpu: Gpu, reading: Reading, width: int) -> list[str]:
    row = (
        f"  {_cell(gpu.index):>3} {_name(gpu.name):<8} {_memory(gpu):>11} {_cell(gpu.utilization, '%'):>4} "
        f"{_cell(gpu.temperature, '°C'):>4} {_cell(gpu.power, ' W'):>5}  "
    )
    found = [_holder(holder, gpu, reading) for holder in holders(gpu, reading)] or ["-"]
    if gpu.error:
        found = [f"not all is known of it: {gpu.error}", *(one for one in found if one != "-")]
    told = []
    for number, text in enumerate(found):
        first = row if not number else " " * _PAD
        told += textwrap.wrap(text, width, initial_indent=first, subsequent_indent=" " * _PAD, break_on_hyphens=False)
    return told


def _holder(holder: Holder, gpu: Gpu, reading: Reading) -> str:
    if holder.claim is not None:
        claim = holder.claim
        mine = [one for one in reading.processes if (one.uuid, one.run) == (gpu.uuid, claim.run)]
        state = {"held": "being launched", "unknown": "not known to live"}.get(claim.alive, "")
        pids = f"pid {', '.join(str(one.pid) for one in mine)}" if mine else ""
        where = "" if claim.owner in ("host", "?") else f"in {claim.owner}"
        return plain(", ".join(part for part in (claim.run, where, claim.user, pids, state) if part))
    if holder.process is not None:
        one = holder.process
        command = one.command if len(one.command) <= 40 else f"{one.command[:39]}…"
        owner = (
            "container unknown" if one.owner is None else "on the host" if one.owner == "host" else f"in {one.owner}"
        )
        parts = (f"pid {one.pid} {command}".strip(), owner, one.user, f"of {one.run}" if one.run else "")
        memory = words.gib(one.memory) if one.memory is not None else ""
        return plain(", ".join(part for part in (*parts, memory) if part))
    if reading.apps_problem:
        return f"{words.gib(holder.ghost)} held by an unknown process"
    return f"{words.gib(holder.ghost)} held by no visible process"


def _claims(reading: Reading, width: int) -> list[str]:
    told = []
    for claim in reading.claims:
        gpus = [gpu for gpu in reading.gpus if gpu.uuid in claim.uuids]
        which = words.numbers(gpus) if gpus else f"{len(claim.uuids)} GPUs"
        text = plain(f"{words.of_claim(claim)}: {which}")
        told += textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
    return told


def _name(name: str | None) -> str:
    """`NVIDIA H200` is H200, `NVIDIA RTX 6000 Ada Generation` RTX 6000."""
    short = (name or "?").removeprefix("NVIDIA ").removeprefix("GeForce ").split("-")[0]
    return short if len(short) <= 8 else short[:8].rstrip()


def _memory(gpu: Gpu) -> str:
    used, total = (("?" if value is None else f"{value / 1024:.1f}") for value in (gpu.memory_used, gpu.memory_total))
    return f"{used}/{total}"


def _cell(value: float | None, unit: str = "") -> str:
    return "?" if value is None else f"{value:.0f}{unit}"
