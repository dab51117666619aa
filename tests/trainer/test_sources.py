"""Files -> documents: every kind, and every way in which a record can be broken."""

import gzip
import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from trainer.data import sources
from trainer.data.chat import load_tokenizer
from trainer.data.records import message
from trainer.errors import TrainerError

TEMPLATE = """
{%- for m in messages -%}
    {%- if m.role == 'judge' -%}{{- raise_exception('no judges here') -}}{%- endif -%}
    {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""


def new_tokenizer() -> PreTrainedTokenizerFast:
    """A token a byte, and <|begin|> before everything, as Llama's do it."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|begin|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=259, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([], trainer)
    backend.post_processor = processors.TemplateProcessing(single="<|begin|> $0", special_tokens=[("<|begin|>", 0)])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|begin|>")
    made.chat_template = TEMPLATE
    return made


TOKENIZER = new_tokenizer()


def load(*paths, share=0.0, vocabulary=259, tokenizer=lambda: TOKENIZER, **more):
    return sources.load_documents(
        paths, tokenizer=tokenizer, vocabulary=vocabulary, template={}, broken_share=share, **more
    )


def lines(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def text_of(tokens) -> str:
    return TOKENIZER.decode(tokens, skip_special_tokens=False)


def prepared(path, tokens, lengths, prompts):
    arrays = {"tokens": np.array(tokens, np.uint16), "lengths": np.array(lengths, np.int32)}
    save_file({**arrays, "prompt_lengths": np.array(prompts, np.int32)}, path)
    return path


CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
GOOD = {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}


def test_prepared_documents_are_read(tmp_path):
    path = prepared(tmp_path / "d.safetensors", [5, 6, 7, 8, 9], [3, 1, 1], [1, 1, 0])
    documents, report = load(path, tokenizer=lambda: pytest.fail("not needed"), vocabulary=10)
    assert [(d.tokens.tolist(), d.generated.tolist()) for d in documents] == [
        ([5, 6, 7], [False, True, True]), ([9], [True])
    ]  # fmt: skip
    assert (report.records, report.documents, report.unsupervised, report.tokens, report.supervised) == (3, 2, 1, 4, 3)
    assert report.warnings() == ["kept out 1 documents in which no token bears loss"]


@pytest.mark.parametrize(
    ("tokens", "lengths", "prompts", "words"),
    [
        ([5, 6, 7], [2], [0], ["add up to 2", "3 tokens"]),
        ([5, 60], [1, 1], [0, 0], ["token 60 in document 1", "vocabulary of 10"]),
        ([5, 6], [2], [3], ["prompt no longer"]),
        ([5, 6], [2], [0, 0], ["prompt no longer"]),
        ([], [], [], ["no documents"]),
        ([[5, 6]], [2], [0], ["must be lists of integers"]),
    ],
)
def test_broken_prepared_documents_are_named(tmp_path, tokens, lengths, prompts, words):
    path = prepared(tmp_path / "d.safetensors", tokens, lengths, prompts)
    with pytest.raises(TrainerError) as error:
        load(path, vocabulary=10, share=1)
    assert all(word in str(error.value) for word in [str(path), *words])


def test_a_damaged_or_incomplete_prepared_file_is_named(tmp_path):
    path = tmp_path / "d.safetensors"
    path.write_bytes(b"not it")
    with pytest.raises(TrainerError, match="not a readable safetensors file"):
        load(path, share=1)
    save_file({"tokens": np.zeros(3, np.uint16)}, path)
    with pytest.raises(TrainerError, match="lacks lengths, prompt_lengths"):
        load(path, share=1)


@pytest.mark.parametrize(
    "record",
    [
        {"messages": CHAT},
        {"messages": None, "conversations": CHAT},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]},
        {"conversations": [{"from": "user", "value": "hi"}, {"from": "model", "value": "yes"}]},
        {"messages": CHAT, "text": "of less rank", "tools": []},
    ],
)
def test_conversations_of_either_form(tmp_path, record):
    [document], report = load(lines(tmp_path / "c.jsonl", {**record, "domain": "chat", "id": 3}))
    assert text_of(document.tokens[document.generated]) == "yes<|im_end|>"
    assert text_of(document.tokens) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
    assert document.domain == "chat" and report.warnings() == []


def test_sharegpts_roles():
    roles = ["human", "user", "gpt", "assistant", "model", "system", "tool"]
    made = [message({"from": role, "value": "x", "k": 1}) for role in roles]
    wanted = ["user", "user", "assistant", "assistant", "assistant", "system", "tool"]
    assert made == [{"role": role, "content": "x", "k": 1} for role in wanted]


def test_tokens_and_texts(tmp_path):
    path = lines(tmp_path / "t.jsonl", GOOD, {"text": "añ"}, {"text": "<|begin|>b"})
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes() + b"  \r\n\n")  # a byte order mark, blank lines
    documents, report = load(path)
    assert [d.tokens.tolist() for d in documents[:1]] == [[5, 6, 7]]
    assert documents[0].generated.tolist() == [False, True, True]
    assert [text_of(d.tokens) for d in documents[1:]] == ["<|begin|>añ", "<|begin|>b"]
    assert all(d.generated.all() for d in documents[1:]) and report.records == 3


