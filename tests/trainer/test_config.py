"""Configuration: every mistake at once, each with its line."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trainer import cli
from trainer.config import ConfigError, load

DEMO = Path(__file__).parents[2] / "trainer" / "configs" / "demo.yaml"
MODEL = {"num_hidden_layers": 6, "vocab_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2}
LEAST = """\
name: least
steps: 10
target: {path: model}
data: {paths: rows.jsonl}
drafter:
  mask_token: 1
"""


@pytest.fixture
def least(tmp_path) -> Path:
    """The fewest settings there can be, and the files that they name."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "rows.jsonl").write_text("")
    path = tmp_path / "least.yaml"
    path.write_text(LEAST)
    return path


def problems(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load(path, list(overrides))
    return str(error.value).splitlines()


def test_the_demo_is_read():
    config = load(DEMO)
    assert config.name == "demo" and config.target.path.name == "target"
    assert len(config.data.paths) == 1 and config.data.paths[0].is_file()


def test_few_settings_suffice_and_the_published_ones_are_the_defaults(least):
    config = load(least)
    assert config.data.paths == (least.parent / "rows.jsonl",) and config.target.path == least.parent / "model"
    assert (config.drafter.layers, config.drafter.block_size, config.drafter.features) == (5, 16, 5)
    assert (config.loss.anchors_per_row, config.loss.gamma, config.loss.cross_entropy) == (512, 7.0, 1.0)
    assert config.evaluate.prompts is config.drafter.initial is None and config.attention == "flex"


def test_overrides(least):
    config = load(DEMO, ["seed=3", "optimizer.muon_rate=2e-3", "drafter.target_layers=[0, 2]"])
    assert (config.seed, config.optimizer.muon_rate, config.drafter.target_layers) == (3, 2e-3, (0, 2))
    found = problems(DEMO, "optimizer.muon_rat=1", "seed=-1", "steps", "name.x=1", "loss=3", "drafter.layers=[")
    text = "\n".join(found)
    assert len(found) == 6 and all(line.startswith("--set: ") for line in found)
    assert "did you mean `muon_rate`" in text and "at least 0" in text and "steps: expected KEY=VALUE" in text
    assert "name has no settings below it" in text and "loss: expected settings below it" in text
    assert "drafter.layers=[: the value is not YAML" in text


def test_an_override_reaches_into_mappings_and_makes_them(least):
    config = load(least, ["report.tensorboard=true", "data.template={enable_thinking: false}", "loss.kl=1"])
    assert config.report.tensorboard is True and config.loss.kl == 1
    assert config.data.template == {"enable_thinking": False} and config.data.paths == (least.parent / "rows.jsonl",)
    config = load(least, ["data.template={a: {b: [1, x]}}", "data.template.c=true"])
    assert config.data.template == {"a": {"b": [1, "x"]}, "c": True}
    assert load(least, ["seed=1", "seed=2"]).seed == 2  # the last one counts


@pytest.mark.parametrize(
    ("text", "value"),
    [("true", True), ("True", True), ("off", False), ("no", False), ("1", None), ("'true'", None), ("[]", None)],
)
def test_true_and_false(least, text, value):
    if value is not None:
        assert load(least, [f"report.tensorboard={text}"]).report.tensorboard is value
    else:
        (line,) = problems(least, f"report.tensorboard={text}")
        assert "`report.tensorboard` must be true or false" in line


def test_lists_choices_and_nothing(least):
    """One path may stand for a list of one; null for no path; layers are whole numbers, each within its bounds."""
    other = least.parent / "other.jsonl"
    other.write_text("")
    assert load(least, [f"data.paths=[rows.jsonl, {other}]"]).data.paths == (least.parent / "rows.jsonl", other)
    assert load(least, ["data.paths='*.jsonl'"]).data.paths == (least.parent / "*.jsonl",)
    assert load(least, ["drafter.initial=null"]).drafter.initial is None
    assert load(least, ["drafter.initial=model"]).drafter.initial == least.parent / "model"
    for override, said in {
        "data.paths=[]": "`data.paths` must be a list of paths",
        "data.paths={a: 1}": "`data.paths` must be a list of paths",
        "data.paths=[[rows.jsonl]]": "`data.paths` must be a path",
        "data.paths=null": "`data.paths` must be a path",
        "drafter.target_layers=3": "`drafter.target_layers` must be a list of whole numbers",
        "drafter.target_layers=[1, x]": "`drafter.target_layers` must be a whole number, not `x`",
        "drafter.target_layers=[1, -1]": "`drafter.target_layers` must be at least 0, not -1",
        "data.template=[1]": "`data.template` must be a mapping",
        "optimizer.kind=sgd": "`optimizer.kind` must be one of muon, adamw, not `sgd`",
        "report.wandb=yes": "`report.wandb` must be one of off, offline, online, not `yes`",
        "loss.kl=nan": "`loss.kl` must be a finite number, not `nan`",
        "data.broken_share=1.5": "`data.broken_share` must be at most 1, not 1.5",
        "steps=1.0": "`steps` must be a whole number, not `1.0`",
        "steps=null": "`steps` must be a whole number",
    }.items():
        (line,) = problems(least, override)
        assert said in line, override


TOGETHER = {  # overrides of LEAST -> the setting that is called wrong, and what is said of it
    ("target.path=.",): ("target.path", "has no config.json"),
    ("data.paths=[rows.jsonl, none.jsonl]",): ("data.paths", "names no file: .*none.jsonl"),
    ("data.paths='*.txt'",): ("data.paths", r"names no file: .*\*.txt"),
    ("evaluate.prompts=none.json",): ("evaluate.prompts", "is not a file: .*none.json"),
    ("evaluate.every=5",): ("evaluate.every", "needs `evaluate.prompts`"),
    ("data.rows_per_step=6", "data.micro_batches=4"): ("data.rows_per_step", "must be a multiple of 4"),
    ("data.row_length=128", "drafter.block_size=129"): ("drafter.block_size", r"is larger than a row \(128 tokens\)"),
    ("topology.mode=split", "drafters=[{name: a}, {name: b, drafter: {target_layers: [0]}}]"): (
        "drafter.target_layers",
        "must be the same for all of `drafters`",
    ),
    ("topology.targets=5",): ("topology.mode", "is colocated, to which targets and drafters say nothing"),
    ("topology.mode=split", "topology.ranks=3"): ("topology.ranks", "is of colocated"),
    ("topology.mode=split", "topology.drafters=2", "drafters=[{name: a}, {name: b}]"): (
        "topology.drafters",
        "says nothing where `drafters` lists several",
    ),
    ("drafter.target_layers=[1, 2, 1]",): ("drafter.target_layers", "names a layer twice"),
    ("drafter.sliding_layers=[5]", "drafter.sliding_window=64"): (
        "drafter.sliding_layers",
        "the drafter's last layer, 4",
    ),
    ("drafter.sliding_layers=[1]",): ("drafter.sliding_layers", "needs `drafter.sliding_window`"),
    ("drafter.sliding_window=15",): ("drafter.sliding_window", "must be at least a block, 16"),
    ("loss.cross_entropy=0",): ("loss.cross_entropy", "there is nothing to learn"),
    ("loss.chunk=15",): ("loss.chunk", "must hold a block, 16 rows"),
    ("data.row_length=200",): ("data.row_length", "must be a multiple of 128 .* such as 256"),
    ("device=cpu",): ("device", "cpu has no backward of flex attention"),
    ("device=gpu",): ("device", "must be auto, cpu, cuda or cuda:N, not `gpu`"),
    ("device=cuda:x",): ("device", "must be auto, cpu, cuda or cuda:N"),
    ("drafter.heads=5",): ("drafter.kv_heads", "must divide the number of heads, 5"),
    ("drafter.kv_heads=3",): ("drafter.kv_heads", "must divide the number of heads, 8"),
    ("drafter.target_layers=[6]",): ("drafter.target_layers", "goes beyond the target's last layer, 5"),
    ("drafters=[{name: a}, {name: b}]",): ("topology.mode", "must be split"),
    ("drafter.target_layers=[3, 1]",): ("drafter.target_layers", "must ascend"),
    ("data.paths=/",): ("data.paths", "names no file: /"),
    ("data.paths='**.jsonl'",): ("data.paths", "names no file: .*"),
    ("optimizer.beta1=1",): ("optimizer.beta1", "must be less than 1"),
    ("optimizer.ema=1",): ("optimizer.ema", "must be less than 1"),
    ("drafter.mask_token=1024",): ("drafter.mask_token", "is outside the target's vocabulary of 1024"),
}


@pytest.mark.parametrize("overrides", TOGETHER, ids=" ".join)
def test_settings_that_do_not_go_together(least, overrides):
    name, said = TOGETHER[overrides]
    (line,) = problems(least, *overrides)
    assert re.search(rf": `{name}` .*{said}", line), line


@pytest.mark.parametrize("text", ["{}", "[", '{"num_hidden_layers": "many", "vocab_size": 3}', "[1]"])
def test_a_target_that_tells_too_little(least, text):
    (least.parent / "model" / "config.json").write_text(text)
    (line,) = problems(least)
    assert "`target.path` has a config.json without num_hidden_layers and vocab_size" in line


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers: 0"),
        ({"num_attention_heads": "many"}, "numbers of heads"),
        ({"num_key_value_heads": -1}, "numbers of heads"),
    ],
)
def test_a_target_of_impossible_numbers(least, numbers, said):
    path = least.parent / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **numbers}))
    (line,) = problems(least)
    assert "`target.path`" in line and said in line


