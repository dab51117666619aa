"""Decoding with drafts against plain decoding, and the cached drafter against one that remembers nothing."""

import dataclasses
import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from trainer import decode, equality, ngram
from trainer.block_mask import LayerKind
from trainer.drafter import Drafter, Shape, initialise
from trainer.proposers import DrafterProposer, Proposal
from trainer.target import Target
from trainer.verify import MATCH, REJECTION, Sampler

CPU = torch.device("cpu")
VOCABULARY, MASK, NEW = 48, 1, 14
ASSETS = Path(__file__).parents[2] / "trainer" / "assets" / "demo"
DEMO, PROMPTS = ASSETS / "target", ASSETS / "prompts.json"
GREEDY = Sampler(temperature=0.0)
SAMPLED = Sampler(temperature=0.8, seed=3)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A target and a drafter for it. The defaults are the plain case."""

    kind: str = "qwen3"
    layers: int = 2
    kv_heads: int = 2
    tied: bool = True
    captured: tuple[int, ...] = (0, 1)
    block: int = 4
    draft_layers: tuple[LayerKind, ...] = (LayerKind(),)
    shifted: bool = False
    dtype: str = "float64"


CASES = {
    "plain": Case(),
    "all heads their own, untied, last layer captured": Case(layers=3, kv_heads=4, tied=False, captured=(2, 0)),
    "llama": Case(kind="llama", layers=3, captured=(1,), block=2),
    "two layers, blocks of eight": Case(layers=4, captured=(0, 1, 3), block=8, draft_layers=(LayerKind(),) * 2),
    "causal": Case(block=5, draft_layers=(LayerKind(causal=True),) * 2),
    "sliding": Case(block=3, draft_layers=(LayerKind(window=5), LayerKind(window=4, causal=True))),
    "shifted": Case(block=3, shifted=True),
    "shifted, causal, llama": Case(
        kind="llama", tied=False, block=6, draft_layers=(LayerKind(causal=True), LayerKind(window=7)), shifted=True
    ),
    "float32": Case(dtype="float32"),
}


@pytest.fixture(scope="module")
def build(small_target):
    """Case -> its target and drafter."""
    made = {}

    def of(case: Case) -> tuple[Target, Drafter]:
        if case not in made:
            folder = small_target(
                case.kind,
                vocab_size=VOCABULARY,
                num_hidden_layers=case.layers,
                num_key_value_heads=case.kv_heads,
                tie_word_embeddings=case.tied,
            )
            made[case] = make(case, folder)
        return made[case]

    return of


def make(case: Case, folder: Path) -> tuple[Target, Drafter]:
    target = Target(folder, case.captured, CPU, dtype=case.dtype, dense=True)
    shape = Shape(
        hidden=32, intermediate=40, heads=4, kv_heads=2, head_size=8, features=len(case.captured),
        layers=len(case.draft_layers), epsilon=1e-6, rope_base=10_000.0, kinds=case.draft_layers,
    )  # fmt: skip
    drafter = Drafter(shape)
    initialise(drafter, seed=1, final_norm=target.final_norm)
    return target, drafter.to(getattr(torch, case.dtype))


def prompts_of(seed: int = 0, lengths: tuple[int, ...] = (5, 9, 3, 6, 1)) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(2, VOCABULARY, length).tolist() for length in lengths]


def proposer_of(case: Case, target: Target, drafter: Drafter) -> DrafterProposer:
    return DrafterProposer(
        drafter, target, block=case.block, mask_token=MASK, capacity=9 + NEW + case.block + 1, shifted=case.shifted
    )


class Peeking:
    """Knows the text to come and drafts it, but for one wrong token after a number of right ones that is drawn evenly
    from none to all, by a hash of the place; or always `right`. Whatever it wraps keeps its caches through all these
    acceptances and rejections, and every proposal of it is recorded."""

    def __init__(self, inner, texts: list[list[int]], prompts: list[list[int]], *, right: bool = False):
        self.inner, self.size, self.right = inner, inner.size, right
        self.whole = [[*prompt, *text, *[0] * 9] for prompt, text in zip(prompts, texts, strict=True)]
        self.seen: list[tuple[list[int], Proposal, int]] = []  # history, proposal of all rows, row

    def begin(self, features, lengths):
        self.inner.begin(features, lengths)
        self.rows = list(range(len(lengths)))

    def accept(self, features, positions):
        self.inner.accept(features, positions)

    def keep(self, rows):
        self.inner.keep(rows)
        self.rows = [self.rows[row] for row in rows.tolist()]

    def propose(self, histories, start):
        proposal = self.inner.propose(histories, start)
        tokens = proposal.tokens.clone()
        for row, history in enumerate(histories):
            assert start[row] == len(history) - 1
            self.seen.append((list(history), proposal, row))
            drafts = self.whole[self.rows[row]][len(history) : len(history) + self.size]
            count = np.random.default_rng((len(history), self.rows[row])).integers(self.size + 1)
            if count < self.size and not self.right:
                drafts[count] = (drafts[count] + 1) % VOCABULARY
            tokens[row] = torch.tensor(drafts)
        return Proposal(tokens=tokens)


def run(target: Target, proposer, prompts, sampler: Sampler, **options) -> decode.Decoded:
    return decode.speculative(target, proposer, prompts, sampler, new_tokens=NEW, **options)


@pytest.mark.parametrize("sampler", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", CASES)
def test_with_drafts_the_text_is_that_of_plain_decoding(build, name, sampler):
    case, prompts = CASES[name], prompts_of()
    target, drafter = build(case)
    plain = decode.plain(target, prompts, sampler, new_tokens=NEW)
    assert plain.margin > (1e-6 if case.dtype == "float64" else 1e-3)  # no tie that rounding could break either way
    assert all(len(gaps) == len(text) == NEW for gaps, text in zip(plain.gaps, plain.tokens, strict=True))
    proposers = {
        "drafter": proposer_of(case, target, drafter),
        "often right": Peeking(proposer_of(case, target, drafter), plain.tokens, prompts),
        "always right": Peeking(proposer_of(case, target, drafter), plain.tokens, prompts, right=True),
    }
    drafts = case.block if case.shifted else case.block - 1
    for which, proposer in proposers.items():
        decoded = run(target, proposer, prompts, sampler)
        assert decoded.tokens == plain.tokens and not equality.divergences(plain, decoded), which
        assert decoded.rounds.shape == (len(prompts), drafts + 1)
        tau = decoded.accepted[0] / decoded.accepted[1]
        if which == "often right":
            assert 1.2 < tau < drafts + 1
        if which == "always right":
            # after the first token drafts + 1 a round; what it drafts beyond the limit is wrong
            assert decoded.rounds.sum(1).tolist() == [math.ceil((NEW - 1) / (drafts + 1))] * len(prompts)
            assert decoded.rounds[:, drafts].tolist() == [NEW // (drafts + 1)] * len(prompts)


@cache
def hooked(path: str, dtype: torch.dtype):
    """Hugging Face's model as it is, and what its layers gave in the last forward, by layer."""
    model, streams = AutoModelForCausalLM.from_pretrained(path, dtype=dtype), {}
    for number, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda module, inputs, output, number=number: streams.update({number: output}))
    return model, streams


