# shell: mount -t tmpfs -o size=40m tmpfs /mnt && ORCH_RUN_DIR=/mnt/run {python} {file}
# Too little room for the only checkpoint of a run, at its end.
from pathlib import Path

import trainer
from trainer.cli import main

demo = Path(trainer.__file__).parent / "configs" / "demo.yaml"
changes = ["evaluate.prompts=null", "evaluate.every=0", "steps=6", "print_every=2"]
changes += ["data.rows_per_step=1", "loss.anchors_per_row=16"]
raise SystemExit(main(["train", str(demo), *(f"--set={change}" for change in changes)]))
