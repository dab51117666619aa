"""A drafter spread over the ranks that train it, by torch's FSDP2 (`torch.distributed.fsdp.fully_shard`).

Each rank holds of every parameter the rows (dimension 0, in equal runs, the last ones shorter or empty) that are its
own, in float32 or wider: the master weights. A layer is a unit, and what is left of the drafter another. A unit's
weights are gathered in the computing dtype for its forward and again for its backward pass, and its gradients are
summed over the ranks in the masters' dtype, each rank keeping its rows. Sums, not means: the weight of a whole step
divides them later. Momentum, AdamW's moments and the moving average are of those rows alone.

All that moves rows elsewhere is one exchange, all-to-all: whole tensors to the leader (checkpoints, evaluation), from
it (resuming), and Muon's matrices, which are orthogonalised whole, to the rank whose turn it is and back.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.config import OptimizerConfig
from trainer.drafter import Drafter

ROOM = 0.75  # of a GPU's memory, for the target and the drafter's state; the rest is for activations and logits


@dataclass(frozen=True, kw_only=True)
class Shards:
    """Where the rows of each parameter lie. All methods but `rows` are called by all ranks of the group together."""

    group: dist.ProcessGroup
    device: torch.device
    shapes: dict[str, torch.Size]  # of whole parameters

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def ranks(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def rows(self, name: str) -> list[int]:
        """How many rows of the parameter each rank has."""
        count = self.shapes[name][0]
        run = -(-count // self.ranks)
        return [min(run, max(0, count - rank * run)) for rank in range(self.ranks)]

    def _sizes(self, name: str) -> list[int]:
        """Elements of the parameter at each rank."""
        return [rows * self.shapes[name][1:].numel() for rows in self.rows(name)]

    def _exchange(self, outgoing: list[Tensor], sizes: list[int]) -> list[Tensor]:
        """One flat tensor to each rank, and of these sizes one from each."""
        sent = torch.cat(outgoing)
        came = sent.new_empty(sum(sizes))
        dist.all_to_all_single(came, sent, sizes, [each.numel() for each in outgoing], group=self.group)
        return list(came.split(sizes))

    def gather(self, name: str, own: Tensor) -> Tensor | None:
        """The whole of a tensor laid out as this parameter is, at the leader, on its device; None elsewhere."""
        nothing = own.new_empty(0)
        outgoing = [own.flatten(), *[nothing] * (self.ranks - 1)]
        came = self._exchange(outgoing, self._sizes(name) if self.leads else [0] * self.ranks)
        return torch.cat(came).view(self.shapes[name]) if self.leads else None

    def scatter(self, name: str, own: Tensor, whole: Tensor | None) -> None:
        """Into `own`, its rows of the leader's `whole`."""
        sizes, nothing = self._sizes(name), own.new_empty(0)
        outgoing = [nothing] * self.ranks
        if self.leads:
            outgoing = list(whole.to(own.device, own.dtype).flatten().split(sizes))
        came = self._exchange(outgoing, [sizes[self.rank], *[0] * (self.ranks - 1)])
        own.copy_(came[0].view_as(own))

    def broadcast(self, own: Tensor) -> None:
        """What is no parameter's, and the same everywhere, from the leader."""
        moved = own.to(self.device)
        dist.broadcast(moved, dist.get_global_rank(self.group, 0), group=self.group)
        own.copy_(moved)

    def sum(self, own: Tensor) -> Tensor:
        dist.all_reduce(own, group=self.group)
        return own

    def rounds(self, names: list[str]) -> list[list[str]]:
        """Matrices dealt out in turn, the largest first, so that those of a round, one a rank, are much alike."""
        dealt = sorted(names, key=lambda name: (-self.shapes[name].numel(), name))
        return [dealt[first : first + self.ranks] for first in range(0, len(dealt), self.ranks)]

    def each_whole(
        self, names: list[str], own: Callable[[str], Tensor], change: Callable[[Tensor], Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """`change`, a function of whole matrices, of each of these: -> name, our rows of what came out.

        A rank changes one matrix of a round, which comes to it and goes back in one exchange each. Over all matrices
        and ranks together this moves `moved(names)` numbers.
        """
        for round_ in self.rounds(names):
            mine = round_[self.rank] if self.rank < len(round_) else None
            outgoing = [own(name).flatten() for name in round_]
            nothing = outgoing[0].new_empty(0)
            spare = [nothing] * (self.ranks - len(round_))
            sizes = self._sizes(mine) if mine else [0] * self.ranks
            came = self._exchange([*outgoing, *spare], sizes)
            back = [nothing] * self.ranks
            if mine:
                back = list(change(torch.cat(came).view(self.shapes[mine])).flatten().split(sizes))
            came = self._exchange(back, [each.numel() for each in outgoing] + [0] * len(spare))
            for name, rows in zip(round_, came, strict=False):
                yield name, rows.view(-1, *self.shapes[name][1:])

    def moved(self, names: list[str]) -> int:
        """Numbers that `each_whole` moves between ranks: what is not at home already, there and back."""
        at_home = sum(self._sizes(name)[owner] for each in self.rounds(names) for owner, name in enumerate(each))
        return 2 * (sum(self.shapes[name].numel() for name in names) - at_home)


def shard(drafter: Drafter, group: dist.ProcessGroup, device: torch.device) -> Shards:
    """Spreads a drafter that lies on the host, whole and the same at each rank; its rows move to `device`."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    dtype = drafter.dtype
    wide = torch.promote_types(dtype, torch.float32)
    shapes = {name: parameter.shape for name, parameter in drafter.named_parameters()}
    drafter.computes_in = dtype
    mesh = DeviceMesh.from_group(group, device.type)
    policy = MixedPrecisionPolicy(
        param_dtype=None if wide == dtype else dtype, reduce_dtype=wide, cast_forward_inputs=False
    )
    for unit in (*drafter.layers, drafter):  # one after the other, so that the host never holds all of it in float32
        for part in [unit] if unit is not drafter else [drafter.fc, drafter.hidden_norm, drafter.norm]:
            part.to(wide)
        fully_shard(unit, mesh=mesh, mp_policy=policy)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no operation but the sum
    register_fsdp_forward_method(drafter, "from_features")
    return Shards(group=group, device=device, shapes=shapes)


def own_rows(parameter: nn.Parameter) -> Tensor:
    """Of a sharded parameter, on this rank; a view of it."""
    return parameter.detach().to_local()


def stand_in(drafter: Drafter, device: torch.device) -> Drafter:
    """One layer of each kind, whole: for such a drafter the same is compiled as for the one that it stands for, before
    there are ranks to gather weights from."""
    kinds = tuple(dict.fromkeys(drafter.kinds))
    with device:
        small = Drafter(replace(drafter.shape, layers=len(kinds), kinds=kinds))
    small.activation_checkpointing = drafter.activation_checkpointing
    return small.to(drafter.dtype)


def empty_copy(drafter: Drafter, device: torch.device) -> Drafter:
    """A whole one of the same shape, in the computing dtype, with whatever is in that memory."""
    with torch.device("meta"):
        copy = Drafter(drafter.shape).to(drafter.dtype)
    return copy.to_empty(device=device)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a whole copy of a drafter and what belongs to it would take of a GPU's memory, in bytes."""

    state: int
    target: int
    memory: int

    @property
    def fits(self) -> bool:
        return self.state + self.target <= ROOM * self.memory

    def line(self) -> str:
        return (
            f"a whole copy's weights, gradients, masters and moments take {self.state / 2**30:.1f} GiB beside "
            f"{self.target / 2**30:.1f} GiB of the target, and {ROOM:.0%} of the GPU's {self.memory / 2**30:.1f} GiB "
            f"may be taken"
        )


def state_bytes(drafter: nn.Module, config: OptimizerConfig) -> int:
    """Of a whole copy: weights, gradients and, where these are narrow, float32 masters; Muon's momentum for matrices
    or AdamW's two moments; the moving average."""
    total = 0
    for parameter in drafter.parameters():
        wide = torch.promote_types(parameter.dtype, torch.float32).itemsize
        each = parameter.dtype.itemsize + wide  # a weight and its gradient
        each += wide if parameter.dtype.itemsize < wide else 0
        each += wide if config.kind == "muon" and parameter.ndim == 2 else 2 * wide
        each += wide if config.ema else 0
        total += parameter.numel() * each
    return total


def estimate(drafter: Drafter, config: OptimizerConfig, device: torch.device) -> Estimate:
    """With target and drafter on the GPU, and nothing else yet."""
    weights = sum(parameter.nbytes for parameter in drafter.parameters())
    return Estimate(
        state=state_bytes(drafter, config),
        target=torch.cuda.memory_allocated(device) - weights,
        memory=torch.cuda.get_device_properties(device).total_memory,
    )
