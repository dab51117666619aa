"""Quality by real speculative decoding of held-out prompts.

tau is the mean number of tokens a round yields, accepted drafts + 1, as in DFlash. A target that loops is easy to
draft for, so every tau comes with the share of repeated 8-grams in the same text, and the headline is the figure of
the temperature that repeats less.

Decoding with drafts and without alternate, batch of prompts by batch of prompts, so that the speed-up compares like
with like; it is that of this batch size on this device.
"""

import json as json_format
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer import checkpoint as checkpoints
from trainer import decode, equality, metrics, ngram, report
from trainer.config import Config, EvaluateConfig
from trainer.data import sources
from trainer.data.chat import load_tokenizer
from trainer.data.rows import Document
from trainer.drafter import Drafter
from trainer.errors import TrainerError
from trainer.models import Models, build, choose_device
from trainer.prompts import Prompt, load_prompts
from trainer.proposers import DrafterProposer, Proposer
from trainer.target import Target
from trainer.verify import MATCH, REJECTION, Sampler

Evaluation = dict[str, Any]
NGRAM_TOKENS = 4_000_000  # of the training documents, from their beginning: enough to count, and seconds to do it


def repeated_share(texts: list[list[int]], n: int = 8) -> tuple[int, int]:
    """(n-grams that occurred earlier in the same text, all n-grams)."""
    repeated = total = 0
    for text in texts:
        grams = [tuple(text[i : i + n]) for i in range(len(text) - n + 1)]
        repeated, total = repeated + len(grams) - len(set(grams)), total + len(grams)
    return repeated, total


def name_of(sampler: Sampler) -> str:
    """temperature_T is of the rule `match`; the other rule is named."""
    name = f"temperature_{sampler.temperature:g}"
    return name if sampler.rule == MATCH else f"{sampler.rule}_{name}"


@dataclass
class Evaluator:
    """Prompts and how they are decoded. The target's own texts are kept for comparison and `margin`."""

    target: Target
    prompts: list[Prompt]
    config: EvaluateConfig
    block: int
    mask_token: int
    shifted: bool = False
    texts: dict[float, decode.Decoded] = field(default_factory=dict)

    @property
    def drafts(self) -> int:
        """A round."""
        return self.block if self.shifted else self.block - 1

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end a text, from the model's own generation settings."""
        ends: set[int] = set()
        for settings in (self.target.config, getattr(self.target.model, "generation_config", None)):
            end = getattr(settings, "eos_token_id", None)
            ends.update(end if isinstance(end, list | tuple) else [] if end is None else [end])
        return frozenset(ends)

    @property
    def margin(self) -> float:
        """Smallest lead of any token in the target's own texts, in logits."""
        return min((text.margin for text in self.texts.values()), default=float("inf"))

    def samplers(self, *, rejection: bool = True) -> list[Sampler]:
        """Greedy, and sampled by each rule."""
        sampled = {"temperature": self.config.temperature, "seed": self.config.noise_seed}
        rules = (MATCH, REJECTION) if rejection else (MATCH,)
        return [Sampler(temperature=0.0), *(Sampler(**sampled, rule=rule) for rule in rules)]

    def proposer(self, drafter: Drafter) -> DrafterProposer:
        longest = decode.capacity_for(self._tokens(), self.config.new_tokens, self.drafts)
        return DrafterProposer(
            drafter, self.target, block=self.block, mask_token=self.mask_token, capacity=longest, shifted=self.shifted
        )

    def _tokens(self, prompts: int | None = None) -> list[list[int]]:
        return [prompt.tokens for prompt in self.prompts[:prompts]]

    def plain(self, sampler: Sampler) -> decode.Decoded:
        """The target's own texts of all prompts."""
        if sampler.temperature not in self.texts:
            parts = [self._plain(group, sampler, first) for first, group in self._groups(self._tokens())]
            self.texts[sampler.temperature] = decode.join(parts)
        return self.texts[sampler.temperature]

    def _groups(self, prompts: list[list[int]]) -> list[tuple[int, list[list[int]]]]:
        size = self.config.batch or len(prompts)
        return [(first, prompts[first : first + size]) for first in range(0, len(prompts), size)]

    def _plain(self, group: list[list[int]], sampler: Sampler, first: int, tokens: int = 0) -> decode.Decoded:
        limit = tokens or self.config.new_tokens
        return decode.plain(self.target, group, sampler, new_tokens=limit, ends=self.ends, first=first)

    def _speculative(
        self, proposer: Proposer, group: list[list[int]], sampler: Sampler, first: int, tokens: int = 0
    ) -> decode.Decoded:
        limit = tokens or self.config.new_tokens
        return decode.speculative(self.target, proposer, group, sampler, new_tokens=limit, ends=self.ends, first=first)

    def _warm_up(self, proposer: Proposer, group: list[list[int]], samplers: list[Sampler]) -> None:
        """Libraries and memory of a GPU are set up in the first calls."""
        for sampler in samplers:
            self._plain(group, sampler, 0, tokens=2)
            # no further than the proposer has room for
            self._speculative(proposer, group, sampler, 0, tokens=min(2 * self.drafts, self.config.new_tokens))

    def measure(self, proposer: Proposer, *, prompts: int | None = None, compare: bool = True) -> Evaluation:
        """tau at both temperatures. With `compare` by both rules, and against plain decoding: speed and equality."""
        chosen = self.prompts[:prompts]
        groups = self._groups(self._tokens(prompts))
        samplers = self.samplers(rejection=compare)
        if compare and self.target.device.type == "cuda":
            self._warm_up(proposer, groups[0][1], samplers)
        drafted: dict[Sampler, list[decode.Decoded]] = {sampler: [] for sampler in samplers}
        undrafted: dict[float, list[decode.Decoded]] = {sampler.temperature: [] for sampler in samplers}
        for first, group in groups:
            for sampler in samplers:
                if compare and sampler.rule == MATCH:
                    undrafted[sampler.temperature].append(self._plain(group, sampler, first))
                drafted[sampler].append(self._speculative(proposer, group, sampler, first))
        result: Evaluation = {
            "prompts": len(chosen),
            "batch": len(groups[0][1]),
            "device": str(self.target.device),
            "dtype": str(self.target.dtype).removeprefix("torch."),
        }
        for sampler in samplers:
            decoded = decode.join(drafted[sampler])
            figures = figures_of(decoded, [prompt.domain for prompt in chosen], sampler.rule)
            if compare:
                text = decode.join(undrafted[sampler.temperature])
                if len(chosen) == len(self.prompts):
                    self.texts[sampler.temperature] = text
                figures |= comparison(decoded, text, self.target.dtype, exact=sampler.rule == MATCH)
            result[name_of(sampler)] = figures
        names = [name_of(sampler) for sampler in samplers if sampler.rule == MATCH]
        headline = min(names, key=lambda name: result[name]["repeat_8gram_share"])
        result["headline"] = {"name": headline, **result[headline]}
        return result


