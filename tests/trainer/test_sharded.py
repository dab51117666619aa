"""A drafter that is spread over its ranks trains as one that is whole at each, and its checkpoints are the same files.

Three ranks are started once, and do all that is looked at; two real runs show that the loop has a part for every rank.
"""

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.trainer import forked, ranked
from trainer import checkpoint, sharding
from trainer.config import Config, ConfigError, OptimizerConfig, load
from trainer.drafter import Drafter, Shape
from trainer.feed import load_rows, step_batches
from trainer.metrics import ratio
from trainer.models import Models, build_without_target
from trainer.optimizer import Optimizer
from trainer.spans import Spans
from trainer.step import compute_gradient
from trainer.topology import Topology
from trainer.world import World

RANKS, HALF, STEPS = 3, 3, 6
SHARED = (
    "drafter.layers=2",
    "drafter.intermediate=47",
    "data.micro_batches=2",
    "steps=6",
    "optimizer.weight_decay=0.1",
)
CASES = {  # the norms of single heads have 4 rows, so that the third rank has none of them
    "muon": ("optimizer.ema=0.8", "optimizer.clip=0.01", "optimizer.weight_decay=0.1"),
    "adamw": ("optimizer.kind=adamw", "activation_checkpointing=true", "optimizer.clip=0.01"),
    "bf16": ("dtype=bfloat16", "optimizer.clip=0"),
}
# in bf16 it shows that the context's gradient is added up layer by layer, not term by term
CLOSE = {"muon": 1e-5, "adamw": 1e-5, "bf16": 1e-2}


class Trained:
    """A drafter in training at one of the ranks; nothing but its shape tells a sharded one from a whole one."""

    def __init__(self, config: Config, world: World, *, sharded: bool):
        self.config, self.world = config, world
        self.models: Models = build_without_target(config, world.device)
        shards = sharding.shard(self.models.drafter, world.peers, world.device) if sharded else None
        self.optimizer = Optimizer(self.models.drafter, config.optimizer, config.steps, shards)
        self.rows, _ = load_rows(config, 96, speak=False)
        self.losses: list[float] = []
        self.norms: list[float] = []
        table = torch.randn(96, self.models.drafter.shape.features * 32, generator=torch.Generator().manual_seed(1))
        self.source = lambda batch: (table[batch.rows.tokens][..., :32], table[batch.rows.tokens])

    def train(self, first: int, last: int) -> "Trained":
        own = list(range(self.world.role.index, 2 * RANKS, RANKS))
        for step in range(first, last):
            gradient = compute_gradient(
                self.config,
                self.models,
                self.optimizer,
                step_batches(self.config, self.rows, step, pad=False, parts=2 * RANKS, only=own),
                Spans(self.world.device),
                source=self.source,
                world=self.world,
            )
            self.losses.append(ratio(gradient.metrics.read()[0]["loss"]))
            self.norms.append(gradient.norm.item())
            self.optimizer.apply(step, gradient.norm)
        return self

    def save(self, folder: Path) -> Path:
        saver = checkpoint.Saver(folder, keep=9)
        state = checkpoint.State(step=len(self.losses), settings={}, seconds=0.0)
        if self.optimizer.shards or self.world.leads:
            saver.save(self.optimizer, state)
        saver.wait()
        dist.barrier()
        return folder / f"step-{state.step:06d}"

    def resumed(self, path: Path, *, sharded: bool) -> "Trained":
        fresh = Trained(self.config, self.world, sharded=sharded)
        with torch.no_grad():
            for master in fresh.optimizer.masters.values():
                master.add_(1.0)  # whatever it was, it is gone
        checkpoint.load(path, fresh.optimizer)
        return fresh.train(HALF, STEPS)

    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.optimizer.tensors().values() if tensor.ndim)


