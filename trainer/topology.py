"""Which rank does what, and which batch goes where. Pure functions: nothing here knows of processes.

`colocated`: every rank holds target and drafter, and the parts of a step are dealt out to them in turn.
`split`: ranks 0 … T-1 hold the target, the others drafters, of one configuration or of several (variants). A step has
P parts; part p of data step s is batch j = s * P + p. It is made by target j mod T and eaten, in each variant, by its
drafter p mod D. All of it is fixed, so a run does not depend on timing, nor on T and D beyond rounding.

A run may go on with fewer ranks than it was written for: it keeps its parts, so that rows, shapes and memory of each
stay the same, and some ranks take more of them than others.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import lcm
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Role:
    rank: int
    kind: Literal["both", "target", "drafter"]
    index: int  # among the targets, or among the drafters of its variant
    variant: int = 0


@dataclass(frozen=True, kw_only=True)
class Topology:
    mode: Literal["colocated", "split"] = "colocated"
    targets: int = 1  # of `split`
    drafters: tuple[int, ...] = (1,)  # ranks of each variant; of `colocated`, the number of all ranks
    parts_per_rank: int = 1  # micro-batches that the drafters of the largest variant take a step
    kept_parts: int = 0  # of a run on fewer ranks, the parts that it has on all

    @property
    def world(self) -> int:
        return sum(self.drafters) + (self.targets if self.mode == "split" else 0)

    @property
    def parts(self) -> int:
        """P: where no rank is missing, every variant's drafters get equally many parts of a step."""
        return self.kept_parts or self.parts_per_rank * lcm(*self.drafters)

    @property
    def even(self) -> bool:
        """Whether all drafters of a variant have as many parts."""
        return not any(self.parts % count for count in self.drafters)

    @property
    def told(self) -> str:
        """How many there are of each kind, in words."""
        if self.mode == "colocated":
            return f"which take the {self.parts} parts of each step"
        drafters = " + ".join(map(str, self.drafters))
        return f"{self.targets} with the target and {drafters} with drafters, for {self.parts} parts of each step"

    def on(self, ranks: int) -> "Topology":
        """The same on fewer ranks. They are taken away one by one, each from the group (the targets, or the drafters
        of a variant) that keeps the largest share of what it had, and of equals from the last one; every group keeps
        one. Raises ValueError where there are not that many, or fewer than there are groups."""
        split = self.mode == "split"
        full = (*((self.targets,) if split else ()), *self.drafters)
        if not len(full) <= ranks <= sum(full):
            raise ValueError(f"it has {sum(full)} ranks, and can do with {len(full)} to {sum(full)} of them")
        left = list(full)
        while sum(left) > ranks:
            left[max((n for n, count in enumerate(left) if count > 1), key=lambda n: (left[n] / full[n], n))] -= 1
        targets, drafters = (left[0], left[1:]) if split else (self.targets, left)
        return replace(self, targets=targets, drafters=tuple(drafters), kept_parts=self.parts)

    def role(self, rank: int) -> Role:
        if not 0 <= rank < self.world:
            raise ValueError(f"there are {self.world} ranks, and no rank {rank}")
        if self.mode == "colocated":
            return Role(rank=rank, kind="both", index=rank)
        if rank < self.targets:
            return Role(rank=rank, kind="target", index=rank)
        index = rank - self.targets
        for variant, count in enumerate(self.drafters):
            if index < count:
                return Role(rank=rank, kind="drafter", index=index, variant=variant)
            index -= count
        raise AssertionError

    def drafter_ranks(self, variant: int) -> list[int]:
        """Ranks that train this variant, in order: their gradients are added up."""
        first = (self.targets if self.mode == "split" else 0) + sum(self.drafters[:variant])
        return list(range(first, first + self.drafters[variant]))

    def own_parts(self, role: Role) -> list[int]:
        """The parts of every step that a drafter trains on."""
        return list(range(role.index, self.parts, self.drafters[role.variant]))

    def maker(self, batch: int) -> int:
        """The target rank that makes this batch."""
        return batch % self.targets

    def eaters(self, batch: int) -> list[int]:
        """The drafter ranks that eat it, one of each variant."""
        return [self.drafter_ranks(v)[batch % self.parts % count] for v, count in enumerate(self.drafters)]

    def made_by(self, target: int, first: int, last: int) -> Iterator[int]:
        """Batches first … last-1 of this target, in the order in which it makes them."""
        return iter(range(first + (target - first) % self.targets, last, self.targets))


@dataclass(frozen=True, kw_only=True)
class Balance:
    """Where time goes, per batch: what a target needs to make one, a drafter to eat one."""

    make: float  # seconds
    eat: float

    def rate(self, targets: int, drafters: int) -> float:
        """Batches a second of such a split."""
        return min(targets / self.make, drafters / self.eat)

    def best(self, ranks: int) -> tuple[int, int]:
        """(targets, drafters) of so many ranks with the highest rate."""
        splits = [(targets, ranks - targets) for targets in range(1, ranks)]
        return max(splits, key=lambda split: self.rate(*split))


def advice(balance: Balance, targets: int, drafters: int) -> str:
    """A sentence on whether another split of the same ranks would be faster; empty when this one is near the best."""
    best = balance.best(targets + drafters)
    gain = balance.rate(*best) / balance.rate(targets, drafters) - 1
    if gain < 0.05:
        return ""
    return (
        f"a target makes a batch in {balance.make:.3g} s, a drafter eats one in {balance.eat:.3g} s: "
        f"{best[0]} targets and {best[1]} drafters would be {gain:.0%} faster than {targets} and {drafters}"
    )
