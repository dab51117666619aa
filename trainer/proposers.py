"""What proposes drafts in speculative decoding: the interface, and the DFlash drafter behind it."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trainer import attention
from trainer.attention import Blocks
from trainer.cache import PositionCache
from trainer.drafter import Drafter
from trainer.target import Target


@dataclass(frozen=True, kw_only=True)
class Proposal:
    tokens: Tensor  # [R, D], the proposer's first choices
    logits: Tensor | None = None  # [R, D, V]; None for a proposer that has no distribution


class Proposer(Protocol):
    size: int  # D, drafts a round

    def begin(self, features: Tensor, lengths: Tensor) -> None:
        """The target has read the prompts: features [P, L, K*H], right-padded to the longest, lengths [P]."""

    def propose(self, histories: list[list[int]], start: Tensor) -> Proposal:
        """Whole rows so far, the last token of each at position `start` [R] and not yet read by the target."""

    def accept(self, features: Tensor, positions: Tensor) -> None:
        """What the target saw at `positions` [R, Q] of this round; those of rejected drafts are void."""

    def keep(self, rows: Tensor) -> None:
        """The other rows are finished."""


class DrafterProposer:
    """The DFlash drafter, with a cache of its own that holds only context, never a block.

    A block [last token, MASK, …] of B slots stands at positions start … start+B-1 and sees context 0 … start-1.
    In place, slot j drafts the token of its own position, j = 1 … B-1; shifted, slot k drafts that of the next one,
    k = 0 … B-1.
    """

    def __init__(
        self, drafter: Drafter, target: Target, *, block: int, mask_token: int, capacity: int, shifted: bool = False
    ):
        self.drafter, self.target, self.block, self.shifted = drafter, target, block, shifted
        self.size = block if shifted else block - 1
        self.mask_token, self.capacity = mask_token, capacity

    @torch.no_grad()
    def begin(self, features: Tensor, lengths: Tensor) -> None:
        self.cache = PositionCache(rows=len(features), capacity=self.capacity)
        positions = torch.arange(features.shape[1], device=features.device).expand(features.shape[:2])
        self.accept(features, positions)

    @torch.no_grad()
    def accept(self, features: Tensor, positions: Tensor) -> None:
        self.cache.at(positions, width=int(positions.max()) + 1)
        for layer, pair in enumerate(self.drafter.context(features.to(self.drafter.dtype), positions)):
            self.cache.update(*pair, layer)

    @torch.no_grad()
    def propose(self, histories: list[list[int]], start: Tensor) -> Proposal:
        last = torch.tensor([history[-1] for history in histories], device=start.device)
        block = torch.cat([last[:, None], last.new_full((len(last), self.block - 1), self.mask_token)], dim=1)
        positions = start[:, None] + torch.arange(self.block, device=start.device)
        context = [self.cache.read(layer) for layer in range(len(self.drafter.kinds))]
        anchor = start[:, None]
        keep = torch.ones_like(anchor, dtype=torch.bool)
        blocks = Blocks(
            start=torch.zeros_like(anchor), anchor=anchor, keep=keep, context=self.cache.width, size=self.block
        )
        noise = self.target.embedding[block].to(self.drafter.dtype)
        hidden = self.drafter(noise, positions, context, attention.dense_plan(blocks))[:, self.block - self.size :]
        logits = hidden.to(self.target.head.dtype) @ self.target.head.T
        return Proposal(tokens=logits.argmax(-1), logits=logits)

    def keep(self, rows: Tensor) -> None:
        self.cache.keep(rows)
