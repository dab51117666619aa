"""Drafters as serving engines read them: written in either layout, behind a parity gate, and read back."""

from pathlib import Path

from torch import Tensor

from trainer.config import Config
from trainer.drafter import Drafter
from trainer.errors import TrainerError
from trainer.export import files, gate, speculators, zlab
from trainer.export.description import Exported, describe, drafter_from
from trainer.target import Target

__all__ = ["Exported", "describe", "drafter_from", "export", "export_checkpoint", "load_into", "read"]

TRAINED_ON = ("target_layers", "mask_token", "shifted", "vocabulary")
LAYOUTS = {"zlab": zlab, "speculators": speculators}


def export_checkpoint(config: Config, *, checkpoint: Path, to: Path, layout: str, overwrite: bool = False) -> int:
    """`trainer export`: a checkpoint of `config`'s run -> the exit code."""
    from trainer import models
    from trainer.checkpoint import check_target, load_drafter, read_state, variant_of
    from trainer.target import choose_dtype

    config = variant_of(checkpoint, config)
    state = read_state(checkpoint, config, ignore=("seed", "steps"))
    device = models.choose_device(config)
    target = models.load_target(config, device)
    check_target(checkpoint, state, target.vocabulary)
    drafter = Drafter(models.shape_of(config.drafter, target.config)).to(device, choose_dtype(config.dtype, device))
    load_drafter(checkpoint, drafter)
    for line in export(config, target, drafter, to=to, layout=layout, overwrite=overwrite):
        print(line)
    return 0


def export(
    config: Config, target: Target, drafter: Drafter, *, to: Path, layout: str, overwrite: bool = False
) -> list[str]:
    """Writes `drafter` into the folder `to`, which appears complete and proven to draft alike, or not at all.

    Returns lines for the user: what was written and proven, and what a reader of this layout may not honour. Raises
    TrainerError: the layout cannot express the drafter, the folder may not be written, or the gate has found a
    difference.
    """
    writer = LAYOUTS[layout]
    exported = describe(config, target, drafter)
    tensors = {name: tensor.detach().cpu() for name, tensor in drafter.state_dict().items()}
    blocks = 0

    def check(part: Path) -> None:
        nonlocal blocks
        prompts = gate.gate_prompts(exported)
        both = {"drafter": drafter, "target": target, "target_path": config.target.path}
        blocks = gate.check(gate.job_of(part, writer, exported, prompts=prompts, **both))

    shared = {"embedding": target.embedding, "head": target.head} if writer is speculators else {}
    writer.write(to, tensors, exported, overwrite=overwrite, check=check, **shared)
    size = sum(path.stat().st_size for path in to.iterdir()) / 1e6
    return [
        f"{to}: {layout} layout, {exported.dtype}, {size:.1f} MB; read back in a fresh process, {blocks} blocks are "
        "drafted alike",
        *(f"note: {remark}" for remark in writer.remarks(exported)),
    ]


def read(folder: Path) -> tuple[dict[str, Tensor], Exported]:
    """An exported drafter in either layout. Raises TrainerError if it is none, or more than a plain DFlash drafter."""
    layout = speculators if "speculators_model_type" in files.read_config(folder) else zlab
    return layout.read(folder)


def load_into(drafter: Drafter, folder: Path, *, config: Config | None = None, target: Target | None = None) -> None:
    """The weights of an exported drafter into one that computes the same. Raises TrainerError if it does not.

    With `config` and `target` it must also have been trained on the same layers, mask token and kind of labels; the
    block may be of another size.
    """
    tensors, exported = read(folder)
    wanted, found = gate.facts_of_shape(drafter.shape), gate.facts_of_shape(exported.shape)
    if config is not None and target is not None:
        wanted |= {name: gate.facts(describe(config, target, drafter))[name] for name in TRAINED_ON}
        found |= {name: gate.facts(exported)[name] for name in TRAINED_ON}
    if problems := gate.differences(wanted, found):
        raise TrainerError(f"{folder}: is not the drafter that the configuration makes: {'; '.join(problems)}")
    drafter.load_state_dict(tensors)
