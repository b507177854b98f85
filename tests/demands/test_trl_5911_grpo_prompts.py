"""A resumed GRPO run requests all its earlier prompts again, and generates for them in vain.

Issue: https://github.com/huggingface/trl/pull/5911
Upstream: fixed in TRL: `AsyncGRPOTrainer` turns off the loop that draws and drops finished batches, and saves its
    position among the prompts (1.16). The loop is Transformers' and still exists, shown on a live source of prompts.
Baton: a chunk that resumes inside a round trains on the saved completions, and generates only for later prompts, to the
    same bits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.demands import chunks, upstream
from tests.exactness.matrix import WRITES, Cell

ROUNDS = {"training": {"grpo": {**WRITES, "num_iterations": 2}}}


def test_upstream_draws_what_it_has_trained_on_again(tmp_path: Path, legs: Any) -> None:
    code, printed = legs.leg(upstream.pulled_when_resumed, str(tmp_path))
    assert code == 0, printed
    told = upstream.read(printed)
    assert told["resumed"] >= upstream.STEPS * upstream.BATCH, "for three steps that are left"
    assert told["resumed"] == told["whole"]


def test_upstream_has_switched_it_off_where_a_model_writes() -> None:
    from trl.experimental.async_grpo import AsyncGRPOConfig

    field = AsyncGRPOConfig.__dataclass_fields__["ignore_data_skip"]
    assert field.default is True


@pytest.mark.slow
def test_baton_asks_for_the_prompts_that_come_next(grid: Any, again: Any, tmp_path: Path, legs: Any) -> None:
    recipe = grid(Cell("grpo", "full", "two iterations", ROUNDS, steps=8))
    run = legs.prepare(legs.changed(recipe, chunks__checkpoint_every=5), "prompted")
    noted = tmp_path / chunks.PROMPTS
    code, printed = legs.leg(chunks.noting_prompts, run.uri, 1, str(tmp_path))
    assert code == 0, printed
    whole = [json.loads(line) for line in noted.read_text().splitlines()]
    noted.unlink()
    before, after, _ = again(run, 5, chunks.noting_prompts, str(tmp_path))
    assert after == before
    rounds = [json.loads(line) for line in noted.read_text().splitlines()]
    assert len(whole) == 4
    assert rounds == whole[3:], "the round of steps 5 and 6 is in the checkpoint"
