"""The Qwen3 configuration that both layouts keep a drafter's body in, written and read."""

from pathlib import Path
from typing import Any

from trainer.block_mask import LayerKind
from trainer.drafter import Shape
from trainer.errors import TrainerError
from trainer.export.description import DTYPES, Exported

FULL, SLIDING = "full_attention", "sliding_attention"
Causal = dict[str, bool]  # by type of layer: whether a block's slots see later ones


def write(exported: Exported) -> dict[str, Any]:
    """The keys under the names of transformers 4 and 5 alike: either of them loses RoPE's base without its own."""
    shape = exported.shape
    windows = [kind.window for kind in shape.kinds]
    if len({window for window in windows if window}) > 1:
        raise TrainerError("sliding layers have windows of different sizes, and the layout has room for one")
    end = exported.end
    return {
        "model_type": "qwen3",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "vocab_size": exported.vocabulary,
        "rms_norm_eps": shape.epsilon,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "rope_theta": shape.rope_base,
        "rope_scaling": None,
        "rope_parameters": {"rope_theta": shape.rope_base, "rope_type": "default"},
        "max_position_embeddings": exported.max_positions,
        "layer_types": [SLIDING if window else FULL for window in windows],
        "sliding_window": max(windows) or None,
        "use_sliding_window": any(windows),
        "max_window_layers": next((layer for layer, window in enumerate(windows) if window), shape.layers),
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": exported.begin,
        "eos_token_id": list(end) if isinstance(end, tuple) else end,
        "dtype": exported.dtype,
        "torch_dtype": exported.dtype,
    }


class Reading:
    """A configuration whose every complaint says where it was."""

    def __init__(self, path: Path, config: dict[str, Any]):
        self.path, self.config = path, config

    def error(self, text: str) -> TrainerError:
        return TrainerError(f"{self.path}: {text}")

    def get(self, key: str, kind: type, default: Any = ...) -> Any:
        """A value of that kind; without a default the key must be there. `null` is as good as no key."""
        value = self.config.get(key)
        if value is None:
            if default is ...:
                raise self.error(f"has no `{key}`")
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.error(f"`{key}` is not of type {kind.__name__}")
        return value

    def ids(self, key: str, default: Any = ...) -> tuple[int, ...]:
        values = self.get(key, list, default)
        if not all(isinstance(value, int) for value in values):
            raise self.error(f"`{key}` is not a list of numbers")
        return tuple(values)

    def demand(self, key: str, *allowed: Any) -> None:
        """What the drafter does not have is refused rather than ignored."""
        value = self.config.get(key)
        if value is not None and value not in allowed:
            raise self.error(f"`{key}` is {value!r}, which this drafter does not have")


def read(reading: Reading, *, features: int, causal: Causal) -> dict[str, Any]:
    """-> the arguments of Exported that such a configuration gives. Raises TrainerError for a body of another kind."""
    reading.demand("hidden_act", "silu")
    reading.demand("attention_bias", False)
    heads, hidden = reading.get("num_attention_heads", int), reading.get("hidden_size", int)
    layers = reading.get("num_hidden_layers", int)
    end = reading.config.get("eos_token_id")
    return {
        "shape": Shape(
            hidden=hidden,
            intermediate=reading.get("intermediate_size", int),
            heads=heads,
            kv_heads=reading.get("num_key_value_heads", int, heads),
            head_size=reading.get("head_dim", int, hidden // heads),
            features=features,
            layers=layers,
            epsilon=reading.get("rms_norm_eps", float),
            rope_base=_rope_base(reading),
            kinds=_kinds(reading, layers, causal),
        ),
        "vocabulary": reading.get("vocab_size", int),
        "max_positions": reading.get("max_position_embeddings", int),
        "begin": reading.config.get("bos_token_id"),
        "end": tuple(end) if isinstance(end, list) else end,
    }


def dtype(*readings: Reading) -> str:
    """The first that is told, under either of its two names."""
    for reading in readings:
        for key in ("dtype", "torch_dtype"):
            if (name := reading.get(key, str, None)) is not None:
                if name not in DTYPES:
                    raise reading.error(f"`{key}` is {name!r}; it can be {', '.join(DTYPES)}")
                return name
    raise readings[0].error("has no `dtype`")


def _rope_base(reading: Reading) -> float:
    """Wherever it stands. Two bases that differ, none, or RoPE that is more than a base: TrainerError."""
    nested = Reading(reading.path, reading.get("rope_parameters", dict, {}))
    scaling = Reading(reading.path, reading.get("rope_scaling", dict, {}))
    if any(isinstance(value, dict) for value in nested.config.values()):
        raise reading.error("has RoPE parameters for each type of layer, and this drafter has one set")
    for part in (reading, nested, scaling):
        part.demand("partial_rotary_factor", 1, 1.0)
        part.demand("rope_type", "default")
        part.demand("type", "default")
    found = {part.get("rope_theta", float, None) for part in (reading, nested, scaling)} - {None}
    if not found:
        raise reading.error("has no `rope_theta`, the base of RoPE, and without it positions mean something else")
    if len(found) > 1:
        raise reading.error(f"names several bases of RoPE: {', '.join(map(str, sorted(found)))}")
    return found.pop()


def _kinds(reading: Reading, layers: int, causal: Causal) -> tuple[LayerKind, ...]:
    types = reading.get("layer_types", list, [FULL] * layers)
    if len(types) != layers or set(types) - {FULL, SLIDING}:
        raise reading.error(f"`layer_types` is not a list of {layers} entries, each {FULL} or {SLIDING}")
    window = reading.get("sliding_window", int) if SLIDING in types else 0
    return tuple(LayerKind(window=window if kind == SLIDING else 0, causal=causal[kind]) for kind in types)
