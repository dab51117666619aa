"""What fixes an exported drafter: the facts that each layout writes in its own words."""

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.config import Config
from trainer.drafter import Drafter, Shape
from trainer.errors import TrainerError
from trainer.target import Target

DTYPES = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True, kw_only=True)
class Exported:
    shape: Shape  # with a kind for every layer
    target_layers: tuple[int, ...]  # whose outputs are the features; the first is 0
    target_depth: int  # layers of the target; 0: not told
    mask_token: int
    block_size: int
    shifted: bool  # slot k predicts the token after its own place
    vocabulary: int  # rows of the target's embedding, padding included
    max_positions: int
    begin: int | None  # the target's token ids
    end: int | tuple[int, ...] | None
    dtype: str  # of the weights
    target: str = ""  # its name or path; empty: not told
    target_architectures: tuple[str, ...] = ()


def describe(config: Config, target: Target, drafter: Drafter) -> Exported:
    """From what is in memory; `config` adds what neither model knows of itself."""
    end = target.config.eos_token_id
    return Exported(
        shape=with_kinds(drafter.shape),
        target_layers=tuple(target.layers),
        target_depth=target.config.num_hidden_layers,
        mask_token=config.drafter.mask_token,
        block_size=config.drafter.block_size,
        shifted=config.drafter.shifted,
        vocabulary=len(target.embedding),
        max_positions=target.config.max_position_embeddings,
        begin=target.config.bos_token_id,
        end=tuple(end) if isinstance(end, list) else end,
        dtype=str(drafter.dtype).removeprefix("torch."),
        target=str(config.target.path),
        target_architectures=tuple(target.config.architectures or ()),
    )


def with_kinds(shape: Shape) -> Shape:
    return Shape(**{**vars(shape), "kinds": shape.layer_kinds})


def drafter_from(exported: Exported, tensors: dict[str, Tensor]) -> Drafter:
    """The drafter itself, on the CPU and in the type of its weights. Raises TrainerError as `check_tensors` does."""
    check_tensors(exported, tensors)
    with torch.device("meta"):
        drafter = Drafter(exported.shape)
    drafter.load_state_dict(tensors, assign=True)
    return drafter.requires_grad_(False)


def check_tensors(exported: Exported, tensors: dict[str, Tensor]) -> None:
    """Raises TrainerError unless they are exactly the drafter's parameters, in the type that `exported` names."""
    with torch.device("meta"):
        wanted = {name: tuple(tensor.shape) for name, tensor in Drafter(exported.shape).state_dict().items()}
    for what, names in (("lacks", wanted.keys() - tensors.keys()), ("has unknown", tensors.keys() - wanted.keys())):
        if names:
            raise TrainerError(f"the drafter {what} {', '.join(sorted(names)[:5])} ({len(names)} tensors)")
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != wanted[name]:
            raise TrainerError(f"{name} is {list(tensor.shape)}, its configuration makes it {list(wanted[name])}")
        if str(tensor.dtype) != f"torch.{exported.dtype}":
            raise TrainerError(f"{name} is {tensor.dtype}, its configuration says {exported.dtype}")
