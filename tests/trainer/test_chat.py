"""Loss on what the assistant wrote, where serving would have written it, in templates of several styles."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from trainer.data.chat import Chat, inside, renderings
from trainer.errors import TrainerError

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|begin|>", "<|start|>", "<|end|>", "<|eot|>"]

PLAIN = """
{%- for m in messages -%}
    {{- '<|im_start|>' + m.role + '\n' + (m.content or '') -}}
    {%- for call in m.tool_calls or [] -%}{{- '<call>' + call.function.name + '</call>' -}}{%- endfor -%}
    {{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""

# drops the thoughts of turns before the last user message, and opens the last turn with thoughts, perhaps empty ones
THINKING = """
{%- if messages[0].role == 'system' and tools -%}{{- '<tools>' ~ tools | length ~ '</tools>\n' -}}{%- endif -%}
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
    {%- if m.role == 'assistant' -%}
        {%- set said = m.content or '' -%}
        {%- set thought = m.reasoning_content or '' -%}
        {{- '<|im_start|>assistant\n' -}}
        {%- if loop.index0 > ns.last and (loop.last or thought) -%}
            {{- '<think>\n' + thought + '\n</think>\n\n' -}}
        {%- endif -%}
        {{- said + '<|im_end|>\n' -}}
    {%- else -%}
        {{- '<|im_start|>' + m.role + '\n' + (m.content or '') + '<|im_end|>\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\n' -}}
    {%- if enable_thinking is defined and not enable_thinking -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}
{%- endif -%}
"""

LLAMA = """
{{- bos_token -}}
{%- for m in messages -%}
    {{- '<|start|>' + m.role + '<|end|>\n\n' + (m.content or '') | trim + '<|eot|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>assistant<|end|>\n\n' -}}{%- endif -%}
"""

MARKED = """
{%- for m in messages -%}
    {{- '<|im_start|>' + m.role + '\n' -}}
    {%- if m.role == 'assistant' -%}
        {%- generation -%}{{- (m.content or '') + '<|im_end|>' -}}{%- endgeneration -%}
        {{- '\n' -}}
    {%- else -%}
        {{- (m.content or '') + '<|im_end|>\n' -}}
    {%- endif -%}
{%- endfor -%}
"""

REFUSING = """
{%- for m in messages -%}
    {%- if m.role == 'system' -%}{{- raise_exception('no system messages') -}}{%- endif -%}
    {{- m.content + '\n' -}}
{%- endfor -%}
"""


def tokenizer(template: str | None, texts: list[str] | None = None, merges: int = 0) -> PreTrainedTokenizerFast:
    """Byte-level, a token a byte unless merges are learnt from texts; offsets are trimmed, as Llama 3 has it."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + len(SPECIAL) + merges, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts or [], trainer)
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|begin|>", eos_token="<|im_end|>")
    made.chat_template = template
    return made


def supervised(chat: Chat, messages: list[dict], tools: list | None = None) -> list[tuple[str, str]]:
    """(text before, text that bears loss) of every supervised stretch of every document, sorted."""
    found = []
    for document in chat.documents(messages, tools)[0]:
        edges = np.flatnonzero(np.diff(np.r_[0, document.generated.astype(int), 0]))
        assert len(document.tokens) == len(document.generated) and document.tokens.dtype == np.int64
        for begin, end in edges.reshape(-1, 2):
            texts = (document.tokens[:begin], document.tokens[begin:end])
            found.append(tuple(chat.tokenizer.decode(part, skip_special_tokens=False) for part in texts))
    return sorted(found)


words = st.text("ab\n <>é.", max_size=6)


@st.composite
def conversations(draw, thoughts: bool = False) -> list[dict]:
    """Turns of user and assistant in any order, perhaps a tool's, after a user's."""
    messages = [{"role": "system", "content": draw(words)}] if draw(st.booleans()) else []
    messages.append({"role": "user", "content": draw(words)})
    for role in draw(st.lists(st.sampled_from(["assistant", "assistant", "user", "tool"]), max_size=6)):
        messages.append({"role": role, "content": draw(words)})
        if thoughts and role == "assistant" and draw(st.booleans()):
            messages[-1]["reasoning_content"] = draw(words)
    return messages


def plain_history(messages: list[dict]) -> str:
    return "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)


def assistant_turns(messages: list[dict]) -> list[int]:
    return [i for i, message in enumerate(messages) if message["role"] == "assistant"]


@settings(max_examples=40, deadline=None)
@given(conversations())
def test_plain_turns_are_served_after_all_before_them(messages):
    served = [
        (plain_history(messages[:i]) + "<|im_start|>assistant\n", messages[i]["content"] + "<|im_end|>")
        for i in assistant_turns(messages)
    ]
    chat = CHATS[PLAIN]
    assert supervised(chat, messages) == sorted(served)
    assert len(chat.documents(messages)[0]) == bool(served)


@settings(max_examples=40, deadline=None)
@given(conversations())
def test_turns_with_headers_and_trimmed_text(messages):
    def history(messages: list[dict]) -> str:
        turns = (f"<|start|>{m['role']}<|end|>\n\n{m['content'].strip()}<|eot|>" for m in messages)
        return "<|begin|>" + "".join(turns)

    served = [
        (history(messages[:i]) + "<|start|>assistant<|end|>\n\n", messages[i]["content"].strip() + "<|eot|>")
        for i in assistant_turns(messages)
    ]
    assert supervised(CHATS[LLAMA], messages) == sorted(served)


@settings(max_examples=40, deadline=None)
@given(conversations())
def test_a_template_that_marks_what_it_generates_is_taken_at_its_word(messages):
    served = [
        (plain_history(messages[:i]) + "<|im_start|>assistant\n", messages[i]["content"] + "<|im_end|>")
        for i in assistant_turns(messages)
    ]
    assert supervised(CHATS[MARKED], messages) == sorted(served)


def thinking_history(messages: list[dict]) -> str:
    """What a served model reads: thoughts only since the last user message."""
    last = max(i for i, m in enumerate(messages) if m["role"] == "user")
    text = ""
    for i, m in enumerate(messages):
        thought = m.get("reasoning_content") if m["role"] == "assistant" and i > last else None
        # the template shows empty thoughts where an assistant's message is the last
        shown = thought or (m["role"] == "assistant" and i > last and i == len(messages) - 1)
        text += f"<|im_start|>{m['role']}\n" + (f"<think>\n{thought or ''}\n</think>\n\n" if shown else "")
        text += f"{m['content']}<|im_end|>\n"
    return text


@settings(max_examples=80, deadline=None)
@given(conversations(thoughts=True), st.booleans())
def test_turns_stand_after_the_thoughts_that_serving_keeps_and_bring_their_own(messages, thinking):
    served, cannot_be = [], 0
    for i in assistant_turns(messages):
        thought = messages[i].get("reasoning_content", "")
        prompt = thinking_history(messages[:i]) + "<|im_start|>assistant\n"
        said = messages[i]["content"] + "<|im_end|>"
        previous = messages[i - 1]
        if previous["role"] == "assistant" and not previous.get("reasoning_content"):
            cannot_be += 1  # the prompt shows the previous turn with empty thoughts, and no later text does
        elif thinking:
            served.append((prompt, f"<think>\n{thought}\n</think>\n\n" + said))
        elif not thought:
            served.append((prompt + "<think>\n\n</think>\n\n", said))
        else:
            cannot_be += 1  # the prompt has closed the thoughts
    chat = Chat(CHATS[THINKING].tokenizer, {} if thinking else {"enable_thinking": False})
    assert supervised(chat, messages) == sorted(served)
    assert chat.documents(messages)[1] == cannot_be


def test_turns_that_the_template_rewrites_become_documents_of_their_own():
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a", "reasoning_content": "t"},
        {"role": "user", "content": "r"},
        {"role": "assistant", "content": "b", "reasoning_content": "u"},
        {"role": "tool", "content": "x"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "nobody answers"},
    ]
    chat = CHATS[THINKING]
    last, first = (
        chat.tokenizer.decode(document.tokens, skip_special_tokens=False) for document in chat.documents(messages)[0]
    )
    assert first == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>\nt\n</think>\n\na<|im_end|>\n"
    assert last.startswith("<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n")
    assert last.endswith("c<|im_end|>\n") and "<think>\nu\n</think>" in last
    assert [text for _, text in supervised(chat, messages)] == [
        "<think>\nt\n</think>\n\na<|im_end|>",
        "<think>\nu\n</think>\n\nb<|im_end|>",
        "<think>\n\n</think>\n\nc<|im_end|>",
    ]


@pytest.mark.parametrize("template", [PLAIN, LLAMA, THINKING])
def test_a_leading_assistant_turn_bears_no_loss_but_is_read(template):
    messages = [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "q"}]
    assert CHATS[template].documents(messages) == ([], 1)
    [(before, text)] = supervised(CHATS[template], [*messages, {"role": "assistant", "content": ""}])
    assert "hello" in before and "hello" not in text and text.endswith(("<|im_end|>", "<|eot|>"))
    assert CHATS[template].documents([*messages, {"role": "assistant", "content": ""}])[1] == 1


def test_what_a_template_refuses_is_raised_unless_some_turn_stands():
    chat = Chat(tokenizer(REFUSING), {})
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    with pytest.raises(Exception, match="no system messages"):
        chat.documents([{"role": "system", "content": "s"}, *turns])
    documents, left_out = chat.documents([*turns, {"role": "system", "content": "s"}, turns[1]])
    assert len(documents) == 1 and left_out == 1


def test_tools_and_further_keys_reach_the_template():
    call = {"type": "function", "function": {"name": "look", "arguments": "{}"}}
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert supervised(CHATS[PLAIN], turns)[0][1] == "<call>look</call><|im_end|>"
    [(before, _)] = supervised(CHATS[THINKING], [{"role": "system", "content": "s"}, *turns], [{"type": "function"}])
    assert before.startswith("<tools>1</tools>\n")


def test_a_token_that_reaches_out_of_its_span_bears_no_loss():
    """The end of the prompt and the begin of the answer may be one token, which serving would never have generated."""
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + '<|eot|>' }}{% endfor %}"
    template += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    chat = Chat(tokenizer(template, texts=[" hello"] * 9, merges=8), {})
    [(before, text)] = supervised(
        chat, [{"role": "user", "content": "q"}, {"role": "assistant", "content": "hello hello"}]
    )
    assert before == "user: q<|eot|>assistant: hello" and text == " hello<|eot|>"


def test_tokens_are_those_of_the_tokenizer_without_its_cuts_and_padding():
    texts = ["user hello\n\n", "assistant hello\n"]
    made = tokenizer(LLAMA, texts=texts * 3, merges=20)
    made.backend_tokenizer.enable_truncation(9)
    made.backend_tokenizer.enable_padding(length=500)
    chat = Chat(made, {})
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "assistant hello\n x"}]
    [document] = chat.documents(messages)[0]
    whole = chat.tokenizer.apply_chat_template(messages, tokenize=False)
    assert document.tokens.tolist() == chat.tokenizer(whole, add_special_tokens=False)["input_ids"]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5)), max_size=9), st.sets(st.integers(0, 20), max_size=6))
def test_a_token_is_inside_one_span_or_not(tokens, edges):
    offsets = np.array([(begin, begin + size) for begin, size in tokens], np.int64).reshape(-1, 2)
    cuts = sorted(edges)[: len(edges) // 2 * 2]
    spans = list(zip(cuts[::2], cuts[1::2], strict=True))

    def plain(begin: int, end: int) -> bool:
        within = [(low, high) for low, high in spans if low <= begin and end <= high]
        return any(low < end and begin < high for low, high in within)

    assert inside(offsets, spans).tolist() == [plain(*offset) for offset in offsets.tolist()]


@settings(max_examples=100, deadline=None)
@given(conversations(), st.integers(0, 4), st.integers(0, 4))
def test_however_turns_are_rewritten_each_stands_in_one_place_or_in_none(messages, period, kept):
    """A template that forgets turns, and remembers them again, by how many there are."""

    def render(of: list[dict], prompt: bool) -> str:
        shown = [i for i in range(len(of)) if i == len(of) - 1 or (len(of) * period + i) % 5 <= kept]
        return "".join(f"[{i}]" for i in shown)

    pairs = [(render(messages[:i], True), render(messages[: i + 1], False)) for i in assistant_turns(messages)]
    served = [(before, after) for before, after in pairs if after.startswith(before)]
    found, left_out = renderings(messages, render)
    spans = [(each.text[:begin], each.text[:end]) for each in found for begin, end in each.spans]
    assert sorted(spans) == sorted(served) and left_out == len(pairs) - len(served)


def test_a_tokenizer_without_a_template_is_refused():
    with pytest.raises(TrainerError, match="has no chat template"):
        Chat(tokenizer(None), {})


CHATS = {template: Chat(tokenizer(template), {}) for template in (PLAIN, THINKING, LLAMA, MARKED)}
