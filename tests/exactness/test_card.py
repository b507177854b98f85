"""What Kubeflow shows of a chunk that has trained."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from baton.checkpoint.store import CheckpointStore
from baton.recipe.recipe import Recipe
from baton.runs.run import Run
from baton.train import page as card
from baton.train.chunk import Ending, Outcome


@pytest.fixture(scope="module")
def trained(recipes: dict[str, Recipe], legs: Any) -> Run:
    """A run of which the first chunk is done."""
    run: Run = legs.prepare(legs.changed(recipes["lora"], chunks__count=3), "on-a-card")
    code, printed = legs.leg(legs.chunk, run.uri, 1)
    assert code == 0, printed
    return run


def _shown(run: Run) -> card.Shown:
    store = CheckpointStore(run)
    newest = store.newest()
    assert newest
    outcome = Outcome(Ending.DONE, store.uri(newest), newest.step, newest.digest)
    return card.Shown.of(run.uri, 1, outcome)


def test_the_card_says_where_the_checkpoint_is_and_how_it_went(trained: Run) -> None:
    shown = _shown(trained)
    assert shown.checkpoint
    facts = card.checkpoint_card(shown).facts
    (attempt,) = trained.attempts(1)
    assert facts["address"] == CheckpointStore(trained).uri(shown.checkpoint)
    assert (facts["step"], facts["digest"]) == (attempt.to_step, shown.checkpoint.digest)
    assert facts["loss"] == round(shown.series("loss")[-1][1], 6)
    plan = trained.plan()
    rate = attempt.to_step * attempt.tokens / plan.steps_per_epoch / attempt.seconds["train"]
    assert facts["tokens_per_second"] == round(rate, 6)


def test_the_page_draws_every_logged_loss(trained: Run) -> None:
    shown = _shown(trained)
    page = card.progress_page(shown)
    (line,) = re.findall(r'<polyline points="([^"]+)"', page)
    assert len(line.split()) == len(shown.series("loss"))
    assert page.count("<circle") == len(shown.series("eval_loss"))
    assert "<script" not in page


def test_what_the_store_does_not_tell_fails_no_chunk_that_is_done(trained: Run, tmp_path: Path) -> None:
    shutil.copytree(trained.uri, tmp_path / "runs/on-a-card")
    trained = Run.open(f"{tmp_path}/runs/on-a-card")
    store = CheckpointStore(trained)
    newest = store.newest()
    assert newest
    trained.storage.write(f"{store.prefix(newest.step)}/manifest.json", b"{")
    shown = card.Shown.of(trained.uri, 1, Outcome(Ending.DONE, store.uri(newest), newest.step, newest.digest))
    assert shown.checkpoint is None
    assert card.checkpoint_card(shown).facts == {}
    assert "Nothing has been logged yet" in card.progress_page(shown)
