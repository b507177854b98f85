"""`make bench`: Baton's checkpoint store and chunks, measured against what people use without it."""

from pathlib import Path

OPPONENTS = Path(__file__).parents[1] / "build" / "opponents"
"""Packages that are measured against, installed by `make bench` for the processes that need them."""
