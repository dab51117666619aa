"""Environments: which wheels a place needs, where they come from, and how they are built there."""
