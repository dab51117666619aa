"""Both layouts to and fro, what each refuses, folders that appear whole, and the gate that catches what got lost."""

import copy
import dataclasses
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests import small_drafters
from trainer import export
from trainer.block_mask import LayerKind
from trainer.drafter import Drafter, Shape
from trainer.errors import TrainerError
from trainer.export import description, files, gate, qwen3, speculators, zlab

OPEN, CAUSAL = LayerKind(), LayerKind(causal=True)
SLIDING, SLIDING_OPEN = LayerKind(window=6, causal=True), LayerKind(window=6)


def exported(**changes) -> description.Exported:
    shape = {name: changes.pop(name) for name in list(changes) if name in Shape.__dataclass_fields__}
    base = Shape(
        hidden=16, intermediate=24, heads=4, kv_heads=2, head_size=8, features=2, layers=1, epsilon=1e-6, rope_base=5e3
    )
    if "kinds" in shape:
        shape["layers"] = len(shape["kinds"])
    facts = {
        "target_layers": (1, 3),
        "target_depth": 6,
        "mask_token": 31,
        "block_size": 4,
        "shifted": False,
        "vocabulary": 32,
        "max_positions": 128,
        "begin": 1,
        "end": (2, 3),
        "dtype": "float32",
        "target": "some/target",
        "target_architectures": ("Qwen3ForCausalLM",),
        **changes,
    }
    shape.setdefault("features", len(facts["target_layers"]))
    return description.Exported(shape=description.with_kinds(dataclasses.replace(base, **shape)), **facts)


def tensors_of(it: description.Exported, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, it.dtype)
    state = Drafter(it.shape).state_dict()
    return {name: torch.randn(tensor.shape, generator=generator).to(dtype) for name, tensor in state.items()}


def shared(it: description.Exported) -> dict[str, torch.Tensor]:
    table = torch.randn(it.vocabulary, it.shape.hidden, generator=torch.Generator().manual_seed(1))
    return {"embedding": table, "head": table}


def edit(folder: Path, **changes) -> None:
    """Changes keys of the configuration, `outer__inner` inside another; None removes one."""
    path = folder / files.CONFIG
    config = json.loads(path.read_text())
    for key, value in changes.items():
        *outer, last = key.split("__")
        place = config
        for name in outer:
            place = place[name]
        if value is None:
            place.pop(last)
        else:
            place[last] = value
    path.write_text(json.dumps(config))


# ------------------------------------------------------------------------------------------------ layouts


def test_the_zlab_layout_has_the_keys_and_names_of_published_drafters(tmp_path):
    it = exported(dtype="bfloat16")
    zlab.write(tmp_path / "drafter", tensors_of(it), it)
    config = json.loads((tmp_path / "drafter/config.json").read_text())
    assert config == {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "block_size": 4,
        "dflash_config": {"mask_token_id": 31, "target_layer_ids": [1, 3], "block_size": 4, "causal": False},
        "is_causal": False,
        "num_target_layers": 6,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 32,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "rope_theta": 5000.0,
        "rope_scaling": None,
        "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"},
        "max_position_embeddings": 128,
        "layer_types": ["full_attention"],
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": 1,
        "tie_word_embeddings": False,
        "use_cache": True,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
    }
    layer = {
        "input_layernorm": [16],
        "post_attention_layernorm": [16],
        "self_attn.q_proj": [32, 16],
        "self_attn.k_proj": [16, 16],
        "self_attn.v_proj": [16, 16],
        "self_attn.o_proj": [16, 32],
        "self_attn.q_norm": [8],
        "self_attn.k_norm": [8],
        "mlp.gate_proj": [24, 16],
        "mlp.up_proj": [24, 16],
        "mlp.down_proj": [16, 24],
    }
    wanted = {"fc": [16, 32], "hidden_norm": [16], "norm": [16], **{f"layers.0.{key}": layer[key] for key in layer}}
    found = load_file(tmp_path / "drafter/model.safetensors")
    assert {name: list(tensor.shape) for name, tensor in found.items()} == {f"{k}.weight": v for k, v in wanted.items()}
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}


