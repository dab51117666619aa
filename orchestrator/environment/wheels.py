"""Brings into the store the wheels that a target needs."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.environment.lock import Pin
from orchestrator.environment.pip_download import WrongHash, download
from orchestrator.environment.progress import Progress
from orchestrator.environment.store import Wheel, WheelStore, fits
from orchestrator.environment.target import Target
from orchestrator.environment.torch_cpu import fetch_cpu, is_cpu_build
from orchestrator.errors import OrchError


def stored(wanted: Sequence[Pin], target: Target, store: WheelStore) -> tuple[list[Wheel], list[Pin]]:
    """The wheels that the store has already, and the pins that it has none for."""
    wheels, missing = [], []
    for pin in wanted:
        wheel = store.find(pin, target)
        if wheel:
            wheels.append(wheel)
        else:
            missing.append(pin)
    return wheels, missing


def fetch(wanted: Sequence[Pin], target: Target, store: WheelStore, progress: Progress) -> list[Wheel]:
    """One wheel for each pin, in the same order; only what the store lacks is fetched.

    Raises OrchError: no hash to check by, no network, a file that is not the locked one, no wheel for the
    target.
    """
    _, missing = stored(wanted, target, store)
    unhashed = [str(pin) for pin in missing if not pin.hashes and not is_cpu_build(pin)]
    if unhashed:
        raise OrchError(
            f"requirements.lock has no hash for {', '.join(unhashed)}: what is fetched could not be checked",
            hint="make the lock anew: python -m orchestrator.environment.lock DIRECTORY",
        )
    ordinary = [pin for pin in missing if not is_cpu_build(pin)]
    if ordinary:
        with store.workspace() as folder:
            lines = [" ".join([str(pin), *(f"--hash=sha256:{h}" for h in pin.hashes)]) for pin in ordinary]
            allowed = {digest for pin in ordinary for digest in pin.hashes}
            for path in download(lines, target, folder, progress):
                wheel = store.add(path)
                if wheel.sha256 not in allowed or not fits(wheel.filename, target):
                    raise WrongHash(f"{wheel.filename} is not a file that requirements.lock lists for {target}")
    for pin in missing:
        if is_cpu_build(pin):
            fetch_cpu(pin, target, store, progress)
    wheels, missing = stored(wanted, target, store)
    if missing:
        raise OrchError(f"pip gave no wheel for {', '.join(map(str, missing))} that fits {target}")
    return wheels
