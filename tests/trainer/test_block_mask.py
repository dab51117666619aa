"""Masks, anchors, labels: pure functions held against slow twins."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer import anchors, block_mask, data
from trainer.attention import attend, attend_blocks
from trainer.loss import block_loss, labels_and_weights


@st.composite
def packed_rows(draw, length: int = 24):
    """Rows of a few documents each, some with prompts, and perhaps padding at the end."""
    count = draw(st.integers(1, 6))
    documents = []
    for _ in range(count):
        size = draw(st.integers(1, length))
        documents.append((np.arange(size) + 2, draw(st.integers(0, size))))
    return data.pack(documents, length, padding=1)


def intervals(rows: data.Rows, seed: int, slots: int):
    anchor, keep = anchors.draw(seed, 3, allowed=anchors.eligible(rows), slots=slots)
    return rows.start.gather(1, anchor), anchor, keep


@settings(max_examples=60, deadline=None)
@given(packed_rows(), st.integers(0, 1000), st.integers(1, 6), st.integers(2, 4))
def test_dense_mask_equals_its_brute_force_twin(rows, seed, slots, block):
    lo, hi, keep = intervals(rows, seed, slots)
    fast = block_mask.dense(lo, hi, keep, context=24, block=block)
    assert torch.equal(fast, block_mask.brute_force(lo, hi, keep, context=24, block=block))


def test_the_anchors_own_feature_is_not_visible():
    lo, hi, keep = torch.tensor([[2]]), torch.tensor([[5]]), torch.tensor([[True]])
    allow = block_mask.dense(lo, hi, keep, context=8, block=2)
    assert allow[0, 0].tolist() == [False, False, True, True, True, False, False, False, True, True]
    assert block_mask.visible_context(lo, hi, context=8)[0, 0].nonzero().flatten().tolist() == [2, 3, 4]


@settings(max_examples=60, deadline=None)
@given(packed_rows(), st.integers(0, 1000), st.integers(1, 30))
def test_anchors_are_valid_sorted_distinct_and_reproducible(rows, seed, slots):
    allowed = anchors.eligible(rows)
    anchor, keep = anchors.draw(seed, 7, allowed=allowed, slots=slots)
    again, _ = anchors.draw(seed, 7, allowed=allowed, slots=slots)
    assert torch.equal(anchor, again)
    assert anchor.shape == keep.shape == (len(rows), slots)
    assert (anchor.diff(dim=1) >= 0).all()
    for r in range(len(rows)):
        kept = anchor[r][keep[r]].tolist()
        assert len(set(kept)) == len(kept) == min(slots, int(allowed[r].sum()))
        for a in kept:
            assert rows.generated[r, a] and rows.generated[r, a + 1]
            assert rows.start[r, a] == rows.start[r, a + 1]


def test_anchors_change_with_the_step_and_the_seed():
    allowed = torch.ones(2, 100, dtype=torch.bool)
    first, _ = anchors.draw(0, 0, allowed=allowed, slots=10)
    assert not torch.equal(first, anchors.draw(0, 1, allowed=allowed, slots=10)[0])
    assert not torch.equal(first, anchors.draw(1, 0, allowed=allowed, slots=10)[0])


@settings(max_examples=40, deadline=None)
@given(packed_rows(), st.integers(0, 1000), st.integers(2, 5))
def test_labels_stay_in_the_document(rows, seed, block):
    _, anchor, keep = intervals(rows, seed, 6)
    labels, weights = labels_and_weights(rows, anchor, keep, block=block, gamma=2.0)
    for r in range(len(rows)):
        for n in range(6):
            a = int(anchor[r, n])
            for j in range(1, block):
                inside = a + j < int(rows.end[r, a]) and bool(rows.generated[r, min(a + j, 23)])
                expected = float(np.exp(-(j - 1) / 2.0)) if keep[r, n] and inside else 0.0
                assert weights[r, n, j - 1] == pytest.approx(expected)
                if expected:
                    assert labels[r, n, j - 1] == rows.tokens[r, a + j]


@settings(max_examples=30, deadline=None)
@given(packed_rows(), st.integers(0, 1000), st.integers(2, 4), st.sampled_from([1, 2, 4]))
def test_block_attention_equals_dense_attention(rows, seed, block, kv_heads):
    torch.manual_seed(seed)
    lo, hi, keep = intervals(rows, seed, 5)
    size, count = 5 * block, len(rows)
    query = torch.randn(count, 4, size, 8)
    context, own = ([torch.randn(count, kv_heads, n, 8) for _ in range(2)] for n in (24, size))
    sees = block_mask.visible_context(lo, hi, context=24)
    fast = attend_blocks(query, tuple(context), tuple(own), sees, keep)
    key, value = (torch.cat(pair, dim=2) for pair in zip(context, own, strict=True))
    plain = attend(query, key, value, block_mask.dense(lo, hi, keep, context=24, block=block))
    torch.testing.assert_close(fast, plain, atol=2e-6, rtol=2e-5)


def test_attention_equals_softmax_written_out():
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    allow = torch.tensor([[[1, 1, 0, 0, 1], [0, 0, 0, 0, 0], [0, 1, 0, 0, 0]]], dtype=torch.bool)
    result = attend(query, key, value, allow)
    for head in range(4):
        scores = query[0, head] @ key[0, head // 2].T / 8**0.5
        weights = scores.masked_fill(~allow[0], float("-inf")).softmax(-1).nan_to_num()
        torch.testing.assert_close(result[0, head], weights @ value[0, head // 2])


def test_a_batch_without_anchors_has_no_weight_and_a_finite_loss():
    rows = data.pack([(np.arange(8), 8)], 8, padding=1)
    anchor, keep = anchors.draw(0, 0, allowed=anchors.eligible(rows), slots=3)
    labels, weights = labels_and_weights(rows, anchor, keep, block=3, gamma=2.0)
    total, measured = block_loss(torch.randn(1, 3, 3, 4), torch.randn(9, 4), labels, weights)
    assert total == 0 and measured["loss"] == (0.0, 0.0)


def test_the_loss_against_a_one_hot_distribution_is_the_loss_against_its_token():
    torch.manual_seed(0)
    hidden, head = torch.randn(2, 3, 4, 8), torch.randn(11, 8)
    labels, weights = torch.randint(11, (2, 3, 3)), torch.rand(2, 3, 3)
    by_token, _ = block_loss(hidden, head, labels, weights)
    one_hot = torch.nn.functional.one_hot(labels, 11).float()
    by_distribution, _ = block_loss(hidden, head, labels, weights, one_hot)
    torch.testing.assert_close(by_token, by_distribution)
