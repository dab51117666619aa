"""Files of several kinds -> documents. Every record that cannot be used is counted and named with file and line.

Kinds, by the name's end:
    .safetensors        prepared tokens, three arrays
        tokens          uint16 or uint32 [T]  all documents, one after the other
        lengths         integer [D]           tokens of each document
        prompt_lengths  integer [D]           its leading tokens that are given, not generated: no loss on them
    .jsonl, .jsonl.gz   a record a line, with the first of these that it has; `domain` and `id` may stand beside it
        input_ids       tokens, and loss_mask as long, 1 where a token bears loss
        messages        OpenAI's [{role, content, …}], beside it perhaps `tools`; assistant turns bear loss
        conversations   ShareGPT's [{from, value}]
        text            all of it bears loss
    .txt                one text; all of it bears loss
"""

import gzip
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from trainer.data.records import Broken, Reader
from trainer.data.rows import Document
from trainer.errors import TrainerError

ENOUGH = 1000  # records after which too many broken ones stop the reading early
EXAMPLES = 10


@dataclass(frozen=True, kw_only=True)
class Report:
    """What the files held."""

    files: int
    records: int  # documents of prepared files, lines, texts
    documents: int
    tokens: int
    supervised: int  # tokens that bear loss
    unsupervised: int  # documents without such a token, kept out
    turns_left_out: int  # assistant turns that serving, by the template, would not have generated: no loss on them
    broken: Mapping[str, int]  # records skipped, by reason
    examples: tuple[str, ...]  # the first of them: file, line, reason
    repeated: tuple[str, ...] = ()  # files that were named more than once

    def warnings(self) -> list[str]:
        """Sentences for the user, none where all is well."""
        said = []
        if self.repeated:
            said.append(
                f"data.paths names {self.repeated[0]} more than once ({len(self.repeated)} such files); "
                "its documents are trained on as often"
            )
        if self.broken:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.broken.items())
            said.append(f"skipped {sum(self.broken.values())} of {self.records} records: {reasons}")
            said += [f"  {example}" for example in self.examples]
        if self.unsupervised:
            said.append(f"kept out {self.unsupervised} documents in which no token bears loss")
        if self.turns_left_out:
            said.append(
                f"{self.turns_left_out} assistant turns bear no loss: after its prompt for them, the chat template "
                "would not write them so (data.template may have to change, as for thinking)"
            )
        return said


@dataclass
class Tally:
    share: float
    records: int = 0
    broken: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    def count_broken(self, where: str, error: Broken) -> None:
        self.broken[error.reason] += 1
        if len(self.examples) < EXAMPLES:
            self.examples.append(f"{where}: {error}")
        if self.records >= ENOUGH:
            self.check(" so far")

    def check(self, when: str = "") -> None:
        count = self.broken.total()
        if count > self.share * self.records:
            raise TrainerError(
                f"{count} of {self.records} records{when} cannot be used, more than data.broken_share, "
                f"{self.share:g}, allows; the first: {'; '.join(self.examples[:3])}"
            )


def load_documents(
    paths: Sequence[Path],
    *,
    tokenizer: Callable[[], Any],
    vocabulary: int,
    template: Mapping[str, Any],
    broken_share: float,
    piece: int = 0,
) -> tuple[list[Document], Report]:
    """All documents of files, or globs, in the order of `paths` and of names, and the report.

    `tokenizer` is called when the first text or conversation comes. `template`: see Chat. `piece`: .txt files are cut
    into documents of so many tokens, 0 leaves them whole. Raises TrainerError: for a file that cannot be read, a
    broken prepared file, more than `broken_share` of all records broken, or no documents.
    """
    files = expand(paths)
    reader = Reader(tokenizer, vocabulary, template)
    tally = Tally(broken_share)
    documents: list[Document] = []
    unsupervised = 0
    for path in files:
        if path.name.endswith(".safetensors"):
            made = prepared(path, vocabulary)
            tally.records += len(made)
        else:
            records = text_file(path) if path.name.endswith(".txt") else json_lines(path)
            made = read(records, reader, tally, piece)
        for document in made:
            if document.generated.any():
                documents.append(document)
            else:
                unsupervised += 1
    tally.check()
    if not documents:
        names = ", ".join(str(path) for path in paths)
        raise TrainerError(f"{names}: no document with a token that bears loss, in {tally.records} records")
    return documents, Report(
        files=len(files),
        records=tally.records,
        documents=len(documents),
        tokens=sum(len(document.tokens) for document in documents),
        supervised=sum(int(document.generated.sum()) for document in documents),
        unsupervised=unsupervised + reader.silent,
        turns_left_out=reader.turns_left_out,
        broken=dict(tally.broken.most_common()),
        examples=tuple(tally.examples),
        repeated=tuple(str(path) for path, count in Counter(files).items() if count > 1),
    )


