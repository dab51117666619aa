"""The processes of a run: their groups, their device, and what they tell each other.

A run of one process is a world of one, in which every sum is the thing itself. Otherwise torchrun has started us, and
its store (which outlives any rank) carries heartbeats and the name of whoever failed first: see watchdog.py.

Communicators: a gloo group for each pair of target and drafter (requests, and features where NCCL cannot carry them),
an NCCL group for such a pair where both have a GPU of their own, and one group for the drafters of a variant. NCCL
refuses two ranks of one communicator on one card, so ranks that share one use gloo.
"""

import datetime
import json
import os
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.config import TopologyConfig
from trainer.errors import TrainerError
from trainer.optimizer import Optimizer
from trainer.topology import Role, Topology
from trainer.watchdog import Watchdog, place_here

Pair = tuple[int, int]  # target rank, drafter rank


@dataclass(kw_only=True)
class World:
    topology: Topology
    role: Role
    device: torch.device
    timeout: float
    peers: dist.ProcessGroup | None = None  # the drafters of this rank's variant
    control: dict[Pair, dist.ProcessGroup] = field(default_factory=dict)  # gloo
    data: dict[Pair, dist.ProcessGroup] = field(default_factory=dict)
    store: dist.Store | None = None
    watchdog: Watchdog | None = None
    barriers: int = 0

    @property
    def alone(self) -> bool:
        return self.topology.world == 1

    @property
    def leads(self) -> bool:
        """Whether this rank speaks and writes for its variant."""
        return self.role.kind != "target" and self.role.index == 0

    def sum(self, tensors: list[Tensor]) -> None:
        """In place, over the drafters of this variant."""
        if self.peers is None or dist.get_world_size(self.peers) == 1:
            return
        for tensor in tensors:
            _all_reduce(tensor, self.peers)

    def barrier(self, *, patience: float | None = 0.0) -> None:
        """Of all ranks, within `patience` seconds (0: the usual; None: for ever). Through the store, so that no
        communicator is needed yet; what ends it when a rank is gone is the watchdog."""
        if self.store is None:
            return
        self.barriers += 1
        name = f"barrier/{self.barriers}"
        if self.store.add(name, 1) == self.topology.world:
            self.store.set(f"{name}/done", "1")
        ends = None if patience is None else time.monotonic() + (patience or self.timeout)
        while not self.store.check([f"{name}/done"]):
            if ends is not None and time.monotonic() > ends:
                came = self.store.add(name, 0)
                raise TrainerError(f"only {came} of {self.topology.world} ranks have come so far, within the time-out")
            time.sleep(0.05)

    def leave(self) -> None:
        """Waits for all the others to be done as well: a rank that goes takes its connections with it."""
        self.barrier(patience=None)
        if self.watchdog is not None:
            self.watchdog.left()
        if dist.is_initialized():
            dist.destroy_process_group()

    def agree(self, steps: list[int]) -> int:
        """The newest of the steps that every variant has a checkpoint of, or 0 where some variant has none yet;
        called by all ranks that train, where `steps` counts only at the leader. Targets learn of it by `published`.
        Raises TrainerError."""
        if self.store is None:
            return steps[-1] if steps else 0
        if self.leads:
            self.store.set(f"steps/{self.role.variant}", json.dumps(steps))
        found = [json.loads(self.published(f"steps/{variant}")) for variant in range(len(self.topology.drafters))]
        common = set.intersection(*map(set, found))
        if all(found) and not common:
            raise TrainerError(
                f"the drafters have no checkpoint of the same step ({found}); remove those of the run to begin anew"
            )
        step = max(common, default=0)
        if self.leads and self.role.variant == 0:
            self.store.set("first", str(step))
        return step

    @property
    def _several(self) -> bool:
        return len(self.topology.drafters) > 1

    def ask_to_stop(self) -> None:
        """Of all variants: one that went on alone would leave checkpoints of other steps than the rest."""
        if self._several and self.store is not None:
            self.store.set("stopping", "1")

    @property
    def asked_to_stop(self) -> bool:
        return self._several and self.leads and self.store is not None and self.store.check(["stopping"])

    def begin_step(self, step: int) -> None:
        if self._several and self.leads:
            self.store.set(f"begun/{self.role.variant}", str(step))

    def last_step(self, step: int) -> int | None:
        """The step after which every variant stops, this one having done `step`: the most that any had done when it
        was asked to stop. None where that is not known yet and another variant is in a later step, for which it may
        need us, since targets send what all have asked for: then one more is to be taken. All ranks of a variant are
        told the same."""
        if not self._several:
            return step
        self.done(step)
        name = f"last/{self.role.variant}/{step}"
        if self.leads:
            self.store.set(name, json.dumps(self._last_step(step)))
        return json.loads(self.published(name))

    def _last_step(self, step: int) -> int | None:
        variants = range(len(self.topology.drafters))
        ends = time.monotonic() + self.timeout
        while True:
            done = [self.peek(f"done/{variant}") for variant in variants]
            if None not in done:
                return max(done)
            if any((self.peek(f"begun/{variant}") or 0) > step for variant in variants):
                return None
            if time.monotonic() > ends:
                raise TrainerError(f"the other drafters have not said within {self.timeout:.0f} s how far they are")
            time.sleep(0.02)

    def done(self, step: int) -> None:
        """So many steps this variant has done, and takes none beyond what the others have; said once."""
        if self._several and self.leads:
            self.store.compare_set(f"done/{self.role.variant}", "", str(step))

    def share(self, optimizer: Optimizer, told: Any) -> Any:
        """The leader's weights and optimizer state, to all of its variant; -> what it tells (is plain JSON)."""
        if self.peers is None or dist.get_world_size(self.peers) == 1:
            return told
        leader = self.topology.drafter_ranks(self.role.variant)[0]
        for tensor in optimizer.tensors().values() if optimizer.shards is None else ():  # rows are their own
            host = tensor.is_cuda and dist.get_backend(self.peers) == "gloo"
            moved = tensor.cpu() if host else tensor
            if not host and not moved.is_cuda and dist.get_backend(self.peers) == "nccl":  # a counter on the host
                moved = moved.to(self.device)
            dist.broadcast(moved, leader, group=self.peers)
            tensor.copy_(moved)
        optimizer.loaded()
        name = f"told/{self.role.variant}"
        if self.leads:
            self.store.set(name, json.dumps(told))
        return json.loads(self.published(name))

    def all_of_variant(self, name: str, holds: bool) -> bool:
        """Whether it holds at all ranks that train this drafter; asked by all of them, once."""
        if self.store is None:
            return holds
        self.store.set(f"{name}/{self.role.rank}", str(int(holds)))
        ranks = self.topology.drafter_ranks(self.role.variant)
        return all(self.published(f"{name}/{rank}") == "1" for rank in ranks)

    def published(self, name: str) -> str:
        """What another rank says of itself, when it has."""
        assert self.store is not None
        self.store.wait([name], datetime.timedelta(seconds=self.timeout))
        return self.store.get(name).decode()

    def publish(self, name: str, content: object) -> None:
        if self.store is not None:
            self.store.set(name, json.dumps(content))

    def peek(self, name: str) -> object:
        """None where nothing was published."""
        if self.store is None or not self.store.check([name]):
            return None
        return json.loads(self.store.get(name))


