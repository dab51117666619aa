from __future__ import annotations

import pytest

from orchestrator.errors import UsageError
from orchestrator.secrets import redacted, values


def test_values_come_from_this_environment(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "s3cret")
    assert values(["WANDB_API_KEY"]) == {"WANDB_API_KEY": "s3cret"}


def test_every_missing_one_is_named(monkeypatch):
    monkeypatch.delenv("ONE_KEY", raising=False)
    monkeypatch.setenv("TWO_KEY", "")
    with pytest.raises(UsageError, match="secrets ONE_KEY, TWO_KEY, which are not set"):
        values(["ONE_KEY", "TWO_KEY"])


def test_longer_values_are_redacted_before_what_they_contain():
    assert redacted("abcd abcdef", {"A": "abcd", "B": "abcdef"}) == "<A> <B>"
    assert redacted("x marks", {"A": "x"}) == "x marks"
