"""The training run: evaluate, train step by step, evaluate again, and leave a result."""

import json
import math
import statistics
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from trainer import anchors, block_mask, checkpoint, metrics
from trainer.config import Config
from trainer.data import rows as packing
from trainer.data import sources
from trainer.data.batches import Batch, micro_batches
from trainer.data.chat import load_tokenizer
from trainer.data.prefetch import Prefetcher
from trainer.errors import TrainerError
from trainer.evaluate import Evaluator, describe, evaluator_of, measure_ngram
from trainer.models import Models, build, choose_device
from trainer.optimizer import Optimizer
from trainer.report import result_of, summary
from trainer.spans import Spans
from trainer.step import compute_gradient
from trainer.stop import Stop, Stopped
from trainer.trackers import Trackers

SPIKE_WINDOW = 100  # last losses whose median a spike is measured against
SPIKE_LEAST = 20  # with fewer there is no median worth the name


class Diverged(Exception):
    """The loss or its gradient is no number any more, or far off; nothing has been changed by this step."""


@dataclass(frozen=True, kw_only=True)
class Done:
    """A step that has been taken."""

    metrics: metrics.Metrics
    by_position: list[tuple[float, float]]
    tokens: int
    rate: float
    norm: float
    spans: dict[str, float]


def step_batches(config: Config, rows: packing.Rows, number: int, *, pad: bool) -> list[Batch]:
    """All that a step reads; a pure function of the seed and the step."""
    drafter, loss, data = config.drafter, config.loss, config.data
    slots = loss.anchors_per_row
    if config.attention == "flex":
        slots = block_mask.padded_slots(slots, drafter.block_size)
    return micro_batches(
        rows,
        seed=config.seed,
        step=number,
        rows_per_step=data.rows_per_step,
        parts=data.micro_batches,
        anchors_per_row=loss.anchors_per_row,
        width=slots,
        block=drafter.block_size,
        shifted=drafter.shifted,
        gamma=None if loss.weights == "dpace" else loss.gamma,
        chunk=loss.chunk,
        pad=pad,
    )


def load_rows(config: Config, vocabulary: int) -> tuple[packing.Rows, list[packing.Document]]:
    documents, report = sources.load_documents(
        config.data.paths,
        tokenizer=partial(load_tokenizer, config.target.path),
        vocabulary=vocabulary,
        template=config.data.template,
        broken_share=config.data.broken_share,
        piece=config.data.row_length,
    )
    for line in report.warnings():
        print(f"warning: {line}")
    rows = packing.pack(documents, config.data.row_length, padding=config.drafter.mask_token)
    if rows.cut:
        print(
            f"warning: {rows.cut} documents are longer than a row; "
            f"only their first {config.data.row_length} tokens are used"
        )
    if not anchors.eligible(rows).any():
        where = ", ".join(map(str, config.data.paths))
        raise TrainerError(f"{where}: no row has two generated tokens in a row, so there is nothing to learn")
    return rows, documents


def train(config: Config, *, run_dir: Path, metrics_path: Path, began: float) -> int:
    stop = Stop()
    if config.threads:
        torch.set_num_threads(config.threads)
    device = choose_device(config)
    models = build(config, device)
    models.target.check_isolation(config.data.row_length)
    rows, documents = load_rows(config, models.target.config.vocab_size)
    optimizer = Optimizer(models.drafter, config.optimizer, config.steps)
    size = sum(parameter.numel() for parameter in models.drafter.parameters())
    print(
        f"drafter of {size / 1e6:.2f} M parameters, blocks of {config.drafter.block_size}; "
        f"{len(documents)} documents in {len(rows)} rows; {device}, {torch.get_num_threads()} threads; "
        f"ready after {time.perf_counter() - began:.1f} s"
    )
    trackers = Trackers(config, run_dir=run_dir, metrics_path=metrics_path)
    run = _Run(config, models, optimizer, rows, run_dir, trackers, stop, began)
    try:
        return run.go(documents)
    except Stopped:
        return run.leave()
    except Diverged as reason:
        run.give_up(reason)
    finally:
        trackers.close()