@torch.no_grad()
def slow_draft(case: Case, target: Target, drafter: Drafter, history: list[int]) -> torch.Tensor:
    """Drafts' logits [D, V] for one row, from its tokens alone: no cache, no batch, no code shared but the layers.

    Features come from Hugging Face's own forward over the tokens before the last, and the drafter sees all of them.
    """
    start = len(history) - 1
    reference, streams = hooked(target.config._name_or_path, target.dtype)
    reference(torch.tensor([history[:start]]))
    features = torch.cat([streams[layer] for layer in case.captured], dim=-1)

    def attend(kind, query, context, block):
        output = torch.zeros_like(query)
        assert context[0].shape[2] == start and block[0].shape[2] == case.block
        for head in range(query.shape[1]):
            group = head // (query.shape[1] // context[0].shape[1])
            for slot in range(case.block):
                first = max(0, start + slot - kind.window + 1) if kind.window else 0
                last = slot + 1 if kind.causal else case.block
                key = torch.cat([context[0][0, group, first:], block[0][0, group, :last]])
                value = torch.cat([context[1][0, group, first:], block[1][0, group, :last]])
                weights = (key @ query[0, head, slot] / query.shape[-1] ** 0.5).softmax(0)
                output[0, head, slot] = weights @ value
        return output

    noise = target.embedding[torch.tensor([[history[-1]] + [MASK] * (case.block - 1)])]
    positions = torch.arange(start, start + case.block)[None]
    hidden = drafter(noise, positions, drafter.context(features, torch.arange(start)[None]), attend)[0]
    return (hidden if case.shifted else hidden[1:]) @ target.head.T


