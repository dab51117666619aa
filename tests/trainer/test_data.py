"""Documents, packing, batch order, metrics."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from trainer import data, metrics
from trainer.errors import TrainerError
from trainer.evaluate import load_prompts, repeated_share


def write(path, tokens, lengths, prompts):
    arrays = {"tokens": np.array(tokens, np.uint16), "lengths": np.array(lengths, np.int32)}
    save_file({**arrays, "prompt_lengths": np.array(prompts, np.int32)}, path)
    return path


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=20))
def test_packing_loses_nothing_and_keeps_documents_apart(lengths):
    documents = [(np.full(n, i + 2), min(1, n)) for i, n in enumerate(lengths)]
    rows = data.pack(documents, 16, padding=1)
    assert rows.used == sum(min(n, 16) for n in lengths)
    for i, n in enumerate(lengths):
        row, at = (rows.tokens == i + 2).nonzero()[0].tolist()
        kept = min(n, 16)
        assert (rows.tokens == i + 2).sum() == kept
        assert (rows.start[row, at : at + kept] == at).all() and (rows.end[row, at : at + kept] == at + kept).all()
        assert rows.position[row, at : at + kept].tolist() == list(range(kept))
    padding = rows.tokens == 1
    assert not rows.generated[padding].any() and (rows.end[padding] == rows.start[padding]).all()


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 20), st.integers(1, 7), st.integers(0, 99))
def test_every_row_comes_once_an_epoch(rows, rows_per_step, seed):
    steps = [data.batch_rows(seed, s, rows=rows, rows_per_step=rows_per_step) for s in range(2 * rows)]
    seen = torch.cat(steps).tolist()
    for epoch in range(len(seen) // rows):
        assert sorted(seen[epoch * rows : (epoch + 1) * rows]) == list(range(rows))


def test_documents_are_read(tmp_path):
    path = write(tmp_path / "d.safetensors", [5, 6, 7, 8], [3, 1], [1, 0])
    documents = data.load_documents(path, 10)
    assert [(tokens.tolist(), prompt) for tokens, prompt in documents] == [([5, 6, 7], 1), ([8], 0)]


@pytest.mark.parametrize(
    ("tokens", "lengths", "prompts", "words"),
    [
        ([5, 6, 7], [2], [0], ["add up to 2", "3 tokens"]),
        ([5, 60], [1, 1], [0, 0], ["token 60 in document 1", "vocabulary of 10"]),
        ([5, 6], [2], [3], ["prompt no longer"]),
        ([], [], [], ["no documents"]),
    ],
)
def test_broken_documents_are_named(tmp_path, tokens, lengths, prompts, words):
    path = write(tmp_path / "d.safetensors", tokens, lengths, prompts)
    with pytest.raises(TrainerError) as error:
        data.load_documents(path, 10)
    assert all(word in str(error.value) for word in [str(path), *words])


def test_a_damaged_or_incomplete_file_is_named(tmp_path):
    path = tmp_path / "d.safetensors"
    path.write_bytes(b"not it")
    with pytest.raises(TrainerError, match="not a readable safetensors file"):
        data.load_documents(path, 10)
    save_file({"tokens": np.zeros(3, np.uint16)}, path)
    with pytest.raises(TrainerError, match="lacks lengths, prompt_lengths"):
        data.load_documents(path, 10)


def test_prompts_are_checked(tmp_path):
    path = tmp_path / "prompts.json"
    for text, words in [("[", "must be a JSON list"), ("[]", "no prompts"), ('[{"tokens": [3, 99]}]', "prompt 0")]:
        path.write_text(text)
        with pytest.raises(TrainerError, match=words):
            load_prompts(path, 10)
    path.write_text(json.dumps([{"tokens": [1, 2]}]))
    assert load_prompts(path, 10) == [[1, 2]]


def test_metrics_add_as_pairs():
    total = metrics.add({"loss": (2.0, 4.0)}, {"loss": (1.0, 1.0), "hits": (3.0, 5.0)})
    assert total == {"loss": (3.0, 5.0), "hits": (3.0, 5.0)}
    assert metrics.ratio(total["loss"]) == 0.6  # not the mean of 0.5 and 1
    assert np.isnan(metrics.ratio((0.0, 0.0)))


def test_repeated_share_counts_within_a_text():
    assert repeated_share([list(range(10)), list(range(10))]) == (0, 6)
    assert repeated_share([[1] * 10]) == (2, 3)
    assert repeated_share([[1, 2]]) == (0, 0)
