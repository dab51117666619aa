"""`orch status` for people: runs, GPUs, and the last lines of what is under way."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from orchestrator.compile_cache.words import compiled, told
from orchestrator.plain import plain
from orchestrator.run import ENDED, Gpu, RunStatus
from orchestrator.survey import PlaceReport
from orchestrator.view.text import duration, mebibytes, number, printable, rate

PHASE_STYLE = {
    "preparing": "cyan",
    "starting": "cyan",
    "compiling": "cyan",
    "training": "green",
    "finished": "bold green",
    "failed": "bold red",
    "lost": "bold red",
    "stopped": "yellow",
    "unknown": "magenta",
}


def status_view(reports: Sequence[PlaceReport], width: int, *, details: bool, fold: bool = True) -> RenderableType:
    """Everything the probes brought back, fitted to `width` columns.

    `details` shows the tail of the log and the pane also of runs that have ended; without `fold` lines of a log stay
    as long as they are.
    """
    parts: list[RenderableType] = []
    runs = [run for report in reports for run in report.runs]
    if runs:
        parts.append(_runs_table(runs, width))
    elif any(report.error is None for report in reports):
        parts.append(Text("no runs yet: orch launch demo", style="dim"))
    for report in reports:
        if report.more:
            parts.append(Text(f"and {report.more} older runs at {report.place}", style="dim"))
        if report.error is not None:
            parts.append(
                Text.assemble(
                    (report.place, "bold"),
                    ": ",
                    ("unknown", PHASE_STYLE["unknown"]),
                    f", {plain(report.error.message)}",
                )
            )
    for report in reports:
        gpus = _gpu_lines(report, width)
        if gpus is not None:
            parts += [Text(), gpus]
    for run in runs:
        if details or run.phase not in ENDED or run.phase in ("failed", "lost"):
            parts += [Text(), *_details(run, fold)]
    return Group(*parts)


def _runs_table(runs: Sequence[RunStatus], width: int) -> Table:
    """A row a run. What no run has has no column, and the place has one wherever there is room for it."""
    narrow = width < 100
    gap = 1 if narrow else 2
    figures = {
        "STEP": ["-" if run.step is None else str(run.step) for run in runs],
        "LOSS": [number(run.loss) for run in runs],
        "TOK/S": [rate(run.tokens_per_second) for run in runs],
        "τ": [number(acceptance_length(run), ".2f") for run in runs],
        "TIME": [duration(run.seconds) for run in runs],
    }
    if set(figures["τ"]) == {"-"}:
        del figures["τ"]
    columns = {"RUN": [run.run for run in runs], "PLACE": [run.place for run in runs]}
    columns |= {"PHASE": [run.phase for run in runs], **figures}
    if sum(max(map(len, (name, *cells))) + gap for name, cells in columns.items()) > width and narrow:
        del columns["PLACE"]
    if not narrow:
        columns["BY"] = [run.user for run in runs]
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, gap, 0, 0))
    for name in columns:
        if name in ("RUN", "PLACE"):
            table.add_column(name, overflow="fold")
        elif name == "BY":
            table.add_column(name, overflow="ellipsis", no_wrap=True)
        else:
            table.add_column(name, justify="right" if name in figures else "left", no_wrap=True)
    for cells in zip(*columns.values(), strict=True):
        styles = [
            PHASE_STYLE.get(cell, "") if name == "PHASE" else "" for name, cell in zip(columns, cells, strict=True)
        ]
        table.add_row(*(Text(cell, style=style) for cell, style in zip(cells, styles, strict=True)))
    return table


def acceptance_length(run: RunStatus) -> float | None:
    """The headline τ of the last evaluation."""
    measured = (run.evaluation or {}).get("eval")
    headline = measured.get("headline") if isinstance(measured, dict) else None
    tau = headline.get("tau") if isinstance(headline, dict) else None
    return float(tau) if isinstance(tau, (int, float)) and abs(tau) < 1e12 else None


def _gpu_lines(report: PlaceReport, width: int) -> RenderableType | None:
    if report.error is not None:
        return None
    if not report.gpus:
        if report.gpu_error and "is not here" not in report.gpu_error:
            return Text(f"GPUs at {report.place}: unknown, {plain(report.gpu_error)}", style="magenta")
        return None
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column(f"GPU at {report.place}", no_wrap=True)
    table.add_column("GiB", justify="right", no_wrap=True)
    table.add_column("UTIL", justify="right", no_wrap=True)
    if width >= 60:
        table.add_column("°C", justify="right", no_wrap=True)
        table.add_column("W", justify="right", no_wrap=True)
    notes = []
    for gpu in report.gpus:
        if gpu.error:
            notes.append(Text(f"GPU {'?' if gpu.index is None else gpu.index}: {gpu.error}", style="magenta"))
        row = [_gpu_name(gpu), mebibytes(gpu.memory_used, gpu.memory_total), _percent(gpu.utilization)]
        if width >= 60:
            row += [number(gpu.temperature, ".0f"), number(gpu.power, ".0f")]
        table.add_row(*(Text(cell) for cell in row))
    return Group(table, *notes)


def _gpu_name(gpu: Gpu) -> str:
    return f"{'?' if gpu.index is None else gpu.index} {gpu.name or ''}".strip()


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}%"


def _details(run: RunStatus, fold: bool) -> list[RenderableType]:
    head = Text.assemble((run.run, "bold"), f" at {run.place}: ", (phase_words(run), PHASE_STYLE.get(run.phase, "")))
    if why := run.why or _never_began(run):
        head.append(f", {why}")
    elif run.phase not in ENDED and run.step_at is not None:
        head.append(f", last step {duration(run.now - run.step_at)} ago")
    parts: list[RenderableType] = [head]
    first = run.first and f"first: {plain(str(run.first.get('said')))}"
    for note in (tmux_note(run), first, run.error and f"could not be read: {plain(run.error)}", *told(run.cache)):
        if note:
            parts.append(Text(note, style="yellow"))
    if run.phase not in ("starting", "compiling") and (words := compiled(run.cache, run.compile)):
        parts.append(Text(words))
    tail = log_lines(run.log)
    if not tail:
        screen = str((run.tmux or {}).get("screen") or "")
        tail = [printable(line) for line in screen.splitlines() if line.strip()][-5:]
    if not fold:
        return parts + [Text(f"  {line}", style="dim", no_wrap=True, overflow="ignore") for line in tail]
    return parts + [Padding(Text(line, style="dim", overflow="fold"), (0, 0, 0, 2), expand=False) for line in tail]


def _never_began(run: RunStatus) -> str:
    """Why a run was stopped whose trainer never ended, since there was none: a launch that was refused."""
    end = run.exit or {}
    if run.phase != "stopped" or end.get("code") is not None or end.get("signal") is not None:
        return ""
    return plain(str(end.get("reason") or ""))


def phase_words(run: RunStatus) -> str:
    """The phase, and until the first step what it compiles: `compiling (warm, 3 of 3 hits)`."""
    words = run.compiling if run.phase in ("starting", "compiling") else ""
    return f"{run.phase} ({words})" if words else run.phase


def log_lines(log: bytes) -> list[str]:
    """The lines of a piece of log as they can be shown, empty ones at its end left out."""
    return [printable(line) for line in log.decode("utf-8", "replace").rstrip().split("\n")] if log.strip() else []


def tmux_note(run: RunStatus) -> str | None:
    """What the tmux witness adds to the record, when it disagrees with it."""
    tmux = run.tmux
    if tmux is None or run.phase in ENDED or run.phase in ("preparing", "unknown"):
        return None
    if tmux.get("error"):
        return plain(f"tmux could not be read: {tmux['error']}")
    if tmux.get("session") is False:
        return "its tmux session is gone; the run itself goes on without it"
    if tmux.get("pane_dead"):
        return "its pane has ended, though the record says that it runs"
    return None


def print_status(console: Console, reports: Sequence[PlaceReport], *, details: bool) -> None:
    """Write the whole status once; where it is piped to, a line of a log stays one line."""
    fold = console.is_terminal
    console.print(status_view(reports, console.width, details=details, fold=fold), soft_wrap=not fold)
