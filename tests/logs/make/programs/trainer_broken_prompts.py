# A line of the prompts file is cut short.
from pathlib import Path

import trainer
from trainer.cli import main

Path("prompts.jsonl").write_text('{"tokens": [4, 5]}\n{"tokens": [4,\n')
demo = Path(trainer.__file__).parent / "configs" / "demo.yaml"
raise SystemExit(main(["train", str(demo), f"--set=evaluate.prompts={Path('prompts.jsonl').resolve()}"]))