def test_the_speculators_layout_counts_layers_from_one_and_names_the_target(tmp_path):
    it = exported(kinds=(SLIDING_OPEN, OPEN), shifted=True)
    speculators.write(tmp_path / "drafter", tensors_of(it), it, **shared(it))
    config = json.loads((tmp_path / "drafter/config.json").read_text())
    assert config["speculators_model_type"] == "dflash"
    assert config["aux_hidden_state_layer_ids"] == [2, 4]
    assert (config["block_size"], config["mask_token_id"], config["draft_vocab_size"]) == (4, 31, 32)
    assert (config["sample_from_anchor"], config["sliding_window_non_causal"]) == (True, True)
    speculation = config["speculators_config"]
    assert speculation["proposal_methods"][0]["speculative_tokens"] == 4
    assert speculation["verifier"] == {"name_or_path": "some/target", "architectures": ["Qwen3ForCausalLM"]}
    body = config["transformer_layer_config"]
    assert body["layer_types"] == ["sliding_attention", "full_attention"]
    assert (body["sliding_window"], body["use_sliding_window"]) == (6, True)
    assert body["rope_parameters"]["rope_theta"] == body["rope_theta"] == 5000.0
    stored = load_file(tmp_path / "drafter/model.safetensors")
    assert torch.equal(stored["embed_tokens.weight"], stored["lm_head.weight"])
    assert torch.equal(stored["embed_tokens.weight"], shared(it)["embedding"])


# a description that z-lab's layout can say
sayable = st.builds(
    exported,
    kinds=st.lists(st.sampled_from([OPEN, SLIDING]), min_size=1, max_size=3).map(tuple)
    | st.integers(1, 3).map(lambda layers: (CAUSAL,) * layers)
    | st.integers(1, 3).map(lambda layers: (SLIDING_OPEN,) * layers)
    | st.just((SLIDING_OPEN, OPEN))
    | st.just((CAUSAL, SLIDING)),
    target_layers=st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True).map(tuple),
    head_size=st.sampled_from([4, 8]),
    kv_heads=st.sampled_from([1, 2, 4]),
    rope_base=st.sampled_from([1e4, 1e6, 2.5e5]),
    block_size=st.integers(2, 32),
    begin=st.none() | st.integers(0, 31),
    end=st.none() | st.integers(0, 31) | st.just((4, 7)),
    dtype=st.sampled_from(["bfloat16", "float32"]),
)


@given(it=sayable)
@settings(deadline=None, max_examples=25)
def test_a_zlab_export_survives_the_way_through_speculators_byte_by_byte(tmp_path_factory, it):
    folder = tmp_path_factory.mktemp("way")
    zlab.write(folder / "first", tensors_of(it), it)
    tensors, found = zlab.read(folder / "first")
    assert found == dataclasses.replace(it, target="", target_architectures=())
    if all(kind.window or not kind.causal for kind in it.shape.kinds):
        named = dataclasses.replace(found, target=it.target, target_architectures=it.target_architectures)
        speculators.write(folder / "between", tensors, named, **shared(it))
        tensors, found = speculators.read(folder / "between")
        assert found == it
    zlab.write(folder / "second", tensors, found)
    for name in (files.CONFIG, files.WEIGHTS, files.CODE):
        assert (folder / "first" / name).read_bytes() == (folder / "second" / name).read_bytes()


@given(it=sayable)
@settings(deadline=None, max_examples=25)
def test_the_causal_flags_say_the_same_to_every_reader(it):
    config = zlab.config_of(it)
    flag, inner = config.get("is_causal"), config["dflash_config"].get("causal")
    for flagged in (flag, inner if flag is None else flag):  # z-lab's package, vLLM
        seen = [flagged if flagged is not None else kind == qwen3.SLIDING for kind in config["layer_types"]]
        assert seen == [kind.causal for kind in it.shape.kinds]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shifted": True}, "shifted"),
        ({"target_layers": (1, 5)}, "last layer, 5, before the final norm"),
        ({"kinds": (CAUSAL, SLIDING_OPEN)}, "full layers are causal and sliding ones are not"),
        ({"kinds": (SLIDING, LayerKind(window=8, causal=True))}, "windows of different sizes"),
        ({"target_depth": 0}, "number of the target's layers"),
    ],
)
def test_zlab_refuses_what_it_cannot_say(tmp_path, changes, words):
    it = exported(**changes)
    with pytest.raises(TrainerError, match=words):
        zlab.write(tmp_path / "drafter", tensors_of(it), it)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kinds": (CAUSAL,)}, "always lets them see their whole block"),
        ({"kinds": (SLIDING, SLIDING_OPEN)}, "one flag for all"),
        ({"target": ""}, "names the target"),
        ({"vocabulary": 33}, "not what the drafter was trained with"),
    ],
)
def test_speculators_refuses_what_it_cannot_say(tmp_path, changes, words):
    it = exported(**changes)
    with pytest.raises(TrainerError, match=words):
        speculators.write(tmp_path / "drafter", tensors_of(it), it, **shared(exported()))
    assert list(tmp_path.iterdir()) == []


