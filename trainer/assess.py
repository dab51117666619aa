"""Who measures a drafter: this process, where it has the target; else target rank 0, which is sent the weights.

A rank that only trains has no target, whose memory it could not spare. So it asks: a request (see pipeline.py), then a
header in JSON, then the drafter's weights one by one; what comes back is the evaluation, in JSON too.
"""

import json
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.config import Config
from trainer.data.rows import Document
from trainer.drafter import Drafter
from trainer.evaluate import Evaluation, Evaluator, evaluator_of, measure_ngram
from trainer.pipeline import ASK, EVALUATE
from trainer.target import Target
from trainer.world import World

ORDER, ANSWER = 2, 3  # tags
NGRAM = "ngram"  # what is measured in place of a drafter


@dataclass
class Local:
    evaluator: Evaluator
    documents: list[Document]

    @property
    def margin(self) -> float:
        return self.evaluator.margin

    def drafter(self, drafter: Drafter, *, prompts: int | None = None, compare: bool = True) -> Evaluation:
        return self.evaluator.measure(self.evaluator.proposer(drafter), prompts=prompts, compare=compare)

    def ngram(self) -> Evaluation:
        return measure_ngram(self.evaluator, self.documents)


@dataclass
class Remote:
    world: World
    margin: float = field(default=float("inf"))

    def drafter(self, drafter: Drafter, *, prompts: int | None = None, compare: bool = True) -> Evaluation:
        return self._ask({"prompts": prompts, "compare": compare}, list(drafter.parameters()))

    def ngram(self) -> Evaluation:
        return self._ask({NGRAM: True}, [])

    def _ask(self, order: dict[str, Any], weights: list[Tensor]) -> Evaluation:
        pair = (0, self.world.role.rank)
        group = self.world.control[pair]
        dist.send(torch.tensor([EVALUATE]), 0, group=group, tag=ASK)
        send_json({**order, "variant": self.world.role.variant}, 0, group, ORDER)
        for tensor in weights:
            dist.send(tensor.detach().cpu().contiguous().view(torch.uint8), 0, group=group, tag=ORDER)
        answer = receive_json(0, group, ANSWER)
        self.margin = min(self.margin, answer["margin"])
        return answer["evaluation"]


class Assessor:
    """At target rank 0: measures what the drafters send, between the batches that it makes."""

    def __init__(self, world: World, target: Target, configs: list[Config], documents: list[Document]):
        self.world, self.target, self.configs, self.documents = world, target, configs, documents
        self.evaluators: dict[int, Evaluator] = {}
        self.drafters: dict[int, Drafter] = {}

    def serve(self, rank: int, _request: int) -> None:
        from trainer.models import new_drafter

        group = self.world.control[(self.world.role.rank, rank)]
        order = receive_json(rank, group, ORDER)
        variant = order["variant"]
        config = self.configs[variant]
        if variant not in self.evaluators:
            self.evaluators[variant] = evaluator_of(config, self.target)
            self.drafters[variant] = new_drafter(config, self.target)
        local = Local(self.evaluators[variant], self.documents)
        if order.get(NGRAM):
            evaluation = local.ngram()
        else:
            drafter = self.drafters[variant]
            for parameter in drafter.parameters():
                came = torch.empty(parameter.shape, dtype=parameter.dtype)
                dist.recv(came.view(torch.uint8), rank, group=group, tag=ORDER)
                parameter.data.copy_(came)
            evaluation = local.drafter(drafter, prompts=order["prompts"], compare=order["compare"])
        send_json({"evaluation": evaluation, "margin": local.margin}, rank, group, ANSWER)


def send_json(content: object, peer: int, group: dist.ProcessGroup, tag: int) -> None:
    data = torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)
    dist.send(torch.tensor([len(data)]), peer, group=group, tag=tag)
    dist.send(data, peer, group=group, tag=tag)


def receive_json(peer: int, group: dist.ProcessGroup, tag: int) -> Any:
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, peer, group=group, tag=tag)
    data = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(data, peer, group=group, tag=tag)
    return json.loads(bytes(data.tolist()))
