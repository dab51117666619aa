"""Real failures that need no GPU, each a small program of its own: `cpu.py OUT [NAME…]` runs them and keeps their logs.

Needs root (for a full disk, a small /dev/shm, another user) and, for the programs that use torch, an interpreter that
has it: ORCH_TORCH_PYTHON. Paths of this machine are replaced.
"""

from __future__ import annotations

import concurrent.futures
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROGRAMS = HERE / "programs"


@dataclass(frozen=True)
class Made:
    """How one program is run: `argv` before its file, `shell` in place of it all."""

    name: str
    torch: bool
    shell: str


def programs() -> dict[str, Made]:
    """Every program of `programs/`; its first lines may hold `# shell: …` ({python}, {file}, {dir})."""
    found = {}
    for path in sorted(PROGRAMS.glob("*.py")):
        text = path.read_text()
        shell = re.search(r"(?m)^# shell: (.*)$", text)
        found[path.stem] = Made(path.stem, "torch" in text, shell.group(1) if shell else "{python} {file}")
    return found


def make(made: Made) -> str:
    """The log of one program."""
    python = os.environ.get("ORCH_TORCH_PYTHON", sys.executable)
    with tempfile.TemporaryDirectory(prefix="made-") as folder:
        Path(folder).chmod(0o777)
        script = Path(folder) / "train.py"
        script.write_text((PROGRAMS / f"{made.name}.py").read_text())
        command = made.shell.format(python=python, file=script, dir=folder)
        env = {"PATH": os.environ["PATH"], "PYTHONUNBUFFERED": "1", "LANG": "C.UTF-8", "HOME": folder, "TMPDIR": folder}
        env["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/cache/inductor"
        env["OMP_NUM_THREADS"] = "1"
        done = subprocess.run(
            ["timeout", "-k", "5", "150", "unshare", "--mount", "sh", "-c", command],
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        return clean(done.stdout.decode("utf-8", "replace"), folder, python)


def clean(text: str, folder: str, python: str) -> str:
    """Without the paths and the name of the machine that it was made on."""
    code = "import sys; print(sys.prefix); print(sys.base_prefix)"
    told = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    names = {folder: "/srv/run", told[0]: "/srv/env", told[1]: "/usr/local", str(HERE.parents[2]): "/srv/code"}
    names[os.uname().nodename] = "node1"
    for found, put in names.items():
        text = text.replace(found, put)
    lines = text.splitlines(keepends=True)
    if len(text) > 50_000:
        lines = [*lines[:150], *lines[-150:]]
    return "".join(lines)


def main(argv: list[str]) -> int:
    out = Path(argv[0])
    out.mkdir(parents=True, exist_ok=True)
    known = programs()
    names = argv[1:] or list(known)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for name, text in zip(names, pool.map(lambda name: make(known[name]), names), strict=True):
            (out / f"{name}.log").write_text(text)
            last = next((line for line in reversed(text.splitlines()) if line.strip()), "")
            print(f"{name}: {len(text)} bytes: {last[:110]}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
