"""The layout of z-lab's published DFlash drafters, which their own package, SGLang and vLLM load.

    config.json          a Qwen3 configuration, `dflash_config`, `block_size` at both places where readers look
    model.safetensors    the drafter's parameters under their own names; no embedding and no head
    dflash.py            names the class in z-lab's package, for `AutoModel` with `trust_remote_code`

z-lab's package loads the folder with its own class and needs neither `dflash.py` nor `auto_map`; SGLang and vLLM go by
`architectures`. They are for those who load a drafter as its model card says: without them `AutoModel` would make it a
plain Qwen3 model and fill what is missing at random.

Whether a block's slots see later ones is told by one flag for all layers. Without the flag, readers let sliding layers
be causal and the others not.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer.errors import TrainerError
from trainer.export import files, qwen3
from trainer.export.description import Exported, check_tensors
from trainer.models import spread_layers

ARCHITECTURE = "DFlashDraftModel"
CODE = f'''"""This drafter's class is in z-lab's package: pip install dflash"""

from dflash import {ARCHITECTURE}

__all__ = ["{ARCHITECTURE}"]
'''
# of `dflash_config`, and what else may stand there as long as it changes nothing
KNOWN = {"mask_token_id", "target_layer_ids", "block_size", "causal"}
NEUTRAL = {"input_embedding_scale": 1, "output_multiplier": 1, "final_logit_softcapping": 0}


def write(
    folder: Path,
    tensors: dict[str, Tensor],
    exported: Exported,
    *,
    overwrite: bool = False,
    check: Callable[[Path], None] = lambda part: None,
) -> None:
    """All or nothing. `check` is given the complete files before they get their name, and may raise.

    Raises TrainerError for a drafter that the layout, or z-lab's loop, cannot express.
    """
    config = config_of(exported)
    check_tensors(exported, tensors)
    with files.new_folder(folder, overwrite=overwrite) as part:
        files.write_config(part, config)
        files.write_tensors(part, tensors)
        (part / files.CODE).write_text(CODE, encoding="utf-8")
        check(part)


def config_of(exported: Exported) -> dict[str, Any]:
    if exported.shifted:
        raise TrainerError(
            "a shifted drafter has no place in z-lab's layout: its loop never asks slot 0 for a draft and would take "
            "every other one for that of the position before; use --layout speculators"
        )
    if exported.target_depth - 1 in exported.target_layers:
        raise TrainerError(
            f"features come from the target's last layer, {exported.target_depth - 1}, before the final norm; z-lab's "
            "loop would take them after it; use --layout speculators, or train on earlier layers"
        )
    if not exported.target_depth:
        raise TrainerError("z-lab's layout tells the number of the target's layers, and it is not known")
    causal = causal_flag(exported)
    flag = {} if causal is None else {"causal": causal}
    return {
        "architectures": [ARCHITECTURE],
        "auto_map": {"AutoModel": f"{files.CODE.removesuffix('.py')}.{ARCHITECTURE}"},
        "block_size": exported.block_size,
        "dflash_config": {
            "mask_token_id": exported.mask_token,
            "target_layer_ids": list(exported.target_layers),
            "block_size": exported.block_size,
            **flag,
        },
        "num_target_layers": exported.target_depth,
        **qwen3.write(exported),
        **({} if causal is None else {"is_causal": causal}),
    }


def causal_flag(exported: Exported) -> bool | None:
    """The flag for all layers, or None where leaving it out says it: sliding layers causal, the others not."""
    kinds = exported.shape.kinds
    if len(found := {kind.causal for kind in kinds}) == 1:
        return found.pop()
    if all(kind.causal == bool(kind.window) for kind in kinds):
        return None
    raise TrainerError(
        "full layers are causal and sliding ones are not: z-lab's layout has one flag for all, and cannot say it"
    )


def remarks(exported: Exported) -> list[str]:
    """What a reader of this export may not honour."""
    return [
        f"{'sliding' if kind.window else 'full'} layers are {'' if kind.causal else 'not '}causal: z-lab's package and "
        "vLLM honour the flag, SGLang goes by the type of layer and would take the opposite"
        for kind in sorted(set(exported.shape.kinds), key=lambda kind: kind.window)
        if kind.causal != bool(kind.window)
    ]


def read(folder: Path) -> tuple[dict[str, Tensor], Exported]:
    """Also what others wrote, as long as it is a plain DFlash drafter. Raises TrainerError if it is not."""
    reading = qwen3.Reading(folder / files.CONFIG, files.read_config(folder))
    architectures = reading.get("architectures", list, [ARCHITECTURE])
    if architectures != [ARCHITECTURE]:
        raise reading.error(f"is of {', '.join(map(str, architectures))}, not of {ARCHITECTURE}")
    inner = qwen3.Reading(reading.path, reading.get("dflash_config", dict, {}))
    for key, value in inner.config.items():
        if key not in KNOWN and value not in (None, False, NEUTRAL.get(key)):
            raise inner.error(f"`dflash_config` has `{key}`: {value!r}, which this drafter does not have")
    depth = reading.get("num_target_layers", int, 0)
    target_layers = inner.ids("target_layer_ids", ()) or _default_layers(reading, depth)
    exported = Exported(
        **qwen3.read(reading, features=len(target_layers), causal=_causal(reading, inner)),
        target_layers=target_layers,
        target_depth=depth,
        mask_token=_either(reading, inner, "mask_token_id"),
        block_size=_either(reading, inner, "block_size"),
        shifted=False,
        dtype=qwen3.dtype(reading),
    )
    tensors = {name.removeprefix("model."): tensor for name, tensor in files.read_tensors(folder).items()}
    check_tensors(exported, tensors)
    return tensors, exported


def _either(reading: qwen3.Reading, inner: qwen3.Reading, key: str) -> int:
    """Readers look at one place or the other, so two that differ are a trap."""
    found = {part.get(key, int, None) for part in (reading, inner)} - {None}
    if len(found) != 1:
        raise reading.error(f"names {'no' if not found else 'two'} `{key}`, at the top and in `dflash_config`")
    return found.pop()


def _causal(reading: qwen3.Reading, inner: qwen3.Reading) -> qwen3.Causal:
    flag = reading.get("is_causal", bool, inner.get("causal", bool, None))
    return {qwen3.FULL: False, qwen3.SLIDING: True} if flag is None else {qwen3.FULL: flag, qwen3.SLIDING: flag}


def _default_layers(reading: qwen3.Reading, depth: int) -> tuple[int, ...]:
    """z-lab's rule where none are named: as many as the drafter has layers, spread evenly."""
    if depth < 1:
        raise reading.error("has neither `dflash_config.target_layer_ids` nor `num_target_layers`")
    return spread_layers(depth, reading.get("num_hidden_layers", int))
