"""From a trainer's death to the diagnosis on screen under `orch launch`: `python benchmarks/diagnosis_latency.py [N]`.

Run it in a directory with a hosts.yaml; `--place` names where. The trainer writes the time of its death into its log,
the clock here is compared when the line with the cause arrives. Needs one clock: a place on this machine (a lab).
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import yaml

TRAINER = "import time; print('step 1', flush=True); time.sleep(1.5); print('died', time.time(), flush=True); {}['x']"


def once(place: str, environment: str, number: int) -> float:
    name = f"latency-{number}"
    recipe = {"environment": environment, "command": ["{python}", "-u", "-c", TRAINER], "metrics": False}
    Path("recipes").mkdir(exist_ok=True)
    Path(f"recipes/{name}.yaml").write_text(yaml.safe_dump(recipe))
    argv = [sys.executable, "-u", "-c", "from orchestrator.cli import main; main()", "launch", name, "--place", place]
    died = shown = None
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    ) as launch:
        assert launch.stdout is not None
        for line in launch.stdout:
            if line.startswith("cause:"):
                shown = time.time()
            found = re.search(r"died ([\d.]+)", line)
            if found:
                died = float(found.group(1))
    if died is None or shown is None:
        raise SystemExit("no diagnosis was shown")
    return shown - died


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("times", type=int, nargs="?", default=7)
    parser.add_argument("--place", default="local")
    parser.add_argument("--environment", default="demo")
    asked = parser.parse_args()
    took = [once(asked.place, asked.environment, number) for number in range(asked.times)]
    print(f"{asked.times} launches at {asked.place}: median {statistics.median(took):.2f} s, most {max(took):.2f} s")


if __name__ == "__main__":
    main()
