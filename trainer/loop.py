"""The training run: evaluate, train step by step, evaluate again, and leave a result."""

import contextlib
import json
import math
import os
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainer import checkpoint, metrics, warming
from trainer.assess import Local, Remote
from trainer.config import Config
from trainer.data.batches import Batch
from trainer.data.prefetch import Prefetcher
from trainer.data.rows import Document, Rows
from trainer.errors import TrainerError
from trainer.evaluate import describe, evaluator_of
from trainer.feed import load_rows, step_batches
from trainer.models import Models, build, build_without_target, choose_device
from trainer.optimizer import Optimizer
from trainer.report import result_of, summary
from trainer.serve import serve
from trainer.source import source_of
from trainer.spans import Spans
from trainer.spread import measured, prepare
from trainer.step import compiles, compute_gradient
from trainer.stop import Stop, Stopped
from trainer.trackers import NoTrackers, Trackers
from trainer.warmup import seal
from trainer.watchdog import Watchdog
from trainer.world import World, join

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
    stopping: bool  # some rank was asked to end


def train(config: Config, *, run_dir: Path, metrics_path: Path, began: float, watchdog: Watchdog | None = None) -> int:
    """One rank of the run, or all of it; -> the exit code. Of several ranks each has a watchdog."""
    stop = Stop()
    if config.threads:
        torch.set_num_threads(config.threads)
    try:
        world = join(config.plan, choose_device(config), config.topology, watchdog)
        if world.role.kind == "target":
            code = serve(config, world, run_dir=run_dir, metrics_path=metrics_path)
        else:
            code = train_drafter(config, world, stop, run_dir=run_dir, metrics_path=metrics_path, began=began)
    except BaseException as error:
        if watchdog:
            watchdog.failed(error)  # does not return where another rank's end is the reason
        raise
    world.leave()
    return code


def train_drafter(config: Config, world: World, stop: Stop, *, run_dir: Path, metrics_path: Path, began: float) -> int:
    """What a rank does that trains: alone, with others of its variant, with the target here or elsewhere."""
    report = warming.report_of(world, metrics_path)  # before a variant's own file takes its place
    stream = config  # whose seed orders the rows, and whose steps are the targets'
    folder, say = run_dir, print if world.leads else _silent
    if config.variants:
        variant = config.variants[world.role.variant]
        config, folder = variant.config, run_dir / "drafters" / variant.name
        if world.leads:
            say = partial(print, f"[{variant.name}]")
        if world.role.variant:  # the run's own metrics file is that of the first
            metrics_path = folder / "metrics.jsonl"
    models = build(config, world.device) if world.role.kind == "both" else build_without_target(config, world.device)
    rows, documents = load_rows(config, models.vocabulary.config.vocab_size, speak=world.leads)
    if models.target is not None:
        warming.warm_target(stream, world, models.target, run_dir, report)
    optimizer, warmed = prepare(config, world, models, run_dir, report, stream=stream, say=say)
    if world.device.type == "cuda" or compiles(config, world.device):
        seal()
    report.done()
    world.barrier()  # the first collective comes after everything has been compiled everywhere
    warming.tidy(run_dir)
    size = sum(parameter.numel() for parameter in models.drafter.parameters())
    say(
        f"drafter of {size / 1e6:.2f} M parameters, blocks of {config.drafter.block_size}; "
        f"{len(documents)} documents in {len(rows)} rows; {world.device}, {torch.get_num_threads()} threads; "
        f"ready after {time.perf_counter() - began:.1f} s"
    )
    if world.device.type == "cuda" or not world.alone:
        say(f"warm-up: {warmed.line()}")
    if report.graphs:
        say(report.line())
    for layer, found in warmed.evidence.items():
        say(f"{layer}: {warming.evidence_line(found)}")
    trackers = Trackers(config, run_dir=folder, metrics_path=metrics_path) if world.leads else NoTrackers()
    if warmed.evidence:
        trackers.append({"step": 0, "time": time.time(), "warmup": warmed.record()})
    run = _Run(config, stream, world, models, optimizer, rows, documents, folder, trackers, stop, say, began)
    try:
        return run.go()
    except Stopped:
        return run.leave()
    except Diverged as reason:
        ended = run.give_up(reason)
        if world.alone:
            raise ended from None
        # other drafters are runs of their own and go on; and all ranks of this one leave together, not before its
        # leader has saved
        say(f"error: {ended}" + ("; the other drafters go on" if stream.variants else ""))
        return 1
    finally:
        trackers.close()


