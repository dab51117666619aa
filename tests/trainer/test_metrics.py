"""Training metrics against a loop over blocks, and pairs that add up."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.loss import HeadResult
from trainer.metrics import OVERALL, RECALL, MetricsFile, TrainingMetrics, add, ratio, training_metrics

P = 4
ENTRY = st.tuples(st.integers(0, 80), st.floats(0.125, 4, width=16), st.floats(0, 8, width=16))  # rank, weight, nll
BLOCK = st.dictionaries(st.integers(0, P - 1), ENTRY | st.tuples(st.just(0), st.just(0.5), st.just(0.25)))
BATCH = st.lists(BLOCK, min_size=1, max_size=6)


def measure(blocks, padding=2):
    """`blocks`: {position: (rank, weight, nll)} each; some padding in front and behind."""
    pad = [(0, 0, 0, 0.0, 3.0)] * padding  # rank 0 and an nll, in block 0 at position 0: must not count
    entries = [(b, p, *entry) for b, block in enumerate(blocks) for p, entry in sorted(block.items())]
    block, position, rank, weight, nll = zip(*(pad + entries + pad), strict=True)
    weight, nll = torch.tensor(weight, dtype=torch.float32), torch.tensor(nll, dtype=torch.float32)
    result = HeadResult(
        total=(weight * nll).sum().requires_grad_(),
        weight=weight.sum(),
        nll=nll,
        rank=torch.tensor(rank, dtype=torch.int32),
    )
    index = {"block": torch.tensor(block), "position": torch.tensor(position)}
    return training_metrics(result, weight=weight, **index, blocks=len(blocks), positions=P)


def by_loops(blocks):
    entries = [entry for block in blocks for entry in block.values()]
    opened = [block for block in blocks if 0 in block]
    accepted = 0
    for block in opened:
        accepted += 1  # the bonus token
        for p in range(P):
            if p not in block or block[p][0] != 0:
                break
            accepted += 1
    hits = [(sum(p in b and b[p][0] == 0 for b in blocks), sum(p in b for b in blocks)) for p in range(P)]
    return {
        "loss": (sum(weight * nll for _, weight, nll in entries), sum(weight for _, weight, _ in entries)),
        "nll": (sum(nll for *_, nll in entries), len(entries)),
        "accepted_in_training": (accepted, len(opened)),
        "first_slot_accuracy": hits[0],
        **{f"recall_{k}": (sum(rank < k for rank, *_ in entries), len(entries)) for k in RECALL},
    }, hits


@settings(deadline=None, max_examples=80)
@given(BATCH)
def test_training_metrics_are_the_loop(blocks):
    overall, hits = measure(blocks).read()
    expected, expected_hits = by_loops(blocks)
    assert tuple(overall) == OVERALL and hits == expected_hits
    for name, pair in expected.items():
        assert overall[name] == pytest.approx(pair, rel=1e-6), name


@settings(deadline=None, max_examples=30)
@given(BATCH, BATCH)
def test_parts_add_up_to_the_whole(first, second):
    parts, whole = measure(first) + measure(second), measure(first + second)
    torch.testing.assert_close(parts.pairs, whole.pairs, rtol=1e-6, atol=0)
    assert not parts.pairs.requires_grad


def test_a_run_ends_where_a_position_is_not_supervised():
    hit, miss = (0, 1.0, 0.0), (1, 1.0, 0.0)
    for block, accepted in (
        ({0: hit, 1: hit, 2: hit, 3: hit}, (5, 1)),
        ({0: hit, 2: hit, 3: hit}, (2, 1)),
        ({0: miss, 1: hit}, (1, 1)),
        ({1: hit, 2: hit}, (0, 0)),
    ):
        assert measure([block]).read()[0]["accepted_in_training"] == accepted


def test_a_batch_without_anchors_measures_nothing():
    overall, hits = measure([{}, {}]).read()
    assert all(pair == (0, 0) for pair in [*overall.values(), *hits])
    assert math.isnan(ratio(overall["loss"]))


def test_metrics_are_one_tensor_read_once(monkeypatch):
    reads = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: reads.append(self.shape) or tolist(self))
    for name in ("item", "__bool__", "__int__", "__float__", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, lambda self, name=name: pytest.fail(f"{name} waits for the device"))
    measured = measure([{0: (0, 1.0, 0.5), 1: (3, 1.0, 2.0)}])
    assert not reads and isinstance(measured, TrainingMetrics) and measured.pairs.dtype == torch.float64
    measured.read()
    assert reads == [(len(OVERALL) + P, 2)]


def test_pairs_add_and_divide():
    assert add({"a": (1, 2)}, {"a": (3, 4), "b": (5, 6)}) == {"a": (4, 6), "b": (5, 6)}
    assert ratio((1, 4)) == 0.25 and math.isnan(ratio((1, 0)))


def test_a_line_a_record_and_no_nan(tmp_path):
    file = MetricsFile(tmp_path / "new" / "metrics.jsonl")
    file.append({"step": 1, "loss": float("nan"), "inner": {"tau": float("inf"), "n": 2}})
    file.append({"step": 2, "accuracy": [0.5, float("nan")]})
    lines = (tmp_path / "new" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()  # before it is closed
    file.close()
    assert [json.loads(line) for line in lines] == [
        {"step": 1, "loss": None, "inner": {"tau": None, "n": 2}},
        {"step": 2, "accuracy": [0.5, None]},
    ]
    assert "NaN" not in "".join(lines)
