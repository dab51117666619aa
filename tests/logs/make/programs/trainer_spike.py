# A rate that rises until the loss leaves its median behind.
from pathlib import Path

import trainer
from trainer.cli import main

demo = Path(trainer.__file__).parent / "configs" / "demo.yaml"
changes = ["evaluate.prompts=null", "evaluate.every=0", "steps=300", "print_every=10", "optimizer.muon_rate=1"]
changes += ["optimizer.adam_rate=3000", "optimizer.warmup=1", "optimizer.clip=0", "data.rows_per_step=1"]
changes += ["loss.anchors_per_row=16", "optimizer.schedule=wsd", "optimizer.decay=0"]
raise SystemExit(main(["train", str(demo), *(f"--set={change}" for change in changes)]))