def test_what_a_reader_may_not_honour_is_said():
    assert zlab.remarks(exported(kinds=(OPEN, SLIDING))) == []
    assert [line.split(":")[0] for line in zlab.remarks(exported(kinds=(CAUSAL,)))] == ["full layers are causal"]
    (line,) = zlab.remarks(exported(kinds=(SLIDING_OPEN, OPEN)))
    assert line.startswith("sliding layers are not causal")
    assert speculators.remarks(exported()) == []
    assert len(speculators.remarks(exported(shifted=True, kinds=(SLIDING,)))) == 2


# ------------------------------------------------------------------------------------------------ reading


@pytest.fixture
def folder(tmp_path) -> Path:
    it = exported(kinds=(OPEN, OPEN))
    zlab.write(tmp_path / "drafter", tensors_of(it), it)
    return tmp_path / "drafter"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_theta": 1e6}, "several bases of RoPE: 5000.0, 1000000.0"),
        ({"rope_theta": None, "rope_parameters": None}, "no `rope_theta`"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "`rope_type` is 'yarn'"),
        ({"rope_parameters__partial_rotary_factor": 0.5}, "`partial_rotary_factor` is 0.5"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "for each type of layer"),
        ({"dflash_config__block_size": 8}, "names two `block_size`"),
        ({"dflash_config__mask_token_id": None}, "names no `mask_token_id`"),
        ({"dflash_config__use_swa": True}, "`dflash_config` has `use_swa`"),
        ({"dflash_config__final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel"),
        ({"attention_bias": True}, "`attention_bias` is True"),
        ({"hidden_act": "gelu"}, "`hidden_act` is 'gelu'"),
        ({"layer_types": ["full_attention"]}, "`layer_types` is not a list of 2"),
        ({"num_hidden_layers": 1, "layer_types": None}, "has unknown layers.1"),
        ({"num_hidden_layers": 3, "layer_types": None}, "lacks layers.2"),
        ({"dflash_config__target_layer_ids": [1, 2, 3]}, "fc.weight is"),
        ({"dtype": "float16"}, "is torch.float32, its configuration says float16"),
        ({"hidden_size": "16"}, "`hidden_size` is not of type int"),
        ({"vocab_size": None}, "has no `vocab_size`"),
    ],
)
def test_a_drafter_of_another_kind_is_refused_rather_than_read_wrongly(folder, changes, words):
    edit(folder, **changes)
    with pytest.raises(TrainerError, match=words):
        zlab.read(folder)


def test_older_forms_of_the_zlab_layout_are_read(folder):
    tensors, it = zlab.read(folder)
    config = json.loads((folder / files.CONFIG).read_text())
    for key in ("rope_parameters", "layer_types", "is_causal", "dtype", "auto_map", "block_size"):
        del config[key]
    del config["dflash_config"]["target_layer_ids"], config["dflash_config"]["causal"]
    (folder / files.CONFIG).write_text(json.dumps(config))
    (folder / files.WEIGHTS).unlink()
    names = sorted(tensors)
    for shard, part in (("model-1", names[:5]), ("model-2", names[5:])):
        save_file({f"model.{name}": tensors[name] for name in part}, folder / f"{shard}.safetensors")
    again, older = zlab.read(folder)
    assert older == dataclasses.replace(it, target_layers=(1, 3))  # 2 of 6 layers, spread from 1 to 3
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensors[name]) for name in names)


def test_the_inner_causal_flag_counts_where_there_is_no_outer_one(folder):
    edit(folder, is_causal=None, dflash_config__causal=True)
    assert zlab.read(folder)[1].shape.kinds == (CAUSAL, CAUSAL)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"draft_vocab_size": 16}, "a part of the vocabulary"),
        ({"aux_hidden_state_layer_ids": [0, 3]}, "target's embedding"),
        ({"speculators_model_type": "eagle3"}, "eagle3"),
        ({"transformer_layer_config__rope_theta": 1e4}, "several bases"),
    ],
)
def test_speculators_reading_refuses(tmp_path, changes, words):
    it = exported()
    speculators.write(tmp_path / "drafter", tensors_of(it), it, **shared(it))
    edit(tmp_path / "drafter", **changes)
    with pytest.raises(TrainerError, match=words):
        speculators.read(tmp_path / "drafter")


