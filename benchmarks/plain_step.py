"""A training step in plain torch, to hold the trainer's beside: the same weights, batches and features, no module of
the trainer's but its block mask.

What is compiled is chosen simply: of each layer the part before attention and the part after it, flex attention, and
the arithmetic of the head. Everything else runs as it is written.
"""

import statistics
import time
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

from benchmarks.step_parts import Bench, Measured
from trainer import block_mask
from trainer.block_mask import LayerKind
from trainer.data.batches import Batch
from trainer.step import blocks_of

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Heads:
    count: int
    groups: int
    size: int


def normed(x: Tensor, gain: Tensor, epsilon: float = 1e-6) -> Tensor:
    wide = x.float()
    return gain * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)).to(x.dtype)


def turned(x: Tensor, angle: Tensor) -> Tensor:
    """x [T, heads, d], angle [T, d/2]: first and second half of a head are the two coordinates that turn."""
    cos, sin = (each.to(x.dtype)[:, None] for each in (angle.cos(), angle.sin()))
    first, second = x.tensor_split(2, dim=-1)
    return torch.cat((cos * first - sin * second, sin * first + cos * second), dim=-1)


def to_attention(x: Tensor, context: Tensor, angles: tuple[Tensor, Tensor], w: Weights, heads: Heads):
    """x [T, H], context [S, H] -> query [1, Hq, T, d], key and value [1, Hkv, S + T, d]."""
    own = normed(x, w["input_layernorm"])
    both, angle = torch.cat((context, own)), torch.cat(angles)
    query = turned(normed(F.linear(own, w["q_proj"]).view(-1, heads.count, heads.size), w["q_norm"]), angles[1])
    key = turned(normed(F.linear(both, w["k_proj"]).view(-1, heads.groups, heads.size), w["k_norm"]), angle)
    value = F.linear(both, w["v_proj"]).view(-1, heads.groups, heads.size)
    return [each.transpose(0, 1).unsqueeze(0) for each in (query, key, value)]


def from_attention(x: Tensor, mixed: Tensor, w: Weights) -> Tensor:
    x = x + F.linear(mixed.squeeze(0).transpose(0, 1).flatten(1), w["o_proj"])
    own = normed(x, w["post_attention_layernorm"])
    return x + F.linear(F.silu(F.linear(own, w["gate_proj"])) * F.linear(own, w["up_proj"]), w["down_proj"])


def chunk_loss(logits: Tensor, label: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """-> the weighted sum of the cross entropies, and its gradient with respect to the logits, in their dtype."""
    log_q = logits.float().log_softmax(-1)
    column = torch.arange(logits.shape[1], device=logits.device)
    slope = weight[:, None] * (log_q.exp() - (column == label[:, None]).float())
    return -(weight * log_q.gather(1, label[:, None])[:, 0]).sum(), slope.to(logits.dtype)


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states: Tensor, head: Tensor, batch: Batch, arithmetic) -> Tensor:
        gradient, total = torch.empty_like(states), torch.zeros((), device=states.device)
        for rows in torch.arange(len(states)).split(batch.chunk):
            here = slice(int(rows[0]), int(rows[-1]) + 1)
            loss, slope = arithmetic(states[here] @ head.T, batch.label[here], batch.weight[here])
            gradient[here] = slope @ head
            total += loss
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx, scale: Tensor):
        return ctx.saved_tensors[0] * scale, None, None, None


