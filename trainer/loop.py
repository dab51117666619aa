"""The training run: evaluate, train step by step, evaluate again, and leave a result."""

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer import anchors, block_mask, checkpoint, data, metrics
from trainer.config import Config
from trainer.drafter import Drafter
from trainer.errors import TrainerError
from trainer.evaluate import Evaluator, build, choose_device, describe, measure_ngram
from trainer.loss import block_loss, labels_and_weights, teacher
from trainer.optimizer import Optimizer
from trainer.report import result_of, summary
from trainer.stop import Stop, Stopped
from trainer.target import Target


class Spans:
    """Seconds by name, of one step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began


@dataclass(frozen=True, kw_only=True)
class Step:
    metrics: metrics.Metrics
    tokens: int
    rate: float
    gradient_norm: float
    spans: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Training:
    """What a step works on."""

    config: Config
    rows: data.Rows
    target: Target
    drafter: Drafter
    optimizer: Optimizer

    def step(self, number: int) -> Step:
        config, spans = self.config, Spans()
        block, slots = config.drafter.block_size, config.loss.anchors_per_row
        device = self.target.embedding.device
        with spans("data"):
            index = data.batch_rows(config.seed, number, rows=len(self.rows), rows_per_step=config.data.rows_per_step)
            rows = self.rows.take(index, device)
            anchor, keep = anchors.draw(config.seed, number, allowed=anchors.eligible(rows), slots=slots)
        with spans("target"):
            last, features = self.target.inspect(rows.tokens, rows.start)
            wanted = None
            if config.loss.labels == "distribution":
                wanted = teacher(last, self.target.head, anchor, block=block, temperature=config.loss.temperature)
        with spans("mask"):
            lo = rows.start.gather(1, anchor)
            seen = block_mask.visible_context(lo, anchor, context=rows.tokens.shape[1]), keep
        with spans("forward"):
            labels, weights = labels_and_weights(rows, anchor, keep, block=block, gamma=config.loss.gamma)
            hidden = draft_blocks(
                self.drafter,
                self.target,
                rows,
                features,
                anchor,
                seen,
                block=block,
                mask=config.drafter.mask_token,
            )
            total, measured = block_loss(hidden, self.target.head.to(hidden.dtype), labels, weights, wanted)
            # a batch without anchors has weight 0 and a zero gradient, but is a step like any other
            loss = total / weights.sum().clamp(min=torch.finfo(torch.float32).tiny)
        with spans("backward"):
            loss.backward()
        with spans("optimizer"):
            rate, norm = self.optimizer.step(number)
        return Step(metrics=measured, tokens=rows.used, rate=rate, gradient_norm=norm, spans=spans.seconds)


def draft_blocks(
    drafter: Drafter,
    target: Target,
    rows: data.Rows,
    features: torch.Tensor,
    anchor: torch.Tensor,
    seen: tuple[torch.Tensor, torch.Tensor],
    *,
    block: int,
    mask: int,
) -> torch.Tensor:
    """One block at every anchor [R, N] -> hidden [R, N, B, H]. Slot j of anchor a stands at position pos(a) + j."""
    dtype = drafter.fc.weight.dtype
    tokens = torch.full((*anchor.shape, block), mask, device=anchor.device)
    tokens[..., 0] = rows.tokens.gather(1, anchor)
    position = rows.position
    slots = position.gather(1, anchor)[..., None] + torch.arange(block, device=anchor.device)
    context = drafter.context(features.to(dtype), position)
    noise = target.embedding[tokens.flatten(1)].to(dtype)
    return drafter(noise, slots.flatten(1), context, seen).unflatten(1, (-1, block))


def train(config: Config, *, run_dir: Path, metrics_path: Path, began: float) -> int:
    stop = Stop()
    if config.threads:
        torch.set_num_threads(config.threads)
    device = choose_device(config.device)
    target, drafter, evaluator = build(config, device)
    documents = data.load_documents(config.data.path, target.config.vocab_size)
    rows = data.pack(documents, config.data.row_length, padding=config.drafter.mask_token)
    if not anchors.eligible(rows).any():
        raise TrainerError(
            f"{config.data.path}: no row has two generated tokens in a row, so there is nothing to learn"
        )
    optimizer = Optimizer(drafter, config.optimizer, config.steps)
    training = Training(config=config, rows=rows, target=target, drafter=drafter, optimizer=optimizer)
    size = sum(parameter.numel() for parameter in drafter.parameters())
    print(
        f"drafter of {size / 1e6:.2f} M parameters, blocks of {config.drafter.block_size}; "
        f"{len(documents)} documents in {len(rows)} rows; {device}, {torch.get_num_threads()} threads; "
        f"ready after {time.perf_counter() - began:.1f} s"
    )
    run = _Run(config, training, evaluator, run_dir, metrics_path, stop, began)
    try:
        return run.go(documents)
    except Stopped:
        return run.leave()
    finally:
        run.metrics.close()


class _Run:
    """One attempt at a run: where it stands, and what it writes."""

    def __init__(
        self,
        config: Config,
        training: Training,
        evaluator: Evaluator,
        run_dir: Path,
        metrics_path: Path,
        stop: Stop,
        began: float,
    ):
        self.config = config
        self.training = training
        self.evaluator = evaluator
        self.run_dir = run_dir
        self.checkpoints = run_dir / "checkpoints"
        self.metrics = metrics.MetricsFile(metrics_path)
        self.stop = stop
        self.began = began
        self.earlier_seconds = 0.0
        self.step = 0
        self.start: dict[str, Any] = {}

    @property
    def seconds(self) -> float:
        return self.earlier_seconds + time.perf_counter() - self.began

    def go(self, documents: list) -> int:
        self._resume()
        if not self.start:
            with self.stop.interruptible():
                self.start = self._evaluate("before training")
        self._train()
        with self.stop.interruptible():
            end = self._evaluate("after training")
            baseline = measure_ngram(self.evaluator, documents)
            print(f"n-gram drafter: {describe(baseline)}")
            margins = [self.evaluator.plain(t).margin for t in self.evaluator.temperatures]
        result = result_of(
            self.config, self.start, end, baseline, steps=self.step, seconds=self.seconds, margin=min(margins)
        )
        partial = self.run_dir / ".result.json.partial"
        partial.write_text(json.dumps(result, indent=1) + "\n")
        partial.replace(self.run_dir / "result.json")
        print(summary(result))
        return 0 if result["equal_to_plain"]["all"] else 1

    def leave(self) -> int:
        path = self._save()
        print(f"stopped by signal {self.stop.requested} after step {self.step}; saved {path}")
        return 128 + self.stop.requested

    def _resume(self) -> None:
        found = checkpoint.checkpoints(self.checkpoints)
        if not found:
            return
        state = checkpoint.read_state(found[-1], self.config)
        checkpoint.load(found[-1], self.training.drafter, self.training.optimizer)
        self.step, self.start, self.earlier_seconds = state.step, state.start, state.seconds
        print(f"resuming after step {self.step} from {found[-1]}")

    def _save(self) -> Path:
        state = checkpoint.State(
            step=self.step,
            settings=checkpoint.settings_of(self.config),
            seconds=self.seconds,
            start=self.start,
        )
        training = self.training
        return checkpoint.save(
            self.checkpoints, training.drafter, training.optimizer, state, keep=self.config.checkpoint.keep
        )

    def _evaluate(self, when: str, prompts: int | None = None) -> dict[str, Any]:
        full = prompts is None
        evaluator = self.evaluator
        result = evaluator.measure(evaluator.proposer(self.training.drafter), prompts=prompts, compare=full)
        self.metrics.append({"step": self.step, "time": time.time(), "eval": result})
        print(f"{when}, {result['prompts']} prompts: {describe(result)}")
        return result

    def _train(self) -> None:
        config, window, since = self.config, {}, time.perf_counter()
        tokens = 0
        while self.step < config.steps:
            done = self.training.step(self.step)
            self.step += 1
            loss = metrics.ratio(done.metrics["loss"])
            self.metrics.append(
                {
                    "step": self.step,
                    "loss": loss,
                    "tokens": done.tokens,
                    "time": time.time(),
                    "lr": done.rate,
                    "grad_norm": done.gradient_norm,
                    "spans": {name: round(value, 5) for name, value in done.spans.items()},
                }
            )
            window, tokens = metrics.add(window, done.metrics), tokens + done.tokens
            if self.stop.requested:
                raise Stopped
            if self.step % config.print_every == 0 or self.step == config.steps:
                elapsed = time.perf_counter() - since
                print(
                    f"step {self.step}/{config.steps}  loss {metrics.ratio(window['loss']):.3f}  "
                    f"first slot {metrics.ratio(window['first_slot_accuracy']):.1%}  "
                    f"accepted {metrics.ratio(window['accepted_in_training']):.2f}  {tokens / elapsed:,.0f} tokens/s"
                )
                window, tokens, since = {}, 0, time.perf_counter()
            if self.step % config.checkpoint.every == 0 or self.step == config.steps:
                self._save()
            if config.evaluate.every and self.step % config.evaluate.every == 0 and self.step < config.steps:
                with self.stop.interruptible():
                    self._evaluate(f"step {self.step}", prompts=config.evaluate.every_prompts)
