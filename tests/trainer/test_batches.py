"""What a step trains on, held against a slow twin written from the definition."""

import hashlib
import math
import threading
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import trainer
from trainer.data import batches
from trainer.data.prefetch import Prefetcher
from trainer.data.rows import Document, Rows, pack
from trainer.data.sources import load_documents

DEMO = Path(trainer.__file__).parent / "assets" / "demo" / "rows.safetensors"
LENGTH = 24
ENTRIES = ("slot", "label", "weight", "source", "block", "position")


@st.composite
def packed(draw) -> Rows:
    """Every token of all rows is another one, so that a label tells where it comes from."""
    lengths = draw(st.lists(st.integers(1, LENGTH), min_size=1, max_size=8))
    generator = np.random.default_rng(draw(st.integers(0, 99)))
    documents, first = [], 2
    for n in lengths:
        prompt = int(generator.integers(0, n + 1))
        generated = (np.arange(n) >= prompt) & (generator.random(n) < draw(st.sampled_from([0.8, 1.0])))
        documents.append(Document(tokens=np.arange(first, first + n), generated=generated))
        first += n
    return pack(documents, LENGTH, padding=1)


def twin(batch: batches.Batch, *, block: int, shifted: bool, gamma: float | None) -> list[list[dict]]:
    """The entries of every block, from the definition."""
    rows, found = batch.rows, []
    for row in range(len(rows)):
        for n, a in enumerate(batch.anchors[row].tolist()):
            found.append([])
            for slot in range(block) if shifted else range(1, block):
                prediction = slot if shifted else slot - 1
                predicted = a + slot + 1 if shifted else a + slot
                if not batch.keep[row, n] or predicted >= rows.end[row, a] or not rows.generated[row, predicted]:
                    continue
                found[-1].append({
                    "slot": (row * batch.anchors.shape[1] + n) * block + slot,
                    "label": int(rows.tokens[row, predicted]),
                    "weight": 1.0 if gamma is None else math.exp(-prediction / gamma),
                    "source": row * rows.tokens.shape[1] + predicted - 1,
                    "block": row * batch.anchors.shape[1] + n,
                    "position": prediction,
                })  # fmt: skip
    return found


def chunked(blocks: list[list[dict]], chunk: int, pad: bool) -> list[dict]:
    nothing = dict.fromkeys(ENTRIES, 0)
    chunks: list[list[dict]] = []
    for entries in blocks:
        if entries and (not chunks or len(chunks[-1]) + len(entries) > chunk):
            chunks.append([])
        if entries:
            chunks[-1] += entries
    if pad and not chunks:
        chunks.append([])
    for each in chunks if pad else chunks[:-1]:
        each += [nothing] * (chunk - len(each))
    return [entry for each in chunks for entry in each]


@settings(max_examples=120, deadline=None)
@given(packed(), st.data())
def test_supervised_slots_are_those_of_the_definition(rows, data):
    block, shifted, pad = data.draw(st.integers(2, 6)), data.draw(st.booleans()), data.draw(st.booleans())
    gamma = data.draw(st.sampled_from([None, 1.5, 7.0]))
    slots, chunk = data.draw(st.integers(1, 12)), data.draw(st.integers(block, 4 * block))
    width = slots + data.draw(st.integers(0, 4))
    parts = data.draw(st.integers(1, 3))
    made = batches.micro_batches(
        rows, seed=3, step=data.draw(st.integers(0, 9)), rows_per_step=2 * parts, parts=parts, anchors_per_row=slots,
        width=width, block=block, shifted=shifted, gamma=gamma, chunk=chunk, pad=pad,
    )  # fmt: skip
    assert len(made) == parts
    for batch in made:
        wanted = chunked(twin(batch, block=block, shifted=shifted, gamma=gamma), chunk, pad)
        for name in ENTRIES:
            values = getattr(batch, name)
            assert values.dtype == (torch.float32 if name == "weight" else torch.int64)
            assert values.tolist() == pytest.approx([entry[name] for entry in wanted], rel=1e-6)
        assert batch.weight_sum == pytest.approx(sum(entry["weight"] for entry in wanted), rel=1e-6)
        assert batch.chunk == chunk and (not pad or (len(wanted) % chunk == 0 and wanted))


