"""What can go wrong with the torch of an environment at a place: asking there, and judging the answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.errors import NotFound, UsageError
from orchestrator.place.session import Session
from orchestrator.plain import plain

SECONDS = 300.0  # that the place has for the answer
Progress = Callable[[int, int], None]

GUARDED, UNGUARDED = ("loose+guard", "fullgraph+guard"), ("loose", "fullgraph")
NOT_TRIED = {
    "compiled-backward": "flex attention has no backward pass on the CPU, and no GPU is touched",
    "compiled-checkpoint": "it needs a backward pass",
}
_PROCESSES = "One process a GPU, as orch's trainer has it"
_GUARD = "where threads have to be, trainer.compile_guard"


@dataclass(frozen=True)
class Setting:
    """A setting or variable as a program finds it at its start. `bad`: why it has to be changed, else empty."""

    name: str
    value: Any
    source: str
    bad: str = ""
    note: str = ""


@dataclass(frozen=True)
class Way:
    """A way to dense attention. `cells`: what came of it, by cell; empty, with `why`, where it was not tried."""

    name: str
    cells: Mapping[str, str]
    why: str = ""


@dataclass(frozen=True)
class Failure:
    """One of the four. `possible` is None where it is unknown; `how` is "tried", "derived" or "unknown"."""

    name: str
    title: str
    possible: bool | None
    how: str
    text: str
    advice: str


@dataclass(frozen=True)
class Report:
    """What was found. With `error` nothing is known but what comes before it."""

    place: str
    environment: Mapping[str, Any] | None
    python: str
    torch: Mapping[str, Any]
    error: str
    condition: Mapping[str, Any]
    settings: tuple[Setting, ...]
    ways: tuple[Way, ...]
    failures: tuple[Failure, ...]
    unknown: tuple[str, ...]

    @property
    def good(self) -> bool:
        """Whether all could be read and nothing is set that has to be changed."""
        return not self.error and not any(setting.bad for setting in self.settings)

    def to_json(self) -> dict[str, Any]:
        return {
            "place": self.place,
            "environment": self.environment,
            "python": self.python,
            "good": self.good,
            "error": self.error or None,
            "torch": self.torch or None,
            "condition": self.condition or None,
            "settings": [one.__dict__ for one in self.settings],
            "ways": [{**one.__dict__, "tried": bool(one.cells)} for one in self.ways],
            "failures": [one.__dict__ for one in self.failures],
            "unknown": list(self.unknown),
        }


def choose(session: Session, wanted: str | None) -> Mapping[str, Any]:
    """The environment that is meant: by name or id, else the one used last, else built last, with torch if any has.

    Raises:
        NotFound: there is none.
    """
    found = session.call("env_list", {}, timeout=60.0).data["environments"]
    here: list[dict[str, Any]] = [one for one in found if one["entry"] == one["id"] and one["manifest"] is not None]
    where = session.place.name
    if wanted is not None:
        here = [one for one in here if one["manifest"].get("name") == wanted or one["id"].startswith(wanted)]
        if not here:
            raise NotFound(f"there is no environment {wanted} at {where}", hint=f"orch env list {where}")
    if not here:
        raise NotFound(f"there is no environment at {where} yet", hint=f"orch env build NAME {where}, or --python PATH")

    def order(one: Mapping[str, Any]) -> tuple[bool, float, float]:
        manifest = one["manifest"]
        return bool(manifest.get("torch")), float(one["last_used"] or 0.0), float(manifest.get("built") or 0.0)

    return max(here, key=order)


def read(session: Session, *, env: str | None, python: str | None, progress: Progress) -> Report:
    """Ask at the place, and judge.

    Raises:
        UsageError: an environment and a Python at once, or no absolute path.
        NotFound: there is no such environment or program.
    """
    if env is not None and python is not None:
        raise UsageError("--env and --python exclude each other")
    if python is not None and not python.startswith("/"):
        raise UsageError("--python takes the whole path of a Python at the place, such as /root/venv/bin/python")
    environment = None
    if python is None:
        chosen = choose(session, env)
        polluted = (chosen.get("polluted") or {}).get("summary")
        environment = {"id": chosen["id"], "name": chosen["manifest"].get("name"), "polluted": polluted}

    def on_event(event: Mapping[str, Any]) -> None:
        if event.get("step") == "trying":
            progress(int(event["done"]), int(event["total"]))

    arguments = {"id": environment and environment["id"], "python": python, "seconds": SECONDS}
    answer = session.call("torch_probe", arguments, timeout=SECONDS + 30.0, on_event=on_event).data
    return judge(session.place.name, environment, _plain(answer))


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, dict):
        return {plain(str(key)): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


# --- judging: from what was read to a report; it asks nothing --------------------------------------


def judge(place: str, environment: Mapping[str, Any] | None, answer: Mapping[str, Any]) -> Report:
    """The report of an answer of `remote.torch_probe`."""
    torch = answer.get("torch") or {}
    error = str(answer.get("why") or "")
    if not error and torch.get("why"):
        error, torch = f"torch cannot be imported there ({torch['why']})", {}
    if not error and (answer.get("compile") or {}).get("why"):
        error = f"torch.compile cannot be imported there ({answer['compile']['why']})"
    facts = answer.get("facts") or {}
    unknown = [f"{name}: {reading['why']}" for name, reading in facts.items() if "why" in reading]
    source = answer.get("source") or {}
    if "why" in source:
        unknown.append(f"source: {source['why']}")
    if "why" in (torch.get("triton") or {}):
        torch = {**torch, "triton": {"value": None}} if "PackageNotFound" in torch["triton"]["why"] else torch
    ways = judge_ways(answer.get("ways")) if not error else ()
    values = {name: reading.get("value") for name, reading in facts.items()}
    lines = source.get("value") or {}
    return Report(
        place=place,
        environment=environment,
        python=str(answer.get("python")),
        torch={**torch, "triton": (torch.get("triton") or {}).get("value")} if torch else {},
        error=error,
        condition=condition(facts, lines) if not error else {},
        settings=judge_settings(values.get("settings") or {}, answer.get("variables") or (), answer.get("run")),
        ways=ways,
        failures=judge_failures(facts, lines, ways) if not error else (),
        unknown=tuple(unknown),
    )


def condition(facts: Mapping[str, Any], lines: Mapping[str, Any]) -> dict[str, Any]:
    """The check that a compiled call makes: where it stands, whose the flag is, what masks it. Null is unknown."""

    def value(name: str) -> Any:
        return (facts.get(name) or {}).get("value")

    raised = facts.get("call_during_trace") or {}
    return {
        "checked": _line(lines.get("check")),
        "flag": {True: "process", False: "thread", None: None}[value("flag_shared")],
        "flag_line": _line(lines.get("flag")),
        "masked_by_is_compiling": bool(lines["reader"]) if lines.get("reader") else None,
        "is_compiling": {True: "process", False: "thread or unused", None: None}[value("compiling_shared")],
        "raises_during_trace": bool(raised["value"]) if "value" in raised else None,
        "config": {True: "thread", False: "process", None: None}[value("config_per_thread")],
        "dense_guard_binds": value("guard_binds"),
    }


def _line(found: Mapping[str, Any] | None) -> str | None:
    return f"{found['file']}:{found['line']}" if found else None


_BAD_SETTINGS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "error_on_nested_fx_trace": (
        lambda value: value is False,
        "a compiled call that meets a trace runs uncompiled, without a word; leave it True",
    ),
    "suppress_errors": (bool, "what fails to compile runs uncompiled, without a word; leave it False"),
    "disable": (bool, "torch.compile does nothing; leave it False"),
    "debug_backend_override": (bool, "another backend takes the place of the compiler; leave it empty"),
    "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": (
        bool,
        "flex attention warns no more, and builds its scores; leave it False",
    ),
    "stance": (lambda value: value != "default", "torch.compile is told not to compile; set no stance at the start"),
}
_BAD_VARIABLES: dict[str, tuple[Callable[[str], bool], str]] = {
    "TORCH_COMPILE_DISABLE": (lambda value: value == "1", "torch.compile does nothing; unset it"),
    "TORCHDYNAMO_DISABLE": (lambda value: value == "1", "torch.compile does nothing; unset it"),
    "TORCHDYNAMO_SUPPRESS_ERRORS": (bool, "what fails to compile runs uncompiled (any value counts, 0 too); unset it"),
    "TORCH_COMPILE_OVERRIDE_BACKENDS": (bool, "another backend takes the place of the compiler; unset it"),
    "TORCHINDUCTOR_VEC_ISA_OK": (lambda value: value == "1", "a wrong vector instruction set may be used; unset it"),
}
_NOTES = {
    "PYTHONWARNINGS": "warnings are filtered, the one of uncompiled flex attention too",
    "TORCHINDUCTOR_MAX_AUTOTUNE": "part of the compile cache's key",
    "OMP_NUM_THREADS": "part of the compile cache's key on the CPU",
}


def judge_settings(
    values: Mapping[str, Any], variables: Sequence[Mapping[str, Any]], run: str | None
) -> tuple[Setting, ...]:
    """What torch found set, then the variables that it may heed."""
    found = []
    for name, value in values.items():
        is_bad, text = _BAD_SETTINGS.get(name, (lambda _: False, ""))
        found.append(Setting(name, value, "torch", bad=text if is_bad(value) else ""))
    for one in variables:
        name, value = str(one["name"]), str(one["value"])
        is_bad, text = _BAD_VARIABLES.get(name, (lambda _: False, ""))
        found.append(
            Setting(name, value, str(one["from"]), bad=text if is_bad(value) else "", note=_NOTES.get(name, ""))
        )
    return tuple(found)


def judge_ways(rows: Sequence[Mapping[str, Any]] | None) -> tuple[Way, ...]:
    """Each way with what came of it: "dense", "dense, then error", "stopped" (by a guard), "error", "compiled", or
    "unknown"."""
    found: dict[str, dict[str, str]] = {}
    reasons: dict[str, str] = {}
    for row in rows or ():
        way, cell = str(row["cell"]).split(" ")
        found.setdefault(way, {})[cell] = _outcome(row.get("value"))
        if "why" in row:
            reasons[way] = str(row["why"])
    tried = tuple(Way(name, cells, reasons.get(name, "")) for name, cells in found.items())
    return tried + tuple(Way(name, {}, why) for name, why in NOT_TRIED.items())


def _outcome(value: Mapping[str, Any] | None) -> str:
    if value is None:
        return "unknown"
    raised = value.get("raised")
    if not value["dense"]:
        return "error" if raised else "compiled"
    if not raised:
        return "dense"
    return "stopped" if str(raised).startswith("Dense:") else "dense, then error"


def judge_failures(facts: Mapping[str, Any], lines: Mapping[str, Any], ways: Sequence[Way]) -> tuple[Failure, ...]:
    """The four, each with what it means and what to do."""
    return (_fx_error(facts), _patched_module(facts), _deadlock(lines), _silent_dense(ways))


def _fx_error(facts: Mapping[str, Any]) -> Failure:
    title = "FX error on any call"
    advice = f"{_PROCESSES}; {_GUARD}. A warm cache does not help: the check is made at each call."
    trace, compile_ = (facts.get(name) or {} for name in ("call_during_trace", "call_during_compile"))
    if "value" not in trace or "value" not in compile_:
        return _unknown("fx-error", title, trace if "value" not in trace else compile_, advice)
    left = (facts.get("left_by_overlap") or {}).get("value") or {}
    when = [name for name, met in (("traces", trace["value"]), ("compiles", compile_["value"])) if met]
    stays = ", and two traces that overlap leave it so for good" if left.get("flag") else ""
    if when:
        text = f"A compiled call fails while another thread {' or '.join(when)}{stays}."
        return Failure("fx-error", title, True, "tried", text, advice)
    return Failure("fx-error", title, False, "tried", "A compiled call does not mind what other threads trace.", "")


def _patched_module(facts: Mapping[str, Any]) -> Failure:
    name, title = "patched-module", "nn.Module patched for all"
    advice = f"{_PROCESSES}; {_GUARD}."
    met, left = (facts.get(one) or {} for one in ("module_during_trace", "left_by_overlap"))
    if "value" not in met:
        return _unknown(name, title, met, advice)
    stays = ", and stays so after two traces that overlap" if (left.get("value") or {}).get("module") else ""
    if met["value"]:
        text = f"A plain module fails while another thread traces{stays} ({met['value'].partition(':')[0]})."
        return Failure(name, title, True, "tried", text, advice)
    if stays:
        return Failure(name, title, True, "tried", "Two traces that overlap leave nn.Module patched for good.", advice)
    return Failure(name, title, False, "tried", "A trace leaves the modules of other threads alone.", "")


def _deadlock(lines: Mapping[str, Any]) -> Failure:
    name, title = "deadlock", "deadlock on a shared GPU"
    advice = (
        f"{_PROCESSES}, or threads with a GPU each; compile forward and backward in one thread at a time, then seal "
        f"(trainer.compile_guard)."
    )
    if not lines:
        return _unknown(name, title, {"why": "the source could not be read"}, advice)
    if lines.get("forward_lock") and lines.get("backward_lock"):
        text = (
            "Forward and backward compile under one lock: a thread that holds it can wait for the GPU's autograd "
            "thread while that waits for the lock."
        )
        return Failure(name, title, True, "derived", text, advice)
    return Failure(name, title, False, "derived", "Forward and backward do not compile under one lock.", "")


def _silent_dense(ways: Sequence[Way]) -> Failure:
    name, title = "silent-dense", "silent dense attention"
    tried = [way for way in ways if way.cells]
    unknown = [way for way in tried if "unknown" in way.cells.values()]
    if not tried or len(unknown) == len(tried):
        return _unknown(name, title, {"why": unknown[0].why if unknown else "no way was tried"}, "")
    silent = [way.name for way in tried if any(way.cells.get(cell) == "dense" for cell in UNGUARDED)]
    loose = [way.name for way in tried if any((way.cells.get(cell) or "").startswith("dense") for cell in GUARDED)]
    if loose:
        advice = f"The guard does not stop {', '.join(loose)}: use a torch that trainer.dense_guard was tested with."
    else:
        advice = "trainer.dense_guard (on in orch's trainer) stops each; compile with fullgraph=True all the same."
    if not silent:
        return Failure(name, title, False, "tried", "None of the ways tried is silent.", "")
    text = f"{len(silent)} of {len(tried)} ways tried build all scores without an error"
    if "plain-if-compiling" in silent:
        text += ", one of them because another thread happens to compile"
    return Failure(name, title, True, "tried", f"{text}.", advice)


def _unknown(name: str, title: str, reading: Mapping[str, Any], advice: str) -> Failure:
    return Failure(name, title, None, "unknown", f"Not known: {reading.get('why') or 'it was not read'}.", advice)
