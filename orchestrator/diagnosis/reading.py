"""From the answers of a place to facts: names and types, each reading by itself."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from orchestrator.diagnosis import shape
from orchestrator.diagnosis.facts import (
    ElasticError,
    Environment,
    Exit,
    Facts,
    Gpus,
    KernelLine,
    Log,
    Match,
    Metrics,
    Raised,
    Traceback,
)
from orchestrator.remote import nvidia_smi

_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([^)]*)\): (\d+)")
_SINCE_BOOT = re.compile(r"^\[\s*(\d+\.\d+)\]")


def log(answer: Mapping[str, Any], name: str = "console.log") -> Log:
    """What `evidence_log.scan` found."""
    tail = answer.get("tail") or {}
    return Log(
        size=int(answer.get("size") or 0),
        matches=tuple(
            Match(
                rule=int(item["rule"]),
                offset=int(item["offset"]),
                line=item.get("line"),
                text=str(item["text"]),
                body=str(item["body"]),
                after=tuple(str(line) for line in item.get("after") or ()),
            )
            for item in answer.get("matches") or ()
        ),
        tracebacks=tuple(_traceback(item) for item in answer.get("tracebacks") or ()),
        more_tracebacks=int(answer.get("more_tracebacks") or 0),
        tail=str(tail.get("text") or ""),
        tail_offset=int(tail.get("offset") or 0),
        why=answer.get("why"),
        name=name,
    )


def _traceback(item: Mapping[str, Any]) -> Traceback:
    return Traceback(
        offset=int(item["offset"]),
        end=int(item["end"]),
        line=item.get("line"),
        text=str(item["text"]),
        raised=tuple(Raised(int(one["offset"]), str(one["text"]), str(one["then"])) for one in item["raised"]),
        after=tuple(str(line) for line in item.get("after") or ()),
        thread=item.get("thread"),
        prefix=str(item.get("prefix") or ""),
    )


def facts(
    answer: Mapping[str, Any],
    place: str,
    host: Mapping[str, Any],
    container: Mapping[str, Any],
    skew: float | None = None,
) -> Facts:
    """Of a run: the answer to `evidence`, and what the place said of itself when the session opened."""
    state: Mapping[str, Any] = answer.get("state") or {}
    kernel, why = _kernel(answer, host)
    launch: Mapping[str, Any] = answer.get("launch") or {}
    recipe = shape.settings(answer.get("recipe"))
    return Facts(
        source="run",
        run=str(answer.get("run") or ""),
        place=place,
        log=log(answer.get("log") or {}, "pane" if answer.get("log_of") == "pane" else "console.log"),
        phase=answer.get("phase"),
        why=answer.get("why"),
        exit=_exit(state.get("exit")),
        stop=state.get("stop"),
        now=answer.get("time"),
        started=state.get("started") or state.get("created"),
        step_at=state.get("step_at"),
        heartbeat=state.get("heartbeat"),
        reports_metrics=launch.get("metrics") is not False,
        restarted=_restarted(answer, host, state),
        elastic=tuple(
            ElasticError(e.get("rank"), e.get("time"), str(e.get("message")), str(e.get("file")))
            for e in answer.get("elastic") or ()
        ),
        kernel=kernel,
        kernel_why=why,
        gpus=_gpus(answer.get("gpus"), answer.get("samples") or {}),
        memory_limit=(answer.get("memory") or {}).get("limit") or container.get("memory_limit"),
        memory_current=(answer.get("memory") or {}).get("current"),
        memory_events=(answer.get("memory") or {}).get("events"),
        metrics=Metrics(**answer["metrics"]) if answer.get("metrics") else None,
        attention=shape.attention(recipe, answer.get("heads")),
        expected_rate=(launch.get("health") or {}).get("tokens_per_second"),
        uvm_node=answer.get("uvm_node"),
        driver=host.get("driver") or answer.get("driver"),
        library=answer.get("library"),
        disk_free=answer.get("disk_free"),
        inodes_free=answer.get("inodes_free"),
        clock_skew=skew,
        tmux=answer.get("tmux"),
        screen=answer.get("screen"),
        stacks=answer.get("stacks"),
        frozen=answer.get("frozen"),
        events=tuple(answer.get("events") or ()),
        environment=_environment(answer.get("environment")),
        first=state.get("first"),
        followed=bool(state.get("first")) and state["first"].get("place") != state.get("place"),
        apart=(state.get("places") or [state.get("place")])[0] != state.get("place"),
        run_dir=answer.get("run_dir"),
        root=container.get("root"),
    )


def _restarted(answer: Mapping[str, Any], host: Mapping[str, Any], state: Mapping[str, Any]) -> str | None:
    """LXC gives a container another boot id at each of its starts: only when the kernel itself began tells which of
    the two was started anew."""
    said = answer.get("restarted")
    began = state.get("started") or state.get("created")
    boot = _boot(host.get("time"), host.get("uptime")) or (answer.get("kernel") or {}).get("boot")
    if said is None or boot is None or not isinstance(began, (int, float)):
        return said
    return "host" if boot > began else "container"


def _environment(said: Mapping[str, Any] | None) -> Environment | None:
    if not said:
        return None
    changes, names, later = (tuple(str(text) for text in said.get(key) or ()) for key in ("changes", "names", "later"))
    return Environment(str(said.get("id")), () if said.get("ok") else changes, frozenset(names), later)


def _exit(record: Mapping[str, Any] | None) -> Exit | None:
    if not record:
        return None
    keys = ("code", "signal", "at", "oom_kills", "machine_oom_kills")
    return Exit(**{key: record.get(key) for key in keys}, reason=str(record.get("reason") or ""))


def _kernel(answer: Mapping[str, Any], host: Mapping[str, Any]) -> tuple[tuple[KernelLine, ...], str | None]:
    """The host's own view first; a container's is of the same kernel, where it may look at all."""
    inside: Mapping[str, Any] = answer.get("kernel") or {}
    lines: list[str] = list(dict.fromkeys([*(host.get("kernel_log") or ()), *(inside.get("lines") or ())]))
    boot = _boot(host.get("time"), host.get("uptime"))
    if boot is None:
        boot = inside.get("boot")
    return kernel_lines(lines, boot), None if lines else inside.get("why")


def kernel_lines(lines: Iterable[str], boot: float | None) -> tuple[KernelLine, ...]:
    """Lines of dmesg; `boot` is when its clock began, in Unix time."""
    out = []
    for text in lines:
        xid, since = _XID.search(text), _SINCE_BOOT.match(text)
        out.append(
            KernelLine(
                text,
                boot + float(since.group(1)) if since and boot is not None else None,
                int(xid.group(2)) if xid else None,
                xid.group(1) if xid else None,
            )
        )
    return tuple(out)


def _boot(time: Any, uptime: Any) -> float | None:
    return float(time) - float(uptime) if isinstance(time, (int, float)) and isinstance(uptime, (int, float)) else None


def _gpus(outcome: Mapping[str, Any] | None, samples: Mapping[str, Any]) -> Gpus:
    seen: Sequence[float] = samples.get("utilization") or ()
    common: dict[str, Any] = {
        "count_before": samples.get("count_first"),
        "errors": tuple(samples.get("errors") or ()),
        "utilization": tuple(seen),
        "utilization_span": float(samples.get("span") or 0.0),
        "memory_peak": samples.get("memory_peak"),
    }
    if outcome is None:
        return Gpus(here=False, **common)
    rows, problems = nvidia_smi.parse(outcome.get("text") or "")
    why = nvidia_smi.explain(dict(outcome))
    here = "is not here" not in (outcome.get("why") or "")
    # a card that is lost answers for itself in its own fields
    problems += [text for row in rows for text in (row.get("why") or {}).values() if "lost" in text.lower()]
    answered = not outcome.get("why")
    return Gpus(
        outcome.get("text"), why if here else None, here, tuple(problems), len(rows) if answered else None, **common
    )