def test_what_is_no_export_is_said_to_be_none(tmp_path, folder):
    with pytest.raises(TrainerError, match="not readable"):
        export.read(tmp_path)
    (folder / files.WEIGHTS).write_bytes((folder / files.WEIGHTS).read_bytes()[:-9])
    with pytest.raises(TrainerError, match=r"model\.safetensors: not readable"):
        export.read(folder)
    (folder / files.WEIGHTS).unlink()
    with pytest.raises(TrainerError, match="has no model"):
        export.read(folder)


# ------------------------------------------------------------------------------------------------ folders


def test_a_failed_export_leaves_nothing_and_keeps_what_was_there(tmp_path):
    it = exported()

    def refuse(part: Path) -> None:
        assert {path.name for path in part.iterdir()} == {files.CONFIG, files.WEIGHTS, files.CODE}
        raise TrainerError("no")

    with pytest.raises(TrainerError, match="no"):
        zlab.write(tmp_path / "drafter", tensors_of(it), it, check=refuse)
    assert list(tmp_path.iterdir()) == []
    zlab.write(tmp_path / "drafter", tensors_of(it), it)
    before = (tmp_path / "drafter" / files.WEIGHTS).read_bytes()
    with pytest.raises(TrainerError, match="no"):
        zlab.write(tmp_path / "drafter", tensors_of(it, seed=1), it, overwrite=True, check=refuse)
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]
    assert (tmp_path / "drafter" / files.WEIGHTS).read_bytes() == before


def test_an_export_is_replaced_only_when_asked_and_nothing_else_ever_is(tmp_path):
    it = exported()
    (tmp_path / "empty").mkdir()
    zlab.write(tmp_path / "empty", tensors_of(it), it)
    with pytest.raises(TrainerError, match="--overwrite"):
        zlab.write(tmp_path / "empty", tensors_of(it, seed=1), it)
    zlab.write(tmp_path / "empty", tensors_of(it, seed=1), it, overwrite=True)
    assert torch.equal(zlab.read(tmp_path / "empty")[0]["fc.weight"], tensors_of(it, seed=1)["fc.weight"])
    (tmp_path / "empty/notes.txt").write_text("mine")
    with pytest.raises(TrainerError, match="not an exported drafter"):
        zlab.write(tmp_path / "empty", tensors_of(it), it, overwrite=True)
    assert (tmp_path / "empty/notes.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


# ------------------------------------------------------------------------------------------------ the gate


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> small_drafters.Small:
    torch.set_num_threads(1)
    target = small_drafters.make_target(tmp_path_factory.mktemp("target"), "Qwen3", rope_parameters={"rope_theta": 5e3})
    made = small_drafters.make(target, layers=2, block_size=4, sliding_window=6, sliding_layers=(1,))
    with torch.no_grad():  # at full size the last norm makes first choices differ from place to place
        made.drafter.norm.weight.fill_(1.0)
    return made


@pytest.fixture
def job(small, tmp_path) -> dict:
    it = description.describe(small.config, small.target, small.drafter)
    zlab.write(tmp_path / "drafter", small.drafter.state_dict(), it)
    both = {"drafter": small.drafter, "target": small.target, "target_path": small.config.target.path}
    return gate.job_of(tmp_path / "drafter", zlab, it, prompts=gate.gate_prompts(it), **both)


def test_a_faithful_export_passes_and_its_blocks_are_many_and_differ(job):
    assert gate.problems_of(job) == []
    blocks = [tuple(block) for rounds in job["drafts"] for block in rounds]
    assert len(blocks) > 30
    assert len(set(blocks)) > 20


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"rope_theta": 1e6, "rope_parameters__rope_theta": 1e6}, "RoPE's base: 5000.0 is wanted"),
        ({"dflash_config__mask_token_id": 94}, "the mask token: 95 is wanted, the export has 94"),
        ({"dflash_config__target_layer_ids": [1, 3]}, "the ids of the target's layers: [0, 2] is wanted"),
        ({"is_causal": False}, "what each layer sees"),
        ({"sliding_window": 7}, "what each layer sees"),
        ({"block_size": 8, "dflash_config__block_size": 8}, "the block size: 4 is wanted"),
        ({"rms_norm_eps": 1e-5}, "the norms' epsilon: 1e-06 is wanted"),
    ],
)
def test_each_lost_fact_has_its_sentence(job, changes, sentence):
    edit(Path(job["folder"]), **changes)
    (problem,) = gate.problems_of(job)
    assert problem.startswith(sentence)


def test_every_fact_has_a_name():
    assert gate.facts(exported()).keys() == gate.FACTS.keys()


