"""Settings: frozen dataclasses read from one YAML file.

Every mistake of the file is reported at once, each with its line; an unknown key comes with the nearest right
one. Relative paths are taken from the file's own directory.
"""

import dataclasses
import difflib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml


class ConfigError(Exception):
    """All mistakes of one file, a line of text each."""


def setting(
    default: Any = dataclasses.MISSING,
    *,
    least: float | None = None,
    most: float | None = None,
    among: tuple[str, ...] = (),
) -> Any:
    """A field with inclusive bounds or a choice; for a tuple they hold for each of its items."""
    return field(default=default, metadata={"least": least, "most": most, "among": among})


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    path: Path  # a Hugging Face causal LM: config.json and safetensors


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    path: Path  # documents, see data.py
    row_length: int = setting(256, least=2)
    rows_per_step: int = setting(4, least=1)


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Widths and the size of a head are the target's."""

    target_layers: tuple[int, ...] = setting(least=0)  # features come from the output of these layers
    mask_token: int = setting(least=0)
    layers: int = setting(1, least=1)
    block_size: int = setting(4, least=2)
    heads: int = setting(0, least=0)  # 0: as many as the target has
    kv_heads: int = setting(0, least=0)


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    anchors_per_row: int = setting(64, least=1)
    gamma: float = setting(4.0, least=1e-3)  # slot j weighs exp(-(j - 1) / gamma)
    # what a slot learns: the `token` of the row, or the target's whole `distribution` for its place
    labels: str = setting("distribution", among=("token", "distribution"))
    temperature: float = setting(1.0, least=1e-2)  # of the target's distribution


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    muon_rate: float = setting(0.01, least=0)  # matrices
    adam_rate: float = setting(3e-3, least=0)  # everything else
    momentum: float = setting(0.95, least=0, most=1)
    weight_decay: float = setting(0.0, least=0)
    warmup: float = setting(0.02, least=0, most=1)  # shares of all steps
    decay: float = setting(0.5, least=0, most=1)
    clip: float = setting(1.0, least=0)  # of the global gradient norm; 0 is off


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    every: int = setting(200, least=1)
    keep: int = setting(2, least=1)


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    prompts: Path
    new_tokens: int = setting(64, least=1)
    temperature: float = setting(0.7, least=1e-3)  # beside greedy decoding
    noise_seed: int = setting(0, least=0)  # of the sampling noise; not the run's, so that runs compare
    every: int = setting(0, least=0)  # a small evaluation now and then; 0 is never
    every_prompts: int = setting(8, least=1)


@dataclass(frozen=True, kw_only=True)
class Config:
    name: str
    target: TargetConfig
    data: DataConfig
    drafter: DrafterConfig
    evaluate: EvaluateConfig
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    steps: int = setting(least=1)
    seed: int = setting(0, least=0)
    device: str = "auto"  # auto, cpu, cuda, cuda:N
    threads: int = setting(0, least=0)  # of torch on the CPU; 0 leaves torch's own choice
    print_every: int = setting(50, least=1)  # steps


def load(path: Path, overrides: list[str] | None = None) -> Config:
    """Read `path`, with `overrides` such as "optimizer.clip=0" laid over it. Raises ConfigError."""
    reader = _Reader(path)
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise ConfigError(f"{path}:{mark.line + 1 if mark else 1}: not YAML: {error.problem}") from None
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}:1: a configuration is a mapping of settings, beginning with `name: …`")
    for override in overrides or []:
        reader.override(root, override)
    config = reader.section(Config, root, "")
    if not reader.problems:
        reader.check_together(config)
    if reader.problems:
        raise ConfigError("\n".join(text for _, text in sorted(reader.problems)))
    return config


