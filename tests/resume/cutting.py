"""Tokenizing in segments so small that a test's rows fill many files."""

from __future__ import annotations

LEAST = 400
"""Bytes of text in a segment."""


def split_and_tokenize(recipe_json: str, name: str) -> None:
    """Runs data split and tokenize."""
    from baton.components.data_split.split import split_data
    from baton.components.shared.recipe import recipe_file
    from baton.components.tokenize import segments
    from baton.components.tokenize.tokenization import tokenize_run

    segments.LEAST = LEAST
    tokenize_run(split_data(recipe_file.loads(recipe_json), name)["run_uri"])