def test_a_target_may_leave_the_number_of_its_key_value_heads_open(least):
    path = least.parent / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_key_value_heads": None}))
    load(least)


@pytest.mark.parametrize("name", ["..", "./a", "a/b", "''"])
def test_drafters_have_names_that_folders_can_have(least, name):
    (line,) = problems(least, "topology.mode=split", f"drafters=[{{name: a}}, {{name: {name}}}]")
    assert "cannot be a drafter's name" in line


@pytest.mark.parametrize("value", ["{a: !unknown 1}", "{[a]: 1}"])
def test_a_template_with_what_yaml_cannot_make_is_named(least, value):
    (line,) = problems(least, f"data.template={value}")
    assert "`data.template` cannot be read" in line


def test_a_seed_beyond_what_torch_takes_is_refused(least):
    (line,) = problems(least, f"seed={1 << 64}")
    assert "`seed` must be at most" in line


def test_what_goes_together(least):
    for overrides in (
        ["attention=dense", "device=cpu", "data.row_length=200"],
        ["device=cuda:1"],
        ["drafter.sliding_window=16", "drafter.sliding_layers=[0, 4]"],
        ["loss.cross_entropy=0", "loss.tv=1"],
        ["drafter.target_layers=[0, 5]", "drafter.heads=6", "drafter.kv_heads=3"],
    ):
        load(least, overrides)


