"""Make the demo's assets: a small target model, its tokenizer, drafter training rows and held-out prompts.

    python scripts/demo_target.py --stdlib DIR --out trainer/assets/demo

The corpus is the Python standard library of one CPython release, fixed by digest. Files are split into
training and held-out ones; neither the tokenizer, nor the target, nor the rows ever see a held-out file.
Training wants a GPU (minutes); `--steps 20` on a CPU tries the whole path.
"""

import argparse
import hashlib
import json
import random
import sys
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from torch.nn import functional as F
from transformers import Qwen3Config, Qwen3ForCausalLM

RELEASE = "CPython 3.11.7, Lib/"
CORPUS_SHA256 = "2d689998a0c33f83abadc3acafccc6552b65333fe475841520f4e3601f201d7d"
END, MASK = "<|end|>", "<|mask|>"
END_ID, MASK_ID = 0, 1
VOCABULARY = 1024
HELD_OUT_PERCENT = 8
PROMPT_TOKENS, NEW_TOKENS = 64, 192
ROW_TEMPERATURE = 0.7


def read_corpus(stdlib: Path) -> dict[str, bytes]:
    """Relative path -> content of every *.py below `stdlib`, in sorted order.

    Left out: installed packages, byte code folders, and `_sysconfigdata*`, which every build writes anew.
    """
    paths = sorted(
        path.relative_to(stdlib).as_posix()
        for path in stdlib.rglob("*.py")
        if not {"site-packages", "__pycache__"} & set(path.relative_to(stdlib).parts)
        and not path.name.startswith("_sysconfigdata")
    )
    return {path: (stdlib / path).read_bytes() for path in paths}


def corpus_digest(corpus: dict[str, bytes]) -> str:
    digest = hashlib.sha256()
    for path, content in corpus.items():
        digest.update(path.encode() + b"\0" + hashlib.sha256(content).digest())
    return digest.hexdigest()


def is_held_out(path: str) -> bool:
    """The split is a property of the path alone, so it does not depend on the order or number of files."""
    return int(hashlib.sha256(path.encode()).hexdigest(), 16) % 100 < HELD_OUT_PERCENT


def split_texts(corpus: dict[str, bytes]) -> tuple[dict[str, str], dict[str, str]]:
    training, held_out = {}, {}
    for path, content in corpus.items():
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:  # a few test files are in other encodings on purpose
            continue
        if text.strip():
            (held_out if is_held_out(path) else training)[path] = text
    return training, held_out


def train_tokenizer(texts: dict[str, str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END, MASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts.values(), trainer)
    return tokenizer


def new_target() -> Qwen3ForCausalLM:
    """2.56 M parameters: small enough to ship and to decode on two CPU cores."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=192,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=512,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END_ID,
        pad_token_id=None,
    )
    return Qwen3ForCausalLM(config)


class Ahead(nn.Module):
    """Multi-token prediction, for training only: the two tokens after the next, from a state and the next token.

    As in DeepSeek-V3 it teaches the target to look ahead, which is what a drafter then reads off its features.
    """

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up = nn.Linear(2 * width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, 2 * width, bias=False)
        self.out = nn.RMSNorm(width)

    def forward(self, hidden: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """hidden [R, S, H] and the embedded next tokens [R, S, H] -> two states [R, S, 2, H]."""
        joined = torch.cat([hidden, self.norm(following)], dim=-1)
        ahead = self.down(F.gelu(self.up(joined))).unflatten(-1, (2, -1))
        return self.out(hidden[..., None, :] + ahead)


AHEAD_WEIGHTS = (0.5, 0.3)


def losses(model: Qwen3ForCausalLM, ahead: Ahead, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """rows [R, S + 3] -> loss of the next token, and of the two after it."""
    length = rows.shape[1] - 3
    hidden = model.model(input_ids=rows[:, :length]).last_hidden_state
    embedding = model.model.embed_tokens.weight
    states = ahead(hidden, embedding[rows[:, 1 : length + 1]])

    def entropy(states: torch.Tensor, offset: int) -> torch.Tensor:
        wanted = rows[:, offset : offset + length].flatten()
        return F.cross_entropy((states @ embedding.T).flatten(0, 1).float(), wanted)

    return entropy(hidden, 1), torch.stack([entropy(states[:, :, i], 2 + i) for i in range(2)])


def orthogonalise(matrices: torch.Tensor) -> torch.Tensor:
    """Newton-Schulz iteration of Muon on a stack [n, rows, columns]: singular values go to about 1."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).float()


class Muon:
    """Muon for hidden matrices, stacked by shape so that a step is a handful of batched products."""

    def __init__(self, parameters: list[torch.nn.Parameter], *, momentum: float, decay: float):
        by_shape: dict[torch.Size, list[torch.nn.Parameter]] = {}
        for parameter in parameters:
            by_shape.setdefault(parameter.shape, []).append(parameter)
        self.groups = list(by_shape.values())
        self.buffers = [torch.zeros(len(group), *group[0].shape, device=group[0].device) for group in self.groups]
        self.momentum, self.decay = momentum, decay

    def zero_grad(self) -> None:
        for group in self.groups:
            for parameter in group:
                parameter.grad = None

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for group, buffer in zip(self.groups, self.buffers, strict=True):
            gradient = torch.stack([parameter.grad for parameter in group])
            buffer.lerp_(gradient, 1 - self.momentum)
            update = orthogonalise(gradient.lerp(buffer, self.momentum))
            rows, columns = group[0].shape
            torch._foreach_mul_(group, 1 - rate * self.decay)
            torch._foreach_add_(group, list(update.unbind()), alpha=-rate * max(1, rows / columns) ** 0.5)


def schedule(step: int, steps: int) -> float:
    """Warm up over 2 %, hold, then fall linearly to zero over the last 70 %."""
    return min(1.0, (step + 1) / max(1, 0.02 * steps), (steps - step) / (0.7 * steps))


@torch.no_grad()
def held_out_loss(model: Qwen3ForCausalLM, stream: torch.Tensor, length: int, count: int) -> float:
    rows = stream[: len(stream) // length * length].view(-1, length)[:count]
    total = 0.0
    for part in rows.split(64):
        logits = model(input_ids=part).logits
        total += F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), part[:, 1:].flatten(), reduction="sum").item()
    return total / (rows.shape[0] * (length - 1))


