"""What travels with a launch: the records that its runner reads, the words and variables that a program is given."""

from __future__ import annotations

import hashlib
import zlib
from typing import TYPE_CHECKING, Any

from orchestrator.config import Health, Recipe, fill
from orchestrator.errors import UsageError
from orchestrator.snapshot import Snapshot
from orchestrator.user import who

if TYPE_CHECKING:
    from orchestrator.launch import Launch

BUNDLED_TRAINER = ["{python}", "-m", "trainer", "train", "{settings}"]
CACHE_FOLDERS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
WARM_UP = ["{python}", "-m", "trainer", "warmup", "{settings}"]


def warming(recipe: Recipe) -> Recipe:
    """The recipe as a run that compiles all that its trainer will use, and trains nothing.

    Raises UsageError where the recipe has a program of its own, of which only it knows what it compiles.
    """
    if recipe.command is not None:
        raise UsageError(
            f"recipe {recipe.name} runs a command of its own, and only the bundled trainer compiles without training; "
            "a launch that becomes healthy fills the cache too",
            hint=f"orch launch {recipe.name}",
        )
    return recipe.model_copy(update={"command": WARM_UP, "metrics": True, "health": Health()})


def snapshot_arguments(snapshot: Snapshot) -> dict[str, Any]:
    """What `put` is told of a snapshot's stream."""
    return {
        "path": snapshot.path,
        "size": len(snapshot.tar),
        "sha256": hashlib.sha256(snapshot.tar).hexdigest(),
        "mode": 0o755,
        "unpack": "tar",
    }


def paths(launch: Launch) -> dict[str, str]:
    """The words that a recipe may use for what is only known at launch, such as `{run_dir}`."""
    assert launch.environment is not None and launch.snapshot is not None
    variables = network(launch)
    return {
        "python": launch.environment.python,
        "code": f"{launch.connected.root}/{launch.snapshot.path}",
        "run_dir": launch.run_directory,
        "settings": f"{launch.run_directory}/trainer.yaml",
        "nodes": variables["ORCH_NODES"],
        "node_rank": variables["ORCH_NODE_RANK"],
        "rendezvous": variables["ORCH_RENDEZVOUS"],
    }


def network(launch: Launch) -> dict[str, str]:
    """The variables by which a program finds its share of the run, and the others."""
    member, meeting = launch.member, launch.meeting
    if member is None or meeting is None:
        port = 20000 + zlib.crc32(launch.run.encode()) % 12000
        alone = {"ORCH_NODES": "1", "ORCH_NODE_RANK": "0", "ORCH_RENDEZVOUS": f"127.0.0.1:{port}"}
        return {"ORCH_PLACE": launch.place.name, **alone, **_fewer(launch)}
    return {
        "ORCH_PLACE": launch.place.name,
        "ORCH_NODES": str(len(member.places)),
        "ORCH_NODE_RANK": str(member.number),
        "ORCH_RENDEZVOUS": f"{member.addresses[0]}:{meeting['rendezvous']}",
        **({"ORCH_RANKS": ",".join(map(str, member.ranks))} if member.ranks else {}),
        **_fewer(launch),
        "GLOO_SOCKET_IFNAME": str(member.interface),
        "NCCL_SOCKET_IFNAME": f"={member.interface}",  # that one, and not all whose names begin so
    }


def _fewer(launch: Launch) -> dict[str, str]:
    """Of a run at fewer places than its recipe has, and of one that goes on from another's checkpoint."""
    member, told = launch.member, {}
    if member is not None and member.wanted:
        told["ORCH_NODES_WANTED"] = str(member.wanted)
        if member.ranks:
            told["ORCH_RANKS"] = ",".join(map(str, member.ranks))
    if launch.from_step:
        told["ORCH_FROM_STEP"] = str(launch.from_step)
    return told


def start_record(launch: Launch) -> dict[str, Any]:
    """`launch.json`: all that the runner needs to start the trainer, without its secrets."""
    assert launch.environment is not None and launch.snapshot is not None
    built, private = launch.environment, f"{launch.run_directory}/cache"
    known = paths(launch)
    return {
        "argv": fill(launch.recipe.command or BUNDLED_TRAINER, known),
        "cwd": known["code"],
        "env": {
            "PATH": f"{built.path}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONDONTWRITEBYTECODE": "1",  # the code snapshot is never written to
            "TORCHINDUCTOR_CACHE_DIR": f"{private}/inductor",
            "TRITON_CACHE_DIR": f"{private}/triton",
            **network(launch),
            **_visible(launch),
            **launch.recipe.env,
        },
        "gpus": None if launch.gpus is None else launch.gpus.to_json(),
        "place": launch.place.name,
        "peers": peers(launch),
        "metrics": launch.recipe.metrics,
        "stop_grace": launch.recipe.stop_grace,
        "sample_seconds": launch.recipe.sample_seconds,
        "health": launch.recipe.health.model_dump(),
        "cache": cache_record(launch),
        "generation": {} if launch.warm else generation_record(launch),
    }


def _visible(launch: Launch) -> dict[str, str]:
    """By UUID: what CUDA counts from 0 are then the claimed GPUs, whatever their indices here or on the host. An index
    that the recipe or its program names is nvidia-smi's, where CUDA by itself would put the fastest first."""
    visible = launch.gpus.visible if launch.gpus is not None else None
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})}


def peers(launch: Launch) -> dict[str, Any] | None:
    """Where the runner finds those of the other places; their token travels with the secrets."""
    if launch.member is None or launch.meeting is None:
        return None
    return {
        "place": launch.place.name,
        "places": list(launch.member.places),
        "address": launch.member.addresses[0],
        "port": launch.meeting["runners"],
    }


def cache_record(launch: Launch) -> dict[str, Any] | None:
    """What the runner makes the run's private copy from, and what is harvested from it is named by."""
    assert launch.snapshot is not None
    if launch.cache is None:
        return None
    return {**launch.cache.to_json(), "label": {"recipe": launch.recipe.name, "code": launch.snapshot.digest}}


def generation_record(launch: Launch) -> dict[str, Any]:
    """What the runner appends to the recipe's generations once the trainer runs."""
    assert launch.environment is not None and launch.snapshot is not None
    pin = launch.pin
    return {
        "recipe": launch.recipe.name,
        "who": who(),
        "why": launch.why or ("launched" if pin is None else f"launched, pinned to generation {pin.generation}"),
        "environment": launch.environment.id,
        "environment_name": launch.recipe.environment if pin is None else pin.environment_name,
        # what the run makes otherwise its runner tells when it is there
        "cache": launch.cache.used if launch.cache is not None and launch.cache.predicted == "warm" else None,
        "code": {"digest": launch.snapshot.digest},
        "pinned_to": None if pin is None else pin.generation,
    }
