"""The compiled head pass on a GPU: near its twins, within its memory, without a wait. Prints its speed (pytest -s)."""

import itertools

import pytest
import torch

from trainer.head import Objective, head_pass
from trainer.loss import plain_head_pass
from trainer.metrics import training_metrics

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

GIB = 2**30
# a mixture, and how far the gradient may lie from the float32 twin's, |difference| / |gradient|, as a whole and in the
# median row. Logits rounded to bfloat16 are off by up to 2^-9 of themselves, q and p by as much of their logits; a
# token whose q and p are closer than that has the sign of TV at random.
MIXTURES = {
    "ce": (Objective(), 0.01, 0.01),
    "ce, dpace": (Objective(weights="dpace"), 0.01, 0.01),
    "kl": (Objective(cross_entropy=0.0, kl=1.0, temperature=0.7), 0.02, 0.02),
    "tv": (Objective(cross_entropy=0.0, tv=1.0), 0.05, 0.05),
    "all, dpace": (Objective(cross_entropy=0.3, kl=0.7, tv=0.2, temperature=0.7, weights="dpace"), 0.02, 0.02),
}
ROW = 0.3  # of the worst row: where the label is all but certain, little is left of q - 1


@pytest.fixture(autouse=True)
def fresh():
    """Each test compiles its own; leaves the device as it was."""
    torch.compiler.reset()
    torch.manual_seed(0)
    yield
    torch.cuda.set_sync_debug_mode("default")
    torch.compiler.reset()
    torch.cuda.empty_cache()


