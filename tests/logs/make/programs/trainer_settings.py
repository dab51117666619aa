# Mistakes in the settings of the bundled trainer.
from pathlib import Path

import trainer
from trainer.cli import main

demo = Path(trainer.__file__).parent / "configs" / "demo.yaml"
text = demo.read_text().replace("block_size: 3", "blok_size: 3").replace("steps: 900", "steps: soon")
Path("settings.yaml").write_text(text.replace("../assets", str(demo.parents[1] / "assets")))
raise SystemExit(main(["train", "settings.yaml"]))
