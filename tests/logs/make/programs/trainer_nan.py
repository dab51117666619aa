# A rate so large that weights leave what float32 can hold.
from pathlib import Path

import trainer
from trainer.cli import main

demo = Path(trainer.__file__).parent / "configs" / "demo.yaml"
changes = ["evaluate.prompts=null", "evaluate.every=0", "steps=40", "print_every=1", "optimizer.muon_rate=1e30"]
changes += ["optimizer.adam_rate=1e30", "spike=0", "data.rows_per_step=1", "loss.anchors_per_row=16"]
raise SystemExit(main(["train", str(demo), *(f"--set={change}" for change in changes)]))
