"""The trainer's tests need its dependencies; without torch only those of the configuration run."""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
collect_ignore = []
if importlib.util.find_spec("torch") is None:
    collect_ignore = [path.name for path in HERE.glob("test_*.py") if path.name != "test_config.py"]

# as the command line does: threads that spin long stop each other on a busy machine; read when torch is imported
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

FAMILIES = {"qwen3": "Qwen3", "llama": "Llama", "mistral": "Mistral"}


@pytest.fixture(scope="session")
def small_target(tmp_path_factory) -> Callable[..., Path]:
    """A function that makes, once for each set of options, a directory with a small target of random weights."""
    made: dict[tuple, Path] = {}

    def make(family: str = "qwen3", *, seed: int = 0, **options) -> Path:
        key = (family, seed, *sorted(options.items()))
        if key not in made:
            made[key] = _make_target(tmp_path_factory.mktemp(family), family, seed, options)
        return made[key]

    return make


def _make_target(folder: Path, family: str, seed: int, options: dict) -> Path:
    import torch
    import transformers

    config = getattr(transformers, f"{FAMILIES[family]}Config")(
        **{
            "vocab_size": 96,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 512,
            "tie_word_embeddings": False,
            **options,
        }
    )
    torch.manual_seed(seed)
    model = getattr(transformers, f"{FAMILIES[family]}ForCausalLM")(config)
    with torch.no_grad():  # at their usual start, layers hardly change the stream, and a wrong one would not show
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 2.0 * parameter.shape[1] ** -0.5)
            else:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder
