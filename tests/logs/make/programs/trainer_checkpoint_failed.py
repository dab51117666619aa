# shell: ulimit -f 1024; {python} {file}
# No file may grow beyond 512 KiB: checkpoints cannot be written, the last one neither.
from pathlib import Path

import trainer
from trainer.cli import main

demo = Path(trainer.__file__).parent / "configs" / "demo.yaml"
changes = ("evaluate.prompts=null", "evaluate.every=0", "steps=12", "checkpoint.every=4", "print_every=2")
raise SystemExit(main(["train", str(demo), *(f"--set={change}" for change in changes)]))