def _share(pair: tuple[float, float]) -> float | None:
    """None when nothing was counted."""
    return pair[0] / pair[1] if pair[1] else None


def figures_of(decoded: decode.Decoded, domains: list[str], rule: str) -> dict[str, Any]:
    """`accepted_share[j]`: of all rounds, those whose drafts 0 … j were accepted; `accepted_given_previous[j]`: of
    those that came so far, draft j - 1 being accepted."""
    by_count = decoded.rounds.sum(dim=0)
    reached = by_count.flip(0).cumsum(0).flip(0).tolist()  # [j]: rounds with at least j accepted drafts
    figures = {
        "rule": rule,
        "tau": metrics.ratio(decoded.accepted),
        "repeat_8gram_share": metrics.ratio(repeated_share(decoded.tokens)),
        "rounds": reached[0],
        "seconds": round(decoded.seconds, 3),
        "tokens_per_second": _share(decoded.rate),
        "accepted_share": [_share((count, reached[0])) for count in reached[1:]],
        "accepted_given_previous": [_share(pair) for pair in zip(reached[1:], reached[:-1], strict=True)],
    }
    if any(domains):
        figures["domains"] = {}
        for domain in dict.fromkeys(domains):
            rows = [row for row, name in enumerate(domains) if name == domain]
            part = decode.Decoded(tokens=[], seconds=0.0, rounds=decoded.rounds[rows])
            figures["domains"][domain] = {
                "prompts": len(rows),
                "rounds": part.accepted[1],
                "tau": _share(part.accepted),
            }
    return figures


def comparison(decoded: decode.Decoded, text: decode.Decoded, dtype: torch.dtype, *, exact: bool) -> dict[str, Any]:
    """Speed against plain decoding, and where the rule promises it, `exact`, equality with its text."""
    speed, plain_speed = _share(decoded.rate), _share(text.rate)
    figures: dict[str, Any] = {
        "plain_tokens_per_second": plain_speed,
        "speedup": speed / plain_speed if speed and plain_speed else None,
    }
    if exact:
        found = equality.divergences(text, decoded)
        figures["equal_to_plain"] = len(decoded.tokens) - len(found)
        figures["divergences"] = equality.summary(found, dtype)
    return figures