@settings(max_examples=60, deadline=None)
@given(packed(), st.booleans(), st.integers(0, 99))
def test_no_label_is_of_another_document_or_a_prompt(rows, shifted, seed):
    [batch] = batches.micro_batches(
        rows, seed=seed, step=0, rows_per_step=2, parts=1, anchors_per_row=9, width=9, block=4, shifted=shifted,
        gamma=7, chunk=8, pad=True,
    )  # fmt: skip
    real = batch.weight > 0
    source, label = batch.source[real], batch.label[real]
    flat = {name: getattr(batch.rows, name).reshape(-1) for name in ("tokens", "start", "generated")}
    row = source // LENGTH
    anchor = batch.anchors.reshape(-1)[batch.block[real]] + row * LENGTH
    assert torch.equal(label, flat["tokens"][source + 1])
    assert torch.equal((source + 1) // LENGTH, row) and torch.equal(anchor // LENGTH, row)
    assert flat["generated"][source + 1].all() and flat["generated"][anchor].all()
    assert torch.equal(flat["start"][source + 1], flat["start"][anchor])
    assert (source >= anchor).all()  # the target forms it from the known token on


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=30), st.integers(5, 12))
def test_no_block_is_in_two_chunks(counts, chunk):
    place, end = batches.chunk_places(np.array(counts, np.int64), chunk)
    assert len(place) == sum(counts) and end == (place[-1] + 1 if len(place) else 0)
    assert (np.diff(place) > 0).all()
    owner = np.repeat(np.arange(len(counts)), counts)
    for block in set(owner.tolist()):
        mine = place[owner == block]
        assert mine[0] // chunk == mine[-1] // chunk and mine[-1] - mine[0] == len(mine) - 1


