"""What environments cost: building, checking, and the usual tools beside them. It measures and asserts nothing.

    python -m benchmarks.environment [NAME]

builds the environment NAME (demo) on this machine under a temporary root, from the wheels in the store (fetched first
where they are missing), and prints seconds and round trips.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from orchestrator.config import find_project, load_environment
from orchestrator.config.models import Host, Place
from orchestrator.environment.build import ensure, request, status
from orchestrator.environment.progress import silent
from orchestrator.environment.store import WheelStore
from orchestrator.environment.uv_tool import workstation_uv
from orchestrator.environment.wheels import fetch
from orchestrator.place.session import Session, open_session


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and what came of it."""
    began = time.perf_counter()
    answer = work()
    return time.perf_counter() - began, answer


def run(argv: Sequence[str], cache: Path, code: int | None = 0) -> None:
    """A tool, with a cache of its own."""
    environment = {**os.environ, "UV_CACHE_DIR": str(cache), "UV_NO_CONFIG": "1", "UV_LINK_MODE": "copy"}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True)
    if code is not None and done.returncode != code:
        sys.exit(f"{' '.join(argv[:4])}: exit {done.returncode}\n{done.stderr}")


def row(what: str, seconds: float, note: str = "") -> None:
    print(f"{what:<58}{seconds:>8.2f} s  {note}".rstrip())


def ours(session: Session, name: str, store: WheelStore) -> Any:
    """Our own figures; the environment."""
    spec = load_environment(find_project(Path.cwd()), name)
    wanted = request(session, spec)
    wheels = fetch(wanted.pins, wanted.target, store, silent, trust="index" if spec.index_hashes else "lock")
    size = sum(wheel.size for wheel in wheels)
    print(f"{name} {wanted.id}: {len(wheels)} wheels, {size / 1e6:.0f} MB, {wanted.target}")
    seconds, built = timed(lambda: ensure(session, spec, store=store))
    parts = ", ".join(f"{key} {value:g}" for key, value in built.manifest["seconds"].items())
    row("orch: build, wheels at hand (cold)", seconds, parts)
    before = session.round_trips
    seconds, _ = timed(lambda: ensure(session, spec, store=store))
    row("orch: nothing to do (with its quick check)", seconds, f"{session.round_trips - before} round trip")
    seconds, answer = timed(lambda: status(session, built.id, verify="quick"))
    row("orch: quick check", seconds, f"{answer['checked']['files']:,} files by size and time")
    seconds, answer = timed(lambda: status(session, built.id, verify="deep"))
    row("orch: deep check", seconds, f"{answer['checked']['digested']:,} files digested")
    return wheels, built


def theirs(folder: Path, python: str, wheels: Sequence[Any], built: Any) -> None:
    """The same packages by `uv pip sync`, and `pip check` and `uv pip check` over them."""
    listing = folder / "requirements.txt"
    listing.write_text("".join(f"{wheel.path} --hash=sha256:{wheel.sha256}\n" for wheel in wheels))
    uv, cache = workstation_uv(), folder / "cache"
    inside = [folder / "one/bin/python", folder / "two/bin/python"]
    sync = ["pip", "sync", "--offline", "--no-index", "--require-hashes", "-q"]
    for number, what in enumerate(("cold", "warm: uv's cache")):
        run([uv, "venv", "-q", "--python", python, str(inside[number].parents[1])], cache)
        seconds, _ = timed(lambda at=inside[number]: run([uv, *sync, "--python", str(at), str(listing)], cache))  # type: ignore[misc]
        row(f"uv pip sync, copies ({what})", seconds)
    seconds, _ = timed(lambda: run([uv, *sync, "--python", str(inside[1]), str(listing)], cache))
    row("uv pip sync, nothing to do", seconds, "sees no changed file")
    seconds, _ = timed(lambda: run([uv, "pip", "check", "-q", "--python", str(inside[1])], cache))
    row("uv pip check", seconds, "sees no changed file")
    check = [sys.executable, "-m", "pip", "--python", str(inside[1]), "check"]
    seconds, _ = timed(lambda: run(check, cache, code=None))
    row("pip check", seconds, "sees no changed file")


def warm(store: WheelStore, place: Place, name: str) -> None:
    """The same build again: what the machine keeps in memory is warm, and our builds have no cache besides."""
    with open_session(place) as session:
        spec = load_environment(find_project(Path.cwd()), name)
        seconds, _ = timed(lambda: ensure(session, spec, store=store))
    row("orch: build, a second place (warm)", seconds)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", default="demo")
    name = parser.parse_args().name
    store = WheelStore()
    with tempfile.TemporaryDirectory(prefix="orch-bench-") as text:
        folder = Path(text)
        places = [Place(Host(name="local", root=str(folder / root)), None) for root in ("first", "second")]
        with open_session(places[0]) as session:
            wheels, built = ours(session, name, store)
        warm(store, places[1], name)
        theirs(folder, built.manifest["python"]["path"], wheels, built)


if __name__ == "__main__":
    main()
