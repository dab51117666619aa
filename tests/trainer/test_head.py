"""The chunked head pass equals the plain one in float64, and never holds the logits of all slots."""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer.head import Objective, _measure, _slope, head_pass
from trainer.loss import plain_head_pass

H, T = 7, 19
MIXTURES = {
    "ce": {},
    "kl": {"cross_entropy": 0.0, "kl": 1.0},
    "tv": {"cross_entropy": 0.0, "tv": 1.0},
    "ce+tv": {"cross_entropy": 0.1, "tv": 1.8},
    "kl+tv": {"cross_entropy": 0.0, "kl": 0.6, "tv": 0.5},
    "all": {"cross_entropy": 0.3, "kl": 0.7, "tv": 0.2, "temperature": 0.6},
    "hot": {"cross_entropy": 0.0, "kl": 1.0, "tv": 1.0, "temperature": 2.5},
}


def batch(*, entries, chunk, vocabulary=37, pad=True, seed=0, dtype=torch.float64, scale=1.0):
    """Arguments of a head pass with about `entries` supervised ones in blocks of 1 to 4, cut as batches are."""
    draw = torch.Generator().manual_seed(seed)

    def integer(high):
        return int(torch.randint(high, (), generator=draw))

    block, position, weight, size = [], [], [], min(4, chunk)

    def fill():
        room = -len(block) % chunk
        block.extend([0] * room), position.extend([0] * room), weight.extend([0.0] * room)

    for number in itertools.count():
        members = [j for j in range(size) if integer(4)] or [0]
        if len(block) + len(members) > entries:
            break
        if len(block) // chunk != (len(block) + len(members) - 1) // chunk:
            fill()
        block += [number] * len(members)
        position += members
        weight += [0.8**j for j in members]
    if pad:
        fill()
    many = len(block)
    normal = {"generator": draw, "dtype": torch.float64}
    return {
        "hidden": (scale * torch.randn(many, H, **normal)).to(dtype).requires_grad_(),
        "head": torch.randn(vocabulary, H, **normal).to(dtype),
        "label": torch.randint(vocabulary, (many,), generator=draw),
        "weight": torch.tensor(weight, dtype=torch.float32),
        "block": torch.tensor(block, dtype=torch.int64),
        "position": torch.tensor(position, dtype=torch.int64),
        "chunk": chunk,
        "teacher": torch.randn(T, H, **normal).to(dtype),
        "source": torch.randint(T, (many,), generator=draw),
    }


def run(head, given, objective):
    """(result, gradient of 1.7 * total)."""
    hidden = given["hidden"].detach().clone().requires_grad_()
    result = head(**{**given, "hidden": hidden}, objective=objective)
    (1.7 * result.total).backward()
    return result, hidden.grad


def same(given, objective, **tolerance):
    tolerance = tolerance or {"rtol": 1e-12, "atol": 1e-12}
    (fast, gradient), (plain, expected) = (run(head, given, objective) for head in (head_pass, plain_head_pass))
    for name in ("total", "weight", "nll"):
        torch.testing.assert_close(getattr(fast, name).detach(), getattr(plain, name).detach(), **tolerance)
    assert torch.equal(fast.rank, plain.rank) and fast.rank.dtype == torch.int32
    torch.testing.assert_close(gradient, expected, **tolerance)
    return fast, gradient


@pytest.mark.parametrize("weights", ["decay", "dpace"])
@pytest.mark.parametrize("mixture", MIXTURES)
def test_equals_the_plain_pass(mixture, weights):
    objective = Objective(**MIXTURES[mixture], weights=weights, alpha=0.3)
    for seed, (chunk, pad) in enumerate([(4, True), (5, True), (8, False), (16, True), (512, False), (512, True)]):
        given = batch(entries=75, chunk=chunk, pad=pad, seed=seed, vocabulary=(2, 37, 64)[seed % 3])
        if chunk == 16:
            given["weight"] = given["weight"].double()  # a wider weight is taken as it is
        result, gradient = same(given, objective)
        assert result.total > 0 and gradient.any()