def _silent(*_: object) -> None:
    """Ranks that do not lead say nothing."""


class _Run:
    """One attempt at a run: where it stands, and what it writes."""

    def __init__(
        self,
        config: Config,
        stream: Config,
        world: World,
        models: Models,
        optimizer: Optimizer,
        rows: Rows,
        documents: list[Document],
        run_dir: Path,
        trackers: Trackers | NoTrackers,
        stop: Stop,
        say: Callable[..., None],
        began: float,
    ):
        self.config, self.stream, self.world, self.models, self.optimizer = config, stream, world, models, optimizer
        self.rows, self.run_dir, self.trackers, self.stop, self.say = rows, run_dir, trackers, stop, say
        self.began = began
        # of a sharded drafter all ranks have a part in measuring, of which the leader's is the most
        self.measures = config.evaluate.prompts is not None and (world.leads or optimizer.shards is not None)
        self.assessor: Local | Remote | None = None
        if config.evaluate.prompts and world.leads:
            if models.target is None:
                self.assessor = Remote(world)
            else:
                self.assessor = Local(evaluator_of(config, models.target), documents)
        self.folder = run_dir / "checkpoints"
        self.saver = checkpoint.Saver(self.folder, keep=config.checkpoint.keep)
        self.earlier_seconds = 0.0
        self.step = 0
        self.start: dict[str, Any] = {}  # the evaluation before training; of a leader
        self.started = False  # whether there has been one
        self.losses: list[float] = []
        self.own = config.plan.own_parts(world.role) if stream is config else stream.plan.own_parts(world.role)
        self.source = source_of(stream, config, world, models)

    @property
    def seconds(self) -> float:
        return self.earlier_seconds + time.perf_counter() - self.began

    def go(self) -> int:
        self._resume()
        self.source.start(self.step)
        if self.measures and not self.started:
            with self._interruptible():
                self.start = self._evaluate("before training")
        self._train()
        if self.world.leads and (advice := self.source.advice()):
            self.say(advice)
        self.world.done(self.step)
        self.saver.wait()
        code = self._finish()
        self.source.stop()
        return code

    def _finish(self) -> int:
        if not self.measures:
            self.say(f"trained {self.step} steps in {self.seconds:.0f} s; no evaluate.prompts, so nothing was measured")
            return 0
        with self._interruptible():
            end = self._evaluate("after training")
            if self.assessor is None:
                return 0
            baseline = self.assessor.ngram()
            self.say(f"n-gram drafter: {describe(baseline)}")
        result = result_of(self.config, self.assessor, self.start, end, baseline, steps=self.step, seconds=self.seconds)
        partial = self.run_dir / ".result.json.partial"
        partial.write_text(json.dumps(metrics.finite(result), indent=1) + "\n")
        partial.replace(self.run_dir / "result.json")
        self.say(summary(result))
        return 0 if result["equal_to_plain"]["within_rounding"] else 1

    def leave(self) -> int:
        path = self._save()
        self.saver.wait()
        self.source.stop()
        self.say(f"stopped by signal {self.stop.requested} after step {self.step}; saved {path}")
        return 128 + (self.stop.requested or signal.SIGTERM)  # 0: another rank was asked

    def give_up(self, reason: Diverged) -> TrainerError:
        try:
            path = self._save()
            self.saver.wait()
            state = f"saved the state of step {self.step} in {path}"
        except TrainerError as error:
            state = f"could not save the state: {error}"
        self.world.done(0)
        self.source.stop()
        return TrainerError(f"{reason}; stopped before the update, and {state}")

    def _resume(self) -> None:
        """From the newest checkpoint that all variants have; the leader of each reads it for the others."""
        found = {int(path.name.removeprefix("step-")): path for path in checkpoint.checkpoints(self.folder)}
        step, wanted = self.world.agree(sorted(found)), int(os.environ.get("ORCH_FROM_STEP") or 0)
        if step < wanted:
            raise TrainerError(
                f"this run goes on from step {wanted} of another, whose checkpoint is not here, where the first rank "
                f"of its drafter is now: copy it into {self.folder}, or begin anew with orch launch --new"
            )
        path = self.folder / f"step-{step:06d}"
        if step and self.world.leads:
            state = checkpoint.read_state(path, self.config)
            checkpoint.check_target(path, state, self.models.vocabulary)
            self.start, self.earlier_seconds, self.losses = state.start, state.seconds, state.losses
            self.say(f"resuming after step {step} from {path}")
        if step and (self.world.leads or self.optimizer.shards):
            checkpoint.load(path, self.optimizer)
        self.step = step
        self.losses, self.started = self.world.share(self.optimizer, (self.losses, bool(self.start)))

    def _save(self) -> Path:
        """Begins a checkpoint; if the one before could not be written, that is said, and is no reason against this."""
        try:
            self.saver.wait()
        except TrainerError as error:
            self.say(f"warning: {error}; training goes on")
        state = checkpoint.State(
            step=self.step,
            settings=checkpoint.settings_of(self.config),
            seconds=self.seconds,
            start=self.start,
            losses=self.losses,
            target=self.models.vocabulary.fingerprint(),
        )
        if not self.world.leads and self.optimizer.shards is None:
            return self.folder / f"step-{self.step:06d}"
        return self.saver.save(self.optimizer, state)

    def _interruptible(self) -> contextlib.AbstractContextManager[None]:
        """Measuring may be cut short, unless other ranks wait for it to end."""
        return self.stop.interruptible() if self.world.alone else contextlib.nullcontext()

    def _evaluate(self, when: str, prompts: int | None = None) -> dict[str, Any]:
        with measured(self.world, self.models, self.optimizer) as drafter:
            if self.assessor is None:
                return {}
            result = self.assessor.drafter(drafter, prompts=prompts, compare=prompts is None)
        self.trackers.append({"step": self.step, "time": time.time(), "eval": result})
        self.say(f"{when}, {result['prompts']} prompts: {describe(result)}")
        return result

    def _batches(self) -> Prefetcher[list[Batch]]:
        make = partial(
            step_batches,
            self.config,
            self.rows,
            pad=self.world.device.type == "cuda" or compiles(self.config, self.world.device),
            parts=self.stream.plan.parts,
            only=self.own,
            order_seed=self.stream.seed,
        )
        return Prefetcher(make, range(self.step, self.config.steps))

    def _take(self, batches: list[Batch]) -> Done:
        """One step. Raises Diverged before it changes anything."""
        self.world.begin_step(self.step + 1)
        spans = Spans(self.world.device)
        gradient = compute_gradient(
            self.config,
            self.models,
            self.optimizer,
            batches,
            spans,
            source=self.source,
            world=self.world,
            stopping=self._asked_to_stop(),
        )
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
            stopping=bool(gradient.stopping),
        )

    def _asked_to_stop(self) -> bool:
        if self.stop.requested:
            self.world.ask_to_stop()
        return bool(self.stop.requested) or self.world.asked_to_stop

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
        last = None  # step, where a stop was asked for
        with self._batches() as batches:
            waited = time.perf_counter()
            for step_parts in batches:
                waited = time.perf_counter() - waited
                done = self._take(step_parts)
                self.step += 1
                self._record(done, waited)
                window, tokens = metrics.add(window, done.metrics), tokens + done.tokens
                if done.stopping and last is None:
                    last = self.world.last_step(self.step)
                if last is not None and self.step >= last:
                    raise Stopped
                if self.step % config.print_every == 0 or self.step == config.steps:
                    elapsed = time.perf_counter() - since
                    mean = {name: metrics.ratio(pair) for name, pair in window.items()}
                    self.say(
                        f"step {self.step}/{config.steps}  loss {mean['loss']:.3f}  "
                        f"first slot {mean['first_slot_accuracy']:.1%}  "
                        f"accepted {mean['accepted_in_training']:.2f}  {tokens / elapsed:,.0f} tokens/s"
                    )
                    window, tokens, since = {}, 0, time.perf_counter()
                if self.step % config.checkpoint.every == 0 or self.step == config.steps:
                    self._checkpoint()
                due = config.evaluate.every and self.step % config.evaluate.every == 0 and self.step < config.steps
                if due and self.measures:
                    with self._interruptible():
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
            self.say(f"warning: no checkpoint of step {self.step}: {error}; training goes on")

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
                **self.source.waits(),
            }
        )

    def _memory(self) -> dict[str, float]:
        if self.world.device.type != "cuda":
            return {}
        return {"peak_memory": torch.cuda.max_memory_allocated(self.world.device)}
