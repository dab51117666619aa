# A target that caps the logits of its attention.
from pathlib import Path

import torch
import trainer
from trainer.cli import main
from transformers import Gemma2Config, Gemma2ForCausalLM

torch.manual_seed(0)
config = Gemma2Config(
    vocab_size=1024, hidden_size=64, intermediate_size=64, num_hidden_layers=6, num_attention_heads=2,
    num_key_value_heads=2, head_dim=32,
)  # fmt: skip
Gemma2ForCausalLM(config).save_pretrained("target")
demo = Path(trainer.__file__).parent / "configs" / "demo.yaml"
changes = ("evaluate.prompts=null", "evaluate.every=0", f"target.path={Path('target').resolve()}")
sets = [f"--set={change}" for change in (*changes, "drafter.heads=2", "drafter.kv_heads=2")]
raise SystemExit(main(["train", str(demo), *sets]))
