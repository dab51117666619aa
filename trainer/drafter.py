"""The DFlash drafter: proposes a whole block at once from what the target knew before the block.

After "DFlash: Block Diffusion for Flash Speculative Decoding" (z-lab); parameter names are those of its published
checkpoints. H target width, K captured layers, d head size, B block size. Context features f [S, K*H] are fused once,
c = RMSNorm(W_fc f), and every layer injects them as keys and values through the very projections that serve its own
noise stream: k = RoPE(k_norm(W_k [c ; n])), v = W_v [c ; n]. The fused context does not pass the input norm. A block's
noise stream is the target's embedding of [token, MASK, …, MASK]. There is no embedding and no head in here, so heads
of later variants are composed with this body rather than derived from it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from trainer.block_mask import LayerKind

KeysValues = tuple[Tensor, Tensor]  # two [R, Hkv, T, d]
Rotation = tuple[Tensor, Tensor]  # cosine and sine, two [R, 1, T, d/2]
# (kind of the layer, query [R, Hq, T, d], context, block) -> [R, Hq, T, d]; see attention.py
Attend = Callable[[LayerKind, Tensor, KeysValues, KeysValues], Tensor]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Everything that fixes the drafter's parameters and what they compute; the width is the target's."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    features: int  # K
    layers: int
    epsilon: float
    rope_base: float
    kinds: tuple[LayerKind, ...] = ()  # by layer; empty: all see everything before and inside their block

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        return self.kinds or (LayerKind(),) * self.layers


def rotation(positions: Tensor, shape: Shape, dtype: torch.dtype) -> Rotation:
    """positions [R, T] -> what `rotate` multiplies with; angles are formed in float32 whatever `dtype` is."""
    half = shape.head_size // 2
    frequency = shape.rope_base ** (-torch.arange(half, device=positions.device, dtype=torch.float32) / half)
    angle = positions[:, None, :, None] * frequency
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """Rotary embedding in the half-split layout: x [R, heads, T, d]."""
    cos, sin = by
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Fused(NamedTuple):
    """The context before a layer's own projections."""

    states: Tensor  # c [R, S, H]
    by: Rotation


class Attention(nn.Module):
    def __init__(self, shape: Shape, kind: LayerKind):
        super().__init__()
        self.kind, self.head_size = kind, shape.head_size
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_size, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_size, shape.hidden, bias=False)
        self.q_norm = nn.RMSNorm(shape.head_size, eps=shape.epsilon)
        self.k_norm = nn.RMSNorm(shape.head_size, eps=shape.epsilon)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_size)).transpose(1, 2)

    def keys_values(self, x: Tensor, by: Rotation) -> KeysValues:
        """x [R, T, H] -> two [R, Hkv, T, d]; for context and noise alike."""
        return rotate(self.k_norm(self._heads(self.k_proj(x))), by), self._heads(self.v_proj(x))

    def forward(self, x: Tensor, by: Rotation, context: KeysValues, attend: Attend) -> Tensor:
        query = rotate(self.q_norm(self._heads(self.q_proj(x))), by)
        mixed = attend(self.kind, query, context, self.keys_values(x, by))
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape, kind: LayerKind):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.epsilon)
        self.self_attn = Attention(shape, kind)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.epsilon)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, by: Rotation, context: KeysValues | Fused, attend: Attend) -> Tensor:
        if isinstance(context, Fused):
            context = self.self_attn.keys_values(*context)
        x = x + self.self_attn(self.input_layernorm(x), by, context, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(shape.features * shape.hidden, shape.hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(shape.hidden, eps=shape.epsilon)
        self.layers = nn.ModuleList(Layer(shape, kind) for kind in shape.layer_kinds)
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.epsilon)
        self.activation_checkpointing = False  # recompute a layer in the backward pass instead of keeping its inside
        self.computes_in: torch.dtype | None = None  # where the weights at rest are wider, as sharded ones are

    @property
    def dtype(self) -> torch.dtype:
        return self.computes_in or self.fc.weight.dtype

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        return self.shape.layer_kinds

    def context(self, features: Tensor, positions: Tensor) -> list[KeysValues]:
        """features [R, S, K*H], positions [R, S] -> the context's keys and values, one pair a layer."""
        fused = self._fuse(features, positions)
        return [layer.self_attn.keys_values(*fused) for layer in self.layers]

    def _fuse(self, features: Tensor, positions: Tensor) -> Fused:
        fused = self.hidden_norm(self.fc(features))
        return Fused(fused, rotation(positions, self.shape, fused.dtype))

    def forward(self, noise: Tensor, positions: Tensor, context: list[KeysValues], attend: Attend) -> Tensor:
        """noise [R, T, H] (embedded blocks), positions [R, T] -> [R, T, H] after the final norm, ready for the head."""
        return self._through_layers(noise, positions, context, attend)

    def from_features(
        self, features: Tensor, context_positions: Tensor, noise: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        """`context` and `forward` in one, as training wants it: all that a layer's weights do happens within the call
        of that layer, so that they need not be there at other times (see sharding.py)."""
        fused = self._fuse(features, context_positions)
        return self._through_layers(noise, positions, [fused] * len(self.layers), attend)

    def _through_layers(
        self, noise: Tensor, positions: Tensor, context: list[KeysValues] | list[Fused], attend: Attend
    ) -> Tensor:
        x, by = noise, rotation(positions, self.shape, noise.dtype)
        for layer, before in zip(self.layers, context, strict=True):
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(layer, x, by, before, attend, use_reentrant=False)
            else:
                x = layer(x, by, before, attend)
        return self.norm(x)


def initialise(drafter: Drafter, *, seed: int, final_norm: Tensor) -> None:
    """Fresh weights, a pure function of the seed.

    The final norm starts from the target's, whose head it feeds, but smaller: at full size the first guesses would
    be as bold as the target's and as good as random, and training would begin with unlearning them.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim == 2:
                values = torch.empty(parameter.shape).normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
                parameter.copy_(values)
            else:
                parameter.fill_(1.0)
        drafter.norm.weight.copy_(0.3 * final_norm)