def test_all_mistakes_come_at_once_with_their_lines(tmp_path):
    path = tmp_path / "broken.yaml"
    path.write_text(
        "name: x\n"
        "stepz: 10\n"
        "seed: many\n"
        "target: {path: nowhere}\n"
        "data: [1]\n"
        "drafter:\n"
        "  target_layers: [1, -3]\n"
        "  mask_token: 1\n"
        "  block_size: 1\n"
        "evaluate:\n"
        "  prompts: p.json\n"
        "  temperature: inf\n"
        "name: y\n"
    )
    with pytest.raises(ConfigError) as error:
        load(path)
    lines = {line.split(": ", 1)[0].rsplit(":", 1)[1]: line for line in str(error.value).splitlines()}
    assert set(lines) == {"1", "2", "3", "5", "7", "9", "12", "13"}
    assert "`stepz`: did you mean `steps`?" in lines["2"]
    assert "`steps` is missing" in lines["1"]
    assert "must be a whole number, not `many`" in lines["3"]
    assert "at least 0, not -3" in lines["7"] and "at least 2, not 1" in lines["9"]
    assert "finite" in lines["12"] and "set twice; first on line 1" in lines["13"]


def test_a_file_that_is_missing_has_its_line(tmp_path):
    text = DEMO.read_text().replace("../assets", str(DEMO.parents[1] / "assets"))
    path = tmp_path / "c.yaml"
    path.write_text(text.replace("rows.safetensors", "none.safetensors"))
    number = next(n for n, line in enumerate(path.read_text().splitlines(), 1) if "none.safetensors" in line)
    (line,) = problems(path)
    assert line.startswith(f"{path}:{number}: `data.paths` names no file: ")


@pytest.mark.parametrize("text", ["a: [", "- 1\n", "", "\xff", "name: \x00"])
def test_what_is_not_a_configuration(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"c\.yaml"):
        load(path)


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *arguments], cwd=DEMO.parents[2], capture_output=True, text=True, timeout=60, check=False
    )


def test_the_command_line_reports_without_a_traceback(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("name: x\nstepz: 1\n")
    result = run("-m", "trainer", "train", str(path))
    assert result.returncode == 2 and "did you mean `steps`" in result.stderr and "Traceback" not in result.stderr
    assert run("-m", "trainer", "train", str(tmp_path / "none.yaml")).returncode == 2
    assert run("-m", "trainer", "frobnicate").returncode == 2


def test_a_run_directory_that_cannot_be_made_is_told_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    result = subprocess.run(
        [sys.executable, "-m", "trainer", "train", str(DEMO)],
        capture_output=True,
        text=True,
        cwd=DEMO.parents[2],
        env={**os.environ, "ORCH_RUN_DIR": str(tmp_path / "file" / "run")},
    )
    assert result.returncode == 1 and "torch" not in result.stderr
    assert result.stderr.startswith("error: ") and "cannot be made" in result.stderr and result.stderr.count("\n") == 1


def test_half_a_character_of_the_data_can_be_printed(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="utf-8"))
    monkeypatch.setattr(cli, "run", lambda *_: print("a role \ud800") or 0)
    assert cli.main(["train", str(DEMO)]) == 0
    assert written.getvalue() == b"a role \\ud800\n"


def test_help_does_not_import_torch():
    code = "import sys; from trainer.cli import parser; parser().format_help(); sys.exit('torch' in sys.modules)"
    assert run("-c", code).returncode == 0
    assert "evaluate" in run("-m", "trainer", "--help").stdout


def test_a_section_of_null_is_as_good_as_left_out(least):
    assert load(least, ["evaluate=null", "loss=null"]) == load(least)
    (line,) = problems(least, "drafter=null")
    assert "`drafter.mask_token` is missing" in line