class _Run:
    """One attempt at a run: where it stands, and what it writes."""

    def __init__(
        self,
        config: Config,
        models: Models,
        optimizer: Optimizer,
        rows: packing.Rows,
        run_dir: Path,
        trackers: Trackers,
        stop: Stop,
        began: float,
    ):
        self.config, self.models, self.optimizer, self.rows = config, models, optimizer, rows
        self.run_dir, self.trackers, self.stop, self.began = run_dir, trackers, stop, began
        self.evaluator: Evaluator | None = evaluator_of(config, models.target) if config.evaluate.prompts else None
        self.folder = run_dir / "checkpoints"
        self.saver = checkpoint.Saver(self.folder, keep=config.checkpoint.keep)
        self.earlier_seconds = 0.0
        self.step = 0
        self.start: dict[str, Any] = {}
        self.losses: list[float] = []

    @property
    def seconds(self) -> float:
        return self.earlier_seconds + time.perf_counter() - self.began

    def go(self, documents: list) -> int:
        self._resume()
        if self.evaluator and not self.start:
            with self.stop.interruptible():
                self.start = self._evaluate("before training")
        self._train()
        self.saver.wait()
        if not self.evaluator:
            print(f"trained {self.step} steps in {self.seconds:.0f} s; no evaluate.prompts, so nothing was measured")
            return 0
        with self.stop.interruptible():
            end = self._evaluate("after training")
            baseline = measure_ngram(self.evaluator, documents)
            print(f"n-gram drafter: {describe(baseline)}")
        result = result_of(
            self.config, self.evaluator, self.start, end, baseline, steps=self.step, seconds=self.seconds
        )
        partial = self.run_dir / ".result.json.partial"
        partial.write_text(json.dumps(result, indent=1) + "\n")
        partial.replace(self.run_dir / "result.json")
        print(summary(result))
        return 0 if result["equal_to_plain"]["within_rounding"] else 1

    def leave(self) -> int:
        path = self._save()
        self.saver.wait()
        print(f"stopped by signal {self.stop.requested} after step {self.step}; saved {path}")
        return 128 + self.stop.requested

    def give_up(self, reason: Diverged) -> NoReturn:
        try:
            path = self._save()
            self.saver.wait()
            state = f"saved the state of step {self.step} in {path}"
        except TrainerError as error:
            state = f"could not save the state: {error}"
        raise TrainerError(f"{reason}; stopped before the update, and {state}")

    def _resume(self) -> None:
        found = checkpoint.checkpoints(self.folder)
        if not found:
            return
        state = checkpoint.read_state(found[-1], self.config)
        checkpoint.load(found[-1], self.optimizer)
        self.step, self.start, self.earlier_seconds = state.step, state.start, state.seconds
        self.losses = state.losses
        print(f"resuming after step {self.step} from {found[-1]}")

    def _save(self) -> Path:
        """Begins a checkpoint; if the one before could not be written, that is said, and is no reason against this."""
        try:
            self.saver.wait()
        except TrainerError as error:
            print(f"warning: {error}; training goes on")
        state = checkpoint.State(
            step=self.step,
            settings=checkpoint.settings_of(self.config),
            seconds=self.seconds,
            start=self.start,
            losses=self.losses,
        )
        return self.saver.save(self.optimizer, state)

    def _evaluate(self, when: str, prompts: int | None = None) -> dict[str, Any]:
        full, evaluator = prompts is None, self.evaluator
        with self.optimizer.averaged():
            result = evaluator.measure(evaluator.proposer(self.models.drafter), prompts=prompts, compare=full)
        self.trackers.append({"step": self.step, "time": time.time(), "eval": result})
        print(f"{when}, {result['prompts']} prompts: {describe(result)}")
        return result

    def _batches(self) -> Prefetcher[list[Batch]]:
        pad = self.models.target.device.type == "cuda"
        return Prefetcher(
            lambda number: step_batches(self.config, self.rows, number, pad=pad), range(self.step, self.config.steps)
        )

    def _take(self, batches: list[Batch]) -> Done:
        """One step. Raises Diverged before it changes anything."""
        spans = Spans(self.models.target.device)
        gradient = compute_gradient(self.config, self.models, self.optimizer, batches, spans)
        measured, by_position = gradient.metrics.read()
        loss, norm = metrics.ratio(measured["loss"]), gradient.norm.item()
        self._check(loss, norm, weighty=measured["loss"][1] > 0)
        with spans("optimizer"):
            rate = self.optimizer.apply(self.step, gradient.norm)
        return Done(
            metrics=measured,
            by_position=by_position,
            tokens=sum(batch.rows.used for batch in batches),
            rate=rate,
            norm=norm,
            spans=spans.seconds(),
        )

    def _check(self, loss: float, norm: float, *, weighty: bool) -> None:
        if not weighty:  # no anchors: the loss of nothing is no number, and that is no news
            return
        number = self.step + 1
        reason = None
        if not math.isfinite(loss):
            reason = f"the loss is {loss} at step {number}"
        elif not math.isfinite(norm):
            reason = f"the loss has diverged: the gradient's norm is {norm} at step {number}, the loss {loss:.4g}"
        elif self.config.spike and len(self.losses) >= SPIKE_LEAST:
            usual = statistics.median(self.losses)
            if loss > self.config.spike * usual:
                reason = (
                    f"the loss has diverged: {loss:.4g} at step {number}, more than {self.config.spike:g} times "
                    f"the median {usual:.4g} of the last {len(self.losses)} (setting `spike`)"
                )
        if reason:
            # as text, which readers take for what it is: a number that is none would be written as null, unknown
            said = loss if math.isfinite(loss) else str(loss)
            self.trackers.append({"step": number, "loss": said, "time": time.time(), "grad_norm": norm})
            raise Diverged(reason)
        self.losses = [*self.losses[1 - SPIKE_WINDOW :], loss]

    def _train(self) -> None:
        config, window, since, tokens = self.config, {}, time.perf_counter(), 0
        with self._batches() as batches:
            waited = time.perf_counter()
            for step_parts in batches:
                waited = time.perf_counter() - waited
                done = self._take(step_parts)
                self.step += 1
                self._record(done, waited)
                window, tokens = metrics.add(window, done.metrics), tokens + done.tokens
                if self.stop.requested:
                    raise Stopped
                if self.step % config.print_every == 0 or self.step == config.steps:
                    elapsed = time.perf_counter() - since
                    mean = {name: metrics.ratio(pair) for name, pair in window.items()}
                    print(
                        f"step {self.step}/{config.steps}  loss {mean['loss']:.3f}  "
                        f"first slot {mean['first_slot_accuracy']:.1%}  "
                        f"accepted {mean['accepted_in_training']:.2f}  {tokens / elapsed:,.0f} tokens/s"
                    )
                    window, tokens, since = {}, 0, time.perf_counter()
                if self.step % config.checkpoint.every == 0 or self.step == config.steps:
                    self._checkpoint()
                if config.evaluate.every and self.step % config.evaluate.every == 0 and self.step < config.steps:
                    with self.stop.interruptible():
                        self._evaluate(f"step {self.step}", prompts=config.evaluate.every_prompts)
                waited = time.perf_counter()

    def _checkpoint(self) -> None:
        """A checkpoint that cannot be written is said, and training goes on: the last complete one still stands.
        Only at the end there is nothing to go on to."""
        try:
            self._save()
        except TrainerError as error:
            if self.step == self.config.steps:
                raise
            print(f"warning: no checkpoint of step {self.step}: {error}; training goes on")

    def _record(self, done: Done, waited: float) -> None:
        self.trackers.append(
            {
                "step": self.step,
                "loss": metrics.ratio(done.metrics["loss"]),
                "tokens": done.tokens,
                "time": time.time(),
                "lr": done.rate,
                "grad_norm": done.norm,
                **{name: metrics.ratio(pair) for name, pair in done.metrics.items() if name != "loss"},
                "accuracy": [metrics.ratio(pair) for pair in done.by_position],
                "spans": {"wait": round(waited, 5), **{name: round(value, 5) for name, value in done.spans.items()}},
                **self._memory(),
            }
        )

    def _memory(self) -> dict[str, float]:
        if self.models.target.device.type != "cuda":
            return {}
        return {"peak_memory": torch.cuda.max_memory_allocated(self.models.target.device)}