def test_a_lost_type_of_the_weights_has_its_sentence(job):
    folder = Path(job["folder"])
    tensors = load_file(folder / files.WEIGHTS)
    save_file({name: tensor.float() for name, tensor in tensors.items()}, folder / files.WEIGHTS)
    edit(folder, dtype="float32", torch_dtype="float32")
    assert gate.problems_of(job) == ['the type of the weights: "float64" is wanted, the export has "float32"']


def test_changed_weights_show_in_the_drafts(job):
    path = Path(job["folder"]) / files.WEIGHTS
    tensors = load_file(path)
    tensors["layers.1.self_attn.k_norm.weight"] *= -1
    save_file(tensors, path)
    (problem,) = gate.problems_of(job)
    assert "blocks are drafted otherwise, the first in round" in problem


def shape_changed(**changes):
    return lambda it: dataclasses.replace(it, shape=dataclasses.replace(it.shape, **changes))


@pytest.mark.parametrize(
    "change",
    [
        shape_changed(rope_base=1e4),
        shape_changed(kinds=(OPEN, SLIDING_OPEN)),
        shape_changed(kinds=(OPEN, LayerKind(window=5, causal=True))),
        shape_changed(kinds=(OPEN, CAUSAL)),
        lambda it: dataclasses.replace(it, mask_token=94),
    ],
)
def test_the_drafts_themselves_depend_on_each_fact(small, job, change):
    """So that the gate would see it even if the file said what is wanted, and the drafter did something else."""
    it = change(description.describe(small.config, small.target, small.drafter))
    drafter = export.drafter_from(it, small.drafter.state_dict())
    assert gate.compare(job["drafts"], gate.drafts(drafter, small.target, it, job["prompts"]))


def test_the_drafts_depend_on_the_layers_and_on_positions(small, job):
    it = description.describe(small.config, small.target, small.drafter)
    target = copy.copy(small.target)
    target.read = lambda tokens, positions, cache: (None, small.target.read(tokens, positions, cache)[1].roll(32, -1))
    assert gate.compare(job["drafts"], gate.drafts(small.drafter, target, it, job["prompts"]))
    later = [[9, *prompt] for prompt in job["prompts"]]  # one place further on, behind another token
    assert gate.compare(job["drafts"], [rounds[1:] for rounds in gate.drafts(small.drafter, small.target, it, later)])


@pytest.mark.parametrize("layout", ["zlab", "speculators"])
def test_export_proves_itself_in_a_fresh_process(small, tmp_path, layout):
    lines = export.export(small.config, small.target, small.drafter, to=tmp_path / "drafter", layout=layout)
    assert "read back in a fresh process" in lines[0]
    _, it = export.read(tmp_path / "drafter")
    assert it.target_layers == (0, 2)
    again = small_drafters.make(small.config.target.path, layers=2, block_size=4, sliding_window=6, sliding_layers=(1,))
    export.load_into(again.drafter, tmp_path / "drafter", config=again.config, target=again.target)
    for name, tensor in again.drafter.state_dict().items():
        assert torch.equal(tensor, small.drafter.state_dict()[name])


def test_an_export_that_fails_the_gate_does_not_appear(small, tmp_path, monkeypatch):
    write = files.write_tensors
    spoil = "layers.0.self_attn.q_norm.weight"
    monkeypatch.setattr(files, "write_tensors", lambda to, tensors: write(to, {**tensors, spoil: -tensors[spoil]}))
    with pytest.raises(TrainerError, match=r"not the drafter that is in memory: .* blocks are drafted otherwise"):
        export.export(small.config, small.target, small.drafter, to=tmp_path / "drafter", layout="zlab")
    assert list(tmp_path.iterdir()) == []


def test_weights_of_another_drafter_are_not_taken(small, tmp_path):
    zlab.write(
        tmp_path / "drafter",
        small.drafter.state_dict(),
        description.describe(small.config, small.target, small.drafter),
    )
    other = small_drafters.make(small.config.target.path, layers=2, block_size=4, sliding_window=5, sliding_layers=(1,))
    with pytest.raises(TrainerError, match="what each layer sees"):
        export.load_into(other.drafter, tmp_path / "drafter")
    other = small_drafters.make(
        small.config.target.path, layers=2, sliding_window=6, sliding_layers=(1,), target_layers=(1, 3)
    )
    with pytest.raises(TrainerError, match="the ids of the target's layers"):
        export.load_into(other.drafter, tmp_path / "drafter", config=other.config, target=other.target)
