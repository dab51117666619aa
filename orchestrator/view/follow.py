"""What is shown while a launch goes through its steps and the run then trains."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from orchestrator.compile_cache.words import compiled, kept, told
from orchestrator.plain import plain
from orchestrator.run import RunStatus
from orchestrator.view.status import PHASE_STYLE, acceptance_length, log_lines, phase_words
from orchestrator.view.text import duration, number, printable, rate, size

_LAST_LINES, _LAST_LINES_OF_A_FAILURE = 24, 60
_LONGEST_PARTIAL = 64 << 10  # bytes kept of a line that does not end
_PLAIN_EVERY = 10.0  # seconds between lines where nothing can be overwritten


class LaunchDisplay:
    """The steps of a launch, one line each; a long one shows how far it is."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live: Live | None = None
        self._began = 0.0
        self._told = 0.0

    def begin(self, step: str) -> None:
        self._began = time.monotonic()
        self._told = self._began
        if self.console.is_terminal:
            self._live = Live(
                Text(f"  {step:<12} …", style="dim"),
                console=self.console,
                transient=True,
                refresh_per_second=8,
            )
            self._live.start()

    def progress(self, step: str, what: str, done: int, total: int | None, unit: str) -> None:
        amount = _amount(done, total, unit)
        if self._live is not None:
            parts: list[RenderableType] = [Text(f"  {step:<12} {amount}  {what}", no_wrap=True, overflow="ellipsis")]
            if total:
                parts.append(Padding(ProgressBar(total=total, completed=min(done, total), width=50), (0, 0, 0, 15)))
            self._live.update(Group(*parts))
        elif time.monotonic() - self._told >= _PLAIN_EVERY:
            self._told = time.monotonic()
            self.console.print(Text(f"  {step:<12} {what} {amount}"), soft_wrap=True)

    def note(self, step: str, what: str) -> None:
        self.console.print(Text(f"  {step:<12} note: {plain(what)}"), soft_wrap=True)

    def end(self, step: str, what: str) -> None:
        self._stop()
        took = time.monotonic() - self._began
        line = Text(f"  {step:<12} {plain(what)}")
        if took >= 1.0:
            line.append(f"  {took:.1f} s", style="dim")
        self.console.print(line, soft_wrap=True)

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __enter__(self) -> LaunchDisplay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()


def _amount(done: int, total: int | None, unit: str) -> str:
    if unit == "B":
        return f"{size(done)} of {size(total)}" if total else size(done)
    return f"{done} of {total} {unit}" if total else (f"{done} {unit}" if done else "")


class FollowDisplay:
    """A run as it trains: a live block on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console, total_steps: int | None) -> None:
        self.console = console
        self.total_steps = total_steps
        self._tail: list[str] = []
        self._partial = b""
        self._live: Live | None = None
        self._told = 0.0
        self._phase = ""
        self._tau: float | None = None

    def __enter__(self) -> FollowDisplay:
        if self.console.is_terminal:
            self._live = Live(Text(""), console=self.console, transient=True, refresh_per_second=6)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def observed(self, status: RunStatus) -> None:
        """Show the latest look."""
        *whole, partial = (self._partial + status.log).split(b"\n")
        self._partial = partial[-_LONGEST_PARTIAL:]
        self._tail = (self._tail + [line.decode("utf-8", "replace") for line in whole])[-6:]
        if self._live is not None:
            self._live.update(self._block(status))
            return
        tau = acceptance_length(status)
        due = time.monotonic() - self._told >= _PLAIN_EVERY
        phase = phase_words(status)
        if phase != self._phase or tau != self._tau or (due and status.step is not None):
            self._told, self._phase, self._tau = time.monotonic(), phase, tau
            self.console.print(Text("  " + self._line(status)), soft_wrap=True)

    def interrupted(self, reason: str, seconds: float) -> None:
        """Say that the place does not answer."""
        text = f"  state unknown: {plain(reason)}; asking again in {seconds:.0f} s (the run needs no connection)"
        if self._live is not None:
            self._live.update(Text(text, style="magenta"))
        else:
            self.console.print(Text(text), soft_wrap=True)

    def _line(self, status: RunStatus) -> str:
        step = "-" if status.step is None else str(status.step)
        of = f"/{self.total_steps}" if self.total_steps else ""
        tau = acceptance_length(status)
        if status.step is None and (words := phase_words(status)) != status.phase:
            return f"{words}  {duration(status.seconds)}"
        return (
            f"{status.phase:<10} step {step}{of}  loss {number(status.loss)}  "
            f"{rate(status.tokens_per_second)} tokens/s  τ {number(tau, '.2f')}  {duration(status.seconds)}"
        )

    def _block(self, status: RunStatus) -> RenderableType:
        grid = Table.grid(padding=(0, 1))
        line = self._line(status)
        grid.add_row(
            Text(f"  {status.phase}", style=PHASE_STYLE.get(status.phase, "")),
            Text(line[max(11, len(status.phase) + 1) :]),
        )
        parts: list[RenderableType] = [grid]
        if self.total_steps and status.step is not None:
            bar = Table.grid(padding=(0, 1))
            bar.add_row(
                Text(" "),
                ProgressBar(
                    total=self.total_steps,
                    completed=min(status.step, self.total_steps),
                    width=min(60, self.console.width - 6),
                ),
            )
            parts.append(bar)
        parts += [Text(f"  │ {printable(line)}", style="dim", no_wrap=True, overflow="ellipsis") for line in self._tail]
        return Group(*parts)


def summary(console: Console, status: RunStatus, log: bytes) -> None:
    """How a run ended, with the last lines of its log: what it says of its result, or what went wrong."""
    style = PHASE_STYLE.get(status.phase, "")
    head = Text.assemble((status.run, "bold"), f" at {status.place} ", (status.phase, style))
    head.append(f" after {duration(status.seconds)}")
    why = status.why or ("" if status.phase == "finished" else plain(str((status.exit or {}).get("reason") or "")))
    if why:
        head.append(f": {why}")
    lines = log_lines(log)[-(_LAST_LINES if status.phase == "finished" else _LAST_LINES_OF_A_FAILURE) :]
    # a table made for this width would break when it is set in
    indent = "  " if max(map(len, lines), default=0) + 2 <= console.width else ""
    for line in lines:
        console.print(Text(f"{indent}{line}", style="" if status.phase != "stopped" else "dim"), soft_wrap=True)
    for words in (compiled(status.cache, status.compile), kept(status.cache), *told(status.cache)):
        if words:
            console.print(Text(words), soft_wrap=True)
    console.print(head, soft_wrap=True)
