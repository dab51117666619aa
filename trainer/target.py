"""The frozen target: a Hugging Face causal LM from a local directory, with its inner features captured.

A feature of layer l is the residual stream after decoder layer l, which is `hidden_states[l + 1]` of Hugging Face,
but for the last layer: there Hugging Face returns the stream after the final norm, so hooks are used instead.

Attention does not go through Hugging Face's own back ends, which build masks of [S, S] and may fall back to building
all scores: the model is given one of our own, and what it may see comes as intervals. That it really is used, and
that packed documents do not see each other, is checked on the loaded model (`check_isolation`).
"""

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, PretrainedConfig
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import logging

from trainer import attention, block_mask
from trainer.cache import PositionCache
from trainer.errors import TrainerError
from trainer.vocabulary import Vocabulary

logging.disable_progress_bar()

ATTENTION = "trainer_intervals"  # our back end's name among those of Hugging Face
# (query [R, Hq, Q, d], key, value [R, Hkv, K, d], window or 0) -> [R, Hq, Q, d]
Attend = Callable[[Tensor, Tensor, Tensor, int], Tensor]
_attend: ContextVar[Attend] = ContextVar("attend")
_TOLERANCE = {torch.bfloat16: 3e-2, torch.float32: 1e-4, torch.float64: 1e-9}


def _attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: object
) -> tuple[Tensor, None]:
    """What Hugging Face calls in every layer; it wants the heads behind the positions."""
    scaling, window = options.pop("scaling", None), options.pop("sliding_window", None)
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if options.get(name) is not None]
    if unknown or options.get("dropout"):
        raise TrainerError(
            f"{type(module).__name__} asks its attention for {', '.join(unknown) or 'dropout'}, "
            "which is not supported; use another target"
        )
    natural = query.shape[-1] ** -0.5
    if scaling is not None and scaling != natural:
        query = query * (scaling / natural)
    return _attend.get()(query, key, value, window or 0).transpose(1, 2), None


