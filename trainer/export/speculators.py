"""The layout of the `speculators` package, which it trains further and vLLM serves.

    config.json          `speculators_model_type: dflash`, the body's Qwen3 configuration nested, the target named
    model.safetensors    the drafter's parameters, and the target's embedding and head

It counts layers from 1: its id l + 1 is the output of the target's layer l. Full layers always see their whole block.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer.errors import TrainerError
from trainer.export import files, qwen3
from trainer.export.description import Exported, check_tensors

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
VERSION = "0.9.0"  # whose format this is
# the target's, or maps of a vocabulary: none of the drafter's own
FOREIGN = (EMBEDDING, HEAD, "verifier_lm_head.weight", "verifier_norm.weight", "d2t", "t2d")


def write(
    folder: Path,
    tensors: dict[str, Tensor],
    exported: Exported,
    *,
    embedding: Tensor,
    head: Tensor,
    overwrite: bool = False,
    check: Callable[[Path], None] = lambda part: None,
) -> None:
    """All or nothing; `embedding` and `head` [V, H] are the target's. `check` is given the complete files before they
    get their name, and may raise. Raises TrainerError for a drafter that the layout cannot express.
    """
    config = config_of(exported)
    check_tensors(exported, tensors)
    shared = {name: tensor.to(tensors["fc.weight"].dtype) for name, tensor in ((EMBEDDING, embedding), (HEAD, head))}
    for name, tensor in shared.items():
        if tensor.shape != (exported.vocabulary, exported.shape.hidden):
            raise TrainerError(f"the target's {name} is {list(tensor.shape)}, not what the drafter was trained with")
    if shared[EMBEDDING].data_ptr() == shared[HEAD].data_ptr():
        shared[HEAD] = shared[HEAD].clone()  # the file format has no tied tensors
    with files.new_folder(folder, overwrite=overwrite) as part:
        files.write_config(part, config)
        files.write_tensors(part, {**tensors, **shared})
        check(part)


def config_of(exported: Exported) -> dict[str, Any]:
    kinds = exported.shape.kinds
    if any(kind.causal and not kind.window for kind in kinds):
        raise TrainerError("full layers are causal, and speculators always lets them see their whole block")
    if len({kind.causal for kind in kinds if kind.window}) > 1:
        raise TrainerError("some sliding layers are causal and some are not; speculators has one flag for all")
    if not exported.target:
        raise TrainerError("speculators names the target, whose embedding and head it loads, and it is not known")
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": exported.block_size - (not exported.shifted),
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": exported.target, "architectures": list(exported.target_architectures)},
        },
        "transformer_layer_config": qwen3.write(exported),
        "draft_vocab_size": exported.vocabulary,
        "block_size": exported.block_size,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in exported.target_layers],
        "mask_token_id": exported.mask_token,
        "sliding_window_non_causal": any(kind.window and not kind.causal for kind in kinds),
        "sample_from_anchor": exported.shifted,
        "num_target_layers": exported.target_depth,  # unknown to speculators; for the way back to z-lab's layout
        "tie_word_embeddings": False,
        "dtype": exported.dtype,
        "torch_dtype": exported.dtype,
    }


def remarks(exported: Exported) -> list[str]:
    """What a reader of this export may not honour."""
    found = []
    if exported.shifted:
        found.append(
            "shifted (`sample_from_anchor`): not every serving engine knows it; speculators itself warns of vLLM"
        )
    if any(kind.window for kind in exported.shape.kinds):
        found.append(
            "speculators trains sliding layers with a window counted from a block's first slot, up to a block longer "
            "than the one served; training on with it shifts what these layers see"
        )
    return found


def read(folder: Path) -> tuple[dict[str, Tensor], Exported]:
    """Also what speculators itself saved, as long as it drafts from the whole vocabulary. Raises TrainerError else.

    The target's embedding and head are left out: they are the target's, and come with it.
    """
    reading = qwen3.Reading(folder / files.CONFIG, files.read_config(folder))
    if reading.config.get("speculators_model_type") != "dflash":
        raise reading.error(f"is of {reading.config.get('speculators_model_type')}, not of dflash")
    body = qwen3.Reading(reading.path, reading.get("transformer_layer_config", dict))
    layers = reading.ids("aux_hidden_state_layer_ids")
    if 0 in layers:
        raise reading.error("takes features from the target's embedding (layer id 0), which this drafter cannot")
    causal = not reading.get("sliding_window_non_causal", bool, False)
    verifier = (reading.config.get("speculators_config") or {}).get("verifier") or {}
    target = verifier.get("name_or_path") or ""
    exported = Exported(
        **qwen3.read(body, features=len(layers), causal={qwen3.FULL: False, qwen3.SLIDING: causal}),
        target_layers=tuple(layer - 1 for layer in layers),
        target_depth=reading.get("num_target_layers", int, 0) or _depth(target),
        mask_token=reading.get("mask_token_id", int),
        block_size=reading.get("block_size", int),
        shifted=reading.get("sample_from_anchor", bool, False),
        dtype=qwen3.dtype(reading, body),
        target=target,
        target_architectures=tuple(verifier.get("architectures") or ()),
    )
    if reading.get("draft_vocab_size", int) != exported.vocabulary:
        raise reading.error("drafts from a part of the vocabulary, and this drafter uses the target's whole head")
    tensors = {name: tensor for name, tensor in files.read_tensors(folder).items() if name not in FOREIGN}
    check_tensors(exported, tensors)
    return tensors, exported


def _depth(target: str) -> int:
    """Layers of the target where it is a local folder; else 0."""
    try:
        return int(files.read_config(Path(target))["num_hidden_layers"])
    except (TrainerError, KeyError, TypeError, ValueError):
        return 0
