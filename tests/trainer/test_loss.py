"""D-PACE weights against a loop over slots, and the plain head pass against numbers worked out by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.loss import Objective, dpace_weights, plain_head_pass


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


SLOT = st.tuples(st.floats(0, 8), st.booleans())  # nll; counted


def by_loops(blocks, alpha):
    """blocks: lists of (nll, counted) in order of position -> weights, block after block."""
    weights = []
    for slots in blocks:
        survival, product = [], 1.0
        for nll, counted in slots:
            if counted:
                product *= (1 - alpha) * math.exp(-nll) + alpha
            survival.append(product if counted else 0.0)
        weights += [sum(survival[j:]) if counted else 0.0 for j, (_, counted) in enumerate(slots)]
    return weights


def flat(blocks):
    """Tensors (nll, counted, block, position) of the slots of `blocks`."""
    slots = [(nll, counted, b, p) for b, each in enumerate(blocks) for p, (nll, counted) in enumerate(each)]
    nll, counted, block, position = zip(*slots, strict=True)
    return torch.tensor(nll), torch.tensor(counted), torch.tensor(block), torch.tensor(position)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(SLOT, min_size=1, max_size=5), min_size=1, max_size=4), st.floats(0, 1))
def test_dpace_is_the_loop(blocks, alpha):
    weights = dpace_weights(*flat(blocks), alpha=alpha)
    torch.testing.assert_close(weights, torch.tensor(by_loops(blocks, alpha)), rtol=1e-13, atol=1e-15)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.lists(SLOT, min_size=1, max_size=5), min_size=1, max_size=4), st.floats(0, 1), st.randoms())
def test_a_slot_that_is_not_counted_may_as_well_be_absent(blocks, alpha, random):
    nll, counted, block, position = flat(blocks)
    whole = dpace_weights(nll, counted, block, position, alpha=alpha)
    order = torch.tensor(random.sample(range(len(nll)), len(nll)))  # nor does the order of entries matter
    kept = order[counted[order]]
    alone = dpace_weights(nll[kept], counted[kept], block[kept], position[kept], alpha=alpha)
    torch.testing.assert_close(alone, whole[kept], rtol=1e-13, atol=0)
    assert not whole[~counted].any()


def test_dpace_at_its_ends():
    nll, counted, block, position = flat([[(0.5, True), (9.0, True), (2.0, True)]])
    ones = dpace_weights(nll, counted, block, position, alpha=1.0)
    assert ones.tolist() == [3, 2, 1]  # nothing depends on the drafter any more
    nll[1] = torch.inf
    never = dpace_weights(nll, counted, block, position, alpha=0.0)
    torch.testing.assert_close(never, torch.tensor([math.exp(-0.5), 0, 0]))  # behind a slot that never hits


def one_slot(z, label=0, **settings):
    """The plain pass over a single slot whose logits are `z`, and whose target logits are settings["t"]."""
    t = settings.pop("t", None)
    index = torch.zeros(1, dtype=torch.int64)
    hidden = torch.tensor([z], requires_grad=True)
    result = plain_head_pass(
        hidden,
        torch.eye(len(z)),
        label=torch.tensor([label]),
        weight=torch.tensor([2.0], dtype=torch.float32),
        block=index,
        position=index,
        chunk=1,
        objective=Objective(**settings),
        teacher=None if t is None else torch.tensor([t]),
        source=index,
    )
    return result, hidden


def test_losses_by_hand():
    z = [math.log(0.5), math.log(0.3), math.log(0.2)]  # q
    t = [2 * math.log(0.2), 2 * math.log(0.6), 2 * math.log(0.2)]  # p = 0.2, 0.6, 0.2 at temperature 2
    ce = -math.log(0.3)
    kl = 0.2 * math.log(0.2 / 0.5) + 0.6 * math.log(0.6 / 0.3)
    tv = 0.3
    for mixture in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (0.5, 0.25, 3)):
        names = dict(zip(("cross_entropy", "kl", "tv"), map(float, mixture), strict=True))
        result, hidden = one_slot(z, label=1, t=t, temperature=2.0, **names)
        expected = mixture[0] * ce + mixture[1] * kl + mixture[2] * tv
        assert result.total.item() == pytest.approx(2 * expected, rel=1e-12)
        assert result.nll.item() == pytest.approx(ce, rel=1e-12)
        assert (result.rank.item(), result.weight.item()) == (1, 2)
        result.total.backward()
        assert hidden.grad.abs().sum() > 0


def test_the_drafter_learns_the_tempered_distribution_itself():
    t = [0.3, -1.0, 2.0]
    for temperature in (0.5, 1.0, 3.0):
        tempered = [each / temperature for each in t]
        result, hidden = one_slot(tempered, t=t, temperature=temperature, cross_entropy=0, kl=1)
        result.total.backward()
        torch.testing.assert_close(result.total.detach(), torch.tensor(0.0))
        torch.testing.assert_close(hidden.grad, torch.zeros(1, 3))


def test_equal_logits_count_for_the_label():
    result, _ = one_slot([1.0, 3.0, 3.0, 3.0, 4.0], label=3)
    assert result.rank.item() == 1


def test_distillation_without_a_teacher_is_refused():
    with pytest.raises(ValueError, match="teacher"):
        one_slot([1.0, 2.0], kl=1.0)
