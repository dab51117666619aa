# More broken records than allowed: lines cut short, and lists of two lengths.
import json
from pathlib import Path

import trainer
from trainer.cli import main

with open("data.jsonl", "w") as lines:
    for number in range(60):
        record = json.dumps({"input_ids": [5] * 40, "loss_mask": [1] * (40 if number % 9 else 39)})
        print(record if number % 7 else record[:50], file=lines)
demo = Path(trainer.__file__).parent / "configs" / "demo.yaml"
changes = ("evaluate.prompts=null", "evaluate.every=0", f"data.paths={Path('data.jsonl').resolve()}")
raise SystemExit(main(["train", str(demo), *(f"--set={change}" for change in changes)]))
