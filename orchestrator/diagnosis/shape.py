"""The attention that a recipe's settings amount to, where they say it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from orchestrator.diagnosis.facts import Attention

_HEADS = ("num_attention_heads", "attention_heads", "query_heads", "num_heads", "n_heads", "heads")
_LENGTH = (
    "row_length",
    "sequence_length",
    "seq_length",
    "seq_len",
    "max_seq_len",
    "max_length",
    "context_length",
    "length",
)
_ROWS = ("rows_per_step", "micro_batch_size", "batch_size", "rows")


def settings(text: str | None) -> Mapping[str, Any]:
    """A recipe's settings from its text at the place; empty where it cannot be read."""
    if not text:
        return {}
    import yaml

    try:
        recipe = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    found = recipe.get("settings") if isinstance(recipe, dict) else None
    return found if isinstance(found, dict) else {}


def attention(values: Mapping[str, Any], heads: int | None = None) -> Attention | None:
    """The shape of the scores, None unless heads and length are both known.

    A block drafter asks with anchors × block size queries; its keys are the row and these.
    """
    heads = heads or _first(values, _HEADS)
    length = _first(values, _LENGTH)
    if not heads or not length:
        return None
    anchors, block = _first(values, ("anchors_per_row",)), _first(values, ("block_size",))
    queries = anchors * block if anchors and block else _first(values, ("query_length", "queries")) or length
    keys = length + queries if anchors and block else _first(values, ("key_length", "keys")) or length
    return Attention(heads, queries, keys, _first(values, _ROWS) or 1)


def _first(values: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    for name in names:
        for key, value in _walk(values):
            if key == name and isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def _walk(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        yield str(key), value
        if isinstance(value, Mapping):
            yield from _walk(value)
