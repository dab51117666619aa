"""Where blocks begin: eligible tokens, drawn uniformly as a pure function of seed and step."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer import anchors
from trainer.data.rows import Document, pack


@st.composite
def packed(draw):
    lengths = draw(st.lists(st.integers(1, 24), min_size=1, max_size=8))
    generator = np.random.default_rng(draw(st.integers(0, 99)))
    share = draw(st.sampled_from([0.3, 0.8, 1.0]))
    return pack(
        [Document(tokens=generator.integers(2, 50, n), generated=generator.random(n) < share) for n in lengths], 24, 1
    )


@settings(max_examples=40, deadline=None)
@given(packed())
def test_an_eligible_token_and_its_successor_are_generated_in_one_document(rows):
    allowed = anchors.eligible(rows)
    for row in range(len(rows)):
        for i in range(24):
            successor = i + 1 < 24 and rows.start[row, i] == rows.start[row, i + 1] and i + 1 < rows.end[row, i]
            wanted = bool(successor and rows.generated[row, i] and rows.generated[row, i + 1])
            assert bool(allowed[row, i]) == wanted


@settings(max_examples=60, deadline=None)
@given(packed(), st.integers(0, 99), st.integers(1, 30), st.integers(0, 9))
def test_anchors_are_eligible_sorted_distinct_and_as_many_as_there_can_be(rows, seed, slots, more):
    allowed = anchors.eligible(rows)
    anchor, keep = anchors.draw(seed, 7, allowed=allowed, slots=slots, width=slots + more)
    assert anchor.shape == keep.shape == (len(rows), slots + more) and anchor.dtype == torch.int64
    for row in range(len(rows)):
        count = min(slots, int(allowed[row].sum()))
        kept = anchor[row, :count]
        assert keep[row].tolist() == [True] * count + [False] * (slots + more - count)
        assert allowed[row, kept].all() and kept.tolist() == sorted(set(kept.tolist()))
        assert (anchor[row, count:] == 23).all()
    again, _ = anchors.draw(seed, 7, allowed=allowed.clone(), slots=slots, width=slots + more)
    assert torch.equal(anchor, again)


def plain_draw(seed: int, step: int, allowed: torch.Tensor, slots: int) -> list[list[int]]:
    """The allowed positions with the smallest keys, all keys of a step from one stream."""
    keys = np.random.default_rng((seed, 1, step)).random(allowed.shape)
    return [
        sorted(sorted(np.flatnonzero(row), key=lambda i, of=of: of[i])[:slots])
        for row, of in zip(allowed.numpy(), keys, strict=True)
    ]


@settings(max_examples=40, deadline=None)
@given(packed(), st.integers(0, 99), st.integers(0, 99), st.integers(1, 30))
def test_anchors_have_the_smallest_keys_of_their_row(rows, seed, step, slots):
    allowed = anchors.eligible(rows)
    anchor, keep = anchors.draw(seed, step, allowed=allowed, slots=slots)
    got = [row[kept].tolist() for row, kept in zip(anchor, keep, strict=True)]
    assert got == plain_draw(seed, step, allowed, slots)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 99), st.integers(1, 5), st.integers(0, 5))
def test_a_part_of_a_step_has_the_anchors_of_the_whole(seed, size, number):
    allowed = torch.rand(7, 33, generator=torch.Generator().manual_seed(seed)) < 0.7
    whole, _ = anchors.draw(seed, 3, allowed=allowed, slots=9, number=number)
    for first in range(0, 7, size):
        part, _ = anchors.draw(seed, 3, allowed=allowed[first : first + size], slots=9, first=first, number=number)
        assert torch.equal(part, whole[first : first + size])


def test_anchors_change_with_the_step_the_seed_and_the_number():
    allowed = torch.ones(1, 200, dtype=torch.bool)
    draws = [
        anchors.draw(seed, step, allowed=allowed, slots=10, number=number)[0].tolist()
        for seed, step, number in [(0, 0, 0), (0, 1, 0), (1, 0, 0), (0, 0, 1), (0, 0, 2)]
    ]
    assert len({str(each) for each in draws}) == len(draws)


def test_every_allowed_position_is_as_likely():
    allowed = torch.ones(1, 20, dtype=torch.bool)
    allowed[0, [3, 11]] = False
    counts = np.zeros(20)
    for step in range(2000):
        counts[anchors.draw(5, step, allowed=allowed, slots=6)[0].numpy()] += 1
    assert counts[3] == counts[11] == 0
    expected = 2000 * 6 / 18  # binomial, standard deviation 21
    assert (np.abs(counts[allowed[0].numpy()] - expected) < 5 * 21).all()


def test_a_width_less_than_the_slots_is_refused():
    with pytest.raises(ValueError, match="width 2 is less than the 3 slots"):
        anchors.draw(0, 0, allowed=torch.ones(1, 4, dtype=torch.bool), slots=3, width=2)
