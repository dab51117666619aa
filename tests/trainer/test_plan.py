"""The plan of a run against what the trainer has and does: sizes, arithmetic, memory, and what it says."""

import dataclasses
import json
import random
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, Qwen3Config

from tests.trainer.counted import count_step
from tests.trainer.counted import target_forward as counted_forward
from trainer import block_mask, cli, plan, plan_fit, sharding
from trainer.block_mask import Blocks, LayerKind
from trainer.config import (
    Config,
    DataConfig,
    DrafterConfig,
    LossConfig,
    OptimizerConfig,
    TargetConfig,
    TopologyConfig,
)
from trainer.data.batches import chunk_places
from trainer.drafter import Drafter
from trainer.models import shape_of, spread_layers
from trainer.optimizer import Optimizer
from trainer.plan_memory import Setting, drafter_rank, target_forward
from trainer.plan_sizes import entries_of, padded_blocks, sizes_of, spread
from trainer.plan_work import attention_tiles, card_named, work

LARGE = {
    "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 36, "vocab_size": 151936,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
}  # fmt: skip
SMALL = {
    **LARGE,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    """Directories with a target's config.json and no weights, by name."""
    folders = {}
    for name, content in (("large", LARGE), ("small", SMALL)):
        folders[name] = tmp_path_factory.mktemp(name)
        (folders[name] / "config.json").write_text(json.dumps(content))
    return folders


def configured(path, *, length=40064, rows=1, parts=1, checkpointing=False, kind="adamw", ema=0.0, dtype="bfloat16",
               anchors=1024, chunk=2048, kl=0.0, block=32, **drafter) -> Config:  # fmt: skip
    return Config(
        name="planned",
        steps=10,
        dtype=dtype,
        compile="on",
        target=TargetConfig(path=path, dtype=dtype),
        data=DataConfig(paths=(), row_length=length, rows_per_step=rows, micro_batches=parts),
        drafter=DrafterConfig(mask_token=1, block_size=block, **drafter),
        loss=LossConfig(anchors_per_row=anchors, chunk=chunk, kl=kl),
        optimizer=OptimizerConfig(kind=kind, ema=ema),
        activation_checkpointing=checkpointing,
    )


SHAPES = {
    "production": ("large", {}),
    "checkpointed, two parts": ("large", {"rows": 2, "parts": 2, "checkpointing": True, "layers": 2}),
    "narrow MLP": ("large", {"intermediate": 1024, "layers": 2}),
    "distilled, Muon": ("small", {"kl": 1.0, "kind": "muon", "ema": 0.9, "layers": 2, "length": 4096, "anchors": 256}),
    "float32, many rows": ("small", {"dtype": "float32", "rows": 4, "length": 2048, "anchors": 96, "block": 16}),
    "long context": ("large", {"length": 65536, "anchors": 64, "layers": 2, "chunk": 256}),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_peak_memory_and_arithmetic_are_those_of_the_trainers_own_step(targets, shape):
    config = configured(targets[shape[0]], **shape[1])
    sizes = sizes_of(config)
    setting = Setting(
        checkpointing=config.activation_checkpointing,
        muon=config.optimizer.kind == "muon",
        average=config.optimizer.ema > 0,
        parts=config.data.micro_batches,
        draws=1,
        colocated=False,
        shards=1,
    )
    counted = count_step(config, sizes)
    assert drafter_rank(sizes, setting).peak == pytest.approx(counted.peak, rel=0.02)
    planned = work(dataclasses.replace(sizes, anchors=0), documents=128, checkpointing=config.activation_checkpointing)
    own = len(sizes.windows) * sizes.rows * attention_tiles(dataclasses.replace(sizes, anchors=0), 0, documents=128)
    attention = 4 * 128 * 128 * sizes.query_width * own * (4.5 if config.activation_checkpointing else 3.5)
    products = sum(planned[span] for span in ("forward", "loss", "backward")) - attention
    assert products * config.data.micro_batches == pytest.approx(counted.flops, rel=0.01)


@pytest.mark.parametrize("changed", [{}, {"intermediate_size": 2048}], ids=["wide MLP", "narrow MLP"])
def test_a_target_takes_what_transformers_own_layers_do(tmp_path, changed):
    content = {**LARGE, **changed, "num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(content))
    sizes = sizes_of(configured(tmp_path, length=4096, target_layers=(0, 1)))
    assert target_forward(sizes) == pytest.approx(counted_forward(Qwen3Config(**content), 4096), rel=0.02)


def test_a_sharded_drafter_takes_its_share_of_what_is_at_rest(targets):
    config = configured(targets["large"], rows=2, layers=8)
    whole, spread_out = (
        plan_fit.drafter_memory(
            dataclasses.replace(config, topology=TopologyConfig(mode="split", drafters=2, shard=shard)), ranks=2
        )
        for shard in ("off", "on")
    )
    for kind in ("masters", "optimizer"):
        assert spread_out.at_peak[kind] == pytest.approx(whole.at_peak[kind] / 2, rel=1e-6)
    assert spread_out.at_peak["weights"] < whole.at_peak["weights"] and spread_out.peak < whole.peak


def test_production_shape_takes_what_was_measured_and_written_down(targets):
    config = configured(targets["large"])
    flops = work(sizes_of(config), documents=2000)
    assert sum(flops[span] for span in ("forward", "loss", "backward")) == pytest.approx(308e12, rel=0.01)
    split = plan_fit.drafter_memory(dataclasses.replace(config, topology=split_of(config)), ranks=1)
    assert split.peak / 2**30 == pytest.approx(49.0, abs=0.5)
    assert plan_fit.drafter_memory(config, ranks=1).peak / 2**30 == pytest.approx(60.5, abs=0.5)
    took = plan.plan(config, plan.Asked(documents=2000), card_named("h200"))["step"]
    assert took["drafter_seconds"] == pytest.approx(0.583, rel=0.01)
    assert took["target_seconds"] == pytest.approx(1.225, rel=0.01)


def split_of(config: Config):
    return dataclasses.replace(config.topology, mode="split")


@given(layers=st.integers(5, 90), features=st.integers(1, 5), blocks=st.integers(1, 200), size=st.integers(2, 40))
@settings(deadline=None, max_examples=40)
def test_the_plan_counts_layers_blocks_and_head_rows_as_the_trainer_does(layers, features, blocks, size):
    assert spread(layers, features) == spread_layers(layers, features)
    assert padded_blocks(blocks, size, flex=True) == block_mask.padded_slots(blocks, size)
    chunk = size + blocks
    _, end = chunk_places(torch.full((blocks,), size).numpy(), chunk)
    assert entries_of(blocks, size, chunk) == -(-end // chunk) * chunk


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_state_and_checkpoint_are_as_large_as_the_optimizers(small_target, kind, tmp_path):
    folder = small_target()
    config = configured(
        folder, length=128, anchors=8, block=4, chunk=64, kind=kind, ema=0.9, dtype="float32", target_layers=(0, 2)
    )
    sizes = sizes_of(config)
    drafter = Drafter(shape_of(config.drafter, AutoConfig.from_pretrained(folder)))
    optimizer = Optimizer(drafter, config.optimizer, 10)
    assert sizes.drafter == sum(parameter.numel() for parameter in drafter.parameters())
    assert sorted(sizes.matrices) == sorted(tuple(p.shape) for p in drafter.parameters() if p.ndim == 2)
    told = plan.plan(config, plan.Asked(), None)["drafters"][0]
    counters = 4 * sum(tensor.ndim == 0 for tensor in optimizer.tensors().values())
    assert told["checkpoint"] == sum(tensor.nbytes for tensor in optimizer.tensors().values()) - counters
    assert plan_fit.state_of(sizes, config) == sharding.state_bytes(drafter, config.optimizer)
    model = json.loads((folder / "config.json").read_text())
    wide = model["vocab_size"] * model["hidden_size"]
    assert sizes.target.numbers > 2 * wide  # read from its files
    (tmp_path / "config.json").write_text(json.dumps(model))
    unread = sizes_of(dataclasses.replace(config, target=TargetConfig(path=tmp_path))).target.numbers
    assert unread == pytest.approx(sizes.target.numbers, rel=0.02)  # by formula, without norms


@pytest.mark.parametrize("window", [0, 700])
def test_tiles_are_those_of_the_mask(targets, window):
    sizes = dataclasses.replace(sizes_of(configured(targets["small"], length=4096, anchors=64, block=16)), blocks=64)
    anchor = torch.tensor(sorted(random.Random(0).sample(range(4096), 64)))[None]
    blocks = Blocks(
        start=anchor // 1000 * 1000, anchor=anchor, keep=torch.ones_like(anchor).bool(), context=4096, size=16
    )
    mask = block_mask.flex_mask(blocks, LayerKind())
    if window:  # a window's lower bound moves with the slot; the plan takes that of slot 0, at most one tile less
        mask = block_mask.flex_mask(blocks, LayerKind(window=window))
    present = int(mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum())
    assert attention_tiles(sizes, window, documents=1000) == pytest.approx(present, abs=2 if window else 0)


@pytest.fixture(scope="module")
def file(targets, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    (folder / "data.jsonl").write_text('{"text": "a"}\n')
    content = {
        "name": "planned",
        "steps": 100,
        "target": {"path": str(targets["large"])},
        "data": {"paths": "data.jsonl", "row_length": 40064, "rows_per_step": 2},
        "drafter": {"mask_token": 1, "block_size": 32},
        "loss": {"anchors_per_row": 1024},
        "optimizer": {"kind": "adamw", "ema": 0.99},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    return folder / "config.yaml"


def said(capsys, *arguments) -> tuple[int, str]:
    code = cli.main(["plan", *map(str, arguments)])
    return code, capsys.readouterr().out


def test_what_does_not_fit_is_said_with_what_each_change_gives(file, capsys):
    code, told = said(capsys, file, "--gpu", "h200", "--gpu-memory", 60, "--json")
    found = json.loads(told)
    assert code == 1 and found["fits"] is False
    gains = [change["gain"] for change in found["changes"]]
    assert len(gains) >= 6 and all(first >= second > 0 for first, second in pairwise(gains))
    for change in found["changes"]:
        less = json.loads(said(capsys, file, "--gpu-memory", 60, "--set", change["setting"], "--json")[1])
        if change["setting"] != "topology.mode=split":  # whose file would not list the ranks alike
            assert found["peak"] - less["peak"] == change["gain"]
    code, told = said(capsys, file, "--gpu-memory", 60)
    assert code == 1 and f"next: python -m trainer plan {file} --gpu-memory 60 --choose" in told
    assert "--set activation_checkpointing=true" in told


def test_chosen_settings_fit_and_what_fits_as_it_is_stays(file, capsys):
    code, told = said(capsys, file, "--gpu-memory", 70, "--choose", "--json")
    found = json.loads(told)
    assert code == 0 and found["fits"] and found["chosen"]["set"]
    sets = [word for each in found["chosen"]["set"] for word in ("--set", each)]
    again = json.loads(said(capsys, file, "--gpu-memory", 70, "--json", *sets)[1])
    assert again["fits"] and again["peak"] == found["peak"]
    roomy = json.loads(said(capsys, file, "--gpu-memory", 400, "--choose", "--json")[1])
    assert not any(each.startswith(("activation", "data")) for each in roomy["chosen"]["set"])
    code, told = said(capsys, file, "--gpu-memory", 8, "--choose")
    assert code == 1 and "no such settings fit" in told


def test_several_drafters_are_planned_apart_and_a_target_rank_too(file, capsys, tmp_path):
    content = yaml.safe_load(file.read_text())
    content["data"]["paths"] = str(file.parent / "data.jsonl")
    content["topology"] = {"mode": "split"}
    content["drafters"] = [{"name": "one"}, {"name": "two", "drafter": {"layers": 2}, "loss": {"kl": 1.0}}]
    (tmp_path / "several.yaml").write_text(yaml.safe_dump(content))
    found = json.loads(said(capsys, tmp_path / "several.yaml", "--gpu", "h200", "--json")[1])
    assert [drafter["name"] for drafter in found["drafters"]] == ["one", "two"]
    one, two = found["drafters"]
    assert one["parameters"] > two["parameters"] and one["flops"]["forward"] > two["flops"]["forward"]
    assert found["target"]["layers_run"] == 36 and found["target"]["memory"]["peak"] > 16 * 2**30
    row = 40064 * (5 + 1) * 4096 * 2  # one drafter wants last hidden states, and then they travel to both
    assert found["features"]["travels"] and found["features"]["step"] == 2 * 2 * row


def test_the_unknown_is_said_to_be_unknown(file, capsys, monkeypatch):
    monkeypatch.setattr(plan, "this_card", lambda: None)
    code, told = said(capsys, file)
    assert code == 0 and "whether it fits: unknown, no GPU here; say --gpu-memory GIB" in told
    assert "a step takes: unknown" in told
    code, told = said(capsys, file, "--gpu", "some other card", "--json")
    found = json.loads(told)
    assert code == 0 and found["card"] is None and found["fits"] is None and found["step"]["seconds"] is None
    muon = json.loads(said(capsys, file, "--gpu", "h200", "--set", "optimizer.kind=muon", "--json")[1])
    assert muon["drafters"][0]["seconds"]["forward"] > 0 and muon["step"]["seconds"] is None
    with pytest.raises(SystemExit):
        said(capsys, file, "--gpu-memory", "much")


def test_a_plan_needs_no_torch(file):
    script = f"import sys; from trainer.cli import main; main(['plan', {str(file)!r}]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "False"
