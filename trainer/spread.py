"""Whether each rank that trains a drafter holds all of it or only its rows, and what it then begins training with."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from trainer import sharding, warming
from trainer.compile_report import Report
from trainer.config import Config
from trainer.drafter import Drafter
from trainer.errors import TrainerError
from trainer.models import Models
from trainer.optimizer import Optimizer
from trainer.warmup import Warmed
from trainer.world import World


def prepare(
    config: Config,
    world: World,
    models: Models,
    run_dir: Path,
    report: Report,
    *,
    stream: Config,
    say: Callable[[str], None],
) -> tuple[Optimizer, Warmed]:
    """Warms, and gives the drafter its optimizer; a drafter that is to be sharded is sharded in between, by all of its
    ranks. Raises TrainerError.

    A layer of each kind is warmed in its stead: while one rank compiles and the others wait for it, no weights can be
    gathered.
    """
    if not _decide(config, world, models, say):
        optimizer = Optimizer(models.drafter, config.optimizer, config.steps)
        return optimizer, warming.warm_drafter(config, world, models, optimizer, run_dir, report, stream=stream)
    _must_be_even(world)
    models.drafter.to("cpu")
    small = sharding.stand_in(models.drafter, world.device)
    passing = Optimizer(small, config.optimizer, config.steps)
    warm = replace(models, drafter=small)
    warmed = warming.warm_drafter(config, world, warm, passing, run_dir, report, stream=stream)
    del small, passing, warm
    shards = sharding.shard(models.drafter, world.peers, world.device)
    optimizer = Optimizer(models.drafter, config.optimizer, config.steps, shards)
    held = sum(tensor.nbytes for tensor in optimizer.tensors().values())
    moved = shards.moved(list(optimizer.momentum)) * next(iter(optimizer.masters.values())).element_size()
    muon = f"; for Muon they exchange {moved / 2**20:,.1f} MiB a step" if moved else ""
    say(
        f"drafter sharded over {shards.ranks} ranks, of which this one holds {held / 2**20:,.1f} MiB of masters and "
        f"optimizer state{muon}"
    )
    return optimizer, warmed


def _decide(config: Config, world: World, models: Models, say: Callable[[str], None]) -> bool:
    """The same at all ranks of the variant. Raises TrainerError where it cannot be as asked."""
    wanted, device = config.topology.shard, world.device
    ranks = world.topology.drafters[world.role.variant]
    if ranks == 1 or wanted == "off":
        return False
    on_host = device.type == "cuda" and dist.get_backend(world.peers) == "gloo"
    if wanted == "on":
        if on_host:
            raise TrainerError(
                "topology.shard: on needs NCCL, and so a GPU for each rank that trains a drafter, since gloo does not "
                "scatter what is on GPUs; give each a GPU of its own, or set topology.shard: off"
            )
        return True
    if device.type != "cuda":
        return False
    found = sharding.estimate(models.drafter, config.optimizer, device)
    fits = world.all_of_variant("drafter fits", found.fits)
    if fits or on_host:
        say(f"drafter whole at each of {ranks} ranks: {found.line()}")
    else:
        say(f"drafter to be sharded: {found.line()}")
    return not (fits or on_host)


def _must_be_even(world: World) -> None:
    """The ranks of a sharded drafter gather its weights together, for each of their parts of a step. Where ranks are
    missing they may have unequal numbers of parts. Raises TrainerError."""
    parts, ranks = world.topology.parts, world.topology.drafters[world.role.variant]
    if parts % ranks:
        would = ", ".join(str(count) for count in range(1, ranks) if parts % count == 0)
        raise TrainerError(
            f"the {parts} parts of a step are no equal shares for the {ranks} ranks left of a sharded drafter: "
            f"{would} ranks would do, or topology.shard: off where it fits whole"
        )


@contextlib.contextmanager
def measured(world: World, models: Models, optimizer: Optimizer) -> Iterator[Drafter | None]:
    """The drafter with its moving average, where there is one, to be measured. Of a sharded one all ranks ask for it,
    and the leader gets a whole copy for the time: beside the target where that is here, else on the host."""
    if optimizer.shards is None:
        with optimizer.averaged():
            yield models.drafter
        return
    copy = None
    if world.leads:
        device = world.device if models.target is not None else torch.device("cpu")
        copy = sharding.empty_copy(models.drafter, device)
    optimizer.gather_into(copy)
    yield copy
