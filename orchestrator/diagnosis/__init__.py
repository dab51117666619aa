"""Saying what went wrong with a run: the catalogue of causes (data), facts, and a pure function between them."""

from orchestrator.diagnosis.facts import Facts
from orchestrator.diagnosis.model import Cause, Evidence, Pattern, Verdict
from orchestrator.diagnosis.rules import diagnose

__all__ = ["Cause", "Evidence", "Facts", "Pattern", "Verdict", "diagnose"]
