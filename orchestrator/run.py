"""What a run is, seen from the workstation: its phases and the typed reading of one probe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.plain import plain

ENDED = frozenset({"finished", "failed", "stopped", "lost"})
BEFORE_TRAINING = frozenset({"preparing", "starting", "compiling"})


@dataclass(frozen=True)
class Gpu:
    """One GPU as nvidia-smi gave it; a value that could not be read is None."""

    index: int | None
    name: str | None
    uuid: str | None
    memory_used: float | None  # MiB
    memory_total: float | None  # MiB
    utilization: float | None  # percent of time
    temperature: float | None  # °C
    power: float | None  # W
    error: str | None = None


@dataclass(frozen=True)
class RunStatus:
    """One run as a probe found it. Times are Unix seconds on the place's own clock, as `now` is."""

    run: str
    place: str
    recipe: str
    user: str
    phase: str
    why: str | None
    now: float
    created: float
    started: float | None
    ended: float | None
    heartbeat: float | None
    step: int | None
    step_at: float | None
    tokens_per_second: float | None
    loss: float | None
    evaluation: Mapping[str, Any] | None
    result: Mapping[str, Any] | None
    exit: Mapping[str, Any] | None
    cache: Mapping[str, Any] | None  # what its compile cache was expected to give, and what its runner did with it
    compile: Mapping[str, Any] | None  # what its trainer told of its compiling
    state: Mapping[str, Any]
    log_size: int | None
    log_inode: int | None
    log_next: int  # offset of the first byte after `log`
    log_truncated: bool
    log: bytes
    tmux: Mapping[str, Any] | None
    error: str | None = None

    @property
    def has_ended(self) -> bool:
        return self.phase in ENDED

    @property
    def places(self) -> tuple[str, ...]:
        """All places of the run, by the names that its launcher had for them; empty where it has one."""
        return tuple(map(str, self.state.get("places") or ()))

    @property
    def first(self) -> Mapping[str, Any] | None:
        """The end that came first of all its ranks and places, where one did: `place`, `kind`, `rank`, `said`."""
        return _mapping(self.state.get("first"))

    @property
    def followed(self) -> bool:
        """Whether it ended because another of its places did."""
        return self.first is not None and self.first.get("place") != self.state.get("place")

    @property
    def seconds(self) -> float:
        """Age of the run, or how long it took."""
        return max(0.0, (self.ended or self.now) - self.created)

    @property
    def compiling(self) -> str:
        """Its compiling in words, such as `warm, 3 of 3 hits`; "" where nothing is known."""
        from orchestrator.compile_cache.words import compiling

        return compiling(self.cache, self.compile)

    def to_json(self) -> dict[str, Any]:
        """The shape of a run in `--json` output, version 1."""
        return {
            "run": self.run,
            "place": self.place,
            "recipe": self.recipe,
            "user": self.user,
            "phase": self.phase,
            "why": self.why,
            "now": self.now,
            "created": self.created,
            "started": self.started,
            "ended": self.ended,
            "heartbeat": self.heartbeat,
            "step": self.step,
            "step_at": self.step_at,
            "tokens_per_second": self.tokens_per_second,
            "loss": self.loss,
            "evaluation": self.evaluation,
            "result": self.result,
            "exit": self.exit,
            "places": list(self.places) or None,
            "first": self.first,
            "cache": self.cache,
            "compile": self.compile,
            "compiling": self.compiling or None,
            "environment": self.state.get("environment"),
            "code": self.state.get("code"),
            "log_size": self.log_size,
            "log_tail": self.log.decode("utf-8", "replace").splitlines(),
            "tmux": self.tmux,
            "error": self.error,
        }


def from_probe(answer: Mapping[str, Any], payload: bytes, place: str) -> list[RunStatus]:
    """The runs in one answer of the probe, in its order."""
    problems: dict[str, list[str]] = {}
    for problem in answer.get("problems") or ():
        problems.setdefault(str(problem.get("run")), []).append(f"{problem.get('part')}: {problem.get('why')}")
    return [
        _status(item, payload, place, float(answer["time"]), problems.get(str(item.get("run")), []))
        for item in answer.get("runs") or ()
    ]


def _status(item: Mapping[str, Any], payload: bytes, place: str, now: float, problems: list[str]) -> RunStatus:
    """Of what programs wrote there only what is of its kind: the rest is unknown."""
    state = _mapping(item.get("state")) or {}
    metrics = _mapping(item.get("metrics")) or {}
    last = _mapping(metrics.get("last")) or {}
    log = _mapping(item.get("log")) or {}
    start, length = int(log.get("from") or 0), int(log.get("length") or 0)
    end = _mapping(state.get("exit"))
    return RunStatus(
        run=_text(item.get("run")) or "?",
        place=place,
        recipe=_text(state.get("recipe")) or "?",
        user=_text(state.get("user")) or "?",
        phase=_text(item.get("phase")) or "unknown",
        why=_text(item.get("why")),
        now=now,
        created=_first(_time(state.get("created")), now),
        started=_time(state.get("started")),
        ended=_time(end.get("at")) if end else None,
        heartbeat=_time(state.get("heartbeat")),
        step=_first(_whole(last.get("step")), _whole(state.get("step"))),
        step_at=_first(_time(last.get("time")), _time(state.get("step_at"))),
        tokens_per_second=_first(
            _number(metrics.get("tokens_per_second")),
            _number(state.get("tokens_per_second")),
        ),
        loss=_number(last.get("loss")),
        evaluation=_mapping(metrics.get("eval")),
        result=_mapping(item.get("result")),
        exit=end,
        cache=_mapping(state.get("cache")),
        compile=_first(_mapping(metrics.get("compile")), _mapping(state.get("compile"))),
        state=state,
        log_size=log.get("size"),
        log_inode=log.get("inode"),
        log_next=int(log.get("next") or 0),
        log_truncated=bool(log.get("truncated") or log.get("rotated")),
        log=payload[start : start + length],
        tmux=_mapping(item.get("tmux")),
        error="; ".join(problems) or None,
    )


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _mapping(value: Any) -> Mapping[str, Any] | None:
    return value if isinstance(value, dict) else None


def _text(value: Any) -> str | None:
    return plain(value) if isinstance(value, str) else None


def _number(value: Any) -> float | None:
    """A number that fits a float. It may be infinite or NaN, as a loss can be."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        float(value)
    except OverflowError:
        return None
    return value


def _whole(value: Any) -> int | None:
    number = _number(value)
    return int(number) if number is not None and abs(number) < 1 << 63 else None


def _time(value: Any) -> float | None:
    """Unix seconds; what is beyond any clock is no time."""
    number = _number(value)
    return number if number is not None and abs(number) < 1e12 else None
