"""Runs in the clients' environment: speculators loads exported drafters, drafts with them, and saves them itself.

usage: speculators_client.py JOB, JSON: a list of {drafter, target, documents, anchors, saved} and optionally
`converted`, which names a z-lab export for its own converter. `documents` are packed into one row, and `anchors` are
indices in it. Prints on the last line of the output a list of {facts, hidden, drafts}, the latter two by anchor and
slot; what it saved is in the folders `saved` and `converted`/speculators.
"""

import json
import sys
from pathlib import Path

import torch
from speculators import SpeculatorModel, SpeculatorModelConfig
from speculators.convert.dflash.converter import DFlashConverter
from transformers import AutoModelForCausalLM

DTYPE = torch.float32  # its mask is bf16, and scores come in the wider of both


def facts(model: SpeculatorModel) -> dict:
    config = model.config
    return {
        "class": type(model).__name__,
        "block_size": model.block_size,
        "mask_token": model.mask_token_id,
        "layer_ids": list(model.target_layer_ids),
        "window": model.sliding_window,
        "sliding": model.sliding_window_indices,
        "non_causal": model.sliding_window_non_causal,
        "shifted": config.sample_from_anchor,
        "rope_base": model.rotary_emb.config.rope_parameters["rope_theta"],
        "speculative_tokens": config.speculators_config.proposal_methods[0].speculative_tokens,
        "verifier": config.speculators_config.verifier.model_dump(include={"name_or_path", "architectures"}),
        "drafts_from_all": not model.use_draft_vocab,
    }


@torch.no_grad()
def run(case: dict) -> dict:
    config = SpeculatorModelConfig.from_pretrained(case["drafter"])
    config.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.from_pretrained(case["drafter"], config=config, dtype=DTYPE).eval()
    target = AutoModelForCausalLM.from_pretrained(case["target"], dtype=DTYPE).eval()
    # its ids are indices of `hidden_states`, where the embedding is number 0
    features = [
        torch.cat([states[layer] for layer in model.target_layer_ids], dim=-1)
        for document in case["documents"]
        for states in [target(torch.tensor([document]), output_hidden_states=True).hidden_states]
    ]
    row = torch.tensor([[token for document in case["documents"] for token in document]])
    number = torch.tensor([[i for i, document in enumerate(case["documents"]) for _ in document]])
    positions = torch.tensor([[i for document in case["documents"] for i in range(len(document))]])
    drawn = torch.zeros_like(row)
    drawn[0, case["anchors"]] = 1  # it draws anchors from these, and is asked for as many
    hidden, logits, *_ = model._backbone_forward(
        torch.cat(features, dim=1),
        row,
        drawn,
        torch.zeros(1, row.shape[1], model.hidden_size),
        number,
        positions,
        max_anchors=len(case["anchors"]),
    )
    blocks = (len(case["anchors"]), model.block_size)
    model.save_pretrained(case["saved"])
    if "converted" in case:
        to = Path(case["converted"]) / "speculators"
        DFlashConverter().convert(case["converted"], to, base_model=case["target"])
    return {
        "facts": facts(model),
        "hidden": hidden[0].unflatten(0, blocks).tolist(),
        "drafts": logits[0].argmax(-1).unflatten(0, blocks).tolist(),
    }


def main() -> None:
    torch.set_num_threads(1)
    print(json.dumps([run(case) for case in json.loads(Path(sys.argv[1]).read_text())]))


if __name__ == "__main__":
    main()
