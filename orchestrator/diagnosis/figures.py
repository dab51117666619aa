"""Conditions on what the cards, the driver, the metrics and the stacks say; and the table of all that need no line."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from orchestrator.diagnosis import conditions, sizes
from orchestrator.diagnosis.conditions import Found, within
from orchestrator.diagnosis.facts import Facts
from orchestrator.diagnosis.model import Evidence

ECC = frozenset({48, 63, 64, 94, 95})
LOST = frozenset({79})
DRIVER = frozenset({32, 38, 56, 57, 61, 62, 69, 74, 109, 110, 119, 120, 140, 143, 149, 154})
PROGRAM = frozenset({13, 31, 43})

IDLE = 3.0  # percent
SILENT = 300.0  # seconds without a step, at least, before that means anything
_HARDWARE = 97  # outweighs what the log shows of it, which is what a program sees of a broken card


def _xids(facts: Facts, numbers: Collection[int]) -> tuple[Evidence, ...]:
    lines = [line for line in within(facts) if line.xid in numbers]
    return tuple(Evidence("kernel log", "kernel log", line.text) for line in lines[:4])


def xid_lost(facts: Facts) -> Found | None:
    seen = _xids(facts, LOST)
    return Found(_HARDWARE, seen, "high") if seen else None


def xid_ecc(facts: Facts) -> Found | None:
    seen = _xids(facts, ECC)
    return Found(_HARDWARE, seen, "high") if seen else None


def xid_driver(facts: Facts) -> Found | None:
    seen = _xids(facts, DRIVER)
    return Found(_HARDWARE - 1, seen, "medium") if seen else None


def xid_program(facts: Facts) -> Found | None:
    """13, 31 and 43 are mostly the program's doing; repeated on one card alone they may be the card's."""
    seen = _xids(facts, {31})
    if not seen:
        return None
    cards = {line.pci for line in within(facts) if line.xid == 31}
    count = sum(1 for line in within(facts) if line.xid == 31)
    if count > 2 and len(cards) == 1:
        note = Evidence("kernel log", "kernel log", f"Xid 31 came {count} times, each time on {cards.pop()}")
        return Found(45, (*seen, note), "low")
    return Found(45, seen, "medium")


def _smi(facts: Facts, *patterns: str) -> tuple[Evidence, ...]:
    texts = [facts.gpus.text or "", facts.gpus.why or "", *facts.gpus.problems, *facts.gpus.errors]
    for text in texts:
        for pattern in patterns:
            found = re.search(rf"[^\n]*{pattern}[^\n]*", text)
            if found:
                return (Evidence("nvidia-smi", "nvidia-smi", found.group(0).strip()[:300]),)
    return ()


def smi_lost(facts: Facts) -> Found | None:
    seen = _smi(facts, "GPU is lost", "Unable to determine the device handle", "fallen off the bus")
    return Found(_HARDWARE, seen, "high") if seen else None


def gpu_vanished(facts: Facts) -> Found | None:
    now, before = facts.gpus.count, facts.gpus.count_before
    if now is None or before is None or not now < before:
        return None
    text = f"nvidia-smi names {now} of the {before} GPUs that were there when the run began"
    return Found(_HARDWARE - 2, (Evidence("nvidia-smi", "nvidia-smi", text),), "medium")


def smi_mismatch(facts: Facts) -> Found | None:
    seen = _smi(facts, "Driver/library version mismatch")
    if not seen:
        return None
    if facts.driver and facts.library and facts.driver != facts.library:
        text = f"the host's kernel module is {facts.driver}, the library here is {facts.library}"
        seen = (*seen, Evidence("driver", "/proc/driver/nvidia/version", text))
    return Found(94, seen, "high")


def smi_no_device(facts: Facts) -> Found | None:
    seen = _smi(
        facts, "No devices were found", "couldn't communicate with the NVIDIA driver", "couldn't find libnvidia-ml"
    )
    return Found(62, seen, "medium") if seen else None


def uvm_node_missing(facts: Facts) -> Found | None:
    if facts.uvm_node is not False or not facts.gpus.count:
        return None
    return Found(63, (Evidence("devices", "/dev", "/dev/nvidia-uvm is not there, and nvidia-smi works"),), "medium")


# ---- metrics -------------------------------------------------------------------------------------


def nan_metrics(facts: Facts) -> Found | None:
    metrics = facts.metrics
    if metrics is None or metrics.nan_step is None:
        return None
    if facts.active and metrics.nan_count < 3:
        return None
    text = f"the loss is not a number from step {metrics.nan_step} on ({metrics.nan_count} lines)"
    return Found(75, (Evidence("metrics", "metrics.jsonl", text),), "high")


def loss_ran_away(facts: Facts) -> Found | None:
    metrics = facts.metrics
    if metrics is None or metrics.last_loss is None or metrics.best_loss is None or (metrics.lines or 0) < 20:
        return None
    if metrics.last_loss < max(10 * abs(metrics.best_loss), metrics.best_loss + 10):
        return None
    text = f"the loss is {metrics.last_loss:.4g} at step {metrics.last_step}; it has been {metrics.best_loss:.4g}"
    return Found(36, (Evidence("metrics", "metrics.jsonl", text),), "medium")


def slow(facts: Facts) -> Found | None:
    metrics = facts.metrics
    if metrics is None or metrics.rate is None or facts.phase != "training" or (metrics.lines or 0) < 20:
        return None
    for what, wanted, share in (
        ("what the recipe calls healthy", facts.expected_rate, 0.7),
        ("what it was in the beginning", metrics.early_rate, 0.5),
    ):
        if wanted and metrics.rate < share * wanted:
            text = f"{metrics.rate:,.0f} tokens/s, {metrics.rate / wanted:.0%} of {what} ({wanted:,.0f})"
            return Found(35, (Evidence("metrics", "metrics.jsonl", text),), "medium")
    return None


def _silence(facts: Facts) -> float | None:
    """Seconds without a step, where that is longer than this run's steps explain."""
    since = facts.step_at or (facts.metrics.last_time if facts.metrics else None)
    if facts.now is None or facts.phase != "training" or not facts.reports_metrics or since is None:
        return None
    silence = facts.now - since
    usual = facts.metrics.step_seconds if facts.metrics and facts.metrics.step_seconds else 0.0
    return silence if silence > max(SILENT, 30 * usual) else None


