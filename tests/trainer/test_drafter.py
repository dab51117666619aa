"""The drafter against the definition of DFlash, and decoding against plain decoding, on the shipped target."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from trainer import block_mask, checkpoint, data, decode, evaluate, ngram
from trainer.config import load
from trainer.drafter import Drafter, rotate
from trainer.loop import draft_blocks
from trainer.target import Target

DEMO = Path(__file__).parents[2] / "trainer" / "configs" / "demo.yaml"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def parts():
    torch.set_num_threads(2)
    config = load(DEMO, ["evaluate.new_tokens=24", "drafter.layers=2", "drafter.block_size=4"])
    config = dataclasses.replace(config, seed=5)
    target, drafter, evaluator = evaluate.build(config, CPU)
    with torch.no_grad():  # away from the start, where layers do nothing and a wrong one would not show
        generator = torch.Generator().manual_seed(1)
        for parameter in drafter.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    evaluator.prompts = [prompt[: 20 + 7 * i] for i, prompt in enumerate(evaluator.prompts[:6])]
    return config, target, drafter, evaluator


def test_features_are_the_stream_after_a_layer_and_before_the_final_norm(parts):
    config, _, _, evaluator = parts
    target = Target(config.target.path, (0, 3, 5), CPU)
    tokens = torch.tensor([evaluator.prompts[0]])
    last, features = target.inspect(tokens, torch.zeros_like(tokens))
    features = features.unflatten(-1, (3, -1))
    model = AutoModelForCausalLM.from_pretrained(config.target.path, dtype=torch.float32)
    with torch.no_grad():
        reference = model(tokens, output_hidden_states=True)
        torch.testing.assert_close(features[:, :, 0], reference.hidden_states[1], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(features[:, :, 1], reference.hidden_states[4], atol=1e-4, rtol=1e-4)
        # Hugging Face's last entry is after the final norm; the feature is before it
        assert not torch.allclose(features[:, :, 2], reference.hidden_states[6], atol=0.1)
        normed = model.model.norm(features[:, :, 2])
        torch.testing.assert_close(normed, reference.hidden_states[6], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(last @ target.head.T, reference.logits, atol=1e-3, rtol=1e-3)


def packed(evaluator) -> data.Rows:
    documents = [(np.array(prompt), 2) for prompt in evaluator.prompts[:4]]
    return data.pack(documents, 96, padding=1)


def test_packed_documents_do_not_see_each_other(parts):
    _, target, drafter, evaluator = parts
    rows = packed(evaluator)
    anchor = torch.tensor([[8, 30]] * len(rows))
    assert rows.start[0, 30] == 20  # the second document begins at 20
    other = dataclasses.replace(rows, tokens=rows.tokens.clone())
    other.tokens[:, :20] = 7

    def hidden(of: data.Rows):
        _, features = target.inspect(of.tokens, of.start)
        lo = of.start.gather(1, anchor)
        seen = block_mask.visible_context(lo, anchor, context=96), torch.ones_like(anchor, dtype=torch.bool)
        with torch.no_grad():
            return draft_blocks(drafter, target, of, features, anchor, seen, block=4, mask=1)

    first, second = hidden(rows), hidden(other)
    torch.testing.assert_close(first[0, 1], second[0, 1], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(first[0, 0], second[0, 0], atol=1e-2)


def test_positions_restart_in_every_document(parts):
    """A document drafts the same alone and behind another one, so its positions must be its own."""
    _, target, drafter, evaluator = parts
    row = packed(evaluator)
    alone = data.pack([(np.array(evaluator.prompts[1]), 2)], 96, padding=1)
    results = []
    for rows, anchor in ((row, torch.tensor([[20 + 12]])), (alone, torch.tensor([[12]]))):
        rows = rows.take(torch.tensor([0]), CPU)
        _, features = target.inspect(rows.tokens, rows.start)
        seen = block_mask.visible_context(rows.start.gather(1, anchor), anchor, context=96), torch.tensor([[True]])
        with torch.no_grad():
            results.append(draft_blocks(drafter, target, rows, features, anchor, seen, block=4, mask=1))
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-5)


def naive_block(drafter: Drafter, embedding, features, token: int, mask: int, start: int, block: int):
    """One block by one document's definition, with loops over layers and heads and nothing shared but parameters."""
    shape = drafter.shape

    def norm(x, weight):
        return x * (x.pow(2).mean(-1, keepdim=True) + shape.epsilon).rsqrt() * weight

    def spin(x, positions):
        out = torch.empty_like(x)
        half = x.shape[-1] // 2
        for row, position in enumerate(positions):
            for i in range(half):
                angle = position * shape.rope_base ** (-i / half)
                a, b = x[row, i], x[row, i + half]
                out[row, i] = a * math.cos(angle) - b * math.sin(angle)
                out[row, i + half] = b * math.cos(angle) + a * math.sin(angle)
        return out

    context = norm(features[:start] @ drafter.fc.weight.T, drafter.hidden_norm.weight)
    x = embedding[torch.tensor([token] + [mask] * (block - 1))]
    places = list(range(start + block))
    d = shape.head_size
    for layer in drafter.layers:
        attention = layer.self_attn
        n = norm(x, layer.input_layernorm.weight)
        both = torch.cat([context, n])
        heads = []
        for head in range(shape.heads):
            group = head // (shape.heads // shape.kv_heads)
            q = (n @ attention.q_proj.weight.T)[:, head * d : (head + 1) * d]
            k = (both @ attention.k_proj.weight.T)[:, group * d : (group + 1) * d]
            v = (both @ attention.v_proj.weight.T)[:, group * d : (group + 1) * d]
            q = spin(norm(q, attention.q_norm.weight), places[start:])
            k = spin(norm(k, attention.k_norm.weight), places)
            heads.append((q @ k.T / d**0.5).softmax(-1) @ v)
        x = x + torch.cat(heads, -1) @ attention.o_proj.weight.T
        n = norm(x, layer.post_attention_layernorm.weight)
        gate, up = n @ layer.mlp.gate_proj.weight.T, n @ layer.mlp.up_proj.weight.T
        x = x + (gate * torch.sigmoid(gate) * up) @ layer.mlp.down_proj.weight.T
    return norm(x, drafter.norm.weight)


