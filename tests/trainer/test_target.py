"""Features against Hugging Face's own forward pass, and that packed documents do not see each other."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from trainer import attention, target
from trainer.config import Config, DataConfig, DrafterConfig, TargetConfig
from trainer.errors import TrainerError
from trainer.models import captured_layers, choose_device, shape_of, spread_layers
from trainer.target import Target
from trainer.vocabulary import load_vocabulary

CPU = torch.device("cpu")
FAMILIES = [("qwen3", {}), ("llama", {}), ("mistral", {"sliding_window": 5}), ("qwen3", {"tie_word_embeddings": True})]


def load(path, layers=(0, 2, 3), **options):
    return Target(path, layers, CPU, dense=True, **options)


@pytest.mark.parametrize(("family", "options"), FAMILIES)
@torch.no_grad()
def test_features_are_the_stream_after_a_layer_and_before_the_final_norm(small_target, family, options):
    path = small_target(family, **options)
    frozen = load(path, dtype="float64")
    tokens = torch.randint(96, (2, 17), generator=torch.Generator().manual_seed(1))
    last, features = frozen.inspect(tokens, torch.zeros_like(tokens))
    first, third, fourth = features.unflatten(-1, (3, -1)).unbind(2)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="sdpa")
    reference = model(tokens, output_hidden_states=True)
    close = {"atol": 1e-9, "rtol": 1e-9}
    torch.testing.assert_close(first, reference.hidden_states[1], **close)
    torch.testing.assert_close(third, reference.hidden_states[3], **close)
    assert not torch.allclose(third, reference.hidden_states[2], atol=0.1)  # a layer off by one
    # Hugging Face's last entry is after the final norm; the feature is before it
    assert not torch.allclose(fourth, reference.hidden_states[4], atol=0.1)
    torch.testing.assert_close(model.model.norm(fourth), reference.hidden_states[4], **close)
    torch.testing.assert_close(last @ frozen.head.T, reference.logits, **close)


@pytest.mark.parametrize(("family", "options"), FAMILIES)
def test_features_of_a_packed_row_are_those_of_each_document_alone(small_target, family, options):
    frozen = load(small_target(family, **options), dtype="float64")
    lengths = [9, 1, 14, 5]
    tokens = torch.randint(96, (1, sum(lengths) + 3), generator=torch.Generator().manual_seed(2))  # 3 of padding
    start, ends = torch.full_like(tokens, sum(lengths)), torch.tensor(lengths).cumsum(0).tolist()
    for length, end in zip(lengths, ends, strict=True):
        start[:, end - length : end] = end - length
    last, features = frozen.inspect(tokens, start)
    assert features.isfinite().all()
    for length, end in zip(lengths, ends, strict=True):
        document = tokens[:, end - length : end]
        alone_last, alone = frozen.inspect(document, torch.zeros_like(document))
        torch.testing.assert_close(features[:, end - length : end], alone, atol=1e-9, rtol=1e-9)
        torch.testing.assert_close(last[:, end - length : end], alone_last, atol=1e-9, rtol=1e-9)
    frozen.check_isolation(24)


def test_stopping_early_changes_no_feature(small_target):
    frozen = load(small_target(), layers=(0, 2), dtype="float64")
    tokens = torch.arange(12)[None]
    last, features = frozen.inspect(tokens, torch.zeros_like(tokens))
    ran = []
    for number, layer in enumerate(frozen.model.model.layers):
        layer.register_forward_hook(lambda *_, number=number: ran.append(number))
    nothing, early = frozen.inspect(tokens, torch.zeros_like(tokens), last=False)
    assert nothing is None and last is not None and torch.equal(early, features)
    assert ran == [0, 1, 2]  # and not the fourth


def seeing_everything(start, *, dense):
    return target_documents(torch.zeros_like(start), dense=dense)


target_documents = target.documents


def test_the_check_finds_a_mask_that_leaks(small_target, monkeypatch):
    frozen = load(small_target())
    monkeypatch.setattr(target, "documents", seeing_everything)
    with pytest.raises(TrainerError, match="lets packed documents see each other"):
        frozen.check_isolation(24)


def test_the_check_finds_positions_that_do_not_restart(small_target, monkeypatch):
    """RoPE tells distances alone, so positions are shifted by a distance that depends on the token."""
    frozen = load(small_target())
    forward = frozen._forward
    monkeypatch.setattr(
        frozen, "_forward", lambda body, tokens, positions, *rest: forward(body, tokens, positions * tokens, *rest)
    )
    frozen.check_isolation(24)  # a function of the document itself is none of the check's business
    index = torch.arange(24)
    monkeypatch.setattr(
        frozen, "_forward", lambda body, tokens, positions, *rest: forward(body, tokens, index[None] ** 2, *rest)
    )
    with pytest.raises(TrainerError, match="lets packed documents see each other"):
        frozen.check_isolation(24)


def test_a_target_with_an_attention_of_its_own_is_refused(small_target):
    frozen = load(small_target())
    frozen.model.set_attn_implementation("eager")
    with pytest.raises(TrainerError, match="does not use the attention it was given"):
        frozen.inspect(torch.arange(8)[None], torch.zeros(1, 8, dtype=torch.int64))


def test_attention_with_what_we_do_not_compute_is_refused():
    some = torch.zeros(1, 2, 4, 8)
    with pytest.raises(TrainerError, match="asks its attention for softcap"):
        target._attention_forward(torch.nn.Identity(), some, some, some, None, softcap=30.0)


def test_a_dense_target_is_refused_above_its_bound(small_target, monkeypatch):
    frozen = load(small_target())
    tokens = torch.zeros(1, 70_000, dtype=torch.int64)
    monkeypatch.setattr(attention.block_mask, "document_dense", lambda start, window: torch.ones(1, 1, 1))
    with pytest.raises(TrainerError, match=r"would build scores of 78400000000 bytes"):
        frozen.inspect(tokens, tokens)


def test_scaling_other_than_the_usual_is_kept():
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 6, 8)
    start = torch.zeros(1, 6, dtype=torch.int64)
    with target._using(target.documents(start, dense=True)):
        ours, _ = target._attention_forward(torch.nn.Identity(), query, key, value, None, scaling=0.5)
    reference = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.5)
    torch.testing.assert_close(ours, reference.transpose(1, 2))


def test_reading_in_pieces_under_the_bound_is_the_same(small_target, monkeypatch):
    from trainer.cache import PositionCache

    frozen = load(small_target("mistral", sliding_window=5), dtype="float64")
    tokens = torch.randint(96, (3, 20), generator=torch.Generator().manual_seed(3))
    positions = torch.arange(20).expand(3, -1)
    whole, _ = frozen.read(tokens, positions, PositionCache(rows=3, capacity=20))
    model = AutoModelForCausalLM.from_pretrained(frozen.model.name_or_path, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(whole, model(tokens).logits, atol=1e-6, rtol=1e-6)
    for bound in (4 * 20 * 8 * 7, 4 * 20 * 8 * 20 * 2):  # 7 queries of a row; two rows
        monkeypatch.setattr(attention, "DENSE_BYTES", bound)
        pieces, _ = frozen.read(tokens, positions, PositionCache(rows=3, capacity=20))
        torch.testing.assert_close(pieces, whole)


def test_features_are_spread_as_in_published_drafters():
    assert spread_layers(36, 5) == (1, 9, 17, 25, 33)
    assert spread_layers(28, 1) == (14,)


def test_what_is_no_model_is_said(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(TrainerError, match="not a loadable causal LM"):
        load(tmp_path)


@pytest.mark.parametrize("options", [{}, {"tie_word_embeddings": True}])
def test_the_ends_of_a_target_are_read_without_its_layers(small_target, options):
    path = small_target(**options)
    whole, ends = load(path).vocabulary, load_vocabulary(path, dtype=torch.float32, device=CPU)
    for name in ("embedding", "head", "final_norm"):
        assert torch.equal(getattr(whole, name), getattr(ends, name))
    assert ends.config.num_hidden_layers == 4
    with pytest.raises(TrainerError, match="cannot be read"):
        load_vocabulary(path / "nowhere", dtype=torch.float32, device=CPU)


def test_features_are_written_where_they_are_wanted(small_target):
    frozen, tokens = load(small_target()), torch.arange(12)[None]
    buffer = torch.full((12 * 96,), float("nan"))
    _, features = frozen.inspect(tokens, torch.zeros_like(tokens), into=buffer.view(1, 12, 96))
    _, anew = frozen.inspect(tokens, torch.zeros_like(tokens))
    assert torch.equal(buffer.view(1, 12, 96), anew) and features.data_ptr() == buffer.data_ptr()


def copied(path, folder, *, config=None, tensors=None):
    """The target at `path` again, with entries of its config.json and its tensors changed."""
    shutil.copytree(path, folder)
    if config:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    if tensors is not None:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_target_whose_files_lack_tensors_is_refused(small_target, tmp_path):
    path = small_target()
    whole = load_file(path / "model.safetensors")
    some = {name: tensor for name, tensor in whole.items() if "layers.1.mlp" not in name}
    with pytest.raises(TrainerError, match=r"lack model\.layers\.1\.mlp\.\S+, .* \(3 tensors in all\)"):
        load(copied(path, tmp_path / "some", tensors=some))
    headless = {name: tensor for name, tensor in whole.items() if name != "lm_head.weight"}
    with pytest.raises(TrainerError, match=r"lack lm_head\.weight"):
        load(copied(path, tmp_path / "headless", tensors=headless))
    with pytest.raises(TrainerError, match=r"lack model\.layers\.4"):
        load(copied(path, tmp_path / "deep", config={"num_hidden_layers": 5, "layer_types": None}))


def test_damaged_files_of_a_target_are_named_in_a_sentence(small_target, tmp_path):
    folder = copied(small_target(), tmp_path / "cut")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    odd = copied(small_target(), tmp_path / "odd", config={"hidden_size": "wide"})
    for path in (folder, odd):
        with pytest.raises(TrainerError, match="not a loadable causal LM") as error:
            load(path)
        assert "\n" not in str(error.value)


def test_a_target_that_scales_caps_or_shifts_its_logits_is_refused(tmp_path):
    def of(family, **options):
        torch.manual_seed(0)
        kind, model = (getattr(transformers, f"{family}{part}") for part in ("Config", "ForCausalLM"))
        sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
        model(kind(**sizes, **heads, **options)).save_pretrained(tmp_path / family)
        return tmp_path / family

    load(of("Granite"))
    for path in (of("Granite", logits_scaling=8.0), of("Cohere", pad_token_id=0, logit_scale=0.25)):
        with pytest.raises(TrainerError, match="does more to its logits"):
            load(path)
    unlike = of("Starcoder2")
    with pytest.raises(TrainerError, match="no rms_norm_eps"):
        shape_of(DrafterConfig(mask_token=3, target_layers=(1, 2)), load(unlike).config)


def test_a_gpu_that_is_not_there_is_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    target, data = TargetConfig(path=Path()), DataConfig(paths=())
    config = Config(name="a", target=target, data=data, drafter=DrafterConfig(mask_token=1), steps=1, device="cuda:2")
    with pytest.raises(TrainerError, match="device cuda:2: there are 2 CUDA devices here"):
        choose_device(config)


def test_layers_that_are_spread_over_too_few_are_refused():
    shallow = transformers.Qwen3Config(num_hidden_layers=3)
    with pytest.raises(TrainerError, match="too few to spread 2 features over"):  # they would be 1 and 0
        captured_layers(DrafterConfig(mask_token=1, features=2), shallow)
