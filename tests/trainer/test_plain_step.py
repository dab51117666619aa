"""The step in plain torch that the benchmark holds the trainer's beside does the same."""

import argparse

import pytest
import torch

from benchmarks import trainer_step
from benchmarks.plain_step import PlainStep
from benchmarks.step_parts import build, configure
from trainer.metrics import ratio
from trainer.spans import Spans
from trainer.step import compute_gradient


def test_both_have_the_same_loss_and_gradient(tmp_path):
    config = configure(tmp_path, "toy", ["compile=off", "optimizer.clip=0"])
    bench, other = (build(tmp_path, config, documents=80, steps=1) for _ in range(2))
    (batches,) = bench.batches(1)
    found = compute_gradient(config, bench.models, bench.optimizer, batches, Spans(bench.device), source=bench.source)
    plain = PlainStep(other)
    plain.adam.step = lambda: None
    plain.adam.zero_grad = lambda: None
    loss = plain.step(batches[0], lambda name: None)
    assert float(loss) == pytest.approx(ratio(found.metrics.read()[0]["loss"]), rel=1e-5)
    assert plain.masters.keys() == bench.optimizer.masters.keys()
    scale = max(1.0, float(found.norm))  # beyond 1 the plain step clips to 1
    for name, master in bench.optimizer.masters.items():
        torch.testing.assert_close(plain.masters[name].grad * scale, master.grad, rtol=1e-3, atol=1e-6, msg=name)


def test_the_benchmark_runs_without_a_gpu(tmp_path, capsys):
    options = argparse.Namespace(
        mode="long-document", documents=0, steps=2, after=1, no_plain=False, profile=tmp_path / "kernels.txt"
    )
    told = trainer_step.run(tmp_path, configure(tmp_path, "toy", []), options, "toy")
    assert told["trainer"]["first_loss"] == pytest.approx(told["plain"]["first_loss"], rel=1e-5)
    assert "TFLOP/s" in capsys.readouterr().out and (tmp_path / "kernels.txt").stat().st_size
