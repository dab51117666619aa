"""Packing, and the demo's rows."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import trainer
from trainer.data.rows import Document, first_fit, pack
from trainer.data.sources import load_documents

DEMO = Path(trainer.__file__).parent / "assets" / "demo" / "rows.safetensors"
FIELDS = ("tokens", "start", "end", "generated")


def documents_of(lengths: list[int], seed: int) -> list[Document]:
    """Document i holds the token i + 2 alone, with a random mask."""
    generator = np.random.default_rng(seed)
    return [
        Document(tokens=np.full(n, i + 2), generated=generator.random(n) < 0.5, domain="x")
        for i, n in enumerate(lengths)
    ]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 30), max_size=20), st.integers(0, 99))
def test_packing_loses_only_the_ends_of_long_documents(lengths, seed):
    documents = documents_of(lengths, seed)
    rows = pack(documents, 16, padding=1)
    assert rows.used == sum(min(n, 16) for n in lengths) and rows.cut == sum(n > 16 for n in lengths)
    assert rows.tokens.shape[1:] == (16,)
    for i, (n, document) in enumerate(zip(lengths, documents, strict=True)):
        row, at = (rows.tokens == i + 2).nonzero()[0].tolist()
        kept = min(n, 16)
        where = (row, slice(at, at + kept))
        assert (rows.tokens == i + 2).sum() == kept
        assert (rows.tokens[where] == i + 2).all()
        assert (rows.start[where] == at).all() and (rows.end[where] == at + kept).all()
        assert rows.generated[where].tolist() == document.generated[:kept].tolist()
        assert rows.position[where].tolist() == list(range(kept))
    padding = rows.tokens == 1
    assert int(padding.sum()) == rows.tokens.numel() - rows.used
    assert not rows.generated[padding].any() and (rows.end[padding] == rows.start[padding]).all()


def plain_first_fit(sizes: list[int], length: int) -> list[tuple[int, int]]:
    filled: list[int] = []
    places = []
    for size in sizes:
        row = next((i for i, used in enumerate(filled) if used + size <= length), None)
        if row is None:
            row = len(filled)
            filled.append(0)
        places.append((row, filled[row]))
        filled[row] += size
    return places


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 20), max_size=40))
def test_the_tree_finds_the_first_row_with_room(sizes):
    assert first_fit(sizes, 20) == plain_first_fit(sizes, 20)


def test_rows_are_taken_in_the_order_asked():
    rows = pack(documents_of([16, 9, 16, 12], 0), 16, padding=1)
    taken = rows.take(torch.tensor([3, 1]))
    for name in FIELDS:
        assert torch.equal(getattr(taken, name), getattr(rows, name)[[3, 1]])
    assert taken.used == 12 + 9


def test_the_demos_rows_are_what_its_published_figures_were_trained_on():
    documents, report = load_documents(
        [DEMO], tokenizer=lambda: pytest.fail("not needed"), vocabulary=1024, template={}, broken_share=0
    )
    rows = pack(documents, 256, padding=1)
    digest = hashlib.sha256()
    for name in FIELDS:
        digest.update(getattr(rows, name).numpy().tobytes())
    assert digest.hexdigest() == "fc4c4cf2a4f651ae289a9f91cf0f496c0e65bd7518a799db9ce670cc34d1a137"
    assert (report.documents, report.tokens, report.supervised) == (1792, 1792 * 256, 1792 * 192)
