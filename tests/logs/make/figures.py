"""Facts that rest on metrics and samples: real files are written, and read as at a place. `figures.py` prints them."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from orchestrator.remote import evidence_metrics


def read(steps: list[dict[str, Any]], samples: list[dict[str, Any]]) -> dict[str, Any]:
    """What `evidence` says of these lines."""
    with tempfile.TemporaryDirectory() as folder:
        metrics, gpus = Path(folder) / "metrics.jsonl", Path(folder) / "gpu.jsonl"
        metrics.write_text("".join(json.dumps(line) + "\n" for line in steps))
        gpus.write_text("".join(json.dumps(line) + "\n" for line in samples))
        found = evidence_metrics.samples(str(gpus)) or {}
        seen = {"utilization": found.get("utilization", []), "utilization_span": found.get("span", 0.0)}
        return {"metrics": evidence_metrics.summary(str(metrics)), "gpus": seen}


def steps(number: int, seconds: float = 1.0, slow_from: int = 10**9, factor: float = 1.0) -> list[dict[str, Any]]:
    out, at = [], 1000.0
    for step in range(1, number + 1):
        at += seconds * (factor if step >= slow_from else 1.0)
        out.append({"step": step, "loss": round(2 + 8 / step, 4), "tokens": 8192, "time": at})
    return out


def samples(begin: float, end: float, use: float, cards: int = 2) -> list[dict[str, Any]]:
    gpus = [{"index": card, "memory_used": 70000, "utilization": use} for card in range(cards)]
    return [{"at": float(at), "gpus": gpus} for at in range(int(begin), int(end), 5)]


def all_facts() -> dict[str, dict[str, Any]]:
    training = {"source": "run", "phase": "training", "started": 990.0}
    busy = samples(1000, 1100, 97)
    return {
        "hang_idle": {**training, **read(steps(100), busy + samples(1100, 1900, 0)), "now": 1900.0},
        "hang_no_gpu": {**training, **read(steps(40, 2.0), []), "now": 2400.0},
        "slow_later": {**training, **read(steps(120, 1.0, 60, 4.0), busy), "now": 1302.0},
        "slow_expected": {**training, **read(steps(60), busy), "now": 1061.0, "expected_rate": 20000.0},
        "slow_is_a_long_step": {**training, **read(steps(100, 40.0), busy), "now": 5300.0},
        "healthy_compiling": {
            **training,
            "phase": "compiling",
            **read(steps(1), samples(1000, 2500, 0)),
            "now": 2500.0,
        },
    }


if __name__ == "__main__":
    print(json.dumps(all_facts(), indent=1))
