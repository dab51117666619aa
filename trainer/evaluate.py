"""Quality by real speculative decoding of held-out prompts.

tau is the mean number of tokens a round yields, accepted drafts + 1, as in DFlash. A target that loops is easy to
draft for, so every tau comes with the share of repeated 8-grams in the same text, and the headline is the figure of
the temperature that repeats less.
"""

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer import checkpoint, data, decode, metrics, ngram
from trainer.config import Config, EvaluateConfig
from trainer.drafter import Drafter, Shape, new_drafter
from trainer.errors import TrainerError
from trainer.target import Target

Evaluation = dict[str, Any]


def load_prompts(path: Path, vocabulary: int) -> list[list[int]]:
    """A JSON list of {"tokens": [...], ...}."""
    try:
        prompts = [[int(token) for token in prompt["tokens"]] for prompt in json.loads(path.read_text())]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise TrainerError(f'{path}: must be a JSON list of {{"tokens": [...]}} ({error!r})') from None
    if not prompts:
        raise TrainerError(f"{path}: holds no prompts")
    for number, prompt in enumerate(prompts):
        if not prompt or not all(0 <= token < vocabulary for token in prompt):
            raise TrainerError(f"{path}: prompt {number} is empty or has tokens outside the vocabulary of {vocabulary}")
    return prompts


def repeated_share(texts: list[list[int]], n: int = 8) -> tuple[int, int]:
    """(n-grams that occurred earlier in the same text, all n-grams)."""
    repeated = total = 0
    for text in texts:
        grams = [tuple(text[i : i + n]) for i in range(len(text) - n + 1)]
        repeated, total = repeated + len(grams) - len(set(grams)), total + len(grams)
    return repeated, total


def name_of(temperature: float) -> str:
    return f"temperature_{temperature:g}"


@dataclass
class Evaluator:
    """Prompts, sampling noise and the target's own texts; the latter two are made once and reused."""

    target: Target
    prompts: list[list[int]]
    config: EvaluateConfig
    block: int
    mask_token: int
    noise: torch.Tensor | None = None
    texts: dict[float, decode.Decoded] = field(default_factory=dict)

    @property
    def temperatures(self) -> tuple[float, float]:
        return 0.0, self.config.temperature

    @property
    def end(self) -> int | None:
        end = self.target.config.eos_token_id
        return end if isinstance(end, int) else None

    @property
    def capacity(self) -> int:
        return decode.capacity_for(self.prompts, self.config.new_tokens, self.block)

    def sampler(self, temperature: float) -> decode.Sampler:
        if temperature == 0:
            return decode.Sampler(temperature=0.0)
        if self.noise is None:
            self.noise = decode.gumbel_noise(
                self.config.noise_seed,
                prompts=len(self.prompts),
                length=self.capacity,
                vocabulary=self.target.config.vocab_size,
            ).to(self.target.embedding.device)
        return decode.Sampler(temperature=temperature, noise=self.noise)

    def plain(self, temperature: float) -> decode.Decoded:
        if temperature not in self.texts:
            self.texts[temperature] = decode.plain(
                self.target,
                self.prompts,
                self.sampler(temperature),
                new_tokens=self.config.new_tokens,
                end=self.end,
            )
        return self.texts[temperature]

    def proposer(self, drafter: Drafter) -> decode.DrafterProposer:
        return decode.DrafterProposer(
            drafter, self.target, block=self.block, mask_token=self.mask_token, capacity=self.capacity
        )

    def measure(self, proposer: decode.Proposer, *, prompts: int | None = None, compare: bool = True) -> Evaluation:
        """tau at both temperatures. With `compare`, also how many prompts came out as without drafts."""
        chosen = self.prompts[:prompts]
        result: Evaluation = {"prompts": len(chosen)}
        for temperature in self.temperatures:
            began = time.perf_counter()
            decoded = decode.speculative(
                self.target,
                proposer,
                chosen,
                self.sampler(temperature),
                new_tokens=self.config.new_tokens,
                end=self.end,
            )
            result[name_of(temperature)] = figures = {
                "tau": metrics.ratio(decoded.accepted),
                "repeat_8gram_share": metrics.ratio(repeated_share(decoded.tokens)),
                "rounds": decoded.accepted[1],
                "seconds": round(time.perf_counter() - began, 3),
            }
            if compare:
                texts = self.plain(temperature).tokens[: len(chosen)]
                figures["equal_to_plain"] = sum(map(list.__eq__, decoded.tokens, texts))
        names = [name_of(temperature) for temperature in self.temperatures]
        headline = min(names, key=lambda name: result[name]["repeat_8gram_share"])
        result["headline"] = {"name": headline, **result[headline]}
        return result


def build(config: Config, device: torch.device) -> tuple[Target, Drafter, Evaluator]:
    target = Target(config.target.path, config.drafter.target_layers, device)
    shape = Shape.of(
        target.config,
        features=len(config.drafter.target_layers),
        layers=config.drafter.layers,
        heads=config.drafter.heads,
        kv_heads=config.drafter.kv_heads,
    )
    drafter = new_drafter(shape, seed=config.seed, final_norm=target.final_norm).to(device)
    evaluator = Evaluator(
        target=target,
        prompts=load_prompts(config.evaluate.prompts, target.config.vocab_size),
        config=config.evaluate,
        block=config.drafter.block_size,
        mask_token=config.drafter.mask_token,
    )
    return target, drafter, evaluator


def measure_ngram(evaluator: Evaluator, documents: list[tuple[np.ndarray, int]]) -> Evaluation:
    counts = ngram.Counts(tokens for tokens, _ in documents)
    return evaluator.measure(ngram.NGramProposer(counts, size=evaluator.block - 1))


def describe(evaluation: Evaluation) -> str:
    return ", ".join(
        f"tau {evaluation[name]['tau']:.3f} at {name.replace('_', ' ')} "
        f"({evaluation[name]['repeat_8gram_share']:.1%} repeated)"
        for name in evaluation
        if name.startswith("temperature_")
    )


def choose_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise TrainerError(
            f"device {name}: torch {torch.__version__} sees no CUDA device here; set device: cpu or auto"
        )
    return torch.device(name)


def evaluate_checkpoint(config: Config, path: Path) -> int:
    if config.threads:
        torch.set_num_threads(config.threads)
    state = checkpoint.read_state(path, config, ignore=("seed", "steps"))
    target, drafter, evaluator = build(config, choose_device(config.device))
    checkpoint.load(path, drafter)
    documents = data.load_documents(config.data.path, target.config.vocab_size)
    print(f"step {state.step}: {describe(evaluator.measure(evaluator.proposer(drafter)))}")
    print(f"n-gram drafter: {describe(measure_ngram(evaluator, documents))}")
    return 0