@torch.no_grad()
def test_the_drafter_equals_a_naive_one_block_at_a_time(parts):
    _, target, drafter, evaluator = parts
    rows = data.pack([(np.array(evaluator.prompts[3]), 2)], 41, padding=1)
    _, features = target.inspect(rows.tokens, rows.start)
    anchor = torch.tensor([[5, 17, 30]])
    seen = block_mask.visible_context(torch.zeros_like(anchor), anchor, context=41), torch.ones(1, 3, dtype=torch.bool)
    fast = draft_blocks(drafter, target, rows, features, anchor, seen, block=4, mask=1)
    for n, a in enumerate(anchor[0].tolist()):
        slow = naive_block(drafter, target.embedding, features[0], int(rows.tokens[0, a]), 1, a, 4)
        torch.testing.assert_close(fast[0, n], slow, atol=2e-4, rtol=2e-4)


def test_rotation_depends_on_the_distance_alone():
    torch.manual_seed(0)
    query, key = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)

    def score(i: int, j: int):
        return rotate(query, torch.tensor([[i]]), 1e4) @ rotate(key, torch.tensor([[j]]), 1e4).mT

    torch.testing.assert_close(score(7, 3), score(104, 100), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(score(0, 0), query @ key.mT)


class Uncached:
    """A proposer without any cache: the target reads the whole row anew and the drafter all its features."""

    def __init__(self, drafter, target, size):
        self.drafter, self.target, self.size = drafter, target, size

    def begin(self, features, lengths): ...

    def accept(self, features, positions): ...

    def keep(self, rows): ...

    @torch.no_grad()
    def propose(self, histories, start):
        drafts = []
        for history in histories:
            rows = data.pack([(np.array(history), 0)], len(history), padding=1)
            _, features = self.target.inspect(rows.tokens, rows.start)
            a = torch.tensor([[len(history) - 1]])
            seen = block_mask.visible_context(torch.zeros_like(a), a, context=len(history)), torch.tensor([[True]])
            block = self.size + 1
            hidden = draft_blocks(self.drafter, self.target, rows, features, a, seen, block=block, mask=1)
            drafts.append((hidden[0, 0, 1:] @ self.target.head.T).argmax(-1))
        return torch.stack(drafts)


def speculate(evaluator, proposer, temperature):
    return decode.speculative(
        evaluator.target, proposer, evaluator.prompts, evaluator.sampler(temperature), new_tokens=24, end=0
    )


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_cached_drafting_equals_uncached_drafting(parts, temperature):
    _, target, drafter, evaluator = parts
    cached = speculate(evaluator, evaluator.proposer(drafter), temperature)
    uncached = speculate(evaluator, Uncached(drafter, target, 3), temperature)
    assert cached.tokens == uncached.tokens and cached.accepted == uncached.accepted


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_speculative_equals_plain_and_plain_equals_hugging_face(parts, temperature):
    config, _, drafter, evaluator = parts
    plain = evaluator.plain(temperature)
    assert speculate(evaluator, evaluator.proposer(drafter), temperature).tokens == plain.tokens
    counts = ngram.Counts([np.array(prompt) for prompt in evaluator.prompts])
    by_ngram = speculate(evaluator, ngram.NGramProposer(counts, size=3), temperature)
    assert by_ngram.tokens == plain.tokens and by_ngram.accepted[0] > by_ngram.accepted[1]
    if temperature:
        return
    model = AutoModelForCausalLM.from_pretrained(config.target.path, dtype=torch.float32)
    for prompt, text in zip(evaluator.prompts[:2], plain.tokens, strict=False):
        row = list(prompt)
        for _ in text:
            with torch.no_grad():
                row.append(int(model(torch.tensor([row])).logits[0, -1].argmax()))
        assert row[len(prompt) :] == text


def test_a_perfect_drafter_is_accepted_whole(parts):
    _, _, _, evaluator = parts
    texts = evaluator.plain(0.0).tokens

    class Oracle(Uncached):
        def propose(self, histories, start):
            drafts = []
            for history in histories:
                number = next(
                    i for i, p in enumerate(evaluator.prompts) if history[: len(p)] == p and len(p) <= len(history)
                )
                done = len(history) - len(evaluator.prompts[number])
                drafts.append([*texts[number], 0, 0, 0][done : done + 3])
            return torch.tensor(drafts)

    result = speculate(evaluator, Oracle(None, None, 3), 0.0)
    assert result.tokens == texts
    assert result.accepted[0] / result.accepted[1] > 3.5  # all but the rounds cut off at the limit


def test_noise_depends_on_its_key_alone():
    small = decode.gumbel_noise(3, prompts=1, length=4, vocabulary=16)
    large = decode.gumbel_noise(3, prompts=2, length=9, vocabulary=16)
    assert torch.equal(small[0], large[0, :4]) and not torch.equal(large[0], large[1])


def test_ngram_backs_off_from_its_own_row_to_the_counts():
    counts = ngram.Counts([np.array([1, 2, 3, 1, 2, 4, 1, 2, 3])])
    assert counts.next([9, 1, 2]) == 3 and counts.next([9, 9]) in (1, 2) and counts.next([3]) == 1
    proposer = ngram.NGramProposer(counts, size=2)
    proposer.begin(None, torch.tensor([7]))
    assert proposer.propose([[5, 1, 2, 8, 7, 5, 1, 2]], None).tolist() == [[8, 7]]


def test_checkpoints_are_whole_and_refuse_other_settings(parts, tmp_path):
    config, _, drafter, _ = parts
    from trainer.errors import TrainerError
    from trainer.optimizer import Optimizer

    optimizer = Optimizer(drafter, config.optimizer, 10)
    state = checkpoint.State(step=3, settings=checkpoint.settings_of(config), seconds=1.0, start={})
    for step in (3, 4, 10):
        checkpoint.save(tmp_path, drafter, optimizer, dataclasses.replace(state, step=step), keep=2)
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["step-000004", "step-000010"]
    path = tmp_path / "step-000010"
    assert checkpoint.read_state(path, config).step == 10
    with pytest.raises(TrainerError, match="written with seed = 5, the configuration says 6"):
        checkpoint.read_state(path, dataclasses.replace(config, seed=6))
    (path / "drafter.safetensors").write_bytes(b"cut")
    with pytest.raises(TrainerError, match="cannot be loaded"):
        checkpoint.load(path, drafter)
    (path / "state.json").write_text(json.dumps({"step": 1}))
    with pytest.raises(TrainerError, match="not a readable checkpoint"):
        checkpoint.read_state(path, config)