def work(rank: int, folder: Path, path: Path) -> None:
    """What one of the ranks does; what it found lies in rank-N.pt."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    topology = Topology(drafters=(RANKS,), parts_per_rank=2)
    world = World(
        topology=topology, role=topology.role(rank), device=torch.device("cpu"), timeout=60, peers=dist.group.WORLD
    )
    found = {}
    for name, changes in CASES.items():
        config = load(path, [*SHARED, *changes])
        here = folder / name
        whole = Trained(config, world, sharded=False).train(0, HALF)
        ours = Trained(config, world, sharded=True).train(0, HALF)
        saved = {"whole": whole.save(here / "whole"), "ours": ours.save(here / "ours")}
        whole.train(HALF, STEPS)
        ours.train(HALF, STEPS)
        again = ours.resumed(saved["ours"], sharded=True)
        copy = sharding.empty_copy(ours.models.drafter, world.device) if world.leads else None
        ours.optimizer.gather_into(copy)
        with whole.optimizer.averaged():
            wanted = {n: p.detach().clone() for n, p in whole.models.drafter.named_parameters()}
        found[name] = {
            "losses": (whole.losses, ours.losses),
            "norms": (whole.norms, ours.norms),
            "bytes": (whole.bytes(), ours.bytes()),
            "resumed": all(
                torch.equal(tensor, again.optimizer.tensors()[n]) for n, tensor in ours.optimizer.tensors().items()
            ),
            "to whole": ours.resumed(saved["ours"], sharded=False).losses,
            "from whole": ours.resumed(saved["whole"], sharded=True).losses,
            "measured": ({n: p.detach() for n, p in copy.named_parameters()} if copy else {}, wanted),
            "dtypes": {str(master.dtype) for master in ours.optimizer.masters.values()},
        }
        ours.save(here / "ours")
        whole.save(here / "whole")
        found[name]["moved"] = moved(ours)
    torch.save(found, folder / f"rank-{rank}.pt")
    dist.destroy_process_group()


def moved(trained: Trained) -> tuple[int, int]:
    """What this rank sends to others for Muon in a step, as counted, and what it is said to be for all of them."""
    exchange, sent = dist.all_to_all_single, []

    def counted(came, out, sizes_in, sizes_out, group):
        sent.append(out.numel() - sizes_out[trained.world.role.index])
        exchange(came, out, sizes_in, sizes_out, group=group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", counted)
        trained.optimizer.apply(STEPS - 1, trained.optimizer.gradient_norm(torch.tensor(1.0)))
    return sum(sent), trained.optimizer.shards.moved(list(trained.optimizer.momentum))


@pytest.fixture(scope="module")
def config(small_target, tmp_path_factory) -> Path:
    return ranked.write_config(tmp_path_factory.mktemp("config"), small_target(head_dim=4))


@pytest.fixture(scope="module")
def folder(config, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    processes = [forked.call(work, rank, folder, config, log=folder / f"{rank}.log") for rank in range(RANKS)]
    try:
        for rank, process in enumerate(processes):
            process.join(ranked.LIMIT)
            assert process.exitcode == 0, (folder / f"{rank}.log").read_text()
    finally:
        for process in processes:
            process.kill()
    return folder


@pytest.fixture(scope="module")
def found(folder) -> list[dict]:
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize("case", CASES)
def test_losses_and_norms_are_those_of_whole_drafters(found, case):
    tolerance = CLOSE[case]
    for rank in found:
        for whole, ours in (rank[case]["losses"], rank[case]["norms"]):
            assert len(whole) == STEPS and whole == pytest.approx(ours, abs=tolerance, rel=tolerance)
        assert rank[case]["losses"] == found[0][case]["losses"] and rank[case]["norms"] == found[0][case]["norms"]
    if case != "bf16":
        assert min(found[0][case]["norms"][1]) > 0.01  # each step was clipped
    assert found[0][case]["dtypes"] == {"torch.float32"}


@pytest.mark.parametrize("case", CASES)
def test_each_rank_holds_its_share_of_the_state(found, case):
    whole = found[0][case]["bytes"][0]
    own = [rank[case]["bytes"][1] for rank in found]
    assert sum(own) == whole
    assert max(own) < 1.1 * whole / RANKS


@pytest.mark.parametrize("case", CASES)
def test_checkpoints_are_interchangeable(found, folder, case):
    tolerance = CLOSE[case]
    for rank in found:
        later = rank[case]["losses"][0][HALF:]
        assert rank[case]["resumed"], "not bit by bit"
        assert rank[case]["to whole"] == pytest.approx(later, abs=tolerance)
        assert rank[case]["from whole"] == pytest.approx(later, abs=tolerance)
    ours, whole = (_tensors(folder / case / kind) for kind in ("ours", "whole"))
    assert ours.keys() == whole.keys()
    for name, tensor in ours.items():
        loose = {"rtol": 1e-3, "atol": 1e-5} if case != "bf16" else {"rtol": 0.05, "atol": 1e-3}
        torch.testing.assert_close(tensor, whole[name], **loose, msg=lambda text, n=name: f"{n}: {text}")


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Of the half and of the end."""
    found = {}
    for path in checkpoint.checkpoints(folder):
        found |= {f"{path.name} {name}": tensor for name, tensor in ranked.tensors(path).items()}
    assert any("step-000006" in name for name in found)
    return found


