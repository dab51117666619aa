"""What is known at the place of one run, for a diagnosis: collected here, so that only findings travel."""

from __future__ import annotations

import os
import re
import tempfile
import time
from typing import Any, Callable, Dict, List, Optional, TypeVar

from . import evidence_log, evidence_machine, evidence_metrics, evidence_stacks, nvidia_smi, processes, tmux
from .cgroup import MemoryGroup
from .derive import Standing
from .evidence_environment import Look
from .rundir import RunDir, find, open_file, read_json

T = TypeVar("T")

_SMALL = 256 << 10
_EVENTS = 60


def evidence(args: Dict[str, Any], call: Any) -> Dict[str, Any]:
    """`{run, rules, prefix, stacks}` -> everything that a diagnosis may rest on; what failed is null, with a line in
    `problems`.

    `log`: as `evidence_log.scan`, of console.log, or of the pane where that file is missing (`log_of`). `state`,
    `phase`, `why`: as in a probe; `restarted`: "host" or "container" where that ended the run. `stacks` (if asked
    for): where each thread stands. `environment`: as `evidence_environment.Look.outcome`.
    """
    run = find(call.root, args.get("run"))
    problems: List[str] = []

    def part(name: str, read: Callable[[], T]) -> Optional[T]:
        try:
            return read()
        except Exception as e:  # one reading that fails must not cost the rest
            problems.append("%s: %s: %s" % (name, type(e).__name__, e))
            return None

    query = part("gpus", nvidia_smi.Query)  # it takes the longest: asked first, collected last
    answer: Dict[str, Any] = {"run": run.run, "run_dir": run.path, "time": time.time(), "problems": problems}
    standing = part("state", lambda: Standing(run))
    answer["state"] = standing.state if standing is not None else None
    answer["phase"] = standing.phase if standing is not None else None
    answer["why"] = standing.why if standing is not None else None
    answer["alive"] = standing.alive if standing is not None else []
    look = part("environment", lambda: Look(call.root, standing))
    answer["restarted"] = part("boot", lambda: _restarted(standing))
    answer["launch"] = part("launch", lambda: read_json(run.file("launch.json"))[0])
    answer["recipe"] = part("recipe", lambda: _text(run.file("recipe.yaml")))
    answer["heads"] = part("heads", lambda: _heads(run))
    answer["tmux"] = part("tmux", lambda: tmux.pane(run.run)["session"])
    answer["screen"] = part("screen", lambda: tmux.screen(run.run, history=True)[0]) if answer["tmux"] else None
    answer["log"], answer["log_of"] = part("log", lambda: _log(run, args, answer["screen"])) or (None, None)
    answer["metrics"] = part("metrics", lambda: evidence_metrics.summary(run.file("metrics.jsonl")))
    answer["samples"] = part("samples", lambda: evidence_metrics.samples(run.file("gpu.jsonl")))
    answer["events"] = part("events", lambda: evidence_metrics.last_lines(run.file("events.jsonl"), _EVENTS))
    answer["elastic"] = part("elastic", lambda: evidence_machine.elastic_errors(run.path))
    answer["kernel"] = part("kernel", evidence_machine.kernel_log)
    answer["memory"] = part("memory", lambda: MemoryGroup().report())
    answer.update(part("machine", lambda: evidence_machine.machine(run.path)) or {})
    answer["stacks"] = part("stacks", lambda: evidence_stacks.dump(run, standing)) if args.get("stacks") else None
    answer["environment"] = part("environment", look.outcome) if look is not None else None
    answer["gpus"] = None
    if query is not None:
        query.wait()
        answer["gpus"] = query.outcome()
    return answer


def _restarted(standing: Optional[Standing]) -> Optional[str]:
    """What was started anew under a run that has no exit record."""
    if standing is None or standing.phase != "lost" or standing.state is None:
        return None
    runner = standing.state.get("runner") or {}
    now = processes.identity(1)
    if runner.get("boot_id") and now["boot_id"] and runner["boot_id"] != now["boot_id"]:
        return "host"
    if runner.get("init_ticks") and now["start_ticks"] and runner["init_ticks"] != now["start_ticks"]:
        return "container"
    return None


def _log(run: RunDir, args: Dict[str, Any], screen: Optional[str]) -> Any:
    rules, prefix = args.get("rules") or [], str(args.get("prefix") or "")
    found = evidence_log.scan(run.console, rules, prefix)
    if found["why"] is None or not screen:
        return found, "console.log"
    # the pane is the last witness: it may lack the end, and has lost the beginning
    with tempfile.NamedTemporaryFile(prefix="orch-pane-") as kept:
        kept.write(screen.encode("utf-8", "replace"))
        kept.flush()
        return evidence_log.scan(kept.name, rules, prefix), "pane"


def _text(path: str) -> Optional[str]:
    try:
        with open_file(path) as f:
            return f.read(_SMALL).decode("utf-8", "replace")
    except OSError:
        return None


def _heads(run: RunDir) -> Optional[int]:
    """The heads of the model that the trainer's settings name, by its own config.json."""
    text = _text(run.file("trainer.yaml")) or ""
    for path in re.findall(r"(?m)^\s*path:\s*[\"']?(/[^\"'\n]+)", text):
        config, _ = read_json(os.path.join(path.strip(), "config.json"))
        heads = (config or {}).get("num_attention_heads")
        if isinstance(heads, int):
            return heads
    return None


def recipe_of(args: Dict[str, Any], call: Any) -> Dict[str, Any]:
    """`{run}` -> `{"recipe": text or null}`: asked first, since a recipe may bring rules of its own."""
    return {"recipe": _text(find(call.root, args.get("run")).file("recipe.yaml"))}


OPS = {"evidence": evidence, "stacks": evidence_stacks.stacks, "recipe_of": recipe_of}
