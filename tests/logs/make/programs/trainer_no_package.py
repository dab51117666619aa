# A tracker that the environment does not hold.
import sys
from pathlib import Path

import trainer
from trainer.cli import main

sys.modules["wandb"] = None  # as if it were not there, wherever this is run
demo = Path(trainer.__file__).parent / "configs" / "demo.yaml"
changes = ("evaluate.prompts=null", "evaluate.every=0", "report.wandb=offline")
raise SystemExit(main(["train", str(demo), *(f"--set={change}" for change in changes)]))
