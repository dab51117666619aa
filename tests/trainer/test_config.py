"""Configuration: every mistake at once, each with its line."""

import subprocess
import sys
from pathlib import Path

import pytest

from trainer.config import ConfigError, load

DEMO = Path(__file__).parents[2] / "trainer" / "configs" / "demo.yaml"


def test_the_demo_is_read():
    config = load(DEMO)
    assert config.name == "demo" and config.target.path.name == "target" and config.data.path.is_file()


def test_overrides():
    config = load(DEMO, ["seed=3", "optimizer.muon_rate=2e-3", "drafter.target_layers=[0, 2]"])
    assert (config.seed, config.optimizer.muon_rate, config.drafter.target_layers) == (3, 2e-3, (0, 2))
    with pytest.raises(ConfigError) as error:
        load(DEMO, ["optimizer.muon_rat=1", "seed=-1", "steps"])
    text = str(error.value)
    assert "did you mean `muon_rate`" in text and "at least 0" in text and "KEY=VALUE" in text


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


def test_files_and_the_target_are_checked(tmp_path):
    text = DEMO.read_text().replace("../assets", str(DEMO.parents[1] / "assets"))
    path = tmp_path / "c.yaml"
    path.write_text(text.replace("rows.safetensors", "none.safetensors"))
    with pytest.raises(ConfigError, match=r"c.yaml:\d+: `data.path` is not a file"):
        load(path)
    path.write_text(text)
    with pytest.raises(ConfigError, match="beyond the target's last layer, 5"):
        load(path, ["drafter.target_layers=[6]"])
    with pytest.raises(ConfigError, match="vocabulary of 1024"):
        load(path, ["drafter.mask_token=1024"])


@pytest.mark.parametrize("text", ["a: [", "- 1\n", "", "\xff"])
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


def test_help_does_not_import_torch():
    code = "import sys; from trainer.cli import parser; parser().format_help(); sys.exit('torch' in sys.modules)"
    assert run("-c", code).returncode == 0
    assert "evaluate" in run("-m", "trainer", "--help").stdout