def expand(paths: Sequence[Path]) -> list[Path]:
    """The files that paths and globs name. Raises TrainerError where one names none, or a kind unknown here."""
    files = []
    for path in paths:
        found = [path] if path.exists() else sorted(path.parent.glob(path.name))
        if not found:
            raise TrainerError(f"data.paths: {path} names no file")
        files += found
    for path in files:
        if not path.name.endswith((".safetensors", ".jsonl", ".jsonl.gz", ".txt")):
            raise TrainerError(f"data.paths: {path} is none of .safetensors, .jsonl, .jsonl.gz, .txt")
    return files


def prepared(path: Path, vocabulary: int) -> list[Document]:
    """The documents of a safetensors file, with everything that can be wrong checked and named."""
    try:
        arrays = load_file(path)
    except (OSError, SafetensorError, TypeError, AttributeError) as error:  # the last two: a type numpy has not
        raise TrainerError(f"{path}: not a readable safetensors file ({error}); make or fetch it anew") from None
    names = ("tokens", "lengths", "prompt_lengths")
    missing = sorted(set(names) - set(arrays))
    if missing:
        raise TrainerError(f"{path}: lacks {', '.join(missing)}; a data file has tokens, lengths, prompt_lengths")
    if any(arrays[name].ndim != 1 or arrays[name].dtype.kind not in "iu" for name in names):
        raise TrainerError(f"{path}: tokens, lengths and prompt_lengths must be lists of integers")
    tokens, lengths, prompts = (arrays[name].astype(np.int64) for name in names)
    if lengths.sum() != len(tokens):
        raise TrainerError(f"{path}: lengths add up to {lengths.sum()}, but there are {len(tokens)} tokens: cut short?")
    if lengths.shape != prompts.shape or (lengths < 1).any() or (prompts < 0).any() or (prompts > lengths).any():
        raise TrainerError(f"{path}: every document needs a length of at least 1 and a prompt no longer than itself")
    if len(tokens) == 0:
        raise TrainerError(f"{path}: holds no documents")
    ends = np.cumsum(lengths)
    wrong = np.flatnonzero((tokens < 0) | (tokens >= vocabulary))
    if len(wrong):
        document = int(np.searchsorted(ends, wrong[0], side="right"))
        raise TrainerError(
            f"{path}: token {tokens[wrong[0]]} in document {document} is outside the target's vocabulary of "
            f"{vocabulary}; the data was made with another tokenizer"
        )
    generated = np.arange(len(tokens)) >= np.repeat(ends - lengths + prompts, lengths)
    return [
        Document(tokens=tokens[e - n : e], generated=generated[e - n : e]) for e, n in zip(ends, lengths, strict=True)
    ]


Record = tuple[str, bytes, bool]  # where, content, whether it is JSON


def text_file(path: Path) -> Iterator[Record]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise TrainerError(f"{path}: cannot be read ({error.strerror})") from None
    yield str(path), content, False


def json_lines(path: Path) -> Iterator[Record]:
    """The lines that are not blank."""
    number = 0
    try:
        with gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{path}:{number}", line, True
    except (OSError, EOFError, zlib.error) as error:
        raise TrainerError(f"{path}: cannot be read after line {number} ({error})") from None


def read(records: Iterator[Record], reader: Reader, tally: Tally, piece: int) -> Iterator[Document]:
    for where, content, is_json in records:
        tally.records += 1
        try:
            yield from reader.json(content) if is_json else reader.plain(content, piece)
        except Broken as error:
            tally.count_broken(where, error)
