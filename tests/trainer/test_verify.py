"""The verify rules: proofs over tiny vocabularies, without a model; and the noise."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer import verify
from trainer.verify import ACCEPT, DRAFT, TARGET, Sampler

GRID = 840  # midpoints of a grid whose edges hold every a / b with b up to 8: summing over it integrates exactly
EIGHTHS = [
    ([8, 0, 0], [0, 0, 8]),  # disjoint: never accepted
    ([3, 5, 0], [3, 5, 0]),  # equal: always accepted
    ([1, 2, 5], [5, 2, 1]),
    ([4, 4, 0], [2, 2, 4]),
    ([0, 1, 7], [3, 3, 2]),
    ([2, 3, 3], [8, 0, 0]),  # a proposer without a distribution
]


def eighths(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64) / 8


@pytest.mark.parametrize(("p", "q"), EIGHTHS)
def test_rejection_keeps_the_target_distribution_and_accepts_what_both_share(p, q):
    """One draft: P(token) = sum over drafts of q(x) * (passes ? x : left over), integrated over the uniform."""
    p, q = eighths(p), eighths(q)
    after = eighths([2, 2, 4])
    targets = torch.stack([p[0], after[0]])[None].expand(GRID, -1, -1)
    drafters = q[None].expand(GRID, -1, -1)
    uniform = ((torch.arange(GRID, dtype=torch.float64) + 0.5) / GRID)[:, None]
    emitted, share, bonus = torch.zeros(3, dtype=torch.float64), 0.0, torch.zeros(3, dtype=torch.float64)
    for draft in range(3):
        drafts = torch.full((GRID, 1), draft)
        accepted = verify.passing(drafts, targets, drafters, uniform)
        passed = accepted.double().mean()
        rest = verify.left_over(targets, drafters, accepted)
        torch.testing.assert_close(rest.sum(-1), torch.ones(GRID, dtype=torch.float64))
        emitted[draft] += q[0, draft] * passed
        emitted += q[0, draft] * (rest * (1 - accepted)[:, None]).mean(0)
        bonus += q[0, draft] * (rest * accepted[:, None]).mean(0)
        share += float(q[0, draft] * passed)
    torch.testing.assert_close(emitted, p[0], atol=1e-12, rtol=0)
    assert math.isclose(share, float(torch.minimum(p, q).sum()), abs_tol=1e-12)
    torch.testing.assert_close(bonus, share * after[0], atol=1e-12, rtol=0)  # whatever was drafted


def test_rejection_keeps_the_joint_distribution_of_a_whole_round():
    """Two drafts and a bonus, with a target that depends on what came before. A round that ends early is continued
    by the target itself, and every text of three tokens must come out as often as the target alone writes it."""
    generator = torch.Generator().manual_seed(3)

    def distribution(*shape):
        weights = torch.randint(0, 4, (*shape, 3), generator=generator).double()
        weights[..., 0] += 8 - weights.sum(-1)  # eighths again: 8 - (a + b + c) + a is never negative for b + c <= 6
        return weights / 8

    first, second, third = distribution(1)[0], distribution(3), distribution(3, 3)
    q = distribution(2)
    points = (torch.arange(GRID, dtype=torch.float64) + 0.5) / GRID
    texts = torch.zeros(3, 3, 3, dtype=torch.float64)
    for x, y in itertools.product(range(3), repeat=2):
        weight = q[0, x] * q[1, y]
        if not weight:
            continue
        p = torch.stack([first, second[x], third[x, y]])[None]
        # the two uniforms are independent, so it is enough to know when each draft alone passes
        passes = []
        for j, token in enumerate((x, y)):
            accepted = verify.passing(
                torch.full((GRID, 1), token),
                p[:, j : j + 2].expand(GRID, -1, -1),
                q[None, j : j + 1].expand(GRID, -1, -1),
                points[:, None],
            )
            passes.append(float(accepted.double().mean()))
        for count, chance in enumerate((1 - passes[0], passes[0] * (1 - passes[1]), passes[0] * passes[1])):
            rest = verify.left_over(p, q[None], torch.tensor([count]))[0] * chance * weight
            if count == 0:
                texts += rest[:, None, None] * second[:, :, None] * third
            elif count == 1:
                texts[x] += rest[:, None] * third[x]
            else:
                texts[x, y] += rest
    torch.testing.assert_close(texts, first[:, None, None] * second[:, :, None] * third, atol=1e-12, rtol=0)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_round_is_judged_draft_by_draft(data):
    """`passing` and `matching` against loops that stop at the first failure."""
    rows, size, vocabulary = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4)), 3
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    p = torch.rand(rows, size + 1, vocabulary, generator=generator).softmax(-1)
    q = torch.rand(rows, size, vocabulary, generator=generator).softmax(-1)
    drafts = torch.randint(vocabulary, (rows, size), generator=generator)
    tokens = torch.randint(2, (rows, size + 1), generator=generator)
    uniform = torch.rand(rows, size, generator=generator)
    passing, matching = verify.passing(drafts, p, q, uniform), verify.matching(drafts, tokens)
    for r in range(rows):
        count = 0
        while count < size and uniform[r, count] < p[r, count, drafts[r, count]] / q[r, count, drafts[r, count]]:
            count += 1
        assert passing[r] == count
        count = 0
        while count < size and drafts[r, count] == tokens[r, count]:
            count += 1
        assert matching[r] == count


def test_equal_distributions_that_reject_by_rounding_fall_back_to_the_target():
    p = eighths([3, 5, 0], [8, 0, 0])[None]
    assert torch.equal(verify.left_over(p, p[:, :1], torch.tensor([0])), p[:, 0])


def test_sampling_frequencies_are_the_probabilities():
    """Each stream, and rejection as a whole, over keyed noise: fixed, so it passes always or never."""
    count = 20_000
    prompts, positions = torch.arange(count), torch.full((count, 1), 5)
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0]).expand(count, 1, 4)
    sampler = Sampler(temperature=0.7, seed=4, rule="rejection")
    wanted = sampler.probabilities(logits[:1, 0])[0]
    for stream in (TARGET, DRAFT):
        found = torch.bincount(sampler.pick(logits, prompts, positions, stream)[:, 0], minlength=4) / count
        torch.testing.assert_close(found.double(), wanted, atol=0.01, rtol=0)
    draft_logits = torch.tensor([1.0, 0.5, 0.0, -2.0]).expand(count, 1, 4)
    drafts = sampler.drafts(draft_logits.argmax(-1), draft_logits, prompts, positions)
    both = logits.expand(-1, 2, -1)
    accepted, tokens = sampler.verify(drafts, draft_logits, both, prompts, torch.cat([positions, positions + 1], 1))
    found = torch.bincount(tokens[:, 0], minlength=4) / count
    torch.testing.assert_close(found.double(), wanted, atol=0.01, rtol=0)
    shared = torch.minimum(wanted, sampler.probabilities(draft_logits[:1, 0])[0]).sum()
    assert abs(float(accepted.double().mean()) - float(shared)) < 0.01
    bonus = tokens[accepted == 1, 1]
    found = torch.bincount(bonus, minlength=4) / len(bonus)
    torch.testing.assert_close(found.double(), wanted, atol=0.02, rtol=0)


def test_certain_drafts_are_judged_as_a_distribution_of_one_token():
    count = 20_000
    prompts, positions = torch.arange(count), torch.tensor([[7, 8]]).expand(count, -1)
    logits = torch.tensor([0.3, -1.0, 2.0]).expand(count, 2, 3)
    sampler = Sampler(temperature=1.0, rule="rejection")
    drafts = sampler.drafts(torch.ones(count, 1, dtype=torch.int64), None, prompts, positions[:, :1])
    accepted, tokens = sampler.verify(drafts, None, logits, prompts, positions)
    wanted = sampler.probabilities(logits[:1, 0])[0]
    assert abs(float(accepted.double().mean()) - float(wanted[1])) < 0.01
    found = torch.bincount(tokens[:, 0], minlength=3) / count
    torch.testing.assert_close(found.double(), wanted, atol=0.01, rtol=0)


def test_without_temperature_both_rules_are_greedy():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 4, 6, generator=generator)
    draft_logits = torch.randn(5, 3, 6, generator=generator)
    tokens, prompts, positions = draft_logits.argmax(-1), torch.arange(5), torch.arange(4).expand(5, -1)
    tokens[:3] = logits[:3, :-1].argmax(-1)
    results = []
    for rule in verify.RULES:
        sampler = Sampler(temperature=0.0, rule=rule)
        drafts = sampler.drafts(tokens, draft_logits, prompts, positions[:, :-1])
        assert torch.equal(drafts, tokens)
        results.append(sampler.verify(drafts, draft_logits, logits, prompts, positions))
        assert torch.equal(results[-1][1], logits.argmax(-1))
    assert torch.equal(results[0][0], results[1][0]) and results[0][0].tolist()[:3] == [3, 3, 3]


def test_noise_depends_on_its_key_alone():
    prompts = torch.tensor([4, 9, 2])
    positions = torch.tensor([[3, 4], [0, 7], [3, 4]])
    noise = verify.uniform(1, TARGET, prompts, positions, 16)
    alone = verify.uniform(1, TARGET, prompts[1:2], positions[1:2, 1:], 8)
    assert torch.equal(noise[1, 1, :8], alone[0, 0])
    values = [noise]
    values.append(verify.uniform(2, TARGET, prompts, positions, 16))
    values.append(verify.uniform(1, ACCEPT, prompts, positions, 16))
    assert len(torch.unique(torch.cat([value.flatten() for value in values]))) == 3 * noise.numel()


def test_noise_is_uniform_and_its_neighbours_are_independent():
    prompts, positions = torch.arange(40), torch.arange(30).expand(40, -1)
    noise = verify.uniform(0, DRAFT, prompts, positions, 50)
    assert noise.min() > 0 and noise.max() < 1
    histogram = torch.histc(noise, 20, 0, 1) / noise.numel()
    torch.testing.assert_close(histogram, torch.full_like(histogram, 1 / 20), atol=0.003, rtol=0)
    centred = noise - 0.5
    for shifted in (centred[1:] * centred[:-1], centred[:, 1:] * centred[:, :-1], centred[..., 1:] * centred[..., :-1]):
        assert abs(float(shifted.mean()) * 12) < 0.015


def test_sampling_does_not_depend_on_how_many_scores_exist_at_a_time(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    logits, prompts = torch.randn(7, 3, 11, generator=generator), torch.arange(7)
    positions = torch.arange(3).expand(7, -1)
    sampler = Sampler(temperature=0.9, seed=1)
    whole = sampler.pick(logits, prompts, positions)
    monkeypatch.setattr(verify, "SLICE", 70)
    assert torch.equal(sampler.pick(logits, prompts, positions), whole)


def splitmix(state: int) -> int:
    """SplitMix64 in whole numbers, straight from its description."""
    word = (1 << 64) - 1
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & word
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & word
    return state ^ (state >> 31)


def plain_uniform(seed: int, stream: int, prompt: int, position: int, token: int) -> float:
    step, word, state = 0x9E3779B97F4A7C15, (1 << 64) - 1, 0
    for part in (seed, stream, prompt, position):
        state = splitmix(((state ^ part) + step) & word)
    bits = splitmix((state + (token + 1) * step) & word)
    return ((bits >> 12) + 0.5) * 2.0**-52


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**62), st.integers(0, 2), st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 200_000))
def test_noise_equals_its_definition_in_whole_numbers(seed, stream, prompt, position, token):
    assert splitmix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # the published generator's first number from seed 0
    fast = verify.uniform(seed, stream, torch.tensor([prompt]), torch.tensor([[position]]), token + 1)[0, 0, token]
    assert float(fast) == plain_uniform(seed, stream, prompt, position, token)