def _all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """gloo reduces on the host; what it may not take from a GPU goes through a copy."""
    if tensor.is_cuda and dist.get_backend(group) == "gloo":
        host = tensor.cpu()
        dist.all_reduce(host, group=group)
        tensor.copy_(host)
    else:
        dist.all_reduce(tensor, group=group)


def choose_backend(wanted: str, devices: list[str]) -> str:
    """nccl where every rank has a card of its own. Raises TrainerError where nccl is demanded and cannot be."""
    apart = all(device != "cpu" for device in devices) and len(set(devices)) == len(devices)
    if wanted == "nccl" and not apart:
        raise TrainerError(
            f"topology.backend: nccl needs a GPU for every rank, and these ranks are on {', '.join(devices)}; "
            "set topology.backend: auto"
        )
    return "nccl" if apart and wanted != "gloo" else "gloo"


def join(topology: Topology, device: torch.device, settings: TopologyConfig, watchdog: Watchdog | None) -> World:
    """This process's place among the ranks. Raises TrainerError where torchrun started another number of them."""
    timeout, backend = settings.timeout, settings.backend
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if topology.world == 1 and size == 1:
        return World(topology=topology, role=topology.role(0), device=device, timeout=timeout)
    if size != topology.world or watchdog is None:
        raise TrainerError(f"the configuration's topology has {topology.world} ranks, and torchrun started {size}")
    patience = datetime.timedelta(seconds=timeout)
    dist.init_process_group("gloo", timeout=patience)
    store = dist.PrefixStore("trainer", dist.distributed_c10d._get_default_store())
    store.set(f"device/{rank}", f"{place_here()} {device}" if device.type == "cuda" else "cpu")
    devices = [store.get(f"device/{other}").decode() for other in range(size)]
    world = World(
        topology=topology,
        role=topology.role(rank),
        device=device,
        timeout=timeout,
        store=store,
        watchdog=watchdog,
    )

    def group(ranks: list[int], kind: str) -> dist.ProcessGroup:
        """Every rank makes every group, in this order; those outside get a token of it."""
        return dist.new_group(ranks, timeout=patience, backend=kind)

    for variant in range(len(topology.drafters)):
        ranks = topology.drafter_ranks(variant)
        made = group(ranks, choose_backend(backend, [devices[r] for r in ranks]))
        if rank in ranks:
            world.peers = made
    if topology.mode == "split":
        for target in range(topology.targets):
            for drafter in range(topology.targets, topology.world):
                pair = (target, drafter)
                control = group(list(pair), "gloo")
                kind = choose_backend(backend, [devices[r] for r in pair])
                data = control if kind == "gloo" else group(list(pair), kind)
                if rank in pair:
                    world.control[pair], world.data[pair] = control, data
    return world
