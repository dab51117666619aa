"""Runs in the clients' environment: z-lab's package loads exported drafters and decodes with them.

usage: dflash_client.py JOB, JSON: a list of {drafter, target, prompts, new_tokens} -> on the last line of the output a
list of {facts, auto_class, tokens, advances}: how the package understood the configuration, the class and agreement of
what `AutoModel` makes of the folder, and by prompt the new tokens and how far each round went.
"""

import json
import sys
import time
from pathlib import Path

import dflash.model
import torch
from transformers import AutoModel, AutoModelForCausalLM

DTYPE = torch.float64


def facts(model: dflash.model.DFlashDraftModel) -> dict:
    layers = [layer.self_attn for layer in model.layers]
    return {
        "block_size": model.block_size,
        "mask_token": model.mask_token_id,
        "target_layers": list(model.target_layer_ids),
        "windows": [layer.sliding_window or 0 for layer in layers],
        "causal": [layer.is_causal for layer in layers],
        "rope_base": model.config.rope_parameters["rope_theta"],
        "epsilon": model.norm.variance_epsilon,
    }


def auto_class(folder: str, model: torch.nn.Module) -> list:
    other = AutoModel.from_pretrained(folder, dtype=DTYPE, trust_remote_code=True)
    same = all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    return [type(other).__name__, same]


def run(case: dict) -> dict:
    target = AutoModelForCausalLM.from_pretrained(case["target"], dtype=DTYPE, attn_implementation="sdpa").eval()
    model = dflash.model.DFlashDraftModel.from_pretrained(case["drafter"], dtype=DTYPE, attn_implementation="sdpa")
    tokens, advances = [], []
    for prompt in case["prompts"]:
        done = dflash.model.dflash_generate(
            model.eval(), target, torch.tensor([prompt]), case["new_tokens"], stop_token_ids=None, return_stats=True
        )
        tokens.append(done.output_ids[0, len(prompt) :].tolist())
        advances.append(done.acceptance_lengths)
    return {
        "facts": facts(model),
        "auto_class": auto_class(case["drafter"], model),
        "tokens": tokens,
        "advances": advances,
    }


def main() -> None:
    torch.set_num_threads(1)
    dflash.model._cuda_time = time.perf_counter  # statistics come with times, and times would need CUDA
    print(json.dumps([run(case) for case in json.loads(Path(sys.argv[1]).read_text())]))


if __name__ == "__main__":
    main()