def some_rows() -> Rows:
    generator = np.random.default_rng(0)
    documents = [
        Document(tokens=generator.integers(2, 90, n), generated=np.arange(n) >= n // 3)
        for n in generator.integers(5, 40, 30)
    ]
    return pack(documents, 40, padding=1)


COMMON = {
    **{"seed": 4, "anchors_per_row": 12, "width": 16},
    **{"block": 4, "shifted": False, "gamma": 2.0, "chunk": 16, "pad": True},
}


def tensors(batch: batches.Batch) -> list[Tensor]:
    of = [getattr(batch, each.name) for each in fields(batch)]
    return [value for value in [*of, *(getattr(batch.rows, each.name) for each in fields(batch.rows))]
            if isinstance(value, Tensor)]  # fmt: skip


def test_a_step_is_the_same_however_it_is_split():
    rows = some_rows()
    [whole] = batches.micro_batches(rows, step=5, rows_per_step=6, parts=1, **COMMON)
    parts = batches.micro_batches(rows, step=5, rows_per_step=6, parts=3, **COMMON)
    assert torch.equal(whole.rows.tokens, torch.cat([part.rows.tokens for part in parts]))
    assert torch.equal(whole.anchors, torch.cat([part.anchors for part in parts]))
    assert torch.equal(whole.keep, torch.cat([part.keep for part in parts]))
    assert whole.weight_sum == pytest.approx(sum(part.weight_sum for part in parts))
    labels = [part.label[part.weight > 0] for part in parts]
    assert torch.equal(whole.label[whole.weight > 0], torch.cat(labels))
    [only] = batches.micro_batches(rows, step=5, rows_per_step=6, parts=3, only=[2], **COMMON)
    assert all(torch.equal(a, b) for a, b in zip(tensors(only), tensors(parts[2]), strict=True))


def test_a_later_draw_has_the_same_rows_and_other_anchors():
    rows = some_rows()
    [first], [second] = (
        batches.micro_batches(rows, step=5, rows_per_step=2, parts=1, draw=draw, **COMMON) for draw in (0, 1)
    )
    assert torch.equal(first.rows.tokens, second.rows.tokens)
    assert not torch.equal(first.anchors, second.anchors)


def test_decay_that_vanishes_leaves_no_slots_and_none_is_padded():
    rows = pack([Document(tokens=np.arange(2, 10), generated=np.ones(8, bool))], 8, padding=1)
    common = {**COMMON, "gamma": 1e-3, "anchors_per_row": 16}
    [batch] = batches.micro_batches(rows, step=0, rows_per_step=1, parts=1, **common)
    assert int((batch.weight > 0).sum()) == 7 and batch.weight_sum == 7  # the first of each block


def test_a_batch_without_anchors_has_one_chunk_of_padding_or_none():
    rows = pack([Document(tokens=np.arange(2, 10), generated=np.arange(8) == 7)], 8, padding=1)
    for pad, size in ((True, 16), (False, 0)):
        [batch] = batches.micro_batches(rows, step=0, rows_per_step=1, parts=1, **{**COMMON, "pad": pad})
        assert len(batch.label) == size and batch.weight_sum == 0 and not batch.keep.any()


@pytest.mark.parametrize(
    ("wrong", "words"), [({"chunk": 2}, "does not hold the 3 predictions"), ({"parts": 4}, "do not split into 4 parts")]
)
def test_what_cannot_be_is_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        batches.micro_batches(some_rows(), step=0, rows_per_step=6, **{"parts": 1, **COMMON, **wrong})


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 20), st.integers(1, 7), st.integers(0, 99))
def test_every_row_comes_once_an_epoch(rows, rows_per_step, seed):
    steps = [batches.order(seed, step, rows=rows, rows_per_step=rows_per_step) for step in range(2 * rows)]
    seen = torch.cat(steps).tolist()
    for epoch in range(len(seen) // rows):
        assert sorted(seen[epoch * rows : (epoch + 1) * rows]) == list(range(rows))


def test_the_demos_steps_are_those_of_its_published_figures():
    """The digest was made by an implementation that this one replaced: rows, anchors, labels and weights, in full."""
    documents, _ = load_documents([DEMO], tokenizer=None, vocabulary=1024, template={}, broken_share=0)
    rows = pack(documents, 256, padding=1)
    digest = hashlib.sha256()
    for step in (0, 1, 7, 895, 899):
        [batch] = batches.micro_batches(
            rows, seed=0, step=step, rows_per_step=2, parts=1, anchors_per_row=96, width=96, block=3, shifted=False,
            gamma=1.5, chunk=2048, pad=False,
        )  # fmt: skip
        for tensor in (batch.rows.tokens, batch.anchors, batch.keep, batch.label, batch.weight):
            digest.update(tensor.numpy().tobytes())
    assert digest.hexdigest() == "72cd32acc2f24b4f982e2b39da15c7840b4da93006ae35e4d99595a4fed91d55"


def test_moving_a_batch_keeps_all_of_it():
    [batch] = batches.micro_batches(some_rows(), step=0, rows_per_step=2, parts=1, **COMMON)
    moved = batch.to("meta")
    assert {tensor.device.type for tensor in tensors(moved)} == {"meta"}
    assert (moved.weight_sum, moved.chunk, moved.rows.used) == (batch.weight_sum, batch.chunk, batch.rows.used)
    here = batch.to("cpu")
    assert all(torch.equal(a, b) for a, b in zip(tensors(here), tensors(batch), strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_batch_arrives_on_the_gpu():
    [batch] = batches.micro_batches(some_rows(), step=0, rows_per_step=2, parts=1, **COMMON)
    there = batch.to("cuda")
    assert all(torch.equal(a.cpu(), b) for a, b in zip(tensors(there), tensors(batch), strict=True))


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "batches"]


def test_resuming_gives_the_steps_that_would_have_come():
    rows = some_rows()

    def make(step: int) -> list[batches.Batch]:
        return batches.micro_batches(rows, step=step, rows_per_step=2, parts=2, **COMMON)

    with Prefetcher(make, range(6)) as whole, Prefetcher(make, range(4, 6)) as resumed:
        made, again = list(whole), list(resumed)
    assert len(made) == 6 and len(again) == 2
    for of_whole, of_resumed in zip(made[4:], again, strict=True):
        for a, b in zip(of_whole, of_resumed, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(tensors(a), tensors(b), strict=True))
    assert not torch.equal(made[0][0].anchors, made[1][0].anchors)


def test_an_error_comes_where_its_step_would_have_come():
    def make(step: int) -> int:
        if step == 2:
            raise RuntimeError("step 2")
        return step

    seen = []
    with Prefetcher(make, range(5)) as steps, pytest.raises(RuntimeError, match="step 2"):
        for step in steps:
            seen.append(step)
    assert seen == [0, 1] and not threads()


def test_no_more_than_the_depth_is_made_ahead_and_leaving_ends_the_thread():
    made, third = [], threading.Event()

    def make(step: int) -> int:
        made.append(step)
        if len(made) == 4:
            third.set()
        return step

    with Prefetcher(make, iter(range(10**9)), depth=2) as steps:
        assert next(iter(steps)) == 0
        assert third.wait(30)  # one taken, two waiting, one in hand
        assert len(threads()) == 1
    assert not threads() and made == [0, 1, 2, 3]
