"""Counts what a step holds, at any size: its tensors are fake, so that shapes are followed and nothing is computed.

Two fused kernels that a GPU has, and the fake tensors of a CPU do not, are stood in for by functions that keep for the
backward pass what those keep: RMS norms (their input and a float32 number a row) and flex attention (queries, keys,
values, its output and a float32 number a query and head). All else is the trainer's own code.
"""

import weakref
from dataclasses import fields, replace
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers import AutoModelForCausalLM, PretrainedConfig

from trainer import head, step, target
from trainer.config import Config
from trainer.drafter import Drafter, Shape
from trainer.feed import made_up
from trainer.models import Models, layer_kinds
from trainer.optimizer import Optimizer
from trainer.plan_sizes import Sizes
from trainer.spans import Spans
from trainer.vocabulary import Vocabulary


class Counter(TorchDispatchMode):
    """Bytes of all storages that operations have made and that still live, and their peak; FLOPs of matrix products."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = self.flops = 0
        self.seen: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if count := flop_registry.get(func._overloadpacket):
            self.flops += count(*args, **(kwargs or {}), out_val=out)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.add(tensor)
        return out

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self.seen or not size:
            return
        self.seen[key] = size
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self.seen.pop(key)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32), weight)
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx, grad):
        x, _, weight = ctx.saved_tensors
        return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(weight)


class _Flex(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value):
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:3], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, value, _, sums = ctx.saved_tensors
        held = grad.contiguous(), torch.empty_like(sums)  # for as long as the kernel runs
        return *(torch.empty_like(each) for each in (query, key, value)), *held[:0]


def _attend(_kind, query, context, block):
    key, value = (torch.cat(pair, dim=2) for pair in zip(context, block, strict=True))
    return _Flex.apply(query, key, value)


def _measure(logits, wanted, label, weight, block, position, objective):
    one = torch.empty_like(weight)
    rank = torch.empty_like(label, dtype=torch.int32)
    return head._Known(one, weight, torch.empty_like(weight), rank, logits.new_empty((len(logits), 1)), None, None)


def _slope(logits, wanted, label, known, objective):
    return torch.empty_like(logits)


def target_forward(hf: PretrainedConfig, length: int) -> int:
    """Peak bytes of a forward pass over one row through all layers but the last, in bfloat16, beside weights and
    features."""
    layers, before = tuple(range(hf.num_hidden_layers - 1)), torch.get_default_dtype()
    hf._attn_implementation = target.ATTENTION
    with FakeTensorMode(allow_non_fake_inputs=True), Counter() as count, torch.no_grad():
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = AutoModelForCausalLM.from_config(hf).eval()
        finally:
            torch.set_default_dtype(before)
        frozen = object.__new__(target.Target)  # without files
        frozen.model, frozen.layers, frozen._features = model, layers, None
        for place, layer in enumerate(layers):
            model.model.layers[layer].register_forward_hook(frozen._capture(place))
        tokens = torch.zeros(1, length, dtype=torch.int64)
        count.peak = base = count.now
        trunk = target._up_to(model.model, max(layers))
        _, features = frozen._forward(trunk, tokens, tokens, lambda query, *_: torch.empty_like(query))
        return count.peak - base - features.nbytes


class Counted(NamedTuple):
    peak: int  # bytes
    flops: int  # of matrix products


def count_step(config: Config, sizes: Sizes) -> Counted:
    """Of a rank that trains on features from elsewhere, up to the optimizer; the two buffers of features are made here,
    as the receiver makes them."""
    batches = [made_up(config, rows=sizes.rows) for _ in range(config.data.micro_batches)]
    ends_of, dtype = sizes.target, {2: torch.bfloat16, 4: torch.float32}[sizes.bytes]
    shape = Shape(
        hidden=ends_of.hidden,
        intermediate=sizes.intermediate,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_size=ends_of.head_size,
        features=sizes.features,
        layers=sizes.layers,
        epsilon=1e-6,
        rope_base=1e6,
        kinds=layer_kinds(config.drafter),
    )
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:

        def moved(of):
            changed = {}
            for each in fields(of):
                value = getattr(of, each.name)
                if isinstance(value, Tensor):
                    changed[each.name] = fake.from_tensor(value)
            return replace(of, **changed)

        batches = [replace(moved(batch), rows=moved(batch.rows)) for batch in batches]
        with Counter() as count:
            drafter = Drafter(shape)
            for parameter in drafter.parameters():
                parameter.data = parameter.data.to(dtype)
            drafter.activation_checkpointing = config.activation_checkpointing
            embedding = torch.empty(ends_of.vocabulary, ends_of.hidden, dtype=dtype)
            output = embedding if ends_of.tied else torch.empty_like(embedding)
            ends = Vocabulary(embedding=embedding, head=output, final_norm=torch.empty(ends_of.hidden), config=None)
            optimizer = Optimizer(drafter, config.optimizer, config.steps)
            optimizer._adam_state()
            wide = sizes.features + sizes.distils
            buffers = [torch.empty(sizes.tokens * wide * ends_of.hidden, dtype=dtype) for _ in range(2)]
            cut = sizes.tokens * sizes.features * ends_of.hidden
            features = buffers[0][:cut].view(sizes.rows, sizes.length, -1)
            last = buffers[0][cut:].view(sizes.rows, sizes.length, -1) if sizes.distils else None
            count.peak = count.now
            with (
                mock.patch("torch.nn.RMSNorm.forward", lambda self, x: _Norm.apply(x, self.weight)),
                mock.patch.object(step, "attention_plan", lambda *_: _attend),
                mock.patch.object(head, "_compiled", lambda: (_measure, _slope)),
            ):
                step.compute_gradient(
                    config,
                    Models(drafter=drafter, vocabulary=ends, target=None),
                    optimizer,
                    batches,
                    Spans(torch.device("cpu")),
                    source=lambda _: (last, features),
                )
    return Counted(count.peak, count.flops)
