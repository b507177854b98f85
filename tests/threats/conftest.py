"""What tests of threats share: a tiny base model."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a tiny Llama with random weights and a tokenizer."""
    from tests.unit import tiny

    return tiny.make_base(Path(tmp_path_factory.mktemp("tiny"), "base"))