def batch(*, blocks, predictions, width, vocabulary, chunk, teacher=True):
    """Whole blocks in chunks of `chunk` entries, the rest of each chunk padding."""
    each = chunk // predictions  # blocks in a chunk
    chunks = -(-blocks // each)
    number = torch.arange(chunks * each, device="cuda").view(chunks, each, 1).expand(-1, -1, predictions)
    step = torch.arange(predictions, device="cuda").expand(chunks, each, -1)

    def padded(values):
        return torch.nn.functional.pad(values.flatten(1), (0, chunk - each * predictions)).flatten()

    weight = padded((number < blocks) * torch.exp(-step / 7))
    counted, many = weight > 0, chunks * chunk
    normal = {"device": "cuda", "dtype": torch.bfloat16}
    head = torch.randn(vocabulary, width, **normal) * width**-0.5
    label = torch.randint(vocabulary, (many,), device="cuda")
    sure = 8 * torch.rand(many, 1, **normal)  # adds as much to the label's logit: from anywhere up to the first place
    given = {
        "hidden": (torch.randn(many, width, **normal) + sure * head[label]).requires_grad_(),
        "head": head,
        "label": label,
        "weight": weight,
        "block": padded(number) * counted,
        "position": padded(step) * counted,
        "chunk": chunk,
    }
    if teacher:
        given["teacher"] = torch.randn(4096, width, **normal)
        given["source"] = torch.randint(4096, (many,), device="cuda")
    return given


def run(head, given, objective, factor=1 / 515):
    hidden = given["hidden"].detach().clone().requires_grad_()
    result = head(**{**given, "hidden": hidden}, objective=objective)
    (result.total * factor).backward()
    return result, hidden.grad.float()


@pytest.mark.parametrize("mixture", MIXTURES)
def test_near_its_twins(mixture):
    objective, whole, median = MIXTURES[mixture]
    given = batch(blocks=90, predictions=15, width=1024, vocabulary=32003, chunk=512)
    counted = given["weight"] > 0
    wide = {name: v.float() if torch.is_tensor(v) and v.is_floating_point() else v for name, v in given.items()}
    result, gradient = run(head_pass, given, objective)
    rounded, near = run(plain_head_pass, given, objective)  # the same rounding of the logits
    exact, far = run(plain_head_pass, wide, objective)
    assert not gradient[~counted].any() and not result.nll[~counted].any()

    def errors(expected):
        rows = ((gradient - expected).norm(dim=1) / expected.norm(dim=1))[counted]
        return ((gradient - expected).norm() / expected.norm()).item(), rows.median().item(), rows.max().item()

    def shown(of):
        return "{:.4f}, median row {:.4f}, worst {:.4f}".format(*of)

    to_near, to_far = errors(near), errors(far)
    print(
        f"\n{mixture}: error of the gradient to the twin {shown(to_near)}; to float32 {shown(to_far)}; "
        f"total {result.total / exact.total - 1:+.1e}"
    )
    torch.testing.assert_close(result.nll, rounded.nll, rtol=1e-3, atol=0.05)  # one step of bfloat16 in a logit
    torch.testing.assert_close(result.total, exact.total, rtol=5e-3, atol=0)
    torch.testing.assert_close(result.weight, exact.weight, rtol=5e-3, atol=0)
    assert (result.rank - rounded.rank).abs().max() < 0.01 * len(given["head"])  # those within one step of a logit
    for k in (1, 64):
        assert ((result.rank < k) == (exact.rank < k))[counted].float().mean() > 0.97
    assert 0.1 < (result.rank == 0)[counted].float().mean() < 0.9
    assert to_far[0] < whole and to_far[1] < median and to_far[2] < ROW


@pytest.mark.parametrize("weights", ["decay", "dpace"])
def test_float64_equals_the_plain_pass(weights):
    given = batch(blocks=20, predictions=7, width=64, vocabulary=999, chunk=64)
    wide = {name: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for name, v in given.items()}
    objective = Objective(cross_entropy=0.3, kl=0.7, tv=0.2, temperature=0.7, weights=weights)
    fast, gradient = run(head_pass, wide, objective)
    plain, expected = run(plain_head_pass, wide, objective)
    for name in ("total", "weight", "nll", "rank"):
        torch.testing.assert_close(getattr(fast, name), getattr(plain, name), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-9)  # run() gives float32


@pytest.mark.parametrize("mixture", MIXTURES)
def test_memory_waits_and_speed_at_the_production_shape(mixture):
    """1024 blocks of 31 predictions, H 4096, V 151936: 31744 entries, and what pads 16 chunks of 2048."""
    objective = MIXTURES[mixture][0]
    given = batch(blocks=1024, predictions=31, width=4096, vocabulary=151936, chunk=2048, teacher=objective.distils)
    hidden, places = given["hidden"], {name: given[name] for name in ("weight", "block", "position")}

    def step():
        result = head_pass(**given, objective=objective)
        measured = training_metrics(result, **places, blocks=1024, positions=31)
        return result, measured

    step()[0].total.backward()  # compiles
    hidden.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
    torch.cuda.set_sync_debug_mode("error")
    marks[0].record()
    result, measured = step()
    marks[1].record()
    result.total.backward()
    marks[2].record()
    head_pass(**{**given, "hidden": hidden.detach()}, objective=objective)  # no gradient
    marks[3].record()
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    above = torch.cuda.max_memory_allocated() - before - hidden.numel() * hidden.element_size()
    forward, backward, quiet = (a.elapsed_time(b) for a, b in itertools.pairwise(marks))
    products = 3 if objective.distils else 2
    rate = products * 2 * hidden.numel() * len(given["head"]) / forward / 1e9
    print(
        f"\n{mixture}: forward with gradient {forward:.1f} ms, {rate:.0f} TFLOP/s; backward {backward:.2f} ms; "
        f"forward alone {quiet:.1f} ms; {above / GIB:.2f} GiB above inputs and gradient"
    )
    assert above < 3 * GIB
    assert hidden.grad.isfinite().all() and measured.read()[0]["nll"][1] == 31744


def test_a_length_that_is_no_multiple_of_a_chunk_is_refused():
    given = batch(blocks=8, predictions=7, width=64, vocabulary=99, chunk=64)
    with pytest.raises(ValueError, match="pad"):
        head_pass(**{**given, "chunk": 48}, objective=Objective())


def test_one_trace_serves_every_number_of_chunks():
    for blocks in (8, 40, 24):
        given = batch(blocks=blocks, predictions=7, width=64, vocabulary=99, chunk=64)
        with torch.compiler.set_stance("fail_on_recompile" if blocks != 8 else "default"):
            run(head_pass, given, Objective(kl=1.0, weights="dpace"))


def test_the_factor_of_backward_is_not_rounded():
    """On a CPU it never is; here a 0-d tensor would be, to bfloat16, and the whole gradient would be off by as much."""
    given = batch(blocks=20, predictions=7, width=64, vocabulary=99, chunk=64)
    factor = 1 + 2**-8 - 2**-12  # bfloat16 has 1 and 1 + 2^-7 beside it
    _, unit = run(head_pass, given, Objective(), factor=1.0)
    _, scaled = run(head_pass, given, Objective(), factor=factor)
    assert torch.equal(scaled, (unit * factor).bfloat16().float())
