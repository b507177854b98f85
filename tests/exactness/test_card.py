"""What Kubeflow shows of a chunk that has trained."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from baton import events
from baton.checkpoint.store import CheckpointStore
from baton.pages import publish
from baton.pages.publish import LivePage
from baton.recipe.recipe import Recipe
from baton.runs.outcomes import RunFailure
from baton.runs.run import Run
from baton.train import page as card
from baton.train.chunk import Ending, Outcome
from tests.support.pages import Page, read


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


def _page(shown: card.Shown) -> Page:
    return read(publish.progress_page(shown.run, shown.plan, shown.checkpoint, shown.log))


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


def test_the_page_of_a_chunk_is_the_runs_so_far(trained: Run) -> None:
    shown = _shown(trained)
    page = _page(shown)
    assert [x for x, _ in page.curves("loss")["training"]] == [step for step, _ in shown.series("loss")]
    assert f"Training: step {shown.outcome.step} of {trained.plan().num_steps}, chunk 2 of 3; loss" in page.text
    publish.write_progress(trained.uri)
    report = read(Path(trained.uri, "report.html").read_text())
    assert report.curves("loss") == page.curves("loss")


def test_the_page_of_a_failed_run_stays(trained: Run, tmp_path: Path) -> None:
    shutil.copytree(trained.uri, tmp_path / "runs/failed")
    run = Run.open(f"{tmp_path}/runs/failed")
    failure = RunFailure(stage="train chunk 2", message="no room", exit_code=1, at="2026-01-01T00:00:00+00:00")
    publish.publish_failure(run, failure)
    page = Path(run.uri, "report.html")
    publish.write_progress(run.uri)  # as the stage of the first chunk's checkpoint, which is late
    assert "no room" in read(page.read_text()).text
    Path(run.uri, RunFailure.NAME).unlink()
    publish.write_progress(run.uri)
    assert "no room" not in read(page.read_text()).text


def test_a_run_that_was_interrupted_says_so(trained: Run) -> None:
    LivePage(trained.uri).write(is_stopped=True)
    assert "Interrupted: step" in read(Path(trained.uri, "report.html").read_text()).text


def test_each_checkpoint_brings_the_page_up_to_date(trained: Run, tmp_path: Path) -> None:
    shutil.copytree(trained.uri, tmp_path / "runs/live")
    page = tmp_path / "runs/live/report.html"
    page.unlink(missing_ok=True)
    live = LivePage(trained.uri)  # of a pipeline whose phase has a run of its own
    event = events.CheckpointCommitted(
        step=1, uri=f"{page.parent}/checkpoints/step-00000001", digest="", bytes=0, seconds={}
    )
    live.heard(event)
    assert "Reload the page after the next checkpoint" in read(page.read_text()).text
    page.unlink()
    live.heard(event)
    assert not page.exists(), "not within moments: training has the time"


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
    assert "Training: step" in _page(shown).text