@pytest.mark.parametrize("name", CASES)
def test_the_cached_drafter_equals_one_that_remembers_nothing(build, name):
    """Through rounds that accept some, none or all drafts, in rows of different lengths that finish at different
    times. A position, a crop of the cache or a feature that is one off shows in the logits."""
    case, prompts = CASES[name], prompts_of(1, (4, 8, 2, 6, 3, 7, 5))
    target, drafter = build(case)
    free = decode.plain(target, prompts, SAMPLED, new_tokens=NEW).tokens
    ends = {next(token for token in reversed(free[1][:-3]) if token not in free[0])}
    plain = decode.plain(target, prompts, SAMPLED, new_tokens=NEW, ends=ends)
    peeking = Peeking(proposer_of(case, target, drafter), plain.tokens, prompts)
    decoded = run(target, peeking, prompts, SAMPLED, ends=ends)
    assert decoded.tokens == plain.tokens and len({len(text) for text in plain.tokens}) > 1
    assert decoded.rounds.sum(0).count_nonzero() >= min(4, len(decoded.rounds[0]))  # so many lengths of acceptance
    tolerance = 1e-6 if case.dtype == "float64" else 1e-3  # Hugging Face's norms and rotations are float32 in any type
    for history, proposal, row in peeking.seen:
        slow = slow_draft(case, target, drafter, history)
        torch.testing.assert_close(proposal.logits[row], slow, atol=tolerance, rtol=tolerance)
        assert torch.equal(proposal.tokens[row], proposal.logits[row].argmax(-1))


@pytest.mark.parametrize("sampler", [GREEDY, SAMPLED, dataclasses.replace(SAMPLED, rule=REJECTION)])
def test_results_do_not_depend_on_the_batch(build, sampler):
    case, prompts = CASES["plain"], prompts_of()
    target, drafter = build(case)
    whole = run(target, proposer_of(case, target, drafter), prompts, sampler)
    parts = [
        run(target, proposer_of(case, target, drafter), prompts[first : first + 2], sampler, first=first)
        for first in (0, 2, 4)
    ]
    joined = decode.join(parts)
    assert joined.tokens == whole.tokens and torch.equal(joined.rounds, whole.rounds)
    plain = decode.join(
        [decode.plain(target, prompts[i : i + 1], sampler, new_tokens=NEW, first=i) for i in range(len(prompts))]
    )
    assert plain.tokens == decode.plain(target, prompts, sampler, new_tokens=NEW).tokens
    if sampler.rule == MATCH:
        assert plain.tokens == whole.tokens


def test_prompts_are_read_in_pieces(build, monkeypatch):
    case, prompts = CASES["plain"], prompts_of()
    target, drafter = build(case)
    whole = [decode.plain(target, prompts, SAMPLED, new_tokens=NEW).tokens]
    monkeypatch.setattr(decode, "PREFILL_LOGITS", 2 * len(prompts) * VOCABULARY)
    assert decode.plain(target, prompts, SAMPLED, new_tokens=NEW).tokens == whole[0]
    peeking = Peeking(proposer_of(case, target, drafter), whole[0], prompts)
    assert run(target, peeking, prompts, SAMPLED).tokens == whole[0]
    history, proposal, row = peeking.seen[1]
    torch.testing.assert_close(proposal.logits[row], slow_draft(case, target, drafter, history), atol=1e-6, rtol=1e-6)


@torch.no_grad()
def test_rejection_writes_with_the_probabilities_of_the_target(build):
    """The same prompt many times over: frequencies of the first three tokens against the target's own distribution.
    The noise is fixed, so this passes always or never."""
    count, sampler = 4000, Sampler(temperature=1.6, seed=2, rule=REJECTION)
    case = CASES["shifted"]
    target, drafter = build(case)
    prompt = prompts_of()[0]
    proposer = DrafterProposer(drafter, target, block=2, mask_token=MASK, capacity=12, shifted=True)
    decoded = decode.speculative(target, proposer, [prompt] * count, sampler, new_tokens=3)
    assert 0.1 < decoded.rounds[:, 1:].sum() / decoded.rounds.sum() < 0.9  # both outcomes are common
    model = AutoModelForCausalLM.from_pretrained(target.config._name_or_path, dtype=torch.float64)
    first = (model(torch.tensor([prompt])).logits[0, -1].double() / 1.6).softmax(-1)
    rows = torch.tensor([[*prompt, token] for token in range(VOCABULARY)])
    second = (model(rows).logits[:, -1].double() / 1.6).softmax(-1)
    rows = torch.cat([rows.repeat_interleave(VOCABULARY, 0), torch.arange(VOCABULARY).repeat(VOCABULARY)[:, None]], 1)
    third = (model(rows).logits[:, -1].double() / 1.6).softmax(-1).view(VOCABULARY, VOCABULARY, -1)
    wanted = [first, first @ second, torch.einsum("i,ij,ijk->k", first, second, third)]
    # the greatest distance of two cumulative distributions; 2 / sqrt(n) is exceeded once in a thousand draws
    for place, probabilities in enumerate(wanted):
        found = torch.bincount(torch.tensor([text[place] for text in decoded.tokens]), minlength=VOCABULARY) / count
        assert (found - probabilities).cumsum(0).abs().max() < 2 / count**0.5, place
    pair = torch.zeros(VOCABULARY, VOCABULARY, dtype=torch.float64)
    for _, one, other in decoded.tokens:
        pair[one, other] += 1 / count
    joint = torch.einsum("i,ij,ijk->jk", first, second, third)
    assert (pair - joint).flatten().cumsum(0).abs().max() < 2 / count**0.5


