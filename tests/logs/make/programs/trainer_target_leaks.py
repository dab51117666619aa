# A target with linear attention beside the other: its state runs on over the borders of packed documents.
from pathlib import Path

import torch
import trainer
from trainer.cli import main
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

torch.manual_seed(0)
config = Qwen3NextConfig(
    vocab_size=1024, hidden_size=64, intermediate_size=64, num_hidden_layers=6, num_attention_heads=2,
    num_key_value_heads=2, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
    shared_expert_intermediate_size=32, linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=32,
    linear_value_head_dim=32,
)  # fmt: skip
Qwen3NextForCausalLM(config).save_pretrained("target")
demo = Path(trainer.__file__).parent / "configs" / "demo.yaml"
changes = ("evaluate.prompts=null", "evaluate.every=0", f"target.path={Path('target').resolve()}")
sets = [f"--set={change}" for change in (*changes, "drafter.heads=2", "drafter.kv_heads=2")]
raise SystemExit(main(["train", str(demo), *sets]))
