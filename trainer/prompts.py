"""The prompts of an evaluation: a JSON list, or a JSON record a line, each with the first of these that it has.

    tokens      a list of token ids
    messages    OpenAI's [{role, content, …}], in the target's chat template with a generation prompt; assistant turns
                at the end are what is to be generated, and are left out; `tools` may stand beside it
    prompt      a text: what a user says, if the target's tokenizer has a chat template; else the beginning of a text
`domain` may stand beside it: results are given for each domain too.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from trainer.errors import TrainerError

KINDS = ("tokens", "messages", "prompt")


@dataclass(frozen=True, kw_only=True)
class Prompt:
    tokens: list[int]
    domain: str = ""


class _Wrong(Exception):
    """What is wrong with one record."""


def load_prompts(
    path: Path,
    vocabulary: int,
    *,
    tokenizer: Callable[[], Any] | None = None,
    template: Mapping[str, Any] | None = None,
) -> list[Prompt]:
    """`tokenizer` is called only if a prompt is text; `template` holds extra arguments for its chat template.

    Raises TrainerError, with the line or the number of the prompt, from 0.
    """
    once = cache(tokenizer) if tokenizer is not None else None
    prompts = []
    for where, record in _records(path):
        try:
            tokens = _tokens(record, once, template or {})
            if not tokens or not all(0 <= token < vocabulary for token in tokens):
                raise _Wrong(f"is empty or has tokens outside the vocabulary of {vocabulary}")
            domain = record.get("domain") or ""
            if not isinstance(domain, str):
                raise _Wrong("has a domain that is no string")
        except _Wrong as error:
            raise TrainerError(f"{path}: {where} {error}") from None
        prompts.append(Prompt(tokens=tokens, domain=domain))
    if not prompts:
        raise TrainerError(f"{path}: holds no prompts")
    return prompts


def _records(path: Path) -> Iterator[tuple[str, dict]]:
    """(where, record)."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise TrainerError(f"{path}: cannot be read ({error})") from None
    if text.lstrip().startswith("["):
        try:
            listed = [(f"prompt {number}", record) for number, record in enumerate(json.loads(text))]
        except ValueError as error:
            raise TrainerError(f"{path}: must be a JSON list of prompts, or a JSON record a line ({error})") from None
    else:
        listed = []
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                try:
                    listed.append((f"line {number}", json.loads(line)))
                except ValueError as error:
                    raise TrainerError(f"{path}: line {number} is not JSON ({error})") from None
    for where, record in listed:
        if not isinstance(record, dict):
            raise TrainerError(f"{path}: {where} must be an object with one of {', '.join(KINDS)}")
        yield where, record


def _tokens(record: dict, tokenizer: Callable[[], Any] | None, template: Mapping[str, Any]) -> list[int]:
    kind = next((kind for kind in KINDS if record.get(kind) is not None), None)
    if kind is None:
        raise _Wrong(f"has none of {', '.join(KINDS)}")
    value = record[kind]
    if kind == "tokens":
        if not isinstance(value, list) or not all(type(token) is int for token in value):
            raise _Wrong("has tokens that are not a list of integers")
        return value
    if tokenizer is None:
        raise _Wrong(f"has {kind}, which needs a tokenizer; give tokens")
    if kind == "prompt":
        if not isinstance(value, str):
            raise _Wrong("has a prompt that is no string")
        if not tokenizer().chat_template:
            begin = tokenizer().bos_token  # once, as in training (data/records.py)
            try:
                return list(tokenizer()(value, add_special_tokens=not (begin and value.startswith(begin)))["input_ids"])
            except Exception as error:  # such as for half a surrogate pair, which JSON can escape
                raise _Wrong(f"is refused by the tokenizer ({' '.join(str(error).split())[:200]})") from None
        value = [{"role": "user", "content": value}]
    return _rendered(value, tokenizer(), template, record.get("tools"))


def _rendered(messages: Any, tokenizer: Any, template: Mapping[str, Any], tools: Any) -> list[int]:
    if not isinstance(tools, list | None):
        raise _Wrong("has tools that are no list")
    if not isinstance(messages, list) or not all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages
    ):
        raise _Wrong("has messages that are not a list of objects with a role")
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise _Wrong("has no message to answer")
    if not tokenizer.chat_template:
        raise _Wrong("has messages, but the target's tokenizer has no chat template; give tokens")
    try:
        text = tokenizer.apply_chat_template(
            messages, tools=tools or None, tokenize=False, add_generation_prompt=True, **template
        )
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    except Exception as error:  # a template is a program of somebody else's
        raise _Wrong(f"is refused by the chat template ({' '.join(str(error).split())[:200]})") from None
