"""The frozen target: a Hugging Face causal LM from a local directory, with its inner features captured.

A feature of layer l is the residual stream after decoder layer l, which is `hidden_states[l + 1]` of Hugging Face,
but for the last layer: there Hugging Face returns the stream after the final norm, so hooks are used instead.
"""

import inspect
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from trainer.cache import PositionCache
from trainer.errors import TrainerError

logging.disable_progress_bar()


class Target:
    """bf16 weights are computed in fp32 on a CPU: bf16 logits often tie, and a tie may break either way."""

    def __init__(self, path: Path, layers: tuple[int, ...], device: torch.device):
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        try:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise TrainerError(f"{path}: not a loadable causal LM: {error}") from None
        self.model = model.requires_grad_(False).eval().to(device)
        self.config = model.config
        self.layers = layers
        self._captured: dict[int, Tensor] = {}
        self._cache_name = (
            "cache" if "cache" in inspect.signature(model.model.forward).parameters else "past_key_values"
        )
        for layer in layers:
            model.model.layers[layer].register_forward_hook(self._capture(layer))

    def _capture(self, layer: int):
        def hook(_module, _inputs, output) -> None:
            self._captured[layer] = output if isinstance(output, Tensor) else output[0]

        return hook

    @property
    def embedding(self) -> Tensor:
        """[V, H], frozen; the drafter embeds its blocks with it."""
        return self.model.get_input_embeddings().weight

    @property
    def head(self) -> Tensor:
        """[V, H], frozen; the drafter's logits come from it."""
        return self.model.get_output_embeddings().weight

    @property
    def final_norm(self) -> Tensor:
        return self.model.model.norm.weight

    def _forward(
        self, tokens: Tensor, positions: Tensor, allow: Tensor, cache: PositionCache | None
    ) -> tuple[Tensor, Tensor]:
        """-> last hidden state after the final norm [R, Q, H], features [R, Q, K*H]."""
        extra = {} if cache is None else {self._cache_name: cache}
        output = self.model.model(
            input_ids=tokens, position_ids=positions, attention_mask=allow[:, None], use_cache=False, **extra
        )
        features = torch.cat([self._captured[layer] for layer in self.layers], dim=-1)
        self._captured.clear()
        return output[0], features

    @torch.no_grad()
    def inspect(self, tokens: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        """Read packed rows: tokens and start [R, S] -> last hidden state after the final norm [R, S, H], and
        features [R, S, K*H]. No document sees another.
        """
        index = torch.arange(tokens.shape[1], device=tokens.device)
        allow = (index <= index[:, None]) & (index >= start[..., None])
        # a padding token's document is empty, and a query that may see nothing would give NaN
        allow |= torch.eye(len(index), dtype=torch.bool, device=tokens.device)
        return self._forward(tokens, index - start, allow, None)

    @torch.no_grad()
    def read(self, tokens: Tensor, positions: Tensor, cache: PositionCache) -> tuple[Tensor, Tensor]:
        """Continue rows: tokens and positions [R, Q] -> logits [R, Q, V] (fp32), features [R, Q, K*H]."""
        width = int(positions.max()) + 1
        cache.at(positions, width=width)
        allow = torch.arange(width, device=tokens.device) <= positions[..., None]
        hidden, features = self._forward(tokens, positions, allow, cache)
        return (hidden @ self.head.T).float(), features
