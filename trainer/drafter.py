"""The DFlash drafter: proposes a whole block at once from what the target knew before the block.

After "DFlash: Block Diffusion for Flash Speculative Decoding" (z-lab); parameter names are those of its published
checkpoints. H target width, K captured layers, d head size, B block size. Context features f [S, K*H] are fused once,
c = RMSNorm(W_fc f), and every layer injects them as keys and values through the very projections that serve its own
noise stream: k = RoPE(k_norm(W_k [c ; n])), v = W_v [c ; n]. The fused context does not pass the input norm. A block's
noise stream is the target's embedding of [token, MASK, …, MASK]. There is no embedding and no head in here.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.attention import attend_blocks

KeysValues = list[tuple[Tensor, Tensor]]  # per layer: two [R, Hkv, S, d]
Seen = tuple[Tensor, Tensor]  # the context each block sees [R, N, S] bool, and whether it counts at all [R, N] bool


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Everything that fixes the drafter's parameters; the widths are the target's."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    features: int  # K
    layers: int
    epsilon: float
    rope_base: float

    @classmethod
    def of(cls, target, *, features: int, layers: int, heads: int = 0, kv_heads: int = 0) -> "Shape":
        """From a Hugging Face configuration. RoPE settings moved in transformers 5; a lost base goes unnoticed."""
        rope = getattr(target, "rope_parameters", None) or {"rope_theta": target.rope_theta}
        return cls(
            hidden=target.hidden_size,
            intermediate=target.intermediate_size,
            heads=heads or target.num_attention_heads,
            kv_heads=kv_heads or target.num_key_value_heads,
            head_size=getattr(target, "head_dim", None) or target.hidden_size // target.num_attention_heads,
            features=features,
            layers=layers,
            epsilon=target.rms_norm_eps,
            rope_base=float(rope["rope_theta"]),
        )


def rotate(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """Rotary embedding in the half-split layout: x [R, heads, T, d], positions [R, T]."""
    half = x.shape[-1] // 2
    frequency = base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = positions[:, None, :, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Attention(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        d = shape.head_size
        self.q_proj = nn.Linear(shape.hidden, shape.heads * d, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * d, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * d, bias=False)
        self.o_proj = nn.Linear(shape.heads * d, shape.hidden, bias=False)
        self.q_norm = nn.RMSNorm(d, eps=shape.epsilon)
        self.k_norm = nn.RMSNorm(d, eps=shape.epsilon)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.shape.head_size)).transpose(1, 2)

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """x [R, T, H] -> two [R, Hkv, T, d]; for context and noise alike."""
        key = self.k_norm(self._heads(self.k_proj(x)))
        return rotate(key, positions, self.shape.rope_base), self._heads(self.v_proj(x))

    def forward(self, x: Tensor, positions: Tensor, context: tuple[Tensor, Tensor], seen: Seen) -> Tensor:
        query = rotate(self.q_norm(self._heads(self.q_proj(x))), positions, self.shape.rope_base)
        mixed = attend_blocks(query, context, self.keys_values(x, positions), *seen)
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
    def __init__(self, shape: Shape):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.epsilon)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.epsilon)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, positions: Tensor, context: tuple[Tensor, Tensor], seen: Seen) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), positions, context, seen)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(shape.features * shape.hidden, shape.hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(shape.hidden, eps=shape.epsilon)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.epsilon)

    def context(self, features: Tensor, positions: Tensor) -> KeysValues:
        """features [R, S, K*H], positions [R, S] -> the context's keys and values for every layer."""
        fused = self.hidden_norm(self.fc(features))
        return [layer.self_attn.keys_values(fused, positions) for layer in self.layers]

    def forward(self, noise: Tensor, positions: Tensor, context: KeysValues, seen: Seen) -> Tensor:
        """noise [R, N*B, H] (embedded blocks), positions [R, N*B] -> [R, N*B, H], ready for the head."""
        x = noise
        for layer, keys_values in zip(self.layers, context, strict=True):
            x = layer(x, positions, keys_values, seen)
        return self.norm(x)


def new_drafter(shape: Shape, *, seed: int, final_norm: Tensor) -> Drafter:
    """A fresh drafter, a pure function of the seed.

    Its final norm starts from the target's, whose head it feeds, but smaller: at full size the first guesses would
    be as bold as the target's and as good as random, and training would begin with unlearning them.
    """
    generator = torch.Generator().manual_seed(seed)
    drafter = Drafter(shape)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
        drafter.norm.weight.copy_(0.3 * final_norm)
    return drafter
