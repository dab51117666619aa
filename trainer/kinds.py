"""`trainer warmup` where the machine has GPUs of several kinds: one process for each, one after the other.

Kernels of one kind serve every card of it, so each process sees a single card.
"""

import os
import subprocess
import sys

import torch

from trainer.config import Config


def cards_of(names: list[str]) -> dict[str, int]:
    """The names of the cards in their order -> the first card of each kind."""
    found: dict[str, int] = {}
    for number, name in enumerate(names):
        found.setdefault(name, number)
    return found


def names_here(config: Config) -> list[str]:
    """Of the cards that a run of this configuration may use; none without a GPU, or where it names one itself."""
    if config.device not in ("auto", "cuda") or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]


def environment_of(card: int, environment: dict[str, str]) -> dict[str, str]:
    """What makes a process see that one card, among those that this one sees."""
    visible = [word.strip() for word in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip()]
    return {**environment, "CUDA_VISIBLE_DEVICES": visible[card] if card < len(visible) else str(card)}


def warm_each(names: list[str], words: list[str]) -> int:
    """Runs `words` on a card of each kind; -> the exit code. One that fails does not stop the others: what they compile
    is kept. Such a process sees one kind only, so it does not come here again."""
    failed = []
    for name, card in cards_of(names).items():
        print(f"{name}: card {card} of {len(names)}", flush=True)
        done = subprocess.run(words, env=environment_of(card, dict(os.environ)), check=False)
        if done.returncode:
            failed.append(f"{name} (exit code {done.returncode})")
    if failed:
        print(f"error: warming up failed on {' and '.join(failed)}; see above", file=sys.stderr)
    return 1 if failed else 0
