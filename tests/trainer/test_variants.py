"""Of several drafters, a checkpoint belongs to one."""

import dataclasses
from pathlib import Path

import pytest

from trainer.checkpoint import variant_of
from trainer.config import Variant, load
from trainer.errors import TrainerError

DEMO = Path(__file__).parents[2] / "trainer" / "configs" / "demo.yaml"


def test_a_checkpoint_is_of_the_drafter_in_whose_folder_it_lies(tmp_path):
    one = load(DEMO)
    other = load(DEMO, ["drafter.block_size=8"])
    several = dataclasses.replace(
        one, variants=tuple(Variant(name=name, ranks=1, config=each) for name, each in (("b3", one), ("b8", other)))
    )
    assert variant_of(tmp_path / "drafters" / "b8" / "checkpoints" / "step-000003", several) is other
    assert variant_of(tmp_path / "step-000003", one) is one
    with pytest.raises(TrainerError, match="which of the drafters b3, b8 is this of"):
        variant_of(tmp_path / "step-000003", several)
