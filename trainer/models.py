"""Target and drafter of a configuration, on a device."""

import os
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from trainer.block_mask import LayerKind
from trainer.config import Config, DrafterConfig
from trainer.drafter import Drafter, Shape, initialise
from trainer.errors import TrainerError
from trainer.target import Target, choose_dtype
from trainer.vocabulary import Vocabulary, load_vocabulary


@dataclass(frozen=True, kw_only=True)
class Models:
    """What a rank that trains has: the whole target, or of it only the vocabulary."""

    drafter: Drafter
    vocabulary: Vocabulary
    target: Target | None


def choose_device(config: Config) -> torch.device:
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise TrainerError(
            f"device {name}: torch {torch.__version__} sees no CUDA device here; set device: cpu or auto"
        )
    if name == "cpu" and config.attention == "flex":
        raise TrainerError(
            "device auto: there is no GPU here, and a CPU has no backward of flex attention; set attention: dense"
        )
    if name == "cuda":  # one of several ranks on this machine takes the card of its number
        name = f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}"
    device = torch.device(name)
    if device.type == "cuda" and device.index >= torch.cuda.device_count():
        raise TrainerError(f"device {name}: there are {torch.cuda.device_count()} CUDA devices here, counted from 0")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def spread_layers(layers: int, features: int) -> tuple[int, ...]:
    """Which of the target's `layers` are captured when none are named: evenly from layer 1 to the fourth last, as
    published DFlash drafters have it (36 layers, 5 features: 1, 9, 17, 25, 33); a single one is the middle."""
    if features == 1:
        return (layers // 2,)
    return tuple(round(1 + i * (layers - 4) / (features - 1)) for i in range(features))


def captured_layers(config: DrafterConfig, target: PretrainedConfig) -> tuple[int, ...]:
    chosen = config.target_layers or spread_layers(target.num_hidden_layers, config.features)
    if list(chosen) != sorted(set(chosen)) or min(chosen) < 0:
        raise TrainerError(
            f"the target has {target.num_hidden_layers} layers, too few to spread {config.features} features over; "
            "name some in drafter.target_layers"
        )
    return chosen


def layer_kinds(config: DrafterConfig) -> tuple[LayerKind, ...]:
    slides = set(config.sliding_layers or range(config.layers)) if config.sliding_window else set()
    return tuple(
        LayerKind(window=config.sliding_window, causal=config.sliding_causal)
        if layer in slides
        else LayerKind(causal=config.causal)
        for layer in range(config.layers)
    )


def rope_base(target: PretrainedConfig) -> float:
    """RoPE settings moved in transformers 5; a lost base goes unnoticed in training and ruins serving."""
    rope = getattr(target, "rope_parameters", None) or {"rope_theta": target.rope_theta}
    if "rope_theta" not in rope:  # a target with several kinds of layers has one set of parameters for each
        rope = rope.get("full_attention") or next(iter(rope.values()))
    return float(rope["rope_theta"])


def shape_of(config: DrafterConfig, target: PretrainedConfig) -> Shape:
    if getattr(target, "rms_norm_eps", None) is None:
        raise TrainerError(
            f"the target's config.json ({target.model_type}) has no rms_norm_eps: a drafter has the RMS norms of its "
            "target, and targets with other norms are not supported"
        )
    return Shape(
        hidden=target.hidden_size,
        intermediate=config.intermediate or target.intermediate_size,
        heads=config.heads or target.num_attention_heads,
        kv_heads=config.kv_heads or target.num_key_value_heads,
        head_size=getattr(target, "head_dim", None) or target.hidden_size // target.num_attention_heads,
        features=len(captured_layers(config, target)),
        layers=config.layers,
        epsilon=target.rms_norm_eps,
        rope_base=rope_base(target),
        kinds=layer_kinds(config),
    )


def load_target(config: Config, device: torch.device) -> Target:
    return Target(
        config.target.path,
        lambda hf: captured_layers(config.drafter, hf),
        device,
        dtype=config.target.dtype,
        dense=config.attention == "dense",
    )


def new_drafter(config: Config, target: Target | Vocabulary) -> Drafter:
    """With fresh weights from the seed, or those of the exported drafter that the configuration begins with."""
    drafter = Drafter(shape_of(config.drafter, target.config))
    if config.drafter.initial is None:
        initialise(drafter, seed=config.seed, final_norm=target.final_norm.cpu())
    else:
        from trainer.export import load_into

        whole = target if isinstance(target, Target) else None  # a rank without the target checks the shape alone
        load_into(drafter, config.drafter.initial, config=config, target=whole)
    drafter.activation_checkpointing = config.activation_checkpointing
    return drafter.to(target.device, choose_dtype(config.dtype, target.device))


def build(config: Config, device: torch.device) -> Models:
    target = load_target(config, device)
    return Models(drafter=new_drafter(config, target), vocabulary=target.vocabulary, target=target)


def build_without_target(config: Config, device: torch.device) -> Models:
    """For ranks that features are sent to."""
    dtype = choose_dtype(config.target.dtype, device)
    vocabulary = load_vocabulary(config.target.path, dtype=dtype, device=device)
    return Models(drafter=new_drafter(config, vocabulary), vocabulary=vocabulary, target=None)
