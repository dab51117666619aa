"""Small targets of random weights, and drafters that have learnt what these say by heart, so that drafts are kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from trainer import attention, decode, models
from trainer.block_mask import Blocks
from trainer.config import Config, DataConfig, DrafterConfig, TargetConfig
from trainer.drafter import Drafter
from trainer.proposers import DrafterProposer
from trainer.target import Target
from trainer.verify import Sampler

CPU = torch.device("cpu")
PROMPTS = [[5, 9, 2, 7, 7, 1, 3, 8, 30, 4, 11], [60, 3, 41, 12], [17, 80, 2, 2, 33, 64, 5]]
MASK = 95


@dataclass(frozen=True, kw_only=True)
class Small:
    config: Config
    target: Target
    drafter: Drafter

    @property
    def block(self) -> int:
        return self.config.drafter.block_size

    def proposer(self, prompt: list[int], new_tokens: int) -> DrafterProposer:
        return DrafterProposer(
            self.drafter,
            self.target,
            block=self.block,
            mask_token=MASK,
            capacity=decode.capacity_for([prompt], new_tokens, self.block),
            shifted=self.config.drafter.shifted,
        )

    def text(self, prompt: list[int], new_tokens: int) -> list[int]:
        """What the target says after it, greedily."""
        return decode.plain(self.target, [prompt], Sampler(temperature=0.0), new_tokens=new_tokens).tokens[0]

    def hidden(self, tokens: torch.Tensor, start: torch.Tensor, anchors: list[int]) -> torch.Tensor:
        """tokens and start [1, S] -> [N, B, H], the drafter's last hidden states as in training."""
        _, features = self.target.inspect(tokens, start, last=False)
        anchor = torch.tensor([anchors])
        blocks = Blocks(
            start=start.gather(1, anchor),
            anchor=anchor,
            keep=torch.ones_like(anchor, dtype=torch.bool),
            context=tokens.shape[1],
            size=self.block,
        )
        slots = torch.full((1, len(anchors), self.block), MASK)
        slots[..., 0] = tokens.gather(1, anchor)
        positions = torch.arange(tokens.shape[1]) - start
        at = positions.gather(1, anchor)[..., None] + torch.arange(self.block)
        context = self.drafter.context(features, positions)
        noise = self.target.embedding[slots.flatten(1)]
        hidden = self.drafter(noise, at.flatten(1), context, attention.dense_plan(blocks))
        return hidden.unflatten(1, (len(anchors), self.block))[0]


def make_target(folder: Path, family: str, **options: Any) -> Path:
    """Qwen3 or Llama, of 96 tokens; saved in `folder`."""
    import transformers

    config = getattr(transformers, f"{family}Config")(
        **{
            "vocab_size": 96,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 5,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 512,
            "bos_token_id": 0,
            "eos_token_id": 0,
            **options,
        }
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():  # at their usual start, layers hardly change the stream, and a wrong one would not show
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 1.5 * parameter.shape[1] ** -0.5)
            else:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def make(target: Path, **drafter: Any) -> Small:
    """A fresh drafter for it, in float64: then all who compute the same come to the same tokens."""
    config = Config(
        name="small",
        target=TargetConfig(path=target, dtype="float64"),
        data=DataConfig(paths=()),
        drafter=DrafterConfig(mask_token=MASK, **{"target_layers": (0, 2), "layers": 1, **drafter}),
        steps=1,
        seed=3,
        device="cpu",
        dtype="float64",
        attention="dense",
    )
    both = models.build(config, CPU)
    return Small(config=config, target=both.target, drafter=both.drafter)


def memorise(small: Small, *, new_tokens: int, steps: int = 60) -> None:
    """Trains the drafter on the target's own answers to PROMPTS."""
    rows = [[*prompt, *small.text(prompt, new_tokens)] for prompt in PROMPTS]
    optimizer = torch.optim.AdamW(small.drafter.parameters(), lr=1e-2, weight_decay=0.0)
    shift = small.config.drafter.shifted
    for _ in range(steps):
        loss = torch.zeros(())
        for row, prompt in zip(rows, PROMPTS, strict=True):
            tokens = torch.tensor([row])
            anchors = list(range(len(prompt), len(row) - small.block))
            hidden = small.hidden(tokens, torch.zeros_like(tokens), anchors)[:, 1 - shift :]
            index = torch.tensor(anchors)[:, None] + torch.arange(hidden.shape[1]) + 1
            loss = loss + F.cross_entropy((hidden @ small.target.head.T).flatten(0, 1), tokens[0][index].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    small.drafter.requires_grad_(False)
