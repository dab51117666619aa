# shell: mount -t tmpfs -o size=40m tmpfs /mnt && ORCH_RUN_DIR=/mnt/run {python} {file} 2>&1 | head -n 9
# Too little room for a checkpoint beside the run, which goes on without.
from pathlib import Path

import trainer
from trainer.cli import main

demo = Path(trainer.__file__).parent / "configs" / "demo.yaml"
changes = ["evaluate.prompts=null", "evaluate.every=0", "checkpoint.every=4", "print_every=2"]
changes += ["data.rows_per_step=1", "loss.anchors_per_row=16"]
raise SystemExit(main(["train", str(demo), *(f"--set={change}" for change in changes)]))
