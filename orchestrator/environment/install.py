"""`python -m orchestrator.environment.install NAME PYTHON`: an environment's packages into an existing venv of this
machine, fetched and chosen as a launch would; for working on the trainer, and for its tests."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from orchestrator.config import find_project, load_environment, load_hosts, resolve_place
from orchestrator.environment.build import request
from orchestrator.environment.progress import silent
from orchestrator.environment.store import WheelStore
from orchestrator.environment.target import PythonAtPlace
from orchestrator.environment.uv_tool import workstation_uv
from orchestrator.environment.wheels import fetch
from orchestrator.errors import OrchError
from orchestrator.place.session import open_session


def install(name: str, python: str) -> int:
    """Installs the environment `name` beside what `python`'s venv holds; how many wheels it has.

    Raises OrchError: they cannot be fetched, or uv refuses them.
    """
    project = find_project(Path.cwd())
    spec = load_environment(project, name)
    version = subprocess.run(
        [python, "-c", "import platform; print(platform.python_version())"], capture_output=True, text=True, check=True
    ).stdout.strip()
    with tempfile.TemporaryDirectory() as folder:
        here = resolve_place(load_hosts(project), "local")
        with open_session(here) as session:
            wanted = request(session, spec, PythonAtPlace(python, version))
        wheels = fetch(wanted.pins, wanted.target, WheelStore(), silent, trust="index" if spec.index_hashes else "lock")
        requirements = Path(folder) / "requirements.txt"
        requirements.write_text("".join(f"{wheel.path} --hash=sha256:{wheel.sha256}\n" for wheel in wheels))
        argv = [workstation_uv(), "pip", "install", "--python", python, "--offline", "--no-index", "--no-deps"]
        argv += ["--require-hashes", "-q", "-r", str(requirements)]
        done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        raise OrchError(f"uv could not install {name}: {done.stderr.strip().splitlines()[-1:]}")
    return len(wheels)


def main() -> None:
    """The command line."""
    if len(sys.argv) != 3:
        sys.exit("usage: python -m orchestrator.environment.install ENVIRONMENT PYTHON")
    try:
        count = install(sys.argv[1], sys.argv[2])
    except OrchError as error:
        sys.exit(f"orch: {error.message}")
    print(f"{count} packages of {sys.argv[1]} installed for {sys.argv[2]}")


if __name__ == "__main__":
    main()