def test_text_files_are_cut_where_asked(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("0123456789")
    [whole], _ = load(path)
    pieces, report = load(path, piece=4)
    assert [text_of(piece.tokens) for piece in pieces] == ["<|begin|>012", "3456", "789"]
    assert np.concatenate([piece.tokens for piece in pieces]).tolist() == whole.tokens.tolist()
    assert (report.records, report.documents) == (1, 3)


def test_globs_and_compressed_files_come_in_order(tmp_path):
    for name, token in (("b", 4), ("a", 3)):
        lines(tmp_path / f"{name}.jsonl", {"input_ids": [token], "loss_mask": [1]})
    with gzip.open(tmp_path / "z.jsonl.gz", "wt") as out:
        out.write(json.dumps({"input_ids": [9], "loss_mask": [True]}) + "\n")
    documents, report = load(tmp_path / "z.jsonl.gz", tmp_path / "*.jsonl")
    assert [d.tokens.tolist() for d in documents] == [[9], [3], [4]] and report.files == 3


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{", "not JSON"),
        (b'{"input_ids": [' + b"1" * 5000 + b"]}", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"text": "\xff"}', "not UTF-8 (byte 10)"),
        (b"[1]", "not a JSON object"),
        (b'{"content": "x"}', "no known key"),
        (b'{"text": 5}', "wrong type (text"),
        (b'{"text": " "}', "empty"),
        (b'{"text": "x", "domain": 5}', "wrong type (domain"),
        (b'{"text": "\\ud800"}', "the tokenizer refuses it"),
        (b'{"input_ids": [], "loss_mask": []}', "empty"),
        (b'{"input_ids": [1, true], "loss_mask": [1, 1]}', "wrong type (input_ids"),
        (b'{"input_ids": [1.0], "loss_mask": [1]}', "wrong type (input_ids"),
        (b'{"input_ids": [1]}', "wrong type (loss_mask"),
        (b'{"input_ids": [1], "loss_mask": [2]}', "wrong type (loss_mask"),
        (b'{"input_ids": [1], "loss_mask": [[]]}', "wrong type (loss_mask"),
        (b'{"input_ids": [1, 2], "loss_mask": [1]}', "loss_mask of another length (1, with 2 tokens)"),
        (b'{"input_ids": [1, 259], "loss_mask": [1, 1]}', "token outside the target's vocabulary (259"),
        (b'{"input_ids": [-1], "loss_mask": [1]}', "token outside the target's vocabulary (-1"),
        (b'{"input_ids": [99999999999999999999], "loss_mask": [1]}', "token outside the target's vocabulary"),
        (b'{"messages": []}', "empty"),
        (b'{"messages": "x"}', "wrong type (messages"),
        (b'{"messages": ["x"]}', "wrong type (messages"),
        (b'{"messages": [{"content": "x"}]}', "wrong type (every turn needs a role"),
        (b'{"messages": [{"role": "user", "content": 3}]}', "wrong type (content"),
        (b'{"messages": [{"role": "user", "content": "x"}], "tools": 3}', "wrong type (tools"),
        (b'{"conversations": [{"from": "alien", "value": "x"}]}', "unknown role (`alien`"),
        (b'{"messages": [{"role": "judge", "content": "x"}, {"role": "assistant", "content": "y"}]}', "no judges here"),
        (b'{"id": "q7", "text": 5}', "id 'q7'"),
    ],
)
def test_a_broken_line_is_named_counted_and_skipped(tmp_path, line, words):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"\n" + line + b"\n" + json.dumps(GOOD).encode() + b"\n")
    documents, report = load(path, share=0.5)
    assert len(documents) == 1 and report.records == 2
    [example] = report.examples
    assert example.startswith(f"{path}:2: ") and words in example and "\n" not in example
    [(reason, count)] = report.broken.items()
    assert count == 1 and reason in example and report.warnings()[0] == f"skipped 1 of 2 records: 1 {reason}"
    with pytest.raises(TrainerError) as error:
        load(path, share=0.49)
    assert all(part in str(error.value) for part in ["1 of 2 records", example, "data.broken_share", "0.49"])


