"""Tokenizing in segments so small that a test's rows fill many files."""

from __future__ import annotations

LEAST = 400
"""Bytes of text in a segment."""


def split_and_tokenize(recipe_json: str, name: str) -> None:
    """Runs data split and tokenize."""
    from baton.data import tokenize
    from baton.data.split import split_data
    from baton.data.tokenize import tokenize_run
    from baton.recipe import load

    tokenize.LEAST = LEAST
    tokenize_run(split_data(load.loads(recipe_json), name)["run_uri"])