def test_a_text_ends_at_the_limit_or_just_past_an_end_token(build):
    case, prompts = CASES["plain"], prompts_of()
    target, _ = build(case)
    free = decode.plain(target, prompts, GREEDY, new_tokens=NEW).tokens
    ends = {free[0][3], free[1][6], free[2][0]}
    wanted = []
    for text in free:
        cut = next((i for i, token in enumerate(text) if token in ends), len(text) - 1)
        wanted.append(text[: cut + 1])
    plain = decode.plain(target, prompts, GREEDY, new_tokens=NEW, ends=ends)
    assert plain.tokens == wanted and plain.rate[0] == sum(map(len, wanted)) - len(wanted)
    counts = ngram.Counts([np.array(text) for text in free])
    for right in (False, True):
        peeking = Peeking(ngram.NGramProposer(counts, size=4), free, prompts, right=right)
        assert run(target, peeking, prompts, GREEDY, ends=ends).tokens == wanted


@pytest.mark.parametrize("sampler", [GREEDY, dataclasses.replace(SAMPLED, temperature=0.7)])
def test_a_trained_target_with_an_ngram_drafter(sampler):
    """Text that can be drafted: many drafts are accepted, and the target's own loop is Hugging Face's."""
    target = Target(DEMO, (1,), CPU, dtype="float64", dense=True)
    prompts = [prompt["tokens"][: 20 + i] for i, prompt in enumerate(json.loads(PROMPTS.read_text())[:5])]
    plain = decode.plain(target, prompts, sampler, new_tokens=24, ends={0})
    counts = ngram.Counts([np.array(prompt) for prompt in prompts])
    decoded = decode.speculative(target, ngram.NGramProposer(counts, size=3), prompts, sampler, new_tokens=24, ends={0})
    assert decoded.tokens == plain.tokens
    if sampler.temperature == 0:
        assert decoded.accepted[0] > 1.25 * decoded.accepted[1]
        model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float64)
        for prompt, text in zip(prompts, plain.tokens, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *text]])).logits[0, len(prompt) - 1 : -1]
            assert logits.argmax(-1).tolist() == text


def test_bfloat16_leaves_plain_decoding_at_small_gaps_alone(build):
    case = dataclasses.replace(CASES["two layers, blocks of eight"], dtype="bfloat16")
    target, drafter = build(case)
    prompts = [prompt for seed in range(6) for prompt in prompts_of(seed)]
    plain = decode.plain(target, prompts, GREEDY, new_tokens=NEW)
    for proposer in (
        Peeking(proposer_of(case, target, drafter), plain.tokens, prompts),
        proposer_of(case, target, drafter),
    ):
        found = equality.divergences(plain, run(target, proposer, prompts, GREEDY))
        assert not any(divergence.real(torch.bfloat16) for divergence in found), found


def test_ngram_backs_off_from_its_own_row_to_the_counts():
    counts = ngram.Counts([np.array([1, 2, 3, 1, 2, 4, 1, 2, 3])])
    assert counts.next([9, 1, 2]) == 3 and counts.next([9, 9]) in (1, 2) and counts.next([3]) == 1
    proposer = ngram.NGramProposer(counts, size=2)
    proposer.begin(None, torch.tensor([7]))
    assert proposer.propose([[5, 1, 2, 8, 7, 5, 1, 2]], torch.tensor([7])).tokens.tolist() == [[8, 7]]
