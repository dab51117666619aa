"""All that a diagnosis may rest on, as plain values: what was read, and None where it could not be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Match:
    """A line of the log that one of the patterns met. `rule` is the index of the pattern that was sent."""

    rule: int
    offset: int
    line: int | None
    text: str  # with its prefix
    body: str  # without it
    after: tuple[str, ...] = ()
    before: str = ""  # the start of what stands before it in its line, where the line is longer than shown


@dataclass(frozen=True)
class Raised:
    """The last line of one traceback in a chain, with what belongs to it. `then`: "direct" and "during" tell how
    the next one of the chain came of it, "last" that there is none."""

    offset: int
    text: str
    then: str


@dataclass(frozen=True)
class Traceback:
    """A traceback with all it was chained to."""

    offset: int
    end: int
    line: int | None
    text: str
    raised: tuple[Raised, ...]
    after: tuple[str, ...] = ()
    thread: str | None = None  # "Exception in thread …" stood before it
    prefix: str = ""

    @property
    def first_line(self) -> str:
        """The first line with its prefix."""
        return f"{self.prefix}Traceback"

    @property
    def exception(self) -> str:
        """The last line, such as `ValueError: …`."""
        return self.raised[-1].text.splitlines()[0] if self.raised and self.raised[-1].text else ""


@dataclass(frozen=True)
class Log:
    """What was found in console.log. `tail` is its end, from `tail_offset` on."""

    size: int
    matches: tuple[Match, ...] = ()
    tracebacks: tuple[Traceback, ...] = ()
    more_tracebacks: int = 0
    tail: str = ""
    tail_offset: int = 0
    why: str | None = None
    name: str = "console.log"


@dataclass(frozen=True)
class Exit:
    """The exit record that the runner wrote."""

    code: int | None
    signal: int | None
    at: float | None
    oom_kills: int | None
    machine_oom_kills: int | None
    reason: str


@dataclass(frozen=True)
class ElasticError:
    """One of torchelastic's error files: what one rank died of, and when."""

    rank: int | None
    time: float | None
    message: str
    file: str


@dataclass(frozen=True)
class KernelLine:
    """A line of the kernel's log; `at` is Unix time, None where unknown."""

    text: str
    at: float | None
    xid: int | None = None
    pci: str | None = None


@dataclass(frozen=True)
class Gpus:
    """What nvidia-smi says now, and what it said while the run went on."""

    text: str | None = None
    why: str | None = None  # no answer, or an answer that names no GPU
    here: bool = True
    problems: tuple[str, ...] = ()
    count: int | None = None  # seen by now
    count_before: int | None = None  # at the run's first sample
    errors: tuple[str, ...] = ()  # of samples during the run, the last ones
    utilization: tuple[float, ...] = ()  # means over the cards, the last samples
    utilization_span: float = 0.0  # seconds that these cover
    memory_peak: float | None = None  # bytes, of the fullest card in any sample


@dataclass(frozen=True)
class Metrics:
    """A summary of metrics.jsonl."""

    lines: int | None
    last_step: int | None
    last_time: float | None
    last_loss: float | None
    best_loss: float | None
    nan_step: int | None  # the first step of the run of not-finite losses that the file ends with
    nan_count: int
    step_seconds: float | None  # the median
    rate: float | None  # tokens a second, over the last lines
    early_rate: float | None  # over the lines after the first ones
    phase: str | None = None


@dataclass(frozen=True)
class Attention:
    """The shape of the recipe's attention: scores of `heads` x `queries` x `keys` for each of `rows`."""

    heads: int
    queries: int
    keys: int
    rows: int = 1

    def bytes(self, width: int) -> int:
        return self.rows * self.heads * self.queries * self.keys * width


@dataclass(frozen=True)
class Environment:
    """How the run's environment differs from what was built. `changes` came before the run ended, in `names`
    (packages); `later` since, or at a time that is not known."""

    id: str
    changes: tuple[str, ...] = ()
    names: frozenset[str] = frozenset()
    later: tuple[str, ...] = ()


@dataclass(frozen=True)
class Facts:
    """Everything known of one run, or of one log by itself (`source`)."""

    source: str = "log"
    run: str = ""
    place: str = ""
    log: Log = field(default_factory=lambda: Log(0))
    phase: str | None = None
    why: str | None = None
    exit: Exit | None = None
    stop: Mapping[str, Any] | None = None
    now: float | None = None  # Unix time at the place
    started: float | None = None
    step_at: float | None = None
    heartbeat: float | None = None
    reports_metrics: bool = True
    restarted: str | None = None  # "host" or "container"
    connection: str | None = None  # why the place does not answer
    elastic: tuple[ElasticError, ...] = ()
    kernel: tuple[KernelLine, ...] = ()
    kernel_why: str | None = None
    gpus: Gpus = Gpus()
    memory_limit: int | None = None
    memory_current: int | None = None
    memory_events: Mapping[str, int] | None = None
    metrics: Metrics | None = None
    attention: Attention | None = None
    expected_rate: float | None = None
    uvm_node: bool | None = None
    driver: str | None = None  # of the host's kernel module
    library: str | None = None  # of libcuda here
    disk_free: int | None = None
    inodes_free: int | None = None
    clock_skew: float | None = None  # seconds that the place is ahead
    tmux: bool | None = None
    screen: str | None = None
    stacks: str | None = None
    frozen: bool | None = None
    events: tuple[Mapping[str, Any], ...] = ()
    environment: Environment | None = None  # of a run that ended badly
    first: Mapping[str, Any] | None = None  # the end that came first, of all ranks and places: place, kind, rank, said
    followed: bool = False  # it was another place's
    apart: bool = False  # this is not the first of the run's places
    run_dir: str | None = None
    root: str | None = None

    @property
    def active(self) -> bool:
        return self.phase in ("preparing", "starting", "compiling", "training")
