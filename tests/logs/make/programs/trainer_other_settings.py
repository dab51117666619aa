# A run that is taken up again with other settings than its checkpoint was written with.
from pathlib import Path

import trainer
from trainer.cli import main

demo = Path(trainer.__file__).parent / "configs" / "demo.yaml"
changes = ["evaluate.prompts=null", "evaluate.every=0", "steps=3", "data.rows_per_step=1", "loss.anchors_per_row=16"]
sets = [f"--set={change}" for change in changes]
main(["train", str(demo), *sets])
raise SystemExit(main(["train", str(demo), *sets, "--set=drafter.block_size=4"]))