def _idle(facts: Facts) -> Evidence | None:
    if not facts.gpus.utilization or facts.gpus.utilization_span < 60:
        return None
    if max(facts.gpus.utilization) > IDLE:
        return None
    text = f"the GPUs have been idle for {facts.gpus.utilization_span:.0f} s"
    return Evidence("nvidia-smi", "gpu.jsonl", text)


def no_step_and_idle(facts: Facts) -> Found | None:
    """Silence alone may be a long compilation or evaluation: both witnesses are wanted where there are cards."""
    silence = _silence(facts)
    if silence is None:
        return None
    text = f"no step for {silence:.0f} s"
    seen = Evidence("metrics", "metrics.jsonl", text)
    if facts.gpus.utilization:
        idle = _idle(facts)
        return Found(46, (seen, idle), "medium") if idle else None
    return Found(44, (seen,), "low")


def stacks_deadlock(facts: Facts) -> Found | None:
    if not facts.stacks or not sizes.is_compile_deadlock(facts.stacks):
        return None
    text = "one thread is in compile_fx_backward, another waits in _engine_run_backward while it traces"
    return Found(93, (Evidence("stacks", "stack dump", text),), "high")


def dense_by_figures(facts: Facts) -> Found | None:
    """No text tells of it, but memory and speed do: the cards hold a score matrix more, and steps take long."""
    metrics, shape, peak = facts.metrics, facts.attention, facts.gpus.memory_peak
    if shape is None or peak is None or metrics is None or not facts.active:
        return None
    matrix, wanted = shape.bytes(4), facts.expected_rate or metrics.early_rate
    if matrix < 2 << 30 or peak < matrix or not wanted or not metrics.rate or metrics.rate > 0.5 * wanted:
        return None
    memory = f"a card holds {sizes.human(peak)}, at least the {sizes.human(matrix)} of one whole score matrix"
    speed = f"{metrics.rate:,.0f} tokens/s in place of {wanted:,.0f}"
    seen = Evidence("nvidia-smi", "gpu.jsonl", memory), Evidence("metrics", "metrics.jsonl", speed)
    return Found(41, seen, "low")


FACTS: dict[str, Callable[[Facts], Found | None]] = {
    function.__name__: function
    for function in (
        conditions.cgroup_oom_kill,
        conditions.machine_oom_kill,
        conditions.sigkill,
        conditions.sighup,
        conditions.sigterm,
        conditions.crash_signal,
        conditions.rank_first,
        conditions.other_place_failed,
        conditions.other_place_silent,
        conditions.not_started,
        conditions.exit_127,
        conditions.stop_asked,
        conditions.container_restarted,
        conditions.host_rebooted,
        conditions.container_not_running,
        conditions.container_frozen,
        conditions.runner_gone,
        conditions.tmux_server_gone,
        conditions.clock_is_off,
        conditions.no_room,
        conditions.environment_polluted,
        xid_lost,
        xid_ecc,
        xid_driver,
        xid_program,
        smi_lost,
        gpu_vanished,
        smi_mismatch,
        smi_no_device,
        uvm_node_missing,
        nan_metrics,
        loss_ran_away,
        slow,
        no_step_and_idle,
        stacks_deadlock,
        dense_by_figures,
    )
}
