"""A log of 2 GB with its cause at 5 %, 50 % and 99 %, echoes after it: seconds, memory, verdict.

`python benchmarks/diagnosis_scan.py [GB]` makes it under TMPDIR, and removes it.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CORPUS = Path(__file__).parents[1] / "tests/logs"


def write(path: Path, size: int, share: float) -> None:
    step = b"[rank0]: 2026-11-30 12:00:00 step %d loss 1.%04d lr 1.2e-4 tok/s 19876 memory pools and results are fine\n"
    block = b"".join(step % (number, number % 10000) for number in range(40000))
    cause = b"".join(b"[rank3]: " + line for line in (CORPUS / "gpu/dense_plain.log").read_bytes().splitlines(True))
    echo = (CORPUS / "public/nccl_watchdog_two_ranks.log").read_bytes()
    with path.open("wb") as file:
        done = False
        while file.tell() < size:
            if not done and file.tell() >= share * size - len(block):
                done = True
                file.write(cause)
            file.write(block)
        file.write(echo)


def main() -> None:
    size = int(float(sys.argv[1] if len(sys.argv) > 1 else 2) * 1e9)
    code = "from orchestrator.cli import main; main()"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "console.log"
        for share in (0.05, 0.5, 0.99):
            write(path, size, share)
            began = time.monotonic()
            argv = [sys.executable, "-c", code, "diagnose", "--log", str(path), "--json"]
            said = json.loads(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)
            took = time.monotonic() - began
            memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
            where = said["evidence"][0]["offset"] / path.stat().st_size
            print(f"cause at {share:.0%}: {said['cause']} at {where:.0%}, {took:.1f} s, {memory:.0f} MiB at most")


if __name__ == "__main__":
    main()
