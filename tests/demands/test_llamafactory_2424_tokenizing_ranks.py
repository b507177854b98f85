"""Large datasets cannot be tokenized with several GPUs: waiting ranks time out after half an hour.

Issue: https://github.com/hiyouga/LLaMA-Factory/issues/2424
Upstream: fixture. LLaMA-Factory's order, with the Transformers method that it calls: rank 0 tokenizes inside
    `main_process_first`, rank 1 waits in a collective. The timeout is 4 seconds here.
Baton: tokenizes in a stage without ranks. A chunk in two processes, in which tokenizing is an error, trains to its end.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.recipe.recipe import Recipe
from tests.demands import chunks, upstream


@pytest.mark.slow
def test_upstream_gives_up_while_the_first_tokenizes(tmp_path: Path, legs: Any) -> None:
    code, printed = legs.leg(upstream.ranks_that_wait, str(tmp_path))
    assert code == 0, printed
    told = upstream.read(printed)
    assert told["rank"] == 1
    assert "imed out" in told["error"], told


@pytest.mark.slow
def test_baton_tokenizes_before_there_are_ranks(recipes: dict[str, Recipe], legs: Any) -> None:
    settings = {"training__parallel": {"processes": 2, "hang_after": "60s"}, "training__threads": 1}
    run = legs.prepare(legs.changed(recipes["scratch"], **settings), "tokenized-before")
    code, printed = legs.leg(chunks.without_a_tokenizer, run.uri, 1)
    assert code == 0, printed
    assert legs.final(run).meta.fingerprint.world_size == 2
    assert len(legs.losses(run)) == run.plan().num_steps
