"""Exported drafters in the hands of z-lab's `dflash` and of `speculators`: the same tokens, drafts and facts as ours.

Everything is in float64 with dflash, so that tokens must be equal and not just nearly so; speculators' own arithmetic
is float32 at best.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch

from tests import small_drafters
from tests.small_drafters import MASK, PROMPTS, Small
from trainer import decode
from trainer.export import description, gate, speculators, zlab
from trainer.verify import Sampler

NEW_TOKENS = 44
# name: (family of the target, its options, the drafter's settings)
TARGETS = {
    "qwen3": ("Qwen3", {"tie_word_embeddings": True, "rope_parameters": {"rope_theta": 5000.0}}),
    "llama": (
        "Llama",
        {
            "rope_parameters": {"rope_theta": 500000.0},
            "hidden_size": 48,
            "num_attention_heads": 6,
            "rms_norm_eps": 1e-5,
        },
    ),
}
DRAFTERS = {
    "qwen3": ("qwen3", {"block_size": 4, "layers": 2}),
    "llama": ("llama", {"block_size": 8, "target_layers": (0, 2, 3)}),
    "sliding": ("qwen3", {"block_size": 4, "layers": 2, "sliding_window": 7, "sliding_layers": (0,)}),
    "sliding-open": ("llama", {"block_size": 4, "layers": 2, "sliding_window": 9, "sliding_causal": False}),
    "causal": ("qwen3", {"block_size": 5, "layers": 2, "causal": True, "heads": 2, "kv_heads": 1}),
    "shifted": ("llama", {"block_size": 4, "shifted": True}),
}
ZLAB = [name for name in DRAFTERS if name != "shifted"]
SPECULATORS = [name for name in DRAFTERS if name != "causal"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("clients")


@pytest.fixture(scope="module")
def smalls(folder: Path) -> dict[str, Small]:
    torch.set_num_threads(1)
    targets = {
        name: small_drafters.make_target(folder / name, family, **options)
        for name, (family, options) in TARGETS.items()
    }
    made = {name: small_drafters.make(targets[target], **settings) for name, (target, settings) in DRAFTERS.items()}
    for small in made.values():
        small_drafters.memorise(small, new_tokens=NEW_TOKENS, steps=14)
    return made


def parts(small: Small) -> tuple[dict[str, torch.Tensor], description.Exported]:
    return small.drafter.state_dict(), description.describe(small.config, small.target, small.drafter)


@pytest.fixture(scope="module")
def by_dflash(run_dflash, smalls: dict[str, Small], folder: Path) -> dict[str, dict]:
    cases = []
    for name in ZLAB:
        zlab.write(folder / f"{name}-zlab", *parts(smalls[name]))
        target = str(smalls[name].config.target.path)
        drafter = str(folder / f"{name}-zlab")
        cases.append({"drafter": drafter, "target": target, "prompts": PROMPTS, "new_tokens": NEW_TOKENS})
    return dict(zip(ZLAB, run_dflash(cases), strict=True))


class Watched:
    """A proposer that notes where each round starts."""

    def __init__(self, proposer):
        self.proposer, self.size, self.starts = proposer, proposer.size, []

    def propose(self, histories, start):
        self.starts.append(int(start[0]))
        return self.proposer.propose(histories, start)

    def __getattr__(self, name):
        return getattr(self.proposer, name)


@pytest.mark.parametrize("name", ZLAB)
def test_dflash_emits_our_tokens_in_rounds_of_the_same_length(name, by_dflash, smalls):
    small, theirs = smalls[name], by_dflash[name]
    kept = set()
    for prompt, tokens, advances in zip(PROMPTS, theirs["tokens"], theirs["advances"], strict=True):
        watched = Watched(small.proposer(prompt, NEW_TOKENS))
        greedy = Sampler(temperature=0.0)
        ours = decode.speculative(small.target, watched, [prompt], greedy, new_tokens=NEW_TOKENS)
        assert tokens == ours.tokens[0] == small.text(prompt, NEW_TOKENS)
        # near the limit dflash drafts shorter blocks; until there, rounds start at the same places
        last = len(prompt) + NEW_TOKENS - small.block
        starts = [*itertools.accumulate(advances, initial=len(prompt))]
        until = [start for start in starts if start <= last]
        assert until == [start for start in watched.starts if start <= last]
        assert len(until) > 3
        kept |= {after - before for before, after in itertools.pairwise(until)}
    assert max(kept) > 1, "no draft was ever kept, so features of kept ones were never used"


@pytest.mark.parametrize("name", ZLAB)
def test_dflash_understands_the_configuration(name, by_dflash, smalls):
    small = smalls[name]
    assert by_dflash[name]["facts"] == {
        "block_size": small.block,
        "mask_token": MASK,
        "target_layers": list(small.target.layers),
        "windows": [kind.window for kind in small.drafter.kinds],
        "causal": [kind.causal for kind in small.drafter.kinds],
        "rope_base": small.drafter.shape.rope_base,
        "epsilon": small.drafter.shape.epsilon,
    }
    assert by_dflash[name]["auto_class"] == ["DFlashDraftModel", True]


DOCUMENTS = [[8, 3, 50, 71, 2, 2, 19, 33, 4, 90, 12, 7, 66], [1, 44, 27, 3, 80, 80, 15, 9, 38, 21, 60, 5, 2, 17, 31, 6]]
ANCHORS = [2, 5, 6, 14, 15, 17, 20]  # sliding windows reach back to the start of the document, see below


@pytest.fixture(scope="module")
def by_speculators(run_speculators, smalls: dict[str, Small], folder: Path) -> dict[str, dict]:
    cases = []
    for name in SPECULATORS:
        small = smalls[name]
        shared = {"embedding": small.target.embedding, "head": small.target.head}
        speculators.write(folder / f"{name}-speculators", *parts(small), **shared)
        case = {
            "drafter": str(folder / f"{name}-speculators"),
            "target": str(small.config.target.path),
            "documents": DOCUMENTS,
            "anchors": ANCHORS,
            "saved": str(folder / f"{name}-saved"),
        }
        if name in ("qwen3", "llama"):
            tensors, exported = parts(small)  # its converter builds the drafter in float32
            tensors = {key: tensor.float() for key, tensor in tensors.items()}
            zlab.write(folder / f"{name}-converted", tensors, dataclasses.replace(exported, dtype="float32"))
            case["converted"] = str(folder / f"{name}-converted")
        cases.append(case)
    return dict(zip(SPECULATORS, run_speculators(cases), strict=True))


@pytest.mark.parametrize("name", SPECULATORS)
def test_speculators_drafts_as_the_trainer_does(name, by_speculators, smalls):
    small = smalls[name]
    row = torch.tensor([[token for document in DOCUMENTS for token in document]])
    start = torch.tensor([[begin for begin, document in ((0, DOCUMENTS[0]), (13, DOCUMENTS[1])) for _ in document]])
    hidden = small.hidden(row, start, ANCHORS)
    theirs = torch.tensor(by_speculators[name]["hidden"], dtype=torch.float64)
    # with a window, speculators sees from `anchor - window` on, whatever the slot; so only blocks that see their
    # whole document in either way can be compared
    window = max(kind.window for kind in small.drafter.kinds)
    begins = torch.tensor([int(start[0, anchor]) for anchor in ANCHORS])
    whole = torch.tensor(ANCHORS) - begins + small.block <= (window or len(row[0]))
    assert whole.sum() >= 3
    torch.testing.assert_close(hidden[whole], theirs[whole], atol=2e-4, rtol=2e-4)
    drafts = (hidden @ small.target.head.T).argmax(-1)[whole]
    assert drafts.tolist() == torch.tensor(by_speculators[name]["drafts"])[whole].tolist()


@pytest.mark.parametrize("name", SPECULATORS)
def test_speculators_understands_the_configuration(name, by_speculators, smalls):
    small = smalls[name]
    kinds = small.drafter.kinds
    family = TARGETS[DRAFTERS[name][0]][0]
    assert by_speculators[name]["facts"] == {
        "class": "DFlashDraftModel",
        "block_size": small.block,
        "mask_token": MASK,
        "layer_ids": [layer + 1 for layer in small.target.layers],
        "window": max(kind.window for kind in kinds) or None,
        "sliding": [layer for layer, kind in enumerate(kinds) if kind.window],
        "non_causal": any(kind.window and not kind.causal for kind in kinds),
        "shifted": small.config.drafter.shifted,
        "rope_base": small.drafter.shape.rope_base,
        "speculative_tokens": small.block - (not small.config.drafter.shifted),
        "verifier": {"name_or_path": str(small.config.target.path), "architectures": [f"{family}ForCausalLM"]},
        "drafts_from_all": True,
    }


def same(folder: Path, small: Small) -> None:
    tensors, exported = speculators.read(folder)
    wanted = dataclasses.replace(parts(small)[1], dtype=exported.dtype)
    assert gate.differences(gate.facts(wanted), gate.facts(exported)) == []
    assert tensors.keys() == small.drafter.state_dict().keys()
    for name, tensor in small.drafter.state_dict().items():
        assert torch.equal(tensors[name], tensor.to(tensors[name].dtype)), name


@pytest.mark.parametrize("name", SPECULATORS)
def test_what_speculators_saves_is_read_back(name, by_speculators, smalls, folder):
    same(folder / f"{name}-saved", smalls[name])


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_what_speculators_makes_of_a_zlab_export_is_the_same_drafter(name, by_speculators, smalls, folder):
    same(folder / f"{name}-converted" / "speculators", smalls[name])