AttentionInterface.register(ATTENTION, _attention_forward)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """auto: bf16 on a GPU; fp32 on a CPU, where bf16 logits would tie often, and a tie may break either way."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, name)


class Target:
    def __init__(
        self,
        path: Path,
        layers: tuple[int, ...] | Callable[[PretrainedConfig], tuple[int, ...]],
        device: torch.device,
        *,
        dtype: str = "auto",
        dense: bool = False,
    ):
        """`layers` are captured; a function chooses them from the model's configuration. With `dense` the scores of
        attention are built, under the bound of attention.py; else flex attention is used."""
        self.device, self.dtype, self.dense = device, choose_dtype(dtype, device), dense
        try:
            model, found = AutoModelForCausalLM.from_pretrained(
                path, dtype=self.dtype, local_files_only=True, attn_implementation=ATTENTION, output_loading_info=True
            )
        except Exception as error:  # whatever is wrong with its files, from several libraries
            raise TrainerError(f"{path}: not a loadable causal LM: {' '.join(str(error).split())}") from None
        if missing := sorted(found["missing_keys"]):  # Hugging Face makes up random ones, and only logs it
            raise TrainerError(
                f"{path}: its files lack {', '.join(missing[:3])} ({len(missing)} tensors in all) that its config.json "
                "asks for; fetch the model anew"
            )
        self.model = model.requires_grad_(False).eval().to(device)
        self.config = model.config
        body = getattr(model, "model", None)
        if not isinstance(getattr(body, "layers", None), nn.ModuleList) or not hasattr(body, "norm"):
            raise TrainerError(
                f"{path}: {type(model).__name__} has no model.layers and model.norm to take features from"
            )
        self._check_logits()
        self.layers = layers(self.config) if callable(layers) else layers
        self._trunk = _up_to(body, max(self.layers))
        self._features: Tensor | None = None
        self._cache_name = "cache" if "cache" in inspect.signature(body.forward).parameters else "past_key_values"
        for place, layer in enumerate(self.layers):
            body.layers[layer].register_forward_hook(self._capture(place))

    @torch.no_grad()
    def _check_logits(self) -> None:
        """Its logits are the head times the last hidden state, as everything here forms them. Raises TrainerError where
        the model adds a bias, scales or caps them: the head alone is asked, with the body taken out."""
        draw = torch.Generator().manual_seed(0)
        states = torch.randn(1, 2, self.head.shape[1], generator=draw).to(self.device, self.dtype)
        states = states * (100 / (states @ self.head.T).abs().max())  # beyond any cap
        body = self.model.model
        body.forward = lambda *_, **__: BaseModelOutputWithPast(last_hidden_state=states)
        try:
            said = self.model(input_ids=torch.zeros(1, 2, dtype=torch.int64, device=self.device)).logits
        finally:
            del body.forward
        wanted = states @ self.head.T
        if not (said - wanted).norm() <= _TOLERANCE[self.dtype] * wanted.norm():
            raise TrainerError(
                f"{type(self.model).__name__} does more to its logits than multiply by the head (a bias, a scale or a "
                "cap), which is not supported; use another target"
            )

    def _capture(self, place: int) -> Callable:
        def hook(_module: nn.Module, _inputs: tuple, output: Tensor | tuple) -> None:
            stream = output if isinstance(output, Tensor) else output[0]
            width = stream.shape[-1]
            if self._features is None:
                self._features = stream.new_empty((*stream.shape[:-1], width * len(self.layers)))
            self._features[..., place * width : (place + 1) * width] = stream

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

    @property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(embedding=self.embedding, head=self.head, final_norm=self.final_norm, config=self.config)

    def _forward(
        self,
        body: nn.Module,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        into: Tensor | None = None,
        **cache: object,
    ) -> tuple:
        """-> what the body returns [R, Q, H], features [R, Q, K*H]; these are written into `into` where it is given."""
        self._features = into
        with _using(attend):
            output = body(input_ids=tokens, position_ids=positions, use_cache=False, **cache)
        features, self._features = self._features, None
        return output[0], features

    @torch.no_grad()
    def inspect(
        self, tokens: Tensor, start: Tensor, *, last: bool = True, into: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor]:
        """Read packed rows: tokens and start [R, S] -> last hidden state after the final norm [R, S, H], and
        features [R, S, K*H]. No document sees another. Without `last` the target stops after the last captured layer.
        Features can be written `into` a tensor that is there.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device) - start
        body = self.model.model if last else self._trunk
        hidden, features = self._forward(body, tokens, positions, documents(start, dense=self.dense), into)
        return hidden if last else None, features

    @torch.no_grad()
    def read(self, tokens: Tensor, positions: Tensor, cache: PositionCache) -> tuple[Tensor, Tensor]:
        """Continue rows: tokens and positions [R, Q] -> logits [R, Q, V] (fp32 or wider), features [R, Q, K*H]."""
        width = int(positions.max()) + 1
        cache.at(positions, width=width)
        hidden, features = self._forward(
            self.model.model, tokens, positions, continued(positions, width), **{self._cache_name: cache}
        )
        logits = hidden @ self.head.T
        return logits if logits.dtype == torch.float64 else logits.float(), features

    def check_isolation(self, length: int, rows: int = 1) -> None:
        """Features of a packed document do not depend on the others, and equal those of the document alone.

        Raises TrainerError. Three forward passes over `rows` equal rows of `length` tokens, in the very form that
        training uses. It catches whatever leaks between documents: a mask, positions, or an architecture that looks
        back by other means than attention. Another neighbour changes nothing, to the last bit in most models; another
        place in the row changes the order of sums, and many layers of bf16 make that grow.
        """
        first = max(1, length // 3)
        draw = torch.Generator().manual_seed(0)
        document, one, other = (
            torch.randint(self.config.vocab_size, (1, size), generator=draw).to(self.device)
            for size in (length - first, first, first)
        )

        def features(before: Tensor, after: Tensor) -> Tensor:
            """Of `document`, where it stands in the row."""
            at, end = before.shape[1], before.shape[1] + document.shape[1]
            start = torch.zeros(1, length, dtype=torch.int64, device=self.device)
            start[:, at:end], start[:, end:] = at, end
            tokens = torch.cat([before, document, after], dim=1)
            _, found = self.inspect(tokens.repeat(rows, 1), start.repeat(rows, 1), last=False)
            return found[:, at:end].float()

        nothing = one[:, :0]
        packed, rounding = features(one, nothing), _TOLERANCE[self.dtype]
        for found, bound, what in (
            (features(other, nothing), rounding, "with another document before it"),
            (features(nothing, one), 10 * rounding, "alone"),
        ):
            difference = float((packed - found).norm() / packed.norm())
            if not difference <= bound:
                raise TrainerError(
                    f"{type(self.model).__name__} lets packed documents see each other: features of a document differ "
                    f"by {difference:.1e} (relative) from those of the same document {what}, and rounding makes up "
                    f"to {bound:.0e}; this architecture cannot be a target"
                )


def _up_to(body: nn.Module, last: int) -> nn.Module:
    """A body that shares all modules but stops after layer `last`, without the final norm."""
    trunk = copy.copy(body)
    trunk._modules = dict(body._modules)
    trunk.layers = body.layers[: last + 1]
    trunk.norm = nn.Identity()
    return trunk


@contextlib.contextmanager
def _using(attend: Attend) -> Iterator[None]:
    """Fails if the model never asked: then it has an attention of its own, which nothing here controls."""
    used = False

    def counted(query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
        nonlocal used
        used = True
        return attend(query, key, value, window)

    token = _attend.set(counted)
    try:
        yield
    finally:
        _attend.reset(token)
    if not used:
        raise TrainerError("the target does not use the attention it was given, so what it sees is unknown")


def documents(start: Tensor, *, dense: bool) -> Attend:
    """Causal attention inside the documents of packed rows, start [R, S]; masks are made once for each window."""
    masks: dict[int, object] = {}

    def attend(query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
        if window not in masks:
            make = block_mask.document_dense if dense else block_mask.document_mask
            masks[window] = make(start, window)
        if dense:
            return attention.dense_document_attention(query, key, value, masks[window])
        return attention.document_attention(query, key, value, masks[window])

    return attend


def continued(positions: Tensor, width: int) -> Attend:
    """Queries at `positions` [R, Q] over a cache that holds positions 0 … width-1; as many rows at a time, and of a
    long row as many queries, as keep the scores under the bound."""

    def attend(query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
        held = torch.arange(width, device=query.device)
        a_query = attention.score_bytes(query[:1, :, :1], width)
        queries = max(1, min(query.shape[2], attention.DENSE_BYTES // a_query))
        rows = max(1, attention.DENSE_BYTES // (a_query * query.shape[2]))
        output = torch.empty_like(query)
        for r in range(0, len(query), rows):
            for q in range(0, query.shape[2], queries):
                here, place = slice(r, r + rows), slice(q, q + queries)
                at = positions[here, place, None]
                allow = held <= at
                if window:
                    allow &= held > at - window
                output[here, :, place] = attention.dense_document_attention(
                    query[here, :, place], key[here], value[here], allow
                )
        return output

    return attend
