"""Where a rank that trains gets what the target says of its batches: from the target here, or from target ranks.

Both are called once for each micro-batch, in order, and keep what they got for the steps that train on it again with
fresh anchors (`data.anchor_draws`). Features given out are valid until the next call for another batch.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from trainer.config import Config
from trainer.data.batches import Batch
from trainer.feed import parcel_of
from trainer.models import Models
from trainer.pipeline import Receiver, Waits
from trainer.step import inspect, objective_of
from trainer.target import Target
from trainer.topology import Balance, advice
from trainer.world import World

Said = tuple[Tensor | None, Tensor]  # last hidden states [R, S, H] or None, features [R, S, K*H]


@dataclass(kw_only=True)
class _Turns:
    """Which micro-batch of which data step a call is for."""

    own: list[int]  # this rank's parts of a step
    draws: int
    calls: int = 0

    def start(self, step: int) -> None:
        self.calls = step * len(self.own)

    def next(self) -> tuple[int, int]:
        """(data step, which of our parts) of this call."""
        step, index = divmod(self.calls, len(self.own))
        self.calls += 1
        return step // self.draws, index


@dataclass(kw_only=True)
class Colocated:
    target: Target
    last: bool
    turns: _Turns
    kept: dict[tuple[int, int], Said] = field(default_factory=dict)

    def start(self, step: int) -> None:
        self.turns.start(step)

    def __call__(self, batch: Batch) -> Said:
        turn = self.turns.next()
        if turn in self.kept:
            return self.kept[turn]
        self.kept = {key: said for key, said in self.kept.items() if key[0] == turn[0]}
        said = inspect(self.target, batch, last=self.last)
        if self.turns.draws > 1:
            self.kept[turn] = said
        return said

    def waits(self) -> dict[str, float]:
        return {}

    def advice(self) -> str:
        return ""

    def stop(self) -> None:
        """Nothing is under way."""


@dataclass(kw_only=True)
class Streamed:
    receiver: Receiver
    turns: _Turns
    parts: int  # of a step, of all ranks
    batches: int  # of the whole run
    last: bool
    kept: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    eating: deque[float] = field(default_factory=lambda: deque(maxlen=100))  # seconds, of the last batches
    since: float | None = None  # when the last one came

    def start(self, step: int) -> None:
        self.turns.start(step)
        self.receiver.start(self._to_come(step // self.turns.draws))

    def _to_come(self, data_step: int) -> Iterator[int]:
        while data_step * self.parts < self.batches:
            for part in self.turns.own:
                yield data_step * self.parts + part
            data_step += 1

    def __call__(self, _batch: Batch) -> Said:
        turn = self.turns.next()
        if turn not in self.kept:
            if self.turns.draws == 1:
                self._give_back(lambda _: True)
            else:
                self._give_back(lambda key: key[0] != turn[0])
            if self.since is not None:
                self.eating.append(time.perf_counter() - self.since)
            self.kept[turn] = self.receiver.take(turn[0] * self.parts + self.turns.own[turn[1]])
            self.since = time.perf_counter()
        last, features = self.receiver.parcel.split(self.kept[turn])
        return last if self.last else None, features

    def _give_back(self, which: Callable[[tuple[int, int]], bool]) -> None:
        for key in [key for key in self.kept if which(key)]:
            self.receiver.give_back(self.kept.pop(key))

    def waits(self) -> dict[str, float]:
        """Seconds: this drafter's of the step; the targets' of a batch, on the average since they began."""
        found = {"waited_for_target": round(self.receiver.waits.take().waiting, 5)}
        if self.receiver.world.leads and (targets := self._targets()):
            found["targets_waited"] = round(targets.waiting / targets.batches, 5)
        return found

    def _targets(self) -> Waits | None:
        """Of all targets, since they began; None before each has made a batch."""
        world = self.receiver.world
        told = [world.peek(f"waits/{target}") for target in range(world.topology.targets)]
        if not all(told):
            return None
        busy, waiting, batches = (sum(each) for each in zip(*told, strict=True))
        return Waits(busy=busy, waiting=waiting, batches=int(batches)) if batches else None

    def advice(self) -> str:
        """Whether another number of targets would be faster; empty where it would not, or nothing is known."""
        plan, targets = self.receiver.world.topology, self._targets()
        if len(plan.drafters) > 1 or len(self.eating) < 10 or targets is None:
            return ""
        # the median, since a drafter is also measured between two batches now and then
        balance = Balance(make=targets.busy / targets.batches, eat=statistics.median(self.eating))
        return advice(balance, plan.targets, plan.drafters[0])

    def stop(self) -> None:
        self.receiver.stop()


def source_of(stream: Config, config: Config, world: World, models: Models) -> Colocated | Streamed:
    """`stream`: the run's configuration, which the targets follow; `config`: that of this rank's drafter."""
    turns = _Turns(own=stream.plan.own_parts(world.role), draws=stream.data.anchor_draws)
    last = objective_of(config).distils
    if models.target is not None:
        return Colocated(target=models.target, last=last, turns=turns)
    held = len(turns.own) if turns.draws > 1 else 1
    receiver = Receiver(world=world, parcel=parcel_of(stream, models.vocabulary.config, world.device), buffers=held + 1)
    steps = -(-stream.steps // turns.draws)
    return Streamed(
        receiver=receiver, turns=turns, parts=stream.plan.parts, batches=steps * stream.plan.parts, last=last
    )
