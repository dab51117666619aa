"""A whole step against the definition of DFlash training, written out block by block."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from trainer import loop, step
from trainer.config import Config, DataConfig, DrafterConfig, LossConfig, OptimizerConfig, TargetConfig
from trainer.data.batches import Batch, supervise
from trainer.data.rows import Document, Rows, pack
from trainer.models import Models, build
from trainer.optimizer import Optimizer
from trainer.spans import Spans

CPU = torch.device("cpu")
LENGTH, BLOCK, MASK, LAYERS = 40, 4, 1, (0, 2)


def configured(path, *, shifted: bool = False, parts: int = 1, layers: int = 2, **loss) -> Config:
    return Config(
        name="step",
        steps=10,
        device="cpu",
        dtype="float64",
        attention="dense",
        target=TargetConfig(path=path, dtype="float64"),
        data=DataConfig(paths=(), row_length=LENGTH, rows_per_step=4, micro_batches=parts),
        drafter=DrafterConfig(
            mask_token=MASK, target_layers=LAYERS, layers=layers, block_size=BLOCK, shifted=shifted, intermediate=24
        ),
        loss=LossConfig(**{"anchors_per_row": 6, "gamma": 2.0, "chunk": 8, **loss}),
        optimizer=OptimizerConfig(kind="adamw"),
    )


MIXTURE = {"cross_entropy": 0.4, "kl": 0.8, "tv": 0.5, "temperature": 0.7}
KINDS = {
    "cross entropy": {},
    "shifted": {"shifted": True},
    "mixture": MIXTURE,
    "mixture shifted": {**MIXTURE, "shifted": True},
    "dpace": {"weights": "dpace", "alpha": 0.3},
    "dpace mixture shifted": {"weights": "dpace", "alpha": 0.3, **MIXTURE, "shifted": True},
}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def documents(count: int, *, seed: int = 0) -> list[Document]:
    """Of 8 to 19 tokens, the first few given and now and then one in between."""
    draw, made = np.random.default_rng(seed), []
    for _ in range(count):
        n = int(draw.integers(8, 20))
        generated = (np.arange(n) >= draw.integers(0, 5)) & (draw.random(n) < 0.9)
        made.append(Document(tokens=draw.integers(2, 96, n), generated=generated))
    return made


def models_of(config: Config) -> Models:
    """The drafter is moved away from its start, where a layer does little and a wrong one would not show."""
    models = build(config, CPU)
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in models.drafter.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
    return models


def gradient_of(config: Config, models: Models, batches: list[Batch]) -> tuple[dict, step.Gradient]:
    """Of the mean loss, by parameter."""
    optimizer = Optimizer(models.drafter, config.optimizer, config.steps)
    result = step.compute_gradient(config, models, optimizer, batches, Spans(CPU))
    gradients = {name: master.grad.clone() for name, master in optimizer.masters.items()}
    for master in optimizer.masters.values():
        master.grad = None
    return gradients, result


def assert_same(one: dict, other: dict, tolerance: float) -> None:
    assert one.keys() == other.keys()
    for name in one:
        difference = (one[name] - other[name]).norm() / other[name].norm()
        assert difference <= tolerance, (name, float(difference))


def far(one: dict, other: dict) -> bool:
    return any((one[name] - other[name]).norm() > 1e-3 * other[name].norm() for name in one)


@kinds
def test_a_step_is_the_same_however_it_is_split(small_target, kind):
    config = configured(small_target(), **kind)
    models, rows = models_of(config), pack(documents(24), LENGTH, MASK)
    for number in (0, 3):
        found = {}
        for parts in (1, 2, 4):
            split = dataclasses.replace(config, data=dataclasses.replace(config.data, micro_batches=parts))
            batches = loop.step_batches(split, rows, number, pad=False)
            assert len(batches) == parts
            found[parts] = gradient_of(split, models, batches)
        for parts in (2, 4):
            assert_same(found[parts][0], found[1][0], 1e-12)
            assert torch.allclose(found[parts][1].metrics.pairs, found[1][1].metrics.pairs, rtol=1e-12, atol=0)
        padded, _ = gradient_of(config, models, loop.step_batches(config, rows, number, pad=True))
        assert_same(padded, found[1][0], 1e-12)


@kinds
def test_packed_documents_are_learned_from_as_if_each_were_alone(small_target, kind):
    config = configured(small_target(), **kind)
    models = models_of(config)
    three = documents(3, seed=2)[:3]
    sizes = [len(document.tokens) for document in three]
    assert sum(sizes) > LENGTH / 2  # two share a row at least
    anchors = [[4, 6, sizes[i] - 2] for i in range(3)]

    def batch(rows: Rows, anchor: torch.Tensor) -> Batch:
        gamma = None if config.loss.weights == "dpace" else config.loss.gamma
        shape = {"block": BLOCK, "shifted": config.drafter.shifted, "gamma": gamma}
        return supervise(rows, anchor, torch.ones_like(anchor, dtype=torch.bool), **shape, chunk=8, pad=False)

    long = sum(sizes)
    starts = [sum(sizes[:i]) for i in range(3)]
    together = batch(
        pack(three, long, MASK), torch.tensor([[at + a for at, own in zip(starts, anchors, strict=True) for a in own]])
    )
    packed, result = gradient_of(config, models, [together])
    weight = float(result.metrics.pairs[0, 1])
    alone = {name: torch.zeros_like(gradient) for name, gradient in packed.items()}
    for document, own in zip(three, anchors, strict=True):
        part = batch(pack([document], len(document.tokens), MASK), torch.tensor([own]))
        gradient, single = gradient_of(config, models, [part])
        for name in alone:
            alone[name] += gradient[name] * float(single.metrics.pairs[0, 1])
    assert_same(packed, {name: total / weight for name, total in alone.items()}, 1e-9)


def twin(config: Config, models: Models, batches: list[Batch], *, off: str = "") -> dict:
    """The gradient by the definition: every block by itself, behind a context that Hugging Face's own model computed
    from the tokens before the anchor alone. `off` names a mistake of one to make.

    Slots of a block, counted from 0, stand at the positions from the anchor's on. In place, slot j >= 1 predicts the
    token at anchor + j; shifted, slot j predicts that at anchor + j + 1. The target's own distribution for a token is
    what it makes of the tokens before it.
    """
    hf = AutoModelForCausalLM.from_pretrained(config.target.path, dtype=torch.float64, attn_implementation="sdpa")
    drafter, loss, shifted = models.drafter, config.loss, config.drafter.shifted
    layers = [layer + (off == "layer") for layer in LAYERS]
    total, weights = torch.zeros((), dtype=torch.float64), 0.0
    for batch in batches:
        rows = batch.rows
        for row, n in batch.keep.nonzero().tolist():
            at = int(batch.anchors[row, n])
            begin, end = int(rows.start[row, at]), int(rows.end[row, at])
            document, generated = rows.tokens[row, begin:end], rows.generated[row, begin:end]
            a = at - begin  # the anchor in its document
            seen = a + (off == "context")
            with torch.no_grad():
                streams = hf(document[None, : max(seen, 1)], output_hidden_states=True).hidden_states
                logits = hf(document[None]).logits[0]
            features = torch.cat([streams[layer + 1] for layer in layers], -1)[:, :seen]
            places = torch.arange(a, a + BLOCK) + (off == "position")
            noise = F.embedding(torch.tensor([int(document[a]), *[MASK] * (BLOCK - 1)]), models.target.embedding)

            def attend(kind, query, context, block):
                keys, values = (torch.cat(pair, 2) for pair in zip(context, block, strict=True))
                return F.scaled_dot_product_attention(query, keys, values, enable_gqa=True)

            context = drafter.context(features, torch.arange(seen)[None])
            states = drafter(noise[None], places[None], context, attend)[0]
            guesses = []  # (prediction, log q, label, log p)
            for prediction in range(BLOCK if shifted else BLOCK - 1):
                token = a + 1 + prediction
                if token >= len(document) or not generated[token]:
                    continue
                slot = prediction if shifted else prediction + 1
                log_q = (states[slot] @ hf.lm_head.weight.T).log_softmax(-1)
                log_p = (logits[min(token - 1 + (off == "source"), len(document) - 1)] / loss.temperature).log_softmax(
                    -1
                )
                label = document[min(token + (off == "label"), len(document) - 1)]
                guesses.append((prediction, log_q, label, log_p))
            smooth = [(1 - loss.alpha) * math.exp(log_q[label].item()) + loss.alpha for _, log_q, label, _ in guesses]
            for i, (prediction, log_q, label, log_p) in enumerate(guesses):
                weight = math.exp(-(prediction + (off == "decay") * i) / loss.gamma)
                if loss.weights == "dpace":
                    weight = sum(math.prod(smooth[: m + 1]) for m in range(i, len(guesses)))
                kl = (log_p.exp() * (log_p - log_q)).sum()
                tv = (log_p.exp() - log_q.exp()).abs().sum() / 2
                total = total + weight * (loss.kl * kl + loss.tv * tv - loss.cross_entropy * log_q[label])
                weights += weight
    (total / weights).backward()
    gradients = {name: parameter.grad.clone() for name, parameter in drafter.named_parameters()}
    drafter.zero_grad()
    return gradients


@kinds
def test_a_step_is_what_the_definition_says(small_target, kind):
    config = configured(small_target(), anchors_per_row=4, **kind)
    models, rows = models_of(config), pack(documents(12, seed=1), LENGTH, MASK)
    batches = loop.step_batches(config, rows, 2, pad=False)
    found, _ = gradient_of(config, models, batches)
    assert_same(found, twin(config, models, batches), 1e-7)  # decay and RoPE angles are float32


@pytest.mark.parametrize("off", ["layer", "context", "position", "source", "label", "decay"])
def test_the_definition_tells_mistakes_of_one_apart(small_target, off):
    config = configured(small_target(), anchors_per_row=4, **MIXTURE)
    models, rows = models_of(config), pack(documents(12, seed=1), LENGTH, MASK)
    batches = loop.step_batches(config, rows, 2, pad=False)
    found, _ = gradient_of(config, models, batches)
    assert far(found, twin(config, models, batches, off=off))


def test_a_step_without_anchors_has_no_gradient_and_takes_place(small_target):
    config = configured(small_target(), **MIXTURE)
    models = models_of(config)
    lonely = [Document(tokens=np.arange(2, 32), generated=np.arange(30) == 7) for _ in range(4)]
    batches = loop.step_batches(config, pack(lonely, LENGTH, MASK), 0, pad=False)
    before = {name: parameter.detach().clone() for name, parameter in models.drafter.named_parameters()}
    optimizer = Optimizer(models.drafter, config.optimizer, config.steps)
    result = step.compute_gradient(config, models, optimizer, batches, Spans(CPU))
    assert result.norm == 0 and result.metrics.pairs.isfinite().all() and result.metrics.pairs[0, 1] == 0
    optimizer.apply(0, result.norm)
    assert all(torch.equal(p, before[name]) for name, p in models.drafter.named_parameters())


def test_the_metrics_of_a_step_are_those_of_its_own_guesses(small_target):
    """`loss` is the mean that the gradient belongs to: it changes by norm squared along the gradient."""
    config = configured(small_target(), **MIXTURE)
    models, rows = models_of(config), pack(documents(24), LENGTH, MASK)
    batches = loop.step_batches(config, rows, 1, pad=False)
    gradient, here = gradient_of(config, models, batches)
    size = 1e-6
    with torch.no_grad():
        for name, parameter in models.drafter.named_parameters():
            parameter.add_(gradient[name], alpha=size)
    _, there = gradient_of(config, models, batches)
    losses = [float(result.metrics.pairs[0, 0] / result.metrics.pairs[0, 1]) for result in (here, there)]
    assert losses[1] - losses[0] == pytest.approx(size * float(here.norm) ** 2, rel=1e-3)
