"""The drafter against the definition of DFlash, written out slowly."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from trainer import attention
from trainer.block_mask import Blocks, LayerKind
from trainer.drafter import Drafter, Shape, initialise, rotate, rotation

SHAPE = Shape(
    hidden=24, intermediate=40, heads=4, kv_heads=2, head_size=8, features=3, layers=2, epsilon=1e-6, rope_base=1e4
)
KINDS = {
    "full": (LayerKind(),) * 2,
    "causal": (LayerKind(causal=True),) * 2,
    "sliding": (LayerKind(window=6, causal=True),) * 2,
    "mixed": (LayerKind(), LayerKind(window=5)),
}
BLOCK = 4


def made(kinds=(), **changes) -> Drafter:
    """Away from the start, where a layer does little and a wrong one would not show."""
    drafter = Drafter(dataclasses.replace(SHAPE, kinds=kinds, **changes)).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.ndim == 2 else 0.3
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * scale
            parameter.copy_(noise if parameter.ndim == 2 else 1 + noise)
    return drafter


def naive_block(drafter: Drafter, features, noise, start: int):
    """One block at `start` of one document, with loops over layers, heads and queries, nothing shared but parameters.

    features [S, K*H] of the whole document, of which only those before `start` may be used; noise [B, H].
    """
    shape, block = drafter.shape, len(noise)

    def norm(x, weight):
        return x * (x.pow(2).mean(-1, keepdim=True) + shape.epsilon).rsqrt() * weight

    def spin(x, positions):
        out = torch.empty_like(x)
        half = x.shape[-1] // 2
        for row, position in enumerate(positions):
            for i in range(half):
                angle = position * shape.rope_base ** (-i / half)
                a, b = x[row, i], x[row, i + half]
                out[row, i] = a * math.cos(angle) - b * math.sin(angle)
                out[row, i + half] = b * math.cos(angle) + a * math.sin(angle)
        return out

    context = norm(features[:start] @ drafter.fc.weight.T, drafter.hidden_norm.weight)
    x = noise
    places = list(range(start + block))
    d = shape.head_size
    for layer, kind in zip(drafter.layers, shape.layer_kinds, strict=True):
        attention = layer.self_attn
        n = norm(x, layer.input_layernorm.weight)
        both = torch.cat([context, n])
        heads = []
        for head in range(shape.heads):
            group = head // (shape.heads // shape.kv_heads)
            q = (n @ attention.q_proj.weight.T)[:, head * d : (head + 1) * d]
            k = (both @ attention.k_proj.weight.T)[:, group * d : (group + 1) * d]
            v = (both @ attention.v_proj.weight.T)[:, group * d : (group + 1) * d]
            q = spin(norm(q, attention.q_norm.weight), places[start:])
            k = spin(norm(k, attention.k_norm.weight), places)
            rows = []
            for slot in range(block):
                seen = [
                    place
                    for place in places
                    if (place < start or not kind.causal or place <= start + slot)
                    and (place >= start or not kind.window or start + slot - place < kind.window)
                ]
                rows.append((q[slot] @ k[seen].T / d**0.5).softmax(-1) @ v[seen])
            heads.append(torch.stack(rows))
        x = x + torch.cat(heads, -1) @ attention.o_proj.weight.T
        n = norm(x, layer.post_attention_layernorm.weight)
        gate, up = n @ layer.mlp.gate_proj.weight.T, n @ layer.mlp.up_proj.weight.T
        x = x + (gate * torch.sigmoid(gate) * up) @ layer.mlp.down_proj.weight.T
    return norm(x, drafter.norm.weight)


def packed_case():
    """Two documents of 15 and 18 tokens in one row, three anchors and a slot that is not kept."""
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(1, 33, SHAPE.features * SHAPE.hidden, generator=generator, dtype=torch.float64)
    start = torch.tensor([[0] * 15 + [15] * 18])
    anchor = torch.tensor([[7, 20, 28, 32]])
    blocks = Blocks(
        start=start.gather(1, anchor),
        anchor=anchor,
        keep=torch.tensor([[True, True, True, False]]),
        context=33,
        size=BLOCK,
    )
    noise = torch.randn(1, 4 * BLOCK, SHAPE.hidden, generator=generator, dtype=torch.float64)
    return features, torch.arange(33) - start, blocks, noise


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
@torch.no_grad()
def test_the_drafter_equals_a_naive_one_block_at_a_time(kinds):
    drafter = made(kinds)
    features, position, blocks, noise = packed_case()
    slots = (blocks.anchor - blocks.start)[..., None] + torch.arange(BLOCK)
    fast = drafter(
        noise, slots.flatten(1), drafter.context(features, position), attention.dense_plan(blocks)
    ).unflatten(1, (-1, BLOCK))
    for number, (anchor, start) in enumerate(
        zip(blocks.anchor[0, :3].tolist(), blocks.start[0, :3].tolist(), strict=True)
    ):
        end = 15 if start == 0 else 33
        own_noise = noise[0, number * BLOCK : (number + 1) * BLOCK]
        slow = naive_block(drafter, features[0, start:end], own_noise, anchor - start)
        # the fast one forms RoPE's angles in float32, as serving engines do; a position off by one moves it by 1e-1
        torch.testing.assert_close(fast[0, number], slow, atol=1e-4, rtol=1e-4)
        wrong = naive_block(drafter, features[0, start:end], own_noise, anchor - start - 1)
        assert not torch.allclose(fast[0, number], wrong, atol=1e-2)


def test_rotation_depends_on_the_distance_alone():
    torch.manual_seed(0)
    query, key = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)

    def at(x, i: int):
        return rotate(x, rotation(torch.tensor([[i]]), SHAPE, torch.float32))

    torch.testing.assert_close(at(query, 7) @ at(key, 3).mT, at(query, 104) @ at(key, 100).mT, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(at(query, 7) @ at(key, 3).mT, at(query, 8) @ at(key, 3).mT, atol=1e-4)
    torch.testing.assert_close(at(query, 0) @ at(key, 0).mT, query @ key.mT)


def test_activation_checkpointing_changes_no_gradient():
    features, position, blocks, noise = packed_case()
    gradients = []
    for recompute in (False, True):
        drafter = made(KINDS["mixed"])
        drafter.activation_checkpointing = recompute
        slots = (blocks.anchor - blocks.start)[..., None] + torch.arange(BLOCK)
        context = drafter.context(features, position)
        drafter(noise, slots.flatten(1), context, attention.dense_plan(blocks)).square().sum().backward()
        gradients.append([parameter.grad for parameter in drafter.parameters()])
    assert all(torch.equal(first, second) for first, second in zip(*gradients, strict=True))
    assert all(gradient.abs().sum() > 0 for gradient in gradients[0])


def test_parameters_are_those_of_published_drafters():
    names = [name for name, _ in Drafter(dataclasses.replace(SHAPE, layers=5)).named_parameters()]
    assert len(names) == 58 and {"fc.weight", "hidden_norm.weight", "norm.weight"} < set(names)
    assert "layers.4.self_attn.k_norm.weight" in names and "layers.0.mlp.down_proj.weight" in names
    with torch.device("meta"):
        drafter = Drafter(
            Shape(
                hidden=4096,
                intermediate=12288,
                heads=32,
                kv_heads=8,
                head_size=128,
                features=5,
                layers=5,
                epsilon=1e-6,
                rope_base=1e6,
            )
        )
    assert round(sum(parameter.numel() for parameter in drafter.parameters()) / 1e9, 4) == 1.0486


def test_fresh_weights_are_a_function_of_the_seed():
    def fresh(seed):
        drafter = Drafter(SHAPE)
        initialise(drafter, seed=seed, final_norm=torch.full((24,), 2.0))
        return nn.utils.parameters_to_vector(drafter.parameters())

    assert torch.equal(fresh(1), fresh(1)) and not torch.equal(fresh(1), fresh(2))
