"""Updates against their plain twins; schedules; float32 masters behind narrower weights."""

import dataclasses

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from trainer.config import OptimizerConfig  # noqa: E402
from trainer.optimizer import Optimizer, orthogonalise  # noqa: E402
from trainer.schedule import factor  # noqa: E402

ONE = torch.tensor(1.0)


def plain(matrix, iterations=5):
    """Newton-Schulz as it is written down: the whole matrix in every iteration."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix / matrix.norm()
    for _ in range(iterations):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


@pytest.mark.parametrize("shape", [(8, 8), (24, 64), (64, 24), (1, 5)])
def test_iterating_on_the_gram_matrix_is_the_same(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.allclose(orthogonalise(matrix), plain(matrix), atol=1e-6)


def test_singular_values_come_out_near_one():
    matrix = torch.randn(24, 64, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonalise(matrix))
    assert values.min() > 0.6 and values.max() < 1.3


def module(dtype=torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.RMSNorm(9), nn.Linear(9, 4, bias=False)).to(dtype)


def backward(net: nn.Module, number: int, *, scale: float = 1.0) -> None:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(number)).to(next(net.parameters()).dtype)
    (scale * net(x).square().sum()).backward()


def run(optimizer: Optimizer, net: nn.Module, steps: int) -> None:
    for number in range(steps):
        backward(net, number)
        optimizer.apply(number, optimizer.gradient_norm(ONE))


CONFIG = OptimizerConfig(kind="adamw", adam_rate=0.02, weight_decay=0.1, clip=0.5, warmup=0.2, decay=0.5)


def test_adamw_is_torchs_with_clipping_and_the_schedule():
    ours, theirs = module(), module()
    run(Optimizer(ours, CONFIG, 10), ours, 10)
    matrices = [parameter for parameter in theirs.parameters() if parameter.ndim == 2]
    gains = [parameter for parameter in theirs.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=0, betas=(0.9, 0.95))
    for number in range(10):
        reference.zero_grad()
        backward(theirs, number)
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        for group in reference.param_groups:
            group["lr"] = 0.02 * min(1.0, (number + 1) / 2, (10 - number) / 5)
        reference.step()
    for first, second in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(first, second, atol=1e-6, rtol=1e-5)


def test_muon_moves_matrices_by_the_orthogonal_momentum_and_adamw_the_rest():
    config = OptimizerConfig(muon_rate=0.1, adam_rate=0.01, momentum=0.8, clip=0, warmup=0, decay=0, weight_decay=0.5)
    net = module()
    before = [parameter.detach().clone() for parameter in net.parameters()]
    optimizer = Optimizer(net, config, 10)
    backward(net, 0)
    gradients = [parameter.grad.clone() for parameter in net.parameters()]
    optimizer.apply(0, optimizer.gradient_norm(ONE))
    for old, gradient, new in zip(before, gradients, net.parameters(), strict=True):
        if old.ndim == 2:
            nesterov = gradient + 0.8 * (0.2 * gradient - gradient)
            moved = orthogonalise(nesterov) * max(1.0, old.shape[0] / old.shape[1]) ** 0.5
            torch.testing.assert_close(new.detach(), old * (1 - 0.05) - 0.1 * moved, atol=1e-4, rtol=1e-3)
        else:  # the first step of Adam is the sign; gains do not decay
            torch.testing.assert_close(new.detach(), old - 0.01 * gradient.sign(), atol=1e-5, rtol=1e-4)


def test_gradients_are_divided_by_the_weight_of_the_step():
    """However the sum is scaled, and in however many parts it comes."""
    one, parts = module(), module()
    first, second = Optimizer(one, CONFIG, 10), Optimizer(parts, CONFIG, 10)
    backward(one, 0)
    norm = first.gradient_norm(torch.tensor(1.0))
    backward(parts, 0, scale=3.0)
    backward(parts, 0, scale=5.0)
    torch.testing.assert_close(second.gradient_norm(torch.tensor(8.0)), norm)
    reference = torch.cat([parameter.grad.flatten() for parameter in one.parameters()]).norm()
    torch.testing.assert_close(norm, reference)


def test_a_step_of_no_weight_is_a_step_without_a_gradient():
    net = module()
    optimizer = Optimizer(net, dataclasses.replace(CONFIG, weight_decay=0.0), 10)
    before = nn.utils.parameters_to_vector(net.parameters()).clone()
    norm = optimizer.gradient_norm(torch.tensor(0.0))  # no parameter has a gradient at all
    optimizer.apply(0, norm)
    assert norm == 0 and torch.equal(nn.utils.parameters_to_vector(net.parameters()), before)


def test_bf16_weights_follow_float32_masters():
    """A rate too small for bf16 to show still adds up, and many small gradients are added in float32."""
    config = OptimizerConfig(kind="adamw", adam_rate=1e-5, clip=0, warmup=0, decay=0)
    net = module(torch.bfloat16)
    optimizer = Optimizer(net, config, 1000)
    start = {name: master.clone() for name, master in optimizer.masters.items()}
    run(optimizer, net, 50)
    for name, parameter in net.named_parameters():
        master = optimizer.masters[name]
        assert parameter.dtype == torch.bfloat16 and master.dtype == torch.float32
        assert torch.equal(parameter, master.to(torch.bfloat16)) and parameter.grad is None
        assert not torch.equal(master, start[name])

    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    holder = nn.ParameterDict({"w": weight})
    optimizer = Optimizer(holder, config, 10)
    for _ in range(1000):  # in bf16, 256 + 1 is 256
        (weight * 1.0).sum().backward()
    assert optimizer.gradient_norm(ONE) == 1000


def test_the_average_is_used_for_a_while_only():
    net = module()
    optimizer = Optimizer(net, dataclasses.replace(CONFIG, ema=0.9), 10)
    expected = [parameter.detach().clone() for parameter in net.parameters()]
    for number in range(5):
        backward(net, number)
        optimizer.apply(number, optimizer.gradient_norm(ONE))
        expected = [0.9 * old + 0.1 * new.detach() for old, new in zip(expected, net.parameters(), strict=True)]
    own = [parameter.detach().clone() for parameter in net.parameters()]
    with optimizer.averaged():
        for parameter, average in zip(net.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.detach(), average)
    assert all(torch.equal(parameter, was) for parameter, was in zip(net.parameters(), own, strict=True))


def test_schedules():
    wsd = OptimizerConfig(warmup=0.1, decay=0.5, final=0.1)
    values = [factor(step, 100, wsd) for step in range(100)]
    assert values[0] == 0.1 and values[9] == 1.0 and values[49] == 1.0
    assert values[75] == pytest.approx(0.1 + 0.9 * 0.5) and values[99] == pytest.approx(0.1 + 0.9 * 0.02)
    cosine = OptimizerConfig(schedule="cosine", warmup=0.1, final=0.2)
    values = [factor(step, 100, cosine) for step in range(100)]
    assert values[4] == 0.5 and values[10] == 1.0 and values[55] == pytest.approx(0.6)
    assert values == [*values[:10], *sorted(values[10:], reverse=True)] and values[99] == pytest.approx(0.2, abs=1e-3)
    assert factor(0, 1, OptimizerConfig()) > 0  # a run of a single step learns too
