"""Decoding with and without drafts, many prompts at once, greedy or sampled.

Sampling adds Gumbel noise keyed by (seed, prompt, absolute position) to the logits and takes the largest: a sample
of the softmax, yet a function of the logits and the key alone. So speculative decoding must give exactly the tokens
of plain decoding at any temperature, and the two can be compared token by token.

Drafts are the drafter's argmax at every temperature, and a draft is accepted if it equals the target's own token
(the rule of z-lab's first release; later releases sample drafts and verify by rejection).
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from trainer.cache import PositionCache
from trainer.drafter import Drafter
from trainer.target import Target


@dataclass(frozen=True, kw_only=True)
class Sampler:
    temperature: float
    noise: Tensor | None = None  # [P, L, V]; None when greedy

    def pick(self, logits: Tensor, prompts: Tensor, positions: Tensor) -> Tensor:
        """Tokens for `positions` [R, Q] of the given prompts [R], from logits [R, Q, V] that predict them."""
        if self.noise is None:
            return logits.argmax(-1)
        return (logits / self.temperature + self.noise[prompts[:, None], positions]).argmax(-1)


def gumbel_noise(seed: int, *, prompts: int, length: int, vocabulary: int) -> Tensor:
    """[P, length, V]; each vector depends on nothing but (seed, prompt, position)."""
    noise = np.empty((prompts, length, vocabulary), np.float32)
    for prompt in range(prompts):
        for position in range(length):
            noise[prompt, position] = np.random.default_rng((seed, 2, prompt, position)).gumbel(size=vocabulary)
    return torch.from_numpy(noise)


@dataclass(frozen=True, kw_only=True)
class Decoded:
    tokens: list[list[int]]  # what was generated, by prompt, up to the limit or just past the end token
    accepted: tuple[int, int] = (0, 0)  # sum of (accepted drafts + 1), rounds
    margin: float = float("inf")  # smallest lead of a chosen token; equality within rounding is safe far below it


class Proposer(Protocol):
    size: int  # drafts a round

    def begin(self, features: Tensor, lengths: Tensor) -> None:
        """The target has read the prompts: features [P, L, K*H], right-padded to the longest."""

    def propose(self, histories: list[list[int]], start: Tensor) -> Tensor:
        """Whole rows so far, the last token of each at position `start` [R] and unread -> drafts [R, size]."""

    def accept(self, features: Tensor, positions: Tensor) -> None:
        """What the target saw at `positions` [R, Q] of this round; those of rejected drafts are void."""

    def keep(self, rows: Tensor) -> None:
        """The other rows are finished."""


class DrafterProposer:
    """The DFlash drafter, with a cache of its own that holds only context, never a block."""

    def __init__(self, drafter: Drafter, target: Target, *, block: int, mask_token: int, capacity: int):
        self.drafter, self.target, self.size = drafter, target, block - 1
        self.mask_token, self.capacity = mask_token, capacity

    @torch.no_grad()
    def begin(self, features: Tensor, lengths: Tensor) -> None:
        self.cache = PositionCache(rows=len(features), capacity=self.capacity)
        positions = torch.arange(features.shape[1], device=features.device).expand(features.shape[:2])
        self.accept(features, positions)

    @torch.no_grad()
    def accept(self, features: Tensor, positions: Tensor) -> None:
        self.cache.at(positions, width=int(positions.max()) + 1)
        for layer, pair in enumerate(self.drafter.context(features.to(self.drafter.fc.weight.dtype), positions)):
            self.cache.update(*pair, layer)

    @torch.no_grad()
    def propose(self, histories: list[list[int]], start: Tensor) -> Tensor:
        last = torch.tensor([history[-1] for history in histories], device=start.device)
        block = torch.cat([last[:, None], last.new_full((len(last), self.size), self.mask_token)], dim=1)
        positions = start[:, None] + torch.arange(self.size + 1, device=start.device)
        sees = (torch.arange(self.cache.width, device=start.device) < start[:, None])[:, None]  # [R, 1, S]
        keep = torch.ones_like(start, dtype=torch.bool)[:, None]
        context = [self.cache.read(layer) for layer in range(len(self.drafter.layers))]
        noise = self.target.embedding[block].to(self.drafter.fc.weight.dtype)
        hidden = self.drafter(noise, positions, context, (sees, keep))[:, 1:]
        return (hidden @ self.target.head.T.to(hidden.dtype)).argmax(-1)

    def keep(self, rows: Tensor) -> None:
        self.cache.keep(rows)


def _prefill(target: Target, prompts: list[list[int]], capacity: int) -> tuple[PositionCache, Tensor, Tensor, Tensor]:
    """-> cache, lengths [P], logits for the first new token [P, 1, V], features [P, longest, K*H].

    Short prompts are padded on the right: what the padding leaves in the cache lies beyond the row's position.
    """
    device = target.embedding.device
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    longest = int(lengths.max())
    tokens = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], device=device)
    cache = PositionCache(rows=len(prompts), capacity=capacity)
    positions = torch.arange(longest, device=device).expand_as(tokens)
    logits, features = target.read(tokens, positions, cache)
    return cache, lengths, logits[torch.arange(len(prompts)), lengths - 1][:, None], features


def capacity_for(prompts: list[list[int]], new_tokens: int, block: int) -> int:
    """Positions that decoding can touch: a last block may reach past the limit."""
    return max(map(len, prompts)) + new_tokens + block


def plain(target: Target, prompts: list[list[int]], sampler: Sampler, *, new_tokens: int, end: int | None) -> Decoded:
    """One token a step, each from the target."""
    cache, position, logits, _ = _prefill(target, prompts, capacity_for(prompts, new_tokens, 1))
    output: list[list[int]] = [[] for _ in prompts]
    alive = torch.arange(len(prompts), device=position.device)
    margin = float("inf")
    while True:
        tokens = sampler.pick(logits, alive, position[:, None])
        margin = min(margin, _margin(sampler, logits, alive, position[:, None]))
        for prompt, token in zip(alive.tolist(), tokens[:, 0].tolist(), strict=True):
            output[prompt].append(token)
        on = [i for i, p in enumerate(alive.tolist()) if len(output[p]) < new_tokens and output[p][-1] != end]
        if not on:
            return Decoded(tokens=output, margin=margin)
        if len(on) < len(alive):
            rows = torch.tensor(on, device=alive.device)
            alive, position, tokens = alive[rows], position[rows], tokens[rows]
            cache.keep(rows)
        logits, _ = target.read(tokens, position[:, None], cache)
        position = position + 1


def _margin(sampler: Sampler, logits: Tensor, prompts: Tensor, positions: Tensor) -> float:
    """Smallest lead of the best token over the second, in logits."""
    scale = 1.0
    if sampler.noise is not None:
        scale = sampler.temperature
        logits = logits / scale + sampler.noise[prompts[:, None], positions]
    best = logits.topk(2, dim=-1).values
    return float((best[..., 0] - best[..., 1]).min()) * scale


def speculative(
    target: Target,
    proposer: Proposer,
    prompts: list[list[int]],
    sampler: Sampler,
    *,
    new_tokens: int,
    end: int | None,
) -> Decoded:
    """Rounds of draft and verify. Counts every accepted draft of a round, also those cut off at the limit."""
    block = proposer.size + 1
    cache, start, logits, features = _prefill(target, prompts, capacity_for(prompts, new_tokens, block))
    alive = torch.arange(len(prompts), device=start.device)
    first = sampler.pick(logits, alive, start[:, None])[:, 0].tolist()
    histories = [[*prompt, token] for prompt, token in zip(prompts, first, strict=True)]
    output: list[list[int]] = [[token] for token in first]
    proposer.begin(features, start)
    emitted = rounds = 0
    while True:
        on = [i for i, p in enumerate(alive.tolist()) if len(output[p]) < new_tokens and output[p][-1] != end]
        if not on:
            return Decoded(tokens=output, accepted=(emitted, rounds))
        if len(on) < len(alive):
            rows = torch.tensor(on, device=alive.device)
            alive, start = alive[rows], start[rows]
            cache.keep(rows)
            proposer.keep(rows)
            histories = [histories[i] for i in on]
        drafts = proposer.propose(histories, start).to(start.device)
        last = torch.tensor([history[-1] for history in histories], device=start.device)
        tokens = torch.cat([last[:, None], drafts], dim=1)
        positions = start[:, None] + torch.arange(block, device=start.device)
        logits, features = target.read(tokens, positions, cache)
        posterior = sampler.pick(logits, alive, positions + 1)
        accepted = (drafts == posterior[:, :-1]).long().cumprod(dim=1).sum(dim=1)
        proposer.accept(features, positions)
        start = start + accepted + 1
        emitted, rounds = emitted + int(accepted.sum()) + len(on), rounds + len(on)
        for i, (count, row) in enumerate(zip(accepted.tolist(), posterior.tolist(), strict=True)):
            new = row[: count + 1]
            histories[i].extend(new)
            done = output[alive[i]]
            done.extend(new[: new_tokens - len(done)])
            if end in done:
                del done[done.index(end) + 1 :]