def test_the_size_of_a_chunk_changes_nothing():
    given = batch(entries=60, chunk=60)
    blocks = given["block"]
    for weights in ("decay", "dpace"):
        objective = Objective(**MIXTURES["all"], weights=weights)
        whole, expected = run(head_pass, given, objective)
        starts = [0, *((blocks[1:] != blocks[:-1]).nonzero()[:, 0] + 1).tolist(), len(blocks)]
        total = 0
        for begin, end in itertools.pairwise(starts):  # one block at a time, and none of the others there
            part = {
                name: value[begin:end] if torch.is_tensor(value) and len(value) == len(blocks) else value
                for name, value in given.items()
            }
            alone, gradient = run(head_pass, part, objective)
            total = total + alone.total.detach()
            torch.testing.assert_close(gradient, expected[begin:end], rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(total, whole.total.detach(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("mixture", ["ce", "kl", "tv", "all"])
def test_gradcheck(mixture):
    given = batch(entries=9, chunk=4, vocabulary=11)
    hidden = given.pop("hidden")
    decay = Objective(**MIXTURES[mixture])
    dpace = Objective(**MIXTURES[mixture], weights="dpace", alpha=1.0)  # weights that do not follow hidden
    for objective in (decay, dpace):
        assert torch.autograd.gradcheck(lambda x, o=objective: head_pass(x, **given, objective=o).total, hidden)


def test_weights_have_no_gradient():
    given = batch(entries=30, chunk=8)
    first, gradient = run(head_pass, given, Objective(weights="dpace"))
    given["weight"] = (given["weight"] > 0).float() * 0.123  # D-PACE only asks which count
    second, again = run(head_pass, given, Objective(weights="dpace"))
    assert torch.equal(first.total, second.total) and torch.equal(gradient, again)
    assert not (first.weight.requires_grad or first.nll.requires_grad or first.rank.requires_grad)


@pytest.mark.parametrize("weights", ["decay", "dpace"])
def test_padding_contributes_nothing_whatever_it_holds(weights):
    objective = Objective(**MIXTURES["all"], weights=weights)
    given = batch(entries=50, chunk=7, dtype=torch.float32)
    padding = given["weight"] == 0
    assert padding.any()
    result, gradient = run(head_pass, given, objective)
    given["hidden"] = torch.where(padding[:, None], 3e38, given["hidden"].detach())  # logits overflow
    for head in (head_pass, plain_head_pass):
        wild, again = run(head, given, objective)
        for name in ("nll", "rank"):
            assert not getattr(wild, name)[padding].any()
        assert not again[padding].any()
        torch.testing.assert_close(wild.total, result.total)
        torch.testing.assert_close(again, gradient)
    fast, again = run(head_pass, given, objective)
    assert torch.equal(fast.total, result.total) and torch.equal(again, gradient)


@pytest.mark.parametrize("weights", ["decay", "dpace"])
@pytest.mark.parametrize("entries", [0, 20])
def test_a_batch_without_anchors_takes_a_step_of_nothing(entries, weights):
    given = batch(entries=entries, chunk=8)
    given["weight"] = torch.zeros_like(given["weight"])
    result, gradient = same(given, Objective(**MIXTURES["all"], weights=weights))
    assert result.total == 0 and result.weight == 0
    assert gradient.shape == given["hidden"].shape and not gradient.any()


def test_no_gradient_is_formed_when_none_is_wanted():
    given = batch(entries=20, chunk=8)
    objective = Objective(**MIXTURES["all"])
    expected = head_pass(**given, objective=objective)
    with torch.no_grad():
        quiet = head_pass(**given, objective=objective)
    frozen = head_pass(**{**given, "hidden": given["hidden"].detach()}, objective=objective)
    for result in (quiet, frozen):
        assert not result.total.requires_grad
        assert torch.equal(result.total, expected.total) and torch.equal(result.rank, expected.rank)
    products = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            products.append(function in (torch.ops.aten.mm.default, torch.ops.aten.mm.out))
            return function(*args, **(kwargs or {}))

    detached, enabled = given["hidden"].detach(), given["hidden"]
    for hidden, grad, each_chunk in ((detached, True, 2), (enabled, False, 2), (enabled, True, 3)):
        products.clear()
        with Products(), torch.set_grad_enabled(grad):
            head_pass(**{**given, "hidden": hidden}, objective=objective)
        assert sum(products) == each_chunk * -(-len(given["label"]) // 8)


def test_logits_of_all_slots_never_exist():
    vocabulary, chunk = 101, 8
    given = batch(entries=400, chunk=chunk, vocabulary=vocabulary)
    largest = 0

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            largest = max([largest, *(each.numel() for each in tree_leaves(out) if isinstance(each, torch.Tensor))])
            return out

    bound = max(chunk * vocabulary, given["hidden"].numel())
    assert bound < len(given["label"]) * vocabulary / 10
    for weights in ("decay", "dpace"):
        with Largest():
            run(head_pass, given, Objective(**MIXTURES["all"], weights=weights))
        assert largest <= bound
    with Largest():
        run(plain_head_pass, given, Objective())
    assert largest > bound  # it would have been seen


def test_arguments_are_left_as_they_were():
    given = batch(entries=30, chunk=8, dtype=torch.float32)
    before = {name: value.clone() for name, value in given.items() if torch.is_tensor(value)}
    hidden = given["hidden"]
    result = head_pass(**given, objective=Objective(**MIXTURES["all"], weights="dpace"))
    result.total.backward(retain_graph=True)
    first = hidden.grad.clone()
    result.total.backward()
    torch.testing.assert_close(hidden.grad, 2 * first)  # a second backward finds what the first one found
    for name, value in before.items():
        assert torch.equal(value, given[name])


@pytest.mark.parametrize("weights", ["decay", "dpace"])
def test_bfloat16_is_near_the_float32_twin(weights):
    objective = Objective(**MIXTURES["all"], weights=weights)
    given = batch(entries=200, chunk=16, vocabulary=300, dtype=torch.bfloat16)
    wide = {name: v.float() if torch.is_tensor(v) and v.is_floating_point() else v for name, v in given.items()}
    result, gradient = run(head_pass, given, objective)
    expected, exact = run(plain_head_pass, wide, objective)
    assert gradient.dtype == torch.bfloat16 and result.nll.dtype == torch.float32
    torch.testing.assert_close(result.nll, expected.nll, rtol=0.01, atol=0.03)
    torch.testing.assert_close(result.total, expected.total.detach(), rtol=0.01, atol=0)
    error = (gradient.float() - exact).norm(dim=1) / exact.norm(dim=1).clamp(min=1e-6)
    assert error.max() < 0.05 and error.median() < 0.01


def test_a_head_of_another_dtype_is_converted():
    given = batch(entries=30, chunk=8, dtype=torch.float32)
    expected, gradient = run(head_pass, given, Objective(**MIXTURES["all"]))
    given["head"], given["teacher"] = given["head"].double(), given["teacher"].double()
    result, again = run(head_pass, given, Objective(**MIXTURES["all"]))
    torch.testing.assert_close(result.total, expected.total)
    torch.testing.assert_close(gradient, again)


def test_ranks_and_ties():
    given = batch(entries=20, chunk=8)
    given["head"] = torch.randint(-1, 2, given["head"].shape).double()
    given["hidden"] = given["hidden"].detach().round().requires_grad_()  # whole numbers: many equal logits
    result = head_pass(**given, objective=Objective())
    logits = (given["hidden"] @ given["head"].T).detach().tolist()
    for row, label, weight, rank in zip(logits, given["label"], given["weight"], result.rank, strict=True):
        assert rank == (sum(each > row[label] for each in row) if weight else 0)


def test_distillation_without_a_teacher_is_refused():
    given = batch(entries=20, chunk=8)
    with pytest.raises(ValueError, match="teacher"):
        head_pass(**{**given, "teacher": None}, objective=Objective(tv=1.0))


def test_what_a_gpu_compiles_can_be_traced_whole():
    """And gives the same. The compiler's own back end runs in test_head_gpu.py."""
    torch.compiler.reset()
    options = {"dynamic": False, "fullgraph": True, "backend": "aot_eager"}
    measure, slope = torch.compile(_measure, **options), torch.compile(_slope, **options)
    given = batch(entries=8, chunk=8)
    label = given["label"]
    logits, wanted = torch.randn(2, len(label), 37, dtype=torch.float64).unbind()
    for weights, mixture in (("dpace", "all"), ("decay", "ce")):
        objective = Objective(**MIXTURES[mixture], weights=weights)
        wanted = wanted if objective.distils else None
        index = (label, given["weight"].double(), given["block"], given["position"], objective)
        with torch.no_grad():
            compiled, eager = measure(logits, wanted, *index), _measure(logits, wanted, *index)
            for name, value in eager._asdict().items():
                torch.testing.assert_close(getattr(compiled, name), value, rtol=1e-12, atol=1e-13)
            again, expected = (each(logits, wanted, label, eager, objective) for each in (slope, _slope))
            torch.testing.assert_close(again, expected, rtol=1e-12, atol=1e-13)