def test_a_text_file_can_be_broken(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff")
    (tmp_path / "b.txt").write_bytes(b" \n")
    lines(tmp_path / "c.jsonl", GOOD)
    _, report = load(tmp_path / "*", share=0.7)
    assert report.broken == {"not UTF-8": 1, "empty": 1} and report.records == 3


def test_the_share_is_of_all_files_and_three_examples_are_named(tmp_path):
    lines(tmp_path / "a.jsonl", *[{}] * 5)
    lines(tmp_path / "b.jsonl", *[GOOD] * 45)
    _, report = load(tmp_path / "*.jsonl", share=0.1)
    assert report.broken == {"no known key": 5} and len(report.examples) == 5
    with pytest.raises(TrainerError) as error:
        load(tmp_path / "*.jsonl", share=0.09)
    text = str(error.value)
    assert "5 of 50 records" in text and all(f"a.jsonl:{i}:" in text for i in (1, 2, 3)) and "a.jsonl:4" not in text


def test_too_many_broken_lines_stop_the_reading_early(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"x\n" * 5000)
    with pytest.raises(TrainerError, match="1000 of 1000 records so far"):
        load(path, share=0.5)
    path.write_bytes(b"x\n" * 999 + json.dumps(GOOD).encode() + b"\n" + b"x\n" * 5000)
    with pytest.raises(TrainerError, match="1000 of 1001 records so far"):
        load(path, share=0.5)


def test_only_broken_or_silent_records_are_no_data(tmp_path):
    path = lines(tmp_path / "a.jsonl", {}, {"messages": CHAT[:1]}, {"input_ids": [1], "loss_mask": [0]})
    with pytest.raises(TrainerError, match="no document with a token that bears loss, in 3 records"):
        load(path, share=1)


def test_silent_conversations_and_turns_are_counted(tmp_path):
    path = lines(
        tmp_path / "a.jsonl", {"messages": CHAT}, {"messages": CHAT[:1]}, {"messages": [CHAT[1], *CHAT]},
        {"input_ids": [1], "loss_mask": [0]},
    )  # fmt: skip
    documents, report = load(path)
    assert len(documents) == 2 and (report.unsupervised, report.turns_left_out) == (2, 1)
    assert any(line.startswith("1 assistant turns bear no loss") for line in report.warnings())


@pytest.mark.parametrize("cut", [5, 30])
def test_an_unreadable_file_stops_at_once(tmp_path, cut):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(GOOD).encode() * 20)[:cut])
    with pytest.raises(TrainerError, match=r"a\.jsonl\.gz: cannot be read after line 0"):
        load(path, share=1)
    for name in ("b.jsonl", "b.txt"):
        (tmp_path / name).mkdir()
        with pytest.raises(TrainerError, match=f"{name}: cannot be read"):
            load(tmp_path / name, share=1)


def test_files_that_are_named_twice_are_told(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text('{"input_ids": [1, 2], "loss_mask": [1, 1]}')
    either = {"tokenizer": lambda: None, "vocabulary": 9, "template": {}, "broken_share": 0.0}
    documents, report = sources.load_documents([tmp_path / "*.jsonl", tmp_path / "b.jsonl"], **either)
    assert len(documents) == 3
    (warning,) = report.warnings()
    assert warning.startswith(f"data.paths names {tmp_path / 'b.jsonl'} more than once (1 such files)")
    assert sources.load_documents([tmp_path / "*.jsonl"], **either)[1].warnings() == []


def test_names_that_mean_nothing(tmp_path):
    with pytest.raises(TrainerError, match="names no file"):
        load(tmp_path / "*.jsonl")
    (tmp_path / "a.parquet").touch()
    with pytest.raises(TrainerError, match=r"a\.parquet is none of \.safetensors"):
        load(tmp_path / "a.parquet")


def test_a_directory_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(TrainerError, match="no tokenizer could be loaded"):
        load(lines(tmp_path / "a.jsonl", {"text": "x"}), tokenizer=lambda: load_tokenizer(tmp_path))
    TOKENIZER.save_pretrained(tmp_path / "there")
    assert load_tokenizer(tmp_path / "there").chat_template == TEMPLATE


values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 400) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
turns = st.lists(
    st.dictionaries(st.sampled_from(["role", "content", "from", "value", "tool_calls"]), values, max_size=3)
    | st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "judge", "é"]), "content": values})
    | st.fixed_dictionaries({"from": st.sampled_from(["human", "gpt", "alien"]), "value": st.text(max_size=4)})
    | values,
    max_size=4,
)
keys = st.sampled_from(["messages", "conversations", "text", "input_ids", "loss_mask", "tools", "domain", "id", "x"])
records = st.dictionaries(keys, values | turns | st.lists(st.integers(-1, 300), max_size=3), max_size=4)
line = st.binary(max_size=40) | records.map(lambda record: json.dumps(record).encode())


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(line, max_size=6))
def test_whatever_a_line_holds_it_is_a_document_or_counted(tmp_path, content):
    path = tmp_path / "f.jsonl"
    path.write_bytes(b"\n".join([json.dumps(GOOD).encode(), *content]))
    documents, report = load(path, share=1)
    count = sum(bool(each.strip()) for each in path.read_bytes().split(b"\n"))
    broken = sum(report.broken.values())
    assert report.records == count and report.documents == len(documents) and len(report.examples) == min(broken, 10)
    if broken:
        with pytest.raises(TrainerError, match=f"{broken} of {count} records"):
            load(path, share=0)
    for document in documents:
        assert document.generated.shape == document.tokens.shape and document.generated.any()
        assert document.tokens.min() >= 0 and document.tokens.max() < 259


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["f.jsonl", "f.jsonl.gz", "f.txt", "f.safetensors"]), st.binary(max_size=60), st.booleans())
def test_whatever_a_file_holds_it_is_read_or_refused_in_words(tmp_path, name, content, compressed):
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if compressed else content)
    try:
        documents, report = load(path, share=1)
    except TrainerError as error:
        assert str(path) in str(error)
    else:
        assert len(documents) == report.documents > 0