def evaluator_of(config: Config, target: Target) -> Evaluator:
    """Raises TrainerError if the configuration names no prompts, or they cannot be used."""
    if config.evaluate.prompts is None:
        raise TrainerError("there is nothing to evaluate on; set evaluate.prompts to a file of prompts")
    prompts = load_prompts(
        config.evaluate.prompts,
        target.config.vocab_size,
        tokenizer=partial(load_tokenizer, config.target.path),
        template=config.data.template,
    )
    most = getattr(target.config, "max_position_embeddings", None)
    for number, prompt in enumerate(prompts):
        if most and len(prompt.tokens) + config.evaluate.new_tokens > most:
            raise TrainerError(
                f"{config.evaluate.prompts}: prompt {number}, counted from 0, has {len(prompt.tokens)} tokens, which "
                f"with {config.evaluate.new_tokens} new ones (evaluate.new_tokens) exceed the target's {most} positions"
            )
    return Evaluator(
        target=target,
        prompts=prompts,
        config=config.evaluate,
        block=config.drafter.block_size,
        mask_token=config.drafter.mask_token,
        shifted=config.drafter.shifted,
    )


def measure_ngram(evaluator: Evaluator, documents: Sequence[Document]) -> Evaluation:
    """The baseline, which has as many drafts a round."""
    taken, total = [], 0
    for document in documents:
        if total >= NGRAM_TOKENS:
            break
        taken.append(np.asarray(document.tokens))
        total += len(document.tokens)
    return evaluator.measure(ngram.NGramProposer(ngram.Counts(taken), size=evaluator.drafts))


def describe(evaluation: Evaluation) -> str:
    return ", ".join(
        f"tau {evaluation[name]['tau']:.3f} at {name.replace('_', ' ')} "
        f"({evaluation[name]['repeat_8gram_share']:.1%} repeated)"
        for name in evaluation
        if name.startswith("temperature_")
    )


def evaluate_checkpoint(
    config: Config, *, checkpoint: Path | None = None, drafter: Path | None = None, json: Path | None = None
) -> int:
    """Of a run's checkpoint, or of an exported drafter -> exit code: 1 if a text differs from plain decoding's."""
    if config.threads:
        torch.set_num_threads(config.threads)
    if checkpoint is not None:
        config = checkpoints.variant_of(checkpoint, config)
        state = checkpoints.read_state(checkpoint, config, ignore=("seed", "steps", "optimizer", "ema"))
    models = build(config, choose_device(config))
    if checkpoint is not None:
        checkpoints.check_target(checkpoint, state, models.vocabulary)
        checkpoints.load_drafter(checkpoint, models.drafter)
        return evaluate_drafter(config, models, name=f"step {state.step}", json=json)
    from trainer.export import load_into

    load_into(models.drafter, drafter, config=config, target=models.target)
    return evaluate_drafter(config, models, name=str(drafter), json=json)


def _must_be_writable(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise TrainerError(f"{path}: cannot be written ({error.strerror}); name another file with --json") from None


def evaluate_drafter(config: Config, models: Models, *, name: str, json: Path | None = None) -> int:
    """Prints tables, of the n-gram baseline too; writes all figures to `json`. -> exit code."""
    evaluator = evaluator_of(config, models.target)
    if json is not None:
        _must_be_writable(json)  # before what may take an hour
    measured = {"drafter": evaluator.measure(evaluator.proposer(models.drafter.eval()))}
    print(report.evaluation(measured["drafter"], name))
    documents, _ = sources.load_documents(
        config.data.paths,
        tokenizer=partial(load_tokenizer, config.target.path),
        vocabulary=models.target.config.vocab_size,
        template=config.data.template,
        broken_share=config.data.broken_share,
    )
    measured["ngram"] = measure_ngram(evaluator, documents)
    print()
    print(report.evaluation(measured["ngram"], "n-gram drafter", positions=False))
    equal = report.equality_of(measured)
    print()
    print(report.equality_line(equal))
    if json is not None:
        written = {"name": name, **measured, "equal_to_plain": equal, "rules": report.RULES}
        json.write_text(json_format.dumps(metrics.finite(written), indent=1) + "\n")
        print(f"figures in {json}")
    return 0 if equal["within_rounding"] else 1
