"""The ends of a target: its embedding, final norm and head. All that a rank needs of it that only trains a drafter."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from trainer.errors import TrainerError


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    embedding: Tensor  # [V, H], frozen; the drafter embeds its blocks with it
    head: Tensor  # [V, H], frozen; the drafter's logits come from it
    final_norm: Tensor  # [H]
    config: PretrainedConfig  # of the whole target

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def fingerprint(self) -> str:
        """By which a target is known again, in whatever precision it is loaded: some of its numbers, in bf16."""
        digest = hashlib.sha256()
        for tensor in (self.final_norm, self.embedding, self.head):
            some = tensor[:: max(1, len(tensor) // 64)].detach().to("cpu", torch.bfloat16).contiguous()
            digest.update(some.view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]


def load_vocabulary(path: Path, *, dtype: torch.dtype, device: torch.device) -> Vocabulary:
    """From the directory of a Hugging Face causal LM, without reading its layers. Raises TrainerError."""
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        files = _files(path)
        embedding = _read(files, "embed_tokens.weight", dtype, device)
        norm = _read(files, "model.norm.weight", dtype, device)
        tied = getattr(config, "tie_word_embeddings", False) and not any(n.endswith("lm_head.weight") for n in files)
        head = embedding if tied else _read(files, "lm_head.weight", dtype, device)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise TrainerError(f"{path}: embedding, final norm and head cannot be read: {error}") from None
    return Vocabulary(embedding=embedding, head=head, final_norm=norm, config=config)


def _files(path: Path) -> dict[str, Path]:
    """Tensor name -> the file that has it."""
    index = path / "model.safetensors.index.json"
    if index.exists():
        return {name: path / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    single = path / "model.safetensors"
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single)


def _read(files: dict[str, Path], name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    found = [full for full in files if full.endswith(name)]
    if len(found) != 1:
        raise ValueError(f"{len(found)} tensors are called …{name}, where one should be")
    with safe_open(files[found[0]], framework="pt") as file:
        return file.get_tensor(found[0]).to(device, dtype)