class PlainStep:
    """Takes over the bench, whose drafter and optimizer are let go; its weights begin as the drafter has them. For one
    row a step, one kind of layer, cross entropy."""

    def __init__(self, bench: Bench):
        self.bench, self.config = bench, bench.config
        self.cuda = bench.device.type == "cuda"
        drafter = bench.models.drafter
        self.weights = {
            name: parameter.detach().clone().requires_grad_() for name, parameter in drafter.named_parameters()
        }
        self.masters = {name: weight.detach().float().clone() for name, weight in self.weights.items()}
        self.adam = torch.optim.AdamW(self.masters.values(), lr=1e-4, betas=(0.9, 0.95), fused=self.cuda or None)
        self.rope_base = drafter.shape.rope_base
        bench.models, bench.optimizer = replace(bench.models, drafter=None), None  # so that memory is this step's alone
        self.heads = Heads(bench.sizes.heads, bench.sizes.kv_heads, bench.sizes.target.head_size)
        made = torch.compile if self.cuda else lambda function, **_: function
        self.before, self.after = made(to_attention, dynamic=False), made(from_attention, dynamic=False)
        self.arithmetic = made(chunk_loss, dynamic=False)
        self.flex = made(flex_attention, dynamic=False, fullgraph=True)

    def layer(self, number: int) -> Weights:
        prefix = f"layers.{number}."
        named = {name.removeprefix(prefix): w for name, w in self.weights.items() if name.startswith(prefix)}
        return {name.split(".")[-2]: weight for name, weight in named.items()}

    def attention(self, batch: Batch):
        blocks = blocks_of(batch, self.config.drafter.block_size)
        if self.cuda:
            mask = block_mask.flex_mask(blocks, LayerKind())
            return lambda q, k, v: self.flex(q, k, v, block_mask=mask, enable_gqa=True)
        allow = block_mask.dense(blocks, LayerKind())[:, None]
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=allow, enable_gqa=True)

    def step(self, waiting: Batch, mark) -> Tensor:
        """-> the mean loss. `mark(name)` is called where a span ends."""
        bench, w = self.bench, self.weights
        batch = waiting.to(bench.device)
        mark("copy")
        attend = self.attention(batch)
        mark("mask")
        _, features = bench.buffers[0]
        size = self.config.drafter.block_size
        rate = self.rope_base ** (-torch.arange(0, self.heads.size, 2, device=bench.device).float() / self.heads.size)
        slots = batch.rows.position[0][batch.anchors[0]][:, None] + torch.arange(size, device=bench.device)
        angles = batch.rows.position[0][:, None] * rate, slots.flatten()[:, None] * rate
        tokens = torch.full_like(slots, self.config.drafter.mask_token)
        tokens[:, 0] = batch.rows.tokens[0][batch.anchors[0]]
        context = normed(F.linear(features[0], w["fc.weight"]), w["hidden_norm.weight"])
        x = F.embedding(tokens.flatten(), bench.models.vocabulary.embedding)
        for number in range(bench.sizes.layers):
            own = self.layer(number)
            x = self.after(x, attend(*self.before(x, context, angles, own, self.heads)), own)
        x = normed(x, w["norm.weight"])
        mark("forward")
        loss = _Head.apply(x[batch.slot], bench.models.vocabulary.head, batch, self.arithmetic)
        loss = loss / batch.weight.sum()
        mark("loss")
        loss.backward()
        mark("backward")
        for name, master in self.masters.items():
            master.grad, w[name].grad = w[name].grad.float(), None
        torch.nn.utils.clip_grads_with_norm_(
            self.masters.values(), 1.0, torch.nn.utils.get_total_norm([m.grad for m in self.masters.values()])
        )
        self.adam.step()
        with torch.no_grad():
            torch._foreach_copy_(list(w.values()), list(self.masters.values()))
        self.adam.zero_grad()
        mark("optimizer")
        return loss.detach()


def measure_plain(plain: PlainStep, *, steps: int, after: int) -> Measured:
    """As `step_parts.measure`."""
    names, times, spans, losses, began = [], [], [], [], 0.0
    for number, (batch,) in enumerate(plain.bench.batches(after + steps)):
        if number == after and plain.cuda:
            torch.cuda.reset_peak_memory_stats()
        if number == after:
            began = time.perf_counter()
        marks = [("", _now(plain.cuda))]
        losses.append(plain.step(batch, lambda name, marks=marks: marks.append((name, _now(plain.cuda)))).item())
        if plain.cuda:
            torch.cuda.synchronize()
        if number >= after:
            now = time.perf_counter()
            times.append(now - began)
            began = now
            names = [name for name, _ in marks[1:]]
            spans.append([_between(a, b) for (_, a), (_, b) in pairwise(marks)])
    return Measured(
        seconds=statistics.median(times),
        spans={name: statistics.median(each[i] for each in spans) for i, name in enumerate(names)},
        first_loss=losses[0],
        peak=torch.cuda.max_memory_allocated() if plain.cuda else 0,
        reserved=torch.cuda.max_memory_reserved() if plain.cuda else 0,
        outside=0,
    )


def _now(cuda: bool):
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(first, second) -> float:
    return second - first if isinstance(first, float) else first.elapsed_time(second) / 1e3