class _Reader:
    """Walks YAML nodes beside dataclass fields and gathers problems as (line, text)."""

    def __init__(self, path: Path):
        self.path = path
        self.problems: list[tuple[int, str]] = []
        self.lines: dict[str, int] = {}

    def problem(self, node: yaml.Node | int, text: str) -> None:
        line = node if isinstance(node, int) else node.start_mark.line + 1
        where = f"{self.path}:{line}" if line else "--set"
        self.problems.append((line, f"{where}: {text}"))

    def override(self, root: yaml.MappingNode, text: str) -> None:
        name, equals, value = text.partition("=")
        if not equals:
            return self.problem(0, f"{text}: expected KEY=VALUE")
        mark = yaml.Mark("--set", 0, -1, 0, None, None)  # line -1 makes line 0, which problem() knows
        try:
            leaf = yaml.compose(value, Loader=yaml.SafeLoader)
        except yaml.YAMLError:
            leaf = None
        if leaf is None:
            return self.problem(0, f"{text}: the value is not YAML")
        for node in [leaf, *(leaf.value if isinstance(leaf, yaml.SequenceNode) else [])]:
            node.start_mark = mark
        *parents, last = name.split(".")
        node = root
        for part in parents:
            below = next((v for k, v in node.value if k.value == part), None)
            if below is None:
                below = yaml.MappingNode("tag:yaml.org,2002:map", [], mark, mark)
                node.value.append((yaml.ScalarNode("tag:yaml.org,2002:str", part, mark, mark), below))
            if not isinstance(below, yaml.MappingNode):
                return self.problem(0, f"{name}: {part} has no settings below it")
            node = below
        node.value = [(k, v) for k, v in node.value if k.value != last]
        node.value.append((yaml.ScalarNode("tag:yaml.org,2002:str", last, mark, mark), leaf))
        return None

    def section(self, kind: type, node: yaml.Node, prefix: str) -> Any:
        if not isinstance(node, yaml.MappingNode):
            return self.problem(node, f"{prefix.rstrip('.')}: expected settings below it, one a line")
        fields = {item.name: item for item in dataclasses.fields(kind)}
        values: dict[str, Any] = {}
        for key, value in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else "?"
            if name not in fields:
                near = difflib.get_close_matches(name, fields, n=1, cutoff=0.5)
                hint = f"did you mean `{near[0]}`?" if near else f"known here: {', '.join(fields)}"
                self.problem(key, f"unknown setting `{prefix}{name}`: {hint}")
            elif name in values:
                self.problem(key, f"`{prefix}{name}` is set twice; first on line {self.lines[prefix + name]}")
            else:
                self.lines[prefix + name] = key.start_mark.line + 1
                values[name] = self.value(fields[name], value, prefix + name)
        for name, item in fields.items():
            if name not in values and item.default is dataclasses.MISSING:
                self.problem(node, f"`{prefix}{name}` is missing")
        return kind(**values) if not self.problems else None

    def value(self, item: dataclasses.Field, node: yaml.Node, name: str) -> Any:
        kind = item.type
        if dataclasses.is_dataclass(kind):
            return self.section(kind, node, f"{name}.")
        if kind == tuple[int, ...]:
            if not isinstance(node, yaml.SequenceNode) or not node.value:
                return self.problem(node, f"`{name}` must be a list of whole numbers, such as [1, 3, 4]")
            return tuple(self.scalar(int, each, name, item.metadata) for each in node.value)
        return self.scalar(kind, node, name, item.metadata)

    def scalar(self, kind: type, node: yaml.Node, name: str, bounds: Any) -> Any:
        wanted = {int: "a whole number", float: "a number", str: "text", Path: "a path"}[kind]
        if not isinstance(node, yaml.ScalarNode) or node.tag.endswith(":null"):
            return self.problem(node, f"`{name}` must be {wanted}")
        if kind is Path:
            return (self.path.parent / Path(node.value).expanduser()).resolve()
        try:
            value = kind(node.value)  # the text itself: YAML reads 1e-2 as text, and 010 as 8
        except ValueError:
            return self.problem(node, f"`{name}` must be {wanted}, not `{node.value}`")
        if isinstance(value, float) and not math.isfinite(value):
            return self.problem(node, f"`{name}` must be a finite number, not `{node.value}`")
        least, most, among = bounds.get("least"), bounds.get("most"), bounds.get("among")
        if among and value not in among:
            return self.problem(node, f"`{name}` must be one of {', '.join(among)}, not `{value}`")
        if least is not None and value < least:
            return self.problem(node, f"`{name}` must be at least {least:g}, not {node.value}")
        if most is not None and value > most:
            return self.problem(node, f"`{name}` must be at most {most:g}, not {node.value}")
        return value

    def check_together(self, config: Config) -> None:
        """What no single setting shows: files that must be there, and settings that must agree."""

        def problem(name: str, text: str) -> None:
            self.problem(self.lines.get(name, 1), f"`{name}` {text}")

        if not (config.target.path / "config.json").is_file():
            problem("target.path", f"has no config.json: {config.target.path}")
        for name, path in (("data.path", config.data.path), ("evaluate.prompts", config.evaluate.prompts)):
            if not path.is_file():
                problem(name, f"is not a file: {path}")
        if config.drafter.block_size > config.data.row_length:
            problem("drafter.block_size", f"is larger than a row ({config.data.row_length} tokens)")
        if len(set(config.drafter.target_layers)) != len(config.drafter.target_layers):
            problem("drafter.target_layers", "names a layer twice")
        self.check_target(config, problem)
        device = config.device
        if device not in ("auto", "cpu", "cuda") and not (device.startswith("cuda:") and device[5:].isdigit()):
            problem("device", f"must be auto, cpu, cuda or cuda:N, not `{device}`")

    def check_target(self, config: Config, problem: Callable[[str, str], None]) -> None:
        try:
            target = json.loads((config.target.path / "config.json").read_text(encoding="utf-8"))
            layers, vocabulary = int(target["num_hidden_layers"]), int(target["vocab_size"])
        except OSError:
            return  # reported already
        except (ValueError, KeyError, TypeError):
            return problem("target.path", "has a config.json without num_hidden_layers and vocab_size")
        heads = config.drafter.heads or target.get("num_attention_heads", 1)
        if heads % (config.drafter.kv_heads or target.get("num_key_value_heads", 1)):
            problem("drafter.kv_heads", f"must divide the number of heads, {heads}")
        if max(config.drafter.target_layers) >= layers:
            problem("drafter.target_layers", f"goes beyond the target's last layer, {layers - 1}")
        if config.drafter.mask_token >= vocabulary:
            problem("drafter.mask_token", f"is outside the target's vocabulary of {vocabulary}")