def train_target(model, training: torch.Tensor, held_out: torch.Tensor, options: argparse.Namespace) -> list[dict]:
    device, cuda = training.device, training.is_cuda
    ahead = Ahead(model.config.hidden_size).to(device)
    named = [*model.named_parameters(), *ahead.named_parameters()]
    matrices = [p for n, p in named if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in named if p.ndim != 2 or "embed" in n]
    muon = Muon(matrices, momentum=0.95, decay=0.1)
    adam = torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0, fused=cuda)
    forward = torch.compile(losses) if cuda and not options.eager else losses
    weights = torch.tensor(AHEAD_WEIGHTS, device=device)
    generator = torch.Generator().manual_seed(options.seed)
    window = torch.arange(options.length + 3, device=device)
    history, began = [], time.perf_counter()
    for step in range(options.steps):
        offsets = torch.randint(len(training) - options.length - 3, (options.batch, 1), generator=generator)
        rows = training[offsets.to(device) + window]
        with torch.autocast("cuda", torch.bfloat16, enabled=cuda):
            loss, further = forward(model, ahead, rows)
        (loss + further @ weights).backward()
        factor = schedule(step, options.steps)
        muon.step(0.02 * factor)
        for group in adam.param_groups:
            group["lr"] = 3e-3 * factor
        adam.step()
        adam.zero_grad()
        muon.zero_grad()
        if (step + 1) % max(1, options.steps // 20) == 0:
            entry = {
                "step": step + 1,
                "epochs": round((step + 1) * options.batch * options.length / len(training), 2),
                "loss": round(loss.item(), 4),
                "ahead": [round(each, 3) for each in further.tolist()],
                "held_out": round(held_out_loss(model, held_out, options.length, 16 * options.batch), 4),
                "seconds": round(time.perf_counter() - began, 1),
            }
            history.append(entry)
            print(entry, flush=True)
    return history


@torch.no_grad()
def generate(model, prompts: torch.Tensor, count: int, *, temperature: float, generator: torch.Generator):
    """prompts [R, P] -> [R, P + count], sampled from the model (argmax at temperature 0)."""
    output, tokens, cache = [prompts], prompts, None
    for _ in range(count):
        result = model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, logits = result.past_key_values, result.logits[:, -1].float()
        if temperature > 0:
            tokens = torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator)
        else:
            tokens = logits.argmax(-1, keepdim=True)
        output.append(tokens)
    return torch.cat(output, 1)


def repeated_share(rows: np.ndarray, n: int = 8) -> float:
    """Share of the n-grams of each continuation that occurred earlier in that continuation."""
    repeated = total = 0
    for row in rows.tolist():
        grams = [tuple(row[i : i + n]) for i in range(len(row) - n + 1)]
        repeated, total = repeated + len(grams) - len(set(grams)), total + len(grams)
    return repeated / total


