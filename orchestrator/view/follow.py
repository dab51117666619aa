"""What is shown while a launch goes through its steps and the run then trains."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from orchestrator.compile_cache.words import compiled, kept, told, took
from orchestrator.expect import Expectation
from orchestrator.plain import plain
from orchestrator.run import RunStatus
from orchestrator.view.status import PHASE_STYLE, acceptance_length, log_lines, phase_words
from orchestrator.view.text import duration, number, printable, rate, size

_LAST_LINES, _LAST_LINES_OF_A_FAILURE = 24, 60
_LONGEST_PARTIAL = 64 << 10  # bytes kept of a line that does not end
_WORTH_A_WORD = 2.0  # seconds: what is shorter is over before its expectation has been read
_PLAIN_EVERY = 10.0  # seconds between lines where nothing can be overwritten


class LaunchDisplay:
    """The steps of a launch, one line each; a long one shows how far it is."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.expected: Callable[[str], Expectation | None] | None = None  # what the step that goes on will take
        self._live: Live | None = None
        self._began = 0.0
        self._told = 0.0

    def begin(self, step: str) -> None:
        self._began = time.monotonic()
        self._told = self._began
        if self.console.is_terminal:
            self._live = Live(
                _GoingOn(f"  {step:<12} …", self._about(step)),
                console=self.console,
                transient=True,
                refresh_per_second=8,
            )
            self._live.start()

    def progress(self, step: str, what: str, done: int, total: int | None, unit: str) -> None:
        amount = _amount(done, total, unit)
        if self._live is not None:
            line = Text(f"  {step:<12} {amount}  {what}", no_wrap=True, overflow="ellipsis")
            parts: list[RenderableType] = [line.append(self._about(step), style="dim")]
            if total:
                parts.append(Padding(ProgressBar(total=total, completed=min(done, total), width=50), (0, 0, 0, 15)))
            self._live.update(Group(*parts))
        elif time.monotonic() - self._told >= _PLAIN_EVERY:
            self._told = time.monotonic()
            self.console.print(Text(f"  {step:<12} {what} {amount}{self._about(step)}"), soft_wrap=True)

    def _about(self, step: str) -> str:
        """How long the step will take in all, where that is worth a word."""
        found = self.expected(step) if self.expected is not None else None
        return f"  ({about(found)})" if found is not None and found.seconds >= _WORTH_A_WORD else ""

    def note(self, step: str, what: str) -> None:
        self.console.print(Text(self._set(step, f"note: {plain(what)}")), soft_wrap=True)

    def _set(self, step: str, what: str) -> str:
        """The line of a step; on a terminal what is longer goes on below itself."""
        line = f"  {step:<12} {what}"
        if not self.console.is_terminal:
            return line
        width = max(self.console.width, 40)
        return textwrap.fill(line, width, subsequent_indent=" " * 15, break_long_words=False, break_on_hyphens=False)

    def end(self, step: str, what: str) -> None:
        self._stop()
        seconds = time.monotonic() - self._began
        line = Text(self._set(step, plain(what)))
        if seconds >= 1.0:
            line.append(f"  {seconds:.1f} s", style="dim")
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


class _GoingOn:
    """A step that tells nothing yet: its line, with how long it has taken once that is long."""

    def __init__(self, line: str, about: str) -> None:
        self._line, self._about, self._began = line, about, time.monotonic()

    def __rich__(self) -> Text:
        seconds = time.monotonic() - self._began
        so_far = f"  {seconds:.0f} s" if seconds >= _WORTH_A_WORD else ""
        return Text(f"{self._line}{so_far}{self._about}", style="dim", no_wrap=True, overflow="ellipsis")


def about(expectation: Expectation) -> str:
    """`about 28 s, as last time`."""
    return f"about {took(expectation.seconds)}, {expectation.why}"


def _amount(done: int, total: int | None, unit: str) -> str:
    if unit == "B":
        return f"{size(done)} of {size(total)}" if total else size(done)
    return f"{done} of {total} {unit}" if total else (f"{done} {unit}" if done else "")


class FollowDisplay:
    """A run as it trains: a live block on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console, total_steps: int | None, first_step: Expectation | None = None) -> None:
        self.console = console
        self.total_steps = total_steps
        self.first_step = first_step
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
        first = self._first(status)
        return f"{status.phase:<10} {self._told_of(status)}{f'  ({first})' if first else ''}"

    def _first(self, status: RunStatus) -> str:
        """When the first step is to be expected, until it has come."""
        if status.step is not None or self.first_step is None or status.has_ended:
            return ""
        return f"first step about {took(self.first_step.seconds)} after the start, {self.first_step.why}"

    def _told_of(self, status: RunStatus) -> str:
        """What is known beside the phase."""
        age = duration(status.seconds)
        if status.step is None and (words := phase_words(status)) != status.phase:
            return f"{words.removeprefix(status.phase).strip()}  {age}"
        of = f"/{self.total_steps}" if self.total_steps else ""
        tau = acceptance_length(status)
        figures = [
            f"step {'-' if status.step is None else status.step}{of}" if of or status.step is not None else "",
            f"loss {number(status.loss)}" if status.loss is not None else "",
            f"{rate(status.tokens_per_second)} tokens/s" if status.tokens_per_second is not None else "",
            f"τ {number(tau, '.2f')}" if tau is not None else "",
        ]
        return "  ".join([*filter(None, figures), age])  # a program of one's own may tell none of them

    def _block(self, status: RunStatus) -> RenderableType:
        grid = Table.grid(padding=(0, 1))
        phase = Text(f"  {status.phase:<10}", style=PHASE_STYLE.get(status.phase, ""))
        grid.add_row(phase, Text(self._told_of(status)))
        parts: list[RenderableType] = [grid]
        if first := self._first(status):
            parts.append(Text(f"             {first}", style="dim", no_wrap=True, overflow="ellipsis"))
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
        # the line that has not ended yet may be a progress bar, which ends with the program
        begun = [self._partial.decode("utf-8", "replace")] if self._partial.strip() else []
        tail = [*self._tail, *begun][-6:]
        parts += [Text(f"  │ {printable(line)}", style="dim", no_wrap=True, overflow="ellipsis") for line in tail]
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
