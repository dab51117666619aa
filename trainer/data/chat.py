"""Conversations in the chat template of the target's tokenizer, with loss on what the assistant wrote and nothing else.

A drafter is to predict what the target generates when it is served, after what it has read by then. So the question
for every assistant turn is: with which text before it, and written how, does it come out of the served model? The
template itself answers: the prompt is the rendering of the messages before the turn with a generation prompt, and the
turn follows as the rendering of the messages up to it has it. Patterns that look for roles in the finished text would
have to be written for every template, and are wrong where templates rewrite their past: Qwen3 drops the thinking of
earlier turns, so in a whole conversation only the last turn stands as it was generated. Turns that a later
rendering changes therefore become documents of their own, which end with them. Every turn bears loss once.

A turn's loss covers its text and the special token that ends it, not the line break that templates put after that:
serving stops at the token.

A template with generation marks (`{% generation %}`) says itself what the assistant wrote, and is taken at its word.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from trainer.data.rows import Document
from trainer.errors import TrainerError

Message = Mapping[str, Any]
MARKS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


@dataclass(frozen=True)
class Rendering:
    text: str
    spans: tuple[tuple[int, int], ...]  # characters that bear loss, ascending, apart from each other


def load_tokenizer(path: Path) -> Any:
    """The tokenizer of a local Hugging Face directory. Raises TrainerError."""
    from transformers import AutoTokenizer  # takes a second, and prepared data needs none

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # whatever is wrong with its files, from several libraries
        raise TrainerError(f"{path}: no tokenizer could be loaded ({error}); text data needs the target's") from None


class Chat:
    """A tokenizer with its template. `template` holds extra arguments of the template, such as enable_thinking.

    Raises TrainerError where the tokenizer has no template, or cannot tell which characters a token covers.
    """

    def __init__(self, tokenizer: Any, template: Mapping[str, Any]):
        if not tokenizer.chat_template:
            raise TrainerError(
                "the target's tokenizer has no chat template, which conversations need; "
                "add one to it, or give the data as input_ids and loss_mask"
            )
        if not tokenizer.is_fast:
            raise TrainerError("the target's tokenizer is not a fast one; conversations need a tokenizer.json")
        self.tokenizer, self.template = tokenizer, dict(template)
        # of the text as it is: a post-processor may take blanks out of the offsets, and we add no special tokens
        self.encoder = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self.encoder.post_processor = None
        self.encoder.no_truncation()
        self.encoder.no_padding()

    def documents(self, messages: Sequence[Message], tools: list | None = None) -> tuple[list[Document], int]:
        """The conversation's documents, and how many assistant turns found no place in them, see `renderings`.

        Raises whatever the template raises.
        """
        if MARKS.search(self.tokenizer.get_chat_template(tools=tools)):
            return [self._marked(messages, tools)], 0

        def render(messages: Sequence[Message], prompt: bool) -> str:
            return self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=prompt, **self.template
            )

        rendered, left_out = renderings(messages, render)
        return [self._tokenized(rendering) for rendering in rendered], left_out

    def _marked(self, messages: Sequence[Message], tools: list | None) -> Document:
        output = self.tokenizer.apply_chat_template(
            messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True, **self.template
        )
        tokens, generated = (np.array(output[name]) for name in ("input_ids", "assistant_masks"))
        return Document(tokens=tokens.astype(np.int64), generated=generated.astype(bool))

    def _tokenized(self, rendering: Rendering) -> Document:
        encoding = self.encoder.encode(rendering.text, add_special_tokens=False)
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        return Document(tokens=np.array(encoding.ids, np.int64), generated=inside(offsets, rendering.spans))


def inside(offsets: np.ndarray, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """[n] bool: which tokens, with characters offsets [n, 2], lie wholly in one of the spans."""
    if not spans:
        return np.zeros(len(offsets), bool)
    begin, end = np.array(spans, np.int64).T
    first, last = offsets.T
    span = np.searchsorted(begin, first, side="right") - 1  # the last that begins at or before the token
    # a token without characters counts if it is between others of the span
    return (span >= 0) & (last > begin[span]) & (first < end[span]) & (last <= end[span])


def renderings(
    messages: Sequence[Message], render: Callable[[Sequence[Message], bool], str]
) -> tuple[list[Rendering], int]:
    """Texts in which every assistant turn bears loss once, where serving would have generated it.

    render(messages, generation prompt or not) -> text. A turn stands in a text that begins with the rendering up to
    the turn, provided that this in turn begins with the turn's prompt. The other count is of turns that stand
    nowhere: nothing comes before them, or the prompt as rendered cannot lead to them, as one that closes the thinking
    cannot lead to a turn with thoughts.

    If the template refuses every turn, what it raised is raised.
    """
    turns: list[tuple[int, str]] = []  # where the turn begins, the rendering up to it
    left_out, refusal = 0, None
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        try:
            after = render(messages[: i + 1], False)
            before = render(messages[:i], True) if i else None
        except Exception as error:  # a template is a program of somebody else's
            refusal, before = error, None
        if before is not None and after.startswith(before):
            turns.append((len(before), after))
        else:
            left_out += 1
    if refusal is not None and not turns:
        raise refusal

    found = []
    while turns:
        text, spans, free = turns[-1][1], [], 0
        for at, after in turns:
            if text.startswith(after):
                begin = max(at, free)
                free = max(begin, len(after.rstrip()))
                spans.append((begin, free))
        turns = [turn for turn in turns if not text.startswith(turn[1])]
        found.append(Rendering(text, tuple(spans)))
    return found, left_out
