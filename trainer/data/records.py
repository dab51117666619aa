"""One record of a text or JSON lines file -> documents; sources.py says what records there are."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from trainer.data.chat import Chat
from trainer.data.rows import Document

ROLES = {  # of ShareGPT's turns
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model"), "assistant"),
    **{role: role for role in ("system", "tool")},
}


class Broken(Exception):
    """A record that cannot be used: the reason, by which records are counted, and the detail."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason} ({detail})" if detail else reason)
        self.reason, self.detail = reason, detail


class Reader:
    """Raises Broken for a record that cannot be used. `tokenizer` is called when it is first needed."""

    def __init__(self, tokenizer: Callable[[], Any], vocabulary: int, template: Mapping[str, Any]):
        self._load, self.vocabulary, self.template = tokenizer, vocabulary, template
        self.turns_left_out = 0  # see chat.renderings
        self.silent = 0  # conversations without a turn that bears loss

    @cached_property
    def tokenizer(self) -> Any:
        return self._load()

    @cached_property
    def chat(self) -> Chat:
        return Chat(self.tokenizer, self.template)

    def json(self, line: bytes) -> list[Document]:
        try:
            record = json.loads(decoded(line))
        except json.JSONDecodeError as error:
            raise Broken("not JSON", f"{error.msg} at character {error.pos + 1}") from None
        except (ValueError, RecursionError) as error:  # a number of too many digits, lists in lists in lists
            raise Broken("not JSON", one_line(error)) from None
        if not isinstance(record, dict):
            raise Broken("not a JSON object")
        kinds = {
            "input_ids": self._tokens,
            "messages": self._conversation,
            "conversations": self._conversation,
            "text": lambda record, key: [self._text(record[key])],
        }
        key = next((key for key in kinds if record.get(key) is not None), None)
        if key is None:
            raise Broken("no known key", f"neither of {', '.join(kinds)}")
        domain, name = record.get("domain"), record.get("id")
        try:
            if not isinstance(domain, str | None):
                raise Broken("wrong type", "domain must be a string")
            documents = [self._checked(document) for document in kinds[key](record, key)]
        except Broken as error:
            if name is None:
                raise
            raise Broken(error.reason, f"{error.detail or key}; id {name!r:.80}") from None
        return [replace(document, domain=domain or "") for document in documents]

    def plain(self, content: bytes, piece: int) -> list[Document]:
        document = self._checked(self._text(decoded(content)))
        if not piece:
            return [document]
        return [
            Document(tokens=document.tokens[at : at + piece], generated=document.generated[at : at + piece])
            for at in range(0, len(document.tokens), piece)
        ]

    def _checked(self, document: Document) -> Document:
        if not len(document.tokens):
            raise Broken("empty")
        if document.tokens.min() < 0 or document.tokens.max() >= self.vocabulary:
            wrong = document.tokens[(document.tokens < 0) | (document.tokens >= self.vocabulary)][0]
            raise Broken("token outside the target's vocabulary", f"{wrong}, with {self.vocabulary} tokens")
        return document

    def _tokens(self, record: dict, key: str) -> list[Document]:
        tokens, mask = record[key], record.get("loss_mask")
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise Broken("wrong type", "input_ids must be a list of integers")
        if not isinstance(mask, list) or not all(each in (0, 1) for each in mask):
            raise Broken("wrong type", "loss_mask must be a list of 0 and 1")
        if len(mask) != len(tokens):
            raise Broken("loss_mask of another length", f"{len(mask)}, with {len(tokens)} tokens")
        try:
            return [Document(tokens=np.array(tokens, np.int64), generated=np.array(mask, bool))]
        except OverflowError:
            raise Broken("token outside the target's vocabulary", "beyond 64 bits") from None

    def _text(self, text: Any) -> Document:
        if not isinstance(text, str):
            raise Broken("wrong type", "text must be a string")
        if not text.strip():
            raise Broken("empty")
        begin = self.tokenizer.bos_token  # added as serving adds it, unless the text brings it
        special = not (begin and text.startswith(begin))
        try:
            tokens = self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        except Exception as error:  # such as for half a surrogate pair, which JSON can escape
            raise Broken("the tokenizer refuses it", one_line(error)) from None
        return Document(tokens=np.array(tokens, np.int64), generated=np.ones(len(tokens), bool))

    def _conversation(self, record: dict, key: str) -> list[Document]:
        turns, tools = record[key], record.get("tools")
        if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
            raise Broken("wrong type", f"{key} must be a list of objects")
        if not isinstance(tools, list | None):
            raise Broken("wrong type", "tools must be a list")
        if not turns:
            raise Broken("empty")
        messages = [message(turn) for turn in turns]
        chat = self.chat
        try:
            documents, left_out = chat.documents(messages, tools or None)
        except Exception as error:  # a template is a program of somebody else's
            raise Broken("the chat template refuses it", one_line(error)) from None
        self.turns_left_out += left_out
        self.silent += not documents
        return documents


def message(turn: dict) -> dict:
    """OpenAI's form of a turn in either form, everything else in it kept."""
    if "from" in turn and "role" not in turn:
        role = turn["from"]
        if not isinstance(role, str) or role not in ROLES:
            raise Broken("unknown role", f"`{role}`, not one of {', '.join(ROLES)}")
        rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
        turn = {"role": ROLES[role], "content": turn.get("value"), **rest}
    if not isinstance(turn.get("role"), str):
        raise Broken("wrong type", "every turn needs a role, or from, that is a string")
    if not isinstance(turn.get("content"), str | list | None):
        raise Broken("wrong type", "content, or value, must be a string or a list of parts")
    return turn


def decoded(content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Broken("not UTF-8", f"byte {error.start}") from None


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
