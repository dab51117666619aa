"""The parity gate: what was written drafts like what is in memory, or the export does not happen.

A fresh process reads the files back, builds the drafter from them alone, loads the target from its own folder and
drafts from the same prompts. Every fact must be the same, and so must every token of every block. What goes wrong
between training and serving goes wrong silently (RoPE's base, layer ids, the mask token, what a block may see), so
each fact is compared by itself and has a sentence of its own.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import trainer
from trainer.cache import PositionCache
from trainer.drafter import Drafter, Shape
from trainer.errors import TrainerError
from trainer.export.description import Exported, drafter_from, with_kinds
from trainer.proposers import DrafterProposer
from trainer.target import Target

PROMPTS, LEAST_LENGTH = 3, 48
LONGEST_PART = 64  # tokens of a prompt that are drafted for
PIECE = 256  # tokens that the target reads at a time
Drafts = list[list[list[int]]]  # by prompt and round

FACTS = {
    "rope_base": "RoPE's base",
    "kinds": "what each layer sees (window and causal flag)",
    "heads": "the number of heads",
    "kv_heads": "the number of key-value heads",
    "head_size": "the size of a head",
    "epsilon": "the norms' epsilon",
    "hidden": "the width",
    "intermediate": "the width of the MLP",
    "features": "the number of captured layers",
    "layers": "the number of layers",
    "target_layers": "the ids of the target's layers",
    "target_depth": "the number of the target's layers",
    "mask_token": "the mask token",
    "block_size": "the block size",
    "shifted": "the place that a slot predicts (shifted)",
    "vocabulary": "the size of the vocabulary",
    "max_positions": "the number of positions",
    "begin": "the first token of a text",
    "end": "the end token",
    "dtype": "the type of the weights",
}


def facts_of_shape(shape: Shape) -> dict[str, Any]:
    """Of JSON's types, as they come back from another process."""
    return json.loads(json.dumps(dataclasses.asdict(with_kinds(shape))))


def facts(exported: Exported) -> dict[str, Any]:
    """All but the target's name, which layouts need not tell."""
    flat = dataclasses.asdict(exported)
    del flat["shape"], flat["target"], flat["target_architectures"]
    return {**facts_of_shape(exported.shape), **json.loads(json.dumps(flat))}


def differences(wanted: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """One sentence for each fact of `facts` that was lost on the way."""
    return [
        f"{FACTS[name]}: {json.dumps(wanted[name])} is wanted, the export has {json.dumps(found[name])}"
        for name in wanted
        if wanted[name] != found[name]
    ]


def gate_prompts(exported: Exported, *, seed: int = 0) -> list[list[int]]:
    """Random tokens; long enough to go beyond every window, where the target can."""
    longest = max(kind.window for kind in exported.shape.kinds) + LEAST_LENGTH
    length = min(max(longest, 4 * exported.block_size), exported.max_positions - exported.block_size)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(exported.vocabulary, (PROMPTS, length), generator=generator).tolist()


@torch.no_grad()
def drafts(drafter: Drafter, target: Target, exported: Exported, prompts: list[list[int]]) -> Drafts:
    """The first choices of every block, drafted as in decoding: with a cache, after rounds that accepted 1, 2, … of a
    block's tokens. The prompt's own tokens stand for the accepted ones, so all rounds see real features."""
    result = []
    for prompt in prompts:
        features = read_features(target, prompt)
        start = max(1, len(prompt) // 3, len(prompt) - LONGEST_PART)
        proposer = DrafterProposer(
            drafter,
            target,
            block=exported.block_size,
            mask_token=exported.mask_token,
            capacity=len(prompt) + exported.block_size,
            shifted=exported.shifted,
        )
        proposer.begin(features[:, :start], torch.tensor([start], device=target.device))
        rounds, advance = [], 1
        while start < len(prompt):
            position = torch.tensor([start], device=target.device)
            rounds.append(proposer.propose([prompt[: start + 1]], position).tokens[0].tolist())
            end = min(start + advance, len(prompt))
            proposer.accept(features[:, start:end], torch.arange(start, end, device=target.device)[None])
            start, advance = end, advance % exported.block_size + 1
        result.append(rounds)
    return result


def read_features(target: Target, prompt: list[int]) -> Tensor:
    """[1, S, K*H], as decoding reads them."""
    tokens = torch.tensor([prompt], device=target.device)
    positions = torch.arange(len(prompt), device=target.device)[None]
    cache = PositionCache(rows=1, capacity=len(prompt))
    pieces = [
        target.read(tokens[:, at : at + PIECE], positions[:, at : at + PIECE], cache)[1]
        for at in range(0, len(prompt), PIECE)
    ]
    return torch.cat(pieces, dim=1)


def job_of(
    folder: Path,
    layout: ModuleType,
    exported: Exported,
    *,
    drafter: Drafter,
    target: Target,
    target_path: Path,
    prompts: list[list[int]],
) -> dict[str, Any]:
    """All that the fresh process is told, of JSON's types: where to read, and what has to come out."""
    return {
        "folder": str(folder),
        "layout": layout.__name__,
        "target": str(target_path),
        "device": str(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "dense": target.dense,
        "threads": torch.get_num_threads(),
        "facts": facts(exported),
        "prompts": prompts,
        "drafts": drafts(drafter, target, exported, prompts),
    }


def check(job: dict[str, Any]) -> int:
    """Runs the job in a fresh process. How many blocks were compared; TrainerError with all that did not survive."""
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "job.json"
        path.write_text(json.dumps(job))
        paths = [str(Path(trainer.__file__).parents[1]), os.environ.get("PYTHONPATH")]
        done = subprocess.run(
            [sys.executable, "-m", "trainer.export.gate", str(path)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            capture_output=True,
            text=True,
        )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise TrainerError(f"the export cannot be read back: {last}")
    if problems := json.loads(done.stdout.splitlines()[-1]):
        raise TrainerError("the export is not the drafter that is in memory: " + "; ".join(problems))
    return sum(map(len, job["drafts"]))


def problems_of(job: dict[str, Any]) -> list[str]:
    """In the fresh process."""
    layout = sys.modules[job["layout"]]
    tensors, exported = layout.read(Path(job["folder"]))
    if found := differences(job["facts"], facts(exported)):
        return found
    torch.set_num_threads(job["threads"])
    device = torch.device(job["device"])
    target = Target(Path(job["target"]), exported.target_layers, device, dtype=job["dtype"], dense=job["dense"])
    drafter = drafter_from(exported, tensors).to(device)
    return compare(job["drafts"], drafts(drafter, target, exported, job["prompts"]))


def compare(wanted: Drafts, found: Drafts) -> list[str]:
    """The first block that differs, and how many do."""
    pairs = [
        (prompt, round_, want, have)
        for prompt, (wants, haves) in enumerate(zip(wanted, found, strict=True))
        for round_, (want, have) in enumerate(zip(wants, haves, strict=True))
    ]
    differ = [pair for pair in pairs if pair[2] != pair[3]]
    if not differ:
        return []
    prompt, round_, want, have = differ[0]
    return [
        f"{len(differ)} of {len(pairs)} blocks are drafted otherwise, the first in round {round_ + 1} of prompt "
        f"{prompt + 1}: {want} in memory, {have} from the export"
    ]


def main() -> None:
    from trainer.export import speculators, zlab  # noqa: F401  the job names one of them

    try:
        print(json.dumps(problems_of(json.loads(Path(sys.argv[1]).read_text()))))
    except TrainerError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
