"""The trainer as a user starts it, at the production shape, on one GPU: from text files to steps.

    python benchmarks/production_shape.py [--steps 40] [--target-layers 36] [--documents 2000] [--folder DIR]

Makes a target of the shape of Qwen3-8B with random weights and a data file of this machine's own Python sources (with
the demo's tokenizer, in pieces of about `--documents` tokens), runs `python -m trainer train` on them with 1024 anchors
of 32 slots in rows of 40,064 tokens, and prints the median of each span over the last half of the steps, tokens a
second and peak memory. With random weights nothing is learnt; the shapes and the work are those of a real run.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch
import yaml
from transformers import Qwen3Config, Qwen3ForCausalLM

ROOT = Path(__file__).parents[1]
TOKENIZER = ROOT / "trainer" / "assets" / "demo" / "target"
SHAPE = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "rope_theta": 1e6, "bos_token_id": None, "eos_token_id": 0,
}  # fmt: skip


def make_target(folder: Path, layers: int, shape: dict | None = None) -> None:
    """On the GPU, where drawing eight billion numbers takes a second. `shape` by default is that of Qwen3-8B."""
    if (folder / "config.json").exists():
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = Qwen3Config(**{**(shape or SHAPE), "num_hidden_layers": layers})
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    model = model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                parameter.fill_(1.0)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (TOKENIZER / name).exists():
            (folder / name).write_bytes((TOKENIZER / name).read_bytes())


def make_data(path: Path, size: int, rows: int) -> None:
    """Pieces of the standard library's sources, each about `size` tokens (of some three characters)."""
    written = 0
    with path.open("w", encoding="utf-8") as file:
        for source in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            text = source.read_text(encoding="utf-8", errors="replace")
            for begin in range(0, len(text), 3 * size):
                file.write(json.dumps({"text": text[begin : begin + 3 * size], "id": source.name}) + "\n")
                written += size
            if written > rows * 40064:
                return


def configuration(folder: Path, options: argparse.Namespace) -> dict:
    return {
        "name": "production-shape",
        "steps": options.steps,
        "print_every": 10,
        "target": {"path": str(folder / "target")},
        "data": {"paths": str(folder / "data.jsonl"), "row_length": 40064, "rows_per_step": 1},
        "drafter": {"mask_token": 151669, "layers": 5, "features": 5, "block_size": 32},
        "loss": {"anchors_per_row": 1024, "gamma": 7, "chunk": 2048},
        "optimizer": {"kind": options.optimizer, "adam_rate": 1e-4},
        "checkpoint": {"every": options.checkpoint_every or options.steps + 1, "keep": 1},
        "topology": {"mode": options.mode},
    }


def report(path: Path, steps: int) -> None:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    records = [record for record in records if "spans" in record][-(steps // 2) :]
    spans = {name: statistics.median(record["spans"][name] for record in records) for name in records[0]["spans"]}
    times = [second["time"] - first["time"] for first, second in itertools.pairwise(records)]
    step, tokens = statistics.median(times), statistics.median(record["tokens"] for record in records)
    peak = max(record.get("peak_memory", 0) for record in records) / 2**30
    waited = [record["waited_for_target"] for record in records if "waited_for_target" in record]
    if waited:
        print(f"the drafter waited {1e3 * statistics.median(waited):.0f} ms of a step for features")
    print("  ".join(f"{name} {1e3 * value:.0f} ms" for name, value in spans.items()))
    print(f"step {1e3 * step:.0f} ms (with the target), {tokens / step / 1e3:.1f} Ktok/s, peak {peak:.1f} GiB")
    print(f"drafter alone {1e3 * (sum(spans.values()) - spans['target'] - spans['wait']):.0f} ms")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--target-layers", type=int, default=36)
    parser.add_argument("--documents", type=int, default=2000, help="tokens of a document, about")
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    parser.add_argument(
        "--mode", choices=("colocated", "split"), default="colocated", help="split: 1 target, 1 drafter"
    )
    parser.add_argument("--checkpoint-every", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=None, help="kept, and used again (default: a temporary one)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        make_target(folder / "target", options.target_layers)
        torch.cuda.empty_cache()
        make_data(folder / "data.jsonl", options.documents, options.steps + 2)
        (folder / "config.yaml").write_text(yaml.safe_dump(configuration(folder, options)))
        run = folder / f"run-{os.getpid()}"
        done = subprocess.run(
            [sys.executable, "-m", "trainer", "train", str(folder / "config.yaml")],
            cwd=ROOT,
            env={**os.environ, "ORCH_RUN_DIR": str(run)},
            check=False,
        )
        if done.returncode == 0:
            report(run / "metrics.jsonl", options.steps)
        return done.returncode


if __name__ == "__main__":
    sys.exit(main())
