# A GPU is asked for where torch sees none.
from pathlib import Path

import trainer
from trainer.cli import main

demo = Path(trainer.__file__).parent / "configs" / "demo.yaml"
changes = ("evaluate.prompts=null", "evaluate.every=0", "device=cuda")
raise SystemExit(main(["train", str(demo), *(f"--set={change}" for change in changes)]))
