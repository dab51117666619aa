"""Which drafts are kept: the two verify rules in use, and the noise they draw from.

`match`: drafts are the drafter's argmax; a draft is accepted while it equals the token that the target itself chooses,
greedily or by sampling. Sampling adds Gumbel noise to logits / T and takes the largest, which is a sample of the
softmax, yet a function of the logits and the noise alone: so speculative decoding gives exactly the tokens of plain
decoding at any temperature, and the two are compared token by token. A draft x passes with probability p(x).

`rejection`: drafts are sampled from the drafter's q at the same temperature; x passes with probability
min(1, p(x) / q(x)), and the first one that fails is replaced by a sample of max(p - q, 0), normalised (Leviathan et
al. 2023, Chen et al. 2023). A draft passes with probability sum min(p, q); the text has the target's distribution, but
is not the text of plain decoding. At temperature 0 the two rules are the same.

Noise is a function of (seed, stream, prompt, position, token) and nothing else, so results depend on neither the batch
nor the device. Noise of a position may be drawn again in a later round: what was drafted there before was thrown away
because of an earlier position, so no emitted token has depended on it yet.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

MATCH, REJECTION = RULES = ("match", "rejection")
TARGET, DRAFT, ACCEPT = range(3)  # streams: the target's own choice, drafts, whether a draft passes
SLICE = 1 << 25  # scores that sampling forms at a time, in 64 bits each

_STEP, _FIRST, _SECOND = (
    constant - (1 << 64) for constant in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def _mix(x: Tensor) -> Tensor:
    """SplitMix64 (Steele, Lea and Flood 2014) of int64, which wraps as unsigned arithmetic does."""
    x = _shifted(x, 30).bitwise_xor_(x).mul_(_FIRST)
    x = _shifted(x, 27).bitwise_xor_(x).mul_(_SECOND)
    return _shifted(x, 31).bitwise_xor_(x)


def _shifted(x: Tensor, bits: int) -> Tensor:
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def uniform(seed: int, stream: int, prompts: Tensor, positions: Tensor, count: int = 1) -> Tensor:
    """prompts [R], positions [R, Q] -> [R, Q, count] float64, each in (0, 1)."""
    state = torch.zeros_like(positions)
    for part in (seed & ((1 << 63) - 1), stream, prompts[:, None], positions):
        state = _mix((state ^ part) + _STEP)
    index = torch.arange(1, count + 1, device=positions.device)
    bits = _mix(state[..., None] + index * _STEP)
    return _shifted(bits, 12).double().add_(0.5).mul_(2.0**-52)


def gumbel(seed: int, stream: int, prompts: Tensor, positions: Tensor, count: int) -> Tensor:
    """prompts [R], positions [R, Q] -> [R, Q, count] float64."""
    return uniform(seed, stream, prompts, positions, count).log_().neg_().log_().neg_()


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """How tokens are chosen. Prompts are numbers that key the noise; temperature 0 is greedy, and without noise."""

    temperature: float
    seed: int = 0
    rule: str = MATCH

    def scores(self, logits: Tensor, prompts: Tensor, positions: Tensor, stream: int = TARGET) -> Tensor:
        """logits [R, Q, V] that predict the tokens of `positions` [R, Q] -> [R, Q, V], the largest of which wins."""
        if self.temperature == 0:
            return logits
        noise = gumbel(self.seed, stream, prompts, positions, logits.shape[-1])
        return noise.add_(logits, alpha=1 / self.temperature)

    def pick(self, logits: Tensor, prompts: Tensor, positions: Tensor, stream: int = TARGET) -> Tensor:
        """As `scores`, but -> tokens [R, Q]; scores exist for a few rows at a time."""
        rows = max(1, SLICE // max(1, logits[0].numel()))
        parts = zip(logits.split(rows), prompts.split(rows), positions.split(rows), strict=True)
        return torch.cat([self.scores(*part, stream).argmax(-1) for part in parts])

    def probabilities(self, logits: Tensor) -> Tensor:
        """float64, in the shape of `logits`."""
        return (logits.double() / self.temperature).softmax(-1)

    def drafts(self, tokens: Tensor, logits: Tensor | None, prompts: Tensor, positions: Tensor) -> Tensor:
        """Drafts [R, D] for `positions` [R, D], from the drafter's argmax [R, D] and logits [R, D, V]."""
        if self.rule == MATCH or self.temperature == 0 or logits is None:
            return tokens
        return self.pick(logits, prompts, positions, DRAFT)

    def verify(
        self, drafts: Tensor, draft_logits: Tensor | None, logits: Tensor, prompts: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Apply the rule to one round.

        drafts [R, D], the drafter's logits [R, D, V] (None if it has no distribution: then its drafts are certain),
        the target's logits [R, D+1, V], positions [R, D+1] of the tokens they predict -> how many leading drafts are
        accepted [R], and tokens [R, D+1]: a row's first accepted + 1 entries are its new text, the others are void.
        """
        if self.rule == MATCH or self.temperature == 0:
            tokens = self.pick(logits, prompts, positions)
            return matching(drafts, tokens), tokens
        p = self.probabilities(logits)
        if draft_logits is None:
            q = F.one_hot(drafts, p.shape[-1]).double()
        else:
            q = self.probabilities(draft_logits)
        accepted = passing(drafts, p, q, uniform(self.seed, ACCEPT, prompts, positions[:, :-1])[..., 0])
        place = positions.gather(1, accepted[:, None])
        noise = gumbel(self.seed, TARGET, prompts, place, p.shape[-1])[:, 0]
        last = (left_over(p, q, accepted).log() + noise).argmax(-1)
        return accepted, torch.cat([drafts, last[:, None]], dim=1).scatter(1, accepted[:, None], last[:, None])


def matching(drafts: Tensor, tokens: Tensor) -> Tensor:
    """drafts [R, D] and the target's own tokens [R, D+1] -> how many leading drafts are equal [R]."""
    return (drafts == tokens[:, :-1]).long().cumprod(dim=1).sum(dim=1)


def passing(drafts: Tensor, p: Tensor, q: Tensor, uniform: Tensor) -> Tensor:
    """drafts [R, D], the target's p [R, D+1, V], the drafter's q [R, D, V], uniform [R, D] -> accepted [R].

    A draft passes if uniform < p / q, so with probability min(1, p / q); the first that does not ends the round.
    """
    p_draft = p[:, :-1].gather(2, drafts[..., None])[..., 0]
    q_draft = q.gather(2, drafts[..., None])[..., 0]
    return (uniform * q_draft < p_draft).long().cumprod(dim=1).sum(dim=1)


def left_over(p: Tensor, q: Tensor, accepted: Tensor) -> Tensor:
    """p [R, D+1, V], q [R, D, V], accepted [R] -> distribution [R, V] of the token that follows the accepted drafts.

    max(p - q, 0) normalised at the first rejected draft; p itself when all were accepted.
    """
    at = accepted[:, None, None].expand(-1, 1, p.shape[-1])
    p_here = p.gather(1, at)[:, 0]
    q_here = F.pad(q, (0, 0, 0, 1)).gather(1, at)[:, 0]
    rest = (p_here - q_here).clamp(min=0)
    total = rest.sum(-1, keepdim=True)
    # a rejection needs p < q somewhere, hence p > q elsewhere, unless they differ by rounding alone
    return torch.where(total > 0, rest / total, p_here)
