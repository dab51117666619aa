# The bundled trainer where dense attention was chosen for a shape that is too large for it.
from pathlib import Path

import trainer
from trainer.cli import main

demo = Path(trainer.__file__).parent / "configs" / "demo.yaml"
changes = ("evaluate.prompts=null", "evaluate.every=0", "data.rows_per_step=16", "loss.anchors_per_row=240")
sets = [f"--set={change}" for change in (*changes, "drafter.block_size=32")]
raise SystemExit(main(["train", str(demo), *sets]))