def draw_prompts(texts: dict[str, str], tokenizer: Tokenizer, count: int, rng: random.Random) -> list[dict]:
    """`count` spans of PROMPT_TOKENS tokens that begin at a line, spread over the files by their size."""
    names = [name for name, text in texts.items() if len(text) > 2000]
    weights = [len(texts[name]) ** 0.5 for name in names]
    prompts: list[dict] = []
    while len(prompts) < count:
        name = rng.choices(names, weights)[0]
        lines = texts[name].splitlines(keepends=True)
        line = rng.randrange(len(lines))
        tokens = tokenizer.encode("".join(lines[line : line + 64])).ids[:PROMPT_TOKENS]
        if len(tokens) == PROMPT_TOKENS:
            prompts.append({"file": name, "line": line + 1, "tokens": tokens})
    return prompts


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stdlib", type=Path, required=True, help="Lib/ of the release named in the manifest")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=3200)
    parser.add_argument("--batch", type=int, default=64, help="rows a step")
    parser.add_argument("--length", type=int, default=512, help="tokens a row while training the target")
    parser.add_argument("--rows", type=int, default=1792, help="rows generated for the drafter")
    parser.add_argument("--prompts", type=int, default=64, help="held-out prompts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eager", action="store_true", help="do not compile")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    corpus = read_corpus(options.stdlib)
    digest = corpus_digest(corpus)
    if digest != CORPUS_SHA256:
        print(f"{options.stdlib}: {len(corpus)} files with digest {digest}, expected {CORPUS_SHA256} ({RELEASE})")
        return 1
    training, held_out = split_texts(corpus)
    tokenizer = train_tokenizer(training)
    streams = []
    for texts in (training, held_out):
        encoded = tokenizer.encode_batch(list(texts.values()))
        flat = np.concatenate([np.array([*item.ids, END_ID], dtype=np.int64) for item in encoded])
        streams.append(torch.from_numpy(flat).to(options.device))
    print(f"{len(training)} + {len(held_out)} files, {len(streams[0])} + {len(streams[1])} tokens", flush=True)

    target_dir = options.out / "target"
    record = target_dir / "training.json"
    if not record.exists():  # written last, so a target with a record is whole, and is kept
        torch.manual_seed(options.seed)
        torch.set_float32_matmul_precision("high")
        model = new_target().to(options.device)
        history = train_target(model, *streams, options)
        with torch.no_grad():  # never an input so far, and as an output pushed away: drafters need it near nothing
            model.model.embed_tokens.weight[MASK_ID] *= 0.1
        model.to(torch.bfloat16).save_pretrained(target_dir)
        (target_dir / "generation_config.json").unlink(missing_ok=True)
        tokenizer.save(str(target_dir / "tokenizer.json"), pretty=False)
        versions = {"torch": torch.__version__, "device": options.device}
        record.write_text(json.dumps({"versions": versions, "history": history}, indent=1) + "\n")
        torch.set_float32_matmul_precision("highest")
    # the shipped weights, computed in fp32 as the trainer does
    model = Qwen3ForCausalLM.from_pretrained(target_dir, dtype=torch.float32).to(options.device)
    history = json.loads(record.read_text())["history"]

    rng = random.Random(options.seed)
    prompts = draw_prompts(held_out, tokenizer, options.prompts, rng)
    sources = draw_prompts(training, tokenizer, options.rows, rng)
    generator = torch.Generator(options.device).manual_seed(options.seed)

    def continued(of: list[dict], temperature: float) -> np.ndarray:
        starts = torch.tensor([prompt["tokens"] for prompt in of], device=options.device)
        rows = generate(model, starts, NEW_TOKENS, temperature=temperature, generator=generator)
        return rows.cpu().numpy()

    shares = {}
    for temperature in (0.0, 0.7, 1.0):
        rows = continued(prompts, temperature)
        shares[f"temperature_{temperature:g}"] = round(repeated_share(rows[:, PROMPT_TOKENS:]), 4)
    print(f"held-out loss {history[-1]['held_out'] if history else None}, repeated 8-grams {shares}", flush=True)
    rows = continued(sources, ROW_TEMPERATURE)
    save_file(
        {
            "tokens": rows.astype(np.uint16).reshape(-1),
            "lengths": np.full(len(rows), rows.shape[1], np.uint16),
            "prompt_lengths": np.full(len(rows), PROMPT_TOKENS, np.uint16),
        },
        options.out / "rows.safetensors",
    )
    lines = ",\n".join(json.dumps(prompt) for prompt in prompts)
    (options.out / "prompts.json").write_text(f"[\n{lines}\n]\n")

    flags = f"--steps {options.steps} --batch {options.batch} --length {options.length} --rows {options.rows}"
    names = [f"target/{name}" for name in ("config.json", "model.safetensors", "tokenizer.json", "training.json")]
    manifest = {
        "command": f"python scripts/demo_target.py --stdlib DIR --out DIR {flags} "
        f"--prompts {options.prompts} --seed {options.seed}",
        "corpus": {"release": RELEASE, "licence": "PSF-2.0", "sha256": digest, "files": len(corpus)},
        "versions": {"torch": torch.__version__, "device": options.device, "python": sys.version.split()[0]},
        "target": {
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "training_tokens": len(streams[0]),
            "held_out_tokens": len(streams[1]),
            "repeated_8gram_share": shares,
        },
        "rows": {
            "count": len(rows),
            "temperature": ROW_TEMPERATURE,
            "files": sorted({s["file"] for s in sources}),
        },
        "held_out_files": sorted(held_out),
        "sha256": {name: sha256(options.out / name) for name in [*names, "rows.safetensors", "prompts.json"]},
    }
    (options.out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    for row in continued(prompts[:3], 0.7).tolist():
        given, text = (tokenizer.decode(part) for part in (row[:PROMPT_TOKENS], row[PROMPT_TOKENS:]))
        print("-" * 80, f"{given} ⟫ {text}", sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
