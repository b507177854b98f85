"""Texts of a recipe that an import writes are read as what they were."""

from __future__ import annotations

import pytest
import yaml

from baton.importers import draft as drafts
from baton.recipe import yaml_text

TEXTS = (
    "1e5",
    "a\x85b",
    "a\nb\x85c",
    "\n",
    "a\n\n",
    "  a\nb",
    "a \nb",
    "\ta\n",
    "# a\nb",
    "null",
    "é\u2028",
    "- a: b",
    "",
)


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_that_is_written_is_read_as_one(text: str) -> None:
    document = {"a": text, "b": [text, {"c": text}]}
    written = yaml.dump(document, Dumper=drafts._Dumper, sort_keys=False, allow_unicode=True, width=200)
    assert yaml_text.load(written) == document
