"""Brings into the store the wheels that a target needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from orchestrator.environment.lock import Pin
from orchestrator.environment.pip_download import WrongHash, download
from orchestrator.environment.progress import Progress
from orchestrator.environment.store import Wheel, WheelStore, fits
from orchestrator.environment.target import Target
from orchestrator.environment.torch_cpu import build_of, fetch_build, unhashed
from orchestrator.errors import OrchError

Trust = Literal["lock", "index", "anyone"]


def _trusted(wheel: Wheel, trust: Trust) -> bool:
    return wheel.origin == "lock" or trust == "anyone" or (wheel.origin == "index" and trust == "index")


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


def fetch(
    wanted: Sequence[Pin], target: Target, store: WheelStore, progress: Progress, *, trust: Trust = "index"
) -> list[Wheel]:
    """One wheel for each pin, in the same order; only what the store lacks is fetched.

    `trust` is whose word on a file's hash counts where the lock has none: nobody's ("lock"), an index's that states
    one ("index"), or whoever sends it ("anyone"). Raises OrchError: no hash to check by, no network, a file that is
    not the locked one, no wheel for the target.
    """
    there, missing = stored(wanted, target, store)
    refused = [f"{wheel.name}=={wheel.version} for {target}" for wheel in there if not _trusted(wheel, trust)]
    if refused:
        raise unhashed(refused)
    bare = [pin for pin in missing if not pin.hashes and not build_of(pin)]
    if bare and trust != "anyone":
        raise unhashed([str(pin) for pin in bare])
    if bare:
        with store.workspace() as folder:
            for path in download([str(pin) for pin in bare], target, folder, progress, hashed=False):
                store.add(path, origin="nobody")
    ordinary = [pin for pin in missing if not build_of(pin) and pin not in bare]
    if ordinary:
        with store.workspace() as folder:
            lines = [" ".join([str(pin), *(f"--hash=sha256:{h}" for h in pin.hashes)]) for pin in ordinary]
            allowed = {digest for pin in ordinary for digest in pin.hashes}
            for path in download(lines, target, folder, progress):
                wheel = store.add(path)
                if wheel.sha256 not in allowed or not fits(wheel.filename, target):
                    raise WrongHash(f"{wheel.filename} is not a file that requirements.lock lists for {target}")
    for pin in missing:
        if build_of(pin):
            fetch_build(pin, target, store, progress, stated_will_do=trust != "lock")
    wheels, missing = stored(wanted, target, store)
    if missing:
        raise OrchError(f"pip gave no wheel for {', '.join(map(str, missing))} that fits {target}")
    return wheels