def test_what_is_measured_is_whole(found):
    for case in CASES:
        copy, wanted = found[0][case]["measured"]
        assert copy.keys() == wanted.keys()
        for name, tensor in copy.items():
            assert tensor.dtype == wanted[name].dtype
            torch.testing.assert_close(tensor, wanted[name], rtol=1e-2, atol=1e-3 if case == "bf16" else 1e-5)


def test_muon_moves_what_it_says(found):
    for case in ("muon", "bf16"):
        said = {rank[case]["moved"][1] for rank in found}
        assert said == {sum(rank[case]["moved"][0] for rank in found)} and said != {0}
    assert all(rank["adamw"]["moved"] == (0, 0) for rank in found)


def test_a_run_is_sharded_measured_and_resumed_in_another_topology(config, tmp_path):
    whole = ranked.alone(config, tmp_path / "whole")
    run = ranked.finish(config, tmp_path / "run", "topology.ranks=2", "topology.shard=on")
    assert "drafter sharded over 2 ranks" in run.said
    ranked.assert_same_training(run.folder, whole)
    taus = [[each["temperature_0"]["tau"] for each in ranked.evaluations(f)] for f in (run.folder, whole)]
    assert len(taus[0]) == 3 and taus[0] == taus[1]

    resumed = tmp_path / "resumed"
    shutil.copytree(run.folder, resumed, ignore=lambda _, names: [n for n in names if "step-000010" < n < "step-999"])
    again = ranked.finish(config, resumed, *ranked.split(1, 2), "topology.shard=on")
    assert "resuming after step 10" in again.said and "drafter sharded over 2 ranks" in again.said
    ranked.assert_same_training(resumed, whole)
    assert len(ranked.evaluations(resumed)) == 5  # two of them at steps that were taken twice


def test_the_estimate_is_what_training_takes():
    """Weights, gradients, masters, moments and average, counted on one that is trained."""
    shape = Shape(
        hidden=8, intermediate=12, heads=2, kv_heads=1, head_size=4, features=2, layers=1, epsilon=1e-6, rope_base=1e4
    )
    for dtype in (torch.float32, torch.bfloat16):
        for kind in ("muon", "adamw"):
            drafter = Drafter(shape).to(dtype)
            optimizer = Optimizer(drafter, OptimizerConfig(kind=kind, ema=0.9), 10)
            held = sum(tensor.nbytes for tensor in optimizer.tensors().values() if tensor.ndim)
            gradients = sum(gradient.nbytes for gradient in optimizer.gradients())
            narrow = sum(p.nbytes for p in drafter.parameters()) if dtype == torch.bfloat16 else 0
            said = sharding.state_bytes(drafter, optimizer.config)
            # a gradient of a narrow weight is there for a moment, before it is added to its master's
            assert said == held + gradients + narrow


def test_a_drafter_of_one_rank_is_not_spread(config):
    with pytest.raises(ConfigError, match=r"topology\.shard.*no drafter has several ranks"):
        load(config, ["topology.shard=on"])
    assert load(config, ["topology.shard=on", *ranked.split(1, 2)]).topology.shard == "on"
