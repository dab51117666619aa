"""Decoding with and without drafts, many prompts at once, greedy or sampled; verify.py says how drafts are judged."""

import time
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.cache import PositionCache
from trainer.proposers import Proposer
from trainer.target import Target
from trainer.verify import Sampler

PREFILL_LOGITS = 1 << 28  # of all prompts, formed at a time: prompts are read in pieces of so many


@dataclass(frozen=True, kw_only=True)
class Decoded:
    tokens: list[list[int]]  # what was generated, by prompt, up to the limit or just past an end token
    seconds: float  # from each prompt's first token on: reading the prompts is left out
    rounds: Tensor | None = None  # speculative: [P, D+1] int64, rounds of a prompt in which exactly k drafts passed
    gaps: list[list[float]] | None = None  # plain: how far each token led the next best one, in logits, noise included

    @property
    def accepted(self) -> tuple[int, int]:
        """(sum over rounds of accepted drafts + 1, rounds); the ratio is tau."""
        if self.rounds is None:
            return 0, 0
        by_count = self.rounds.sum(dim=0)
        return int((by_count * torch.arange(1, len(by_count) + 1)).sum()), int(by_count.sum())

    @property
    def rate(self) -> tuple[int, float]:
        """(tokens after the first of each prompt, the seconds they took)."""
        return sum(map(len, self.tokens)) - len(self.tokens), self.seconds

    @property
    def margin(self) -> float:
        """Smallest lead of any token; equality within rounding is safe far below it."""
        return min((gap for gaps in self.gaps or () for gap in gaps), default=float("inf"))


def join(parts: list[Decoded]) -> Decoded:
    """Of several batches of prompts, decoded one after another."""
    return Decoded(
        tokens=[text for part in parts for text in part.tokens],
        seconds=sum(part.seconds for part in parts),
        rounds=None if parts[0].rounds is None else torch.cat([part.rounds for part in parts]),
        gaps=None if parts[0].gaps is None else [gaps for part in parts for gaps in part.gaps],
    )


def capacity_for(prompts: list[list[int]], new_tokens: int, drafts: int) -> int:
    """Positions that decoding can touch: a last block may reach past the limit."""
    return max(map(len, prompts)) + new_tokens + drafts + 1


def _prefill(target: Target, prompts: list[list[int]], capacity: int) -> tuple[PositionCache, Tensor, Tensor, Tensor]:
    """-> cache, lengths [P], logits for the first new token [P, 1, V], features [P, longest, K*H].

    Short prompts are padded on the right: what the padding leaves in the cache lies beyond the row's position.
    """
    device = target.device
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    longest = int(lengths.max())
    tokens = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], device=device)
    cache = PositionCache(rows=len(prompts), capacity=capacity)
    positions = torch.arange(longest, device=device).expand_as(tokens)
    piece = max(1, PREFILL_LOGITS // (len(prompts) * target.head.shape[0]))
    last, features = None, []
    for begin in range(0, longest, piece):
        logits, seen = target.read(tokens[:, begin : begin + piece], positions[:, begin : begin + piece], cache)
        features.append(seen)
        index = (lengths - 1 - begin)[:, None, None]
        here = logits.gather(1, index.clamp(0, logits.shape[1] - 1).expand(-1, 1, logits.shape[2]))
        inside = (index >= 0) & (index < logits.shape[1])
        last = here if last is None else torch.where(inside, here, last)
    return cache, lengths, last, torch.cat(features, dim=1)


def plain(
    target: Target,
    prompts: list[list[int]],
    sampler: Sampler,
    *,
    new_tokens: int,
    ends: Collection[int] = (),
    first: int = 0,
) -> Decoded:
    """One token a step, each from the target. `first` is the number of the first prompt, which keys its noise."""
    cache, position, logits, _ = _prefill(target, prompts, capacity_for(prompts, new_tokens, 0))
    output: list[list[int]] = [[] for _ in prompts]
    alive = torch.arange(len(prompts), device=position.device)
    leads: list[tuple[list[int], Tensor]] = []
    began = None
    while True:
        scores = sampler.scores(logits, alive + first, position[:, None])
        tokens = scores.argmax(-1)
        best = scores.topk(2, dim=-1).values[:, 0]
        numbers = alive.tolist()
        leads.append((numbers, (best[:, 0] - best[:, 1]) * (sampler.temperature or 1.0)))
        for prompt, token in zip(numbers, tokens[:, 0].tolist(), strict=True):
            output[prompt].append(token)
        if began is None:
            began = time.perf_counter()
        on = [i for i, p in enumerate(numbers) if len(output[p]) < new_tokens and output[p][-1] not in ends]
        if not on:
            break
        if len(on) < len(alive):
            rows = torch.tensor(on, device=alive.device)
            alive, position, tokens = alive[rows], position[rows], tokens[rows]
            cache.keep(rows)
        logits, _ = target.read(tokens, position[:, None], cache)
        position = position + 1
    seconds = time.perf_counter() - began
    gaps: list[list[float]] = [[] for _ in prompts]
    for numbers, lead in leads:
        for prompt, gap in zip(numbers, lead.tolist(), strict=True):
            gaps[prompt].append(gap)
    return Decoded(tokens=output, seconds=seconds, gaps=gaps)


def speculative(
    target: Target,
    proposer: Proposer,
    prompts: list[list[int]],
    sampler: Sampler,
    *,
    new_tokens: int,
    ends: Collection[int] = (),
    first: int = 0,
) -> Decoded:
    """Rounds of draft and verify. Counts every accepted draft of a round, also those cut off at the limit."""
    cache, start, logits, features = _prefill(target, prompts, capacity_for(prompts, new_tokens, proposer.size))
    alive = torch.arange(len(prompts), device=start.device)
    chosen = sampler.pick(logits, alive + first, start[:, None])[:, 0].tolist()
    began = time.perf_counter()
    histories = [[*prompt, token] for prompt, token in zip(prompts, chosen, strict=True)]
    output: list[list[int]] = [[token] for token in chosen]
    proposer.begin(features, start)
    rounds = torch.zeros(len(prompts), proposer.size + 1, dtype=torch.int64)
    while True:
        numbers = alive.tolist()
        on = [i for i, p in enumerate(numbers) if len(output[p]) < new_tokens and output[p][-1] not in ends]
        if not on:
            return Decoded(tokens=output, seconds=time.perf_counter() - began, rounds=rounds)
        if len(on) < len(alive):
            rows = torch.tensor(on, device=alive.device)
            alive, start = alive[rows], start[rows]
            cache.keep(rows)
            proposer.keep(rows)
            histories, numbers = [histories[i] for i in on], [numbers[i] for i in on]
        proposal = proposer.propose(histories, start)
        positions = start[:, None] + torch.arange(proposer.size + 1, device=start.device)
        drafts = sampler.drafts(proposal.tokens, proposal.logits, alive + first, positions[:, 1:])
        last = torch.tensor([history[-1] for history in histories], device=start.device)
        logits, features = target.read(torch.cat([last[:, None], drafts], dim=1), positions, cache)
        accepted, tokens = sampler.verify(drafts, proposal.logits, logits, alive + first, positions + 1)
        proposer.accept(features, positions)
        start = start + accepted + 1
        for i, (count, row) in enumerate(zip(accepted.tolist(), tokens.tolist(), strict=True)):
            new = row[: count + 1]
            rounds[numbers[i], count] += 1
            histories[i].extend(new)
            text = output[numbers[i]]
            for token in new[: new_tokens - len(text)]:
                text.append(token)
                if token in ends:
                    break
