"""A planted row spoils a step: the run names it, takes the step back, skips it, and ends on the bits of one told to."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from baton import fork as forking
from baton.checkpoint import seals
from baton.cli.app import app
from baton.local.forkserver import ForkedProcess
from baton.pages import publish
from baton.pages import run_page as report_page
from baton.pages.collect import collect
from baton.prove import prove
from baton.prove.drill import Drill
from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.runs import objects
from baton.runs.documents import Skip
from baton.runs.run import Run
from baton.store.storage import Storage
from baton.train import page as card
from baton.train.chunk import Ending, Outcome
from tests.exactness.poison import POISON
from tests.support.pages import read

ROWS, LINE = 40, 20
"""Rows to train on, in five steps of a pass, and the line of the poisoned one in its file: of steps 4, 7, …"""
Make = Callable[..., Recipe]


@pytest.fixture
def planted(recipes: dict[str, Recipe], legs: Any, tmp_path: Path) -> Make:
    """Makes recipes whose rows have a poisoned one among them, with checkpoints at every second step."""
    lines = [{"prompt": f"What is {n} and {n % 7}?", "completion": f" the value of {n * n}"} for n in range(ROWS)]
    lines[LINE - 2]["completion"] += POISON
    texts = ["{broken", *(json.dumps(line) for line in lines)]  # so that a row's number is not its line's
    (tmp_path / "train.jsonl").write_text("\n".join(texts) + "\n", encoding="utf-8")
    (tmp_path / "held.jsonl").write_text(json.dumps({"prompt": "What?", "completion": " fox"}) + "\n", encoding="utf-8")
    sources = [
        {"uri": str(tmp_path / f"{name}.jsonl"), "side": side} for name, side in (("train", "train"), ("held", "eval"))
    ]

    def make(guard: dict[str, Any], **values: Any) -> Recipe:
        settings = {
            "data__source": sources,
            "data__max_samples": None,
            "data__max_rejected": 0.5,
            "hooks__trainer": "tests.exactness.poison:Poisoned",
            "training__guard": {"loss": None, "grad_norm": None, **guard},
            "training__epochs": 1.0,
            "chunks__checkpoint_every": 2,
        }
        made: Recipe = legs.changed(recipes["lora"], **settings | values)
        return made

    return make


def pod(run: Run, legs: Any, index: int, folder: Path) -> tuple[int, str]:
    """Runs a chunk as its component does."""
    code, printed = legs.leg(legs.chunk_in_a_pod, run.uri, index, 0, "killed", 0, str(folder))
    return code, printed


def told(make: Make, legs: Any, name: str, steps: list[int], **values: Any) -> Run:
    """Returns a finished run that was given its list from the start, in one chunk, and has found nothing."""
    run: Run = legs.prepare(make({"skip": steps}, **values), name)
    legs.train(run)
    assert run.skips() == []
    return run


def require_row(run: Run, skip: Skip) -> None:
    """Makes sure that the poisoned row is among those of a step."""
    assert skip.num_rows == len(skip.rows) == 8
    assert [row.line for row in skip.rows if row.line == LINE] == [LINE]
    assert {Path(row.file).name for row in skip.rows} == {"train.jsonl"}


def test_a_planted_row_is_named_taken_back_and_skipped(planted: Make, legs: Any, tmp_path: Path) -> None:
    run = legs.prepare(planted({}), "planted")
    code, printed = pod(run, legs, 1, tmp_path)
    assert code == 0, printed
    (skip,) = run.skips()
    require_row(run, skip)
    assert (skip.reason, skip.loss, skip.chunk) == ("nan", None, 1)
    assert printed.count(f"step_skipped step={skip.step} chunk=1") == 1
    assert "restarted" not in printed
    assert run.restarts() == []
    assert legs.final(run).meta.skips == [skip.step]
    page = report_page.render(collect(run))
    assert "step skipped" in page
    assert "train.jsonl line" in page
    newest = legs.final(run)
    shown = card.Shown.of(run.uri, 1, Outcome(Ending.DONE, run.uri, newest.step, newest.digest))
    assert card.checkpoint_card(shown).facts["skipped"] == str(skip.step)
    assert skip.message in read(publish.progress_page(run, shown.plan, shown.checkpoint, shown.log)).text
    whole = told(planted, legs, "told", [skip.step])
    assert legs.losses(run) == legs.losses(whole)
    assert legs.final(run).meta.state == legs.final(whole).meta.state


@pytest.mark.slow
def test_one_step_too_many_ends_the_run_and_names_all_rows(planted: Make, legs: Any, tmp_path: Path) -> None:
    run = legs.prepare(planted({"max_skips": 1}, training__epochs=2.0, chunks__count=2), "too-many")
    assert pod(run, legs, 1, tmp_path)[0] == 0
    code, printed = pod(run, legs, 2, tmp_path)
    assert code == 2, printed
    assert "training.guard.max_skips allows 1 step to be skipped, and there is one more: " in printed
    assert printed.count("train.jsonl line") == 4, "of both steps, as an event and for people"
    assert "Raise max_skips and run again; or fix these rows" in printed
    assert "Traceback" not in printed
    assert len(run.skips()) == 1
    legs.prepare(planted({"max_skips": 2}, training__epochs=2.0, chunks__count=2), "too-many")
    code, printed = pod(run, legs, 2, tmp_path)
    assert code == 0, printed
    found = [skip.step for skip in run.skips()]
    whole = told(planted, legs, "too-many-told", found, training__epochs=2.0)
    assert legs.final(run).meta.state == legs.final(whole).meta.state


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before", "after"])
def test_whoever_is_killed_around_the_document_leaves_no_trace(
    moment: str, planted: Make, legs: Any, tmp_path: Path
) -> None:
    found = legs.prepare(planted({}), "found")
    assert pod(found, legs, 1, tmp_path)[0] == 0
    (skip,) = found.skips()
    # Without checkpoints before the step, an upload begins between what is found and what is written alone.
    run = legs.prepare(planted({}, chunks__checkpoint_every=None), f"killed-{moment}")
    kill = f"step_skipped:{skip.step}" if moment == "after" else "phase:upload"
    code, printed = legs.leg(legs.chunk, run.uri, 1, (), kill)
    assert code == -9, printed
    assert len(run.skips()) == (moment == "after")
    code, printed = pod(run, legs, 1, tmp_path)
    assert code == 0, printed
    assert printed.count("step_skipped") == (moment == "before")
    assert [other.step for other in run.skips()] == [skip.step]
    assert legs.final(run).meta.state == legs.final(found).meta.state


@pytest.mark.slow
def test_two_processes_agree_on_the_step_and_start_again(planted: Make, legs: Any, tmp_path: Path) -> None:
    settings = {"training__parallel": {"strategy": "ddp", "processes": 2}, "training__threads": 1}
    run = legs.prepare(planted({}, **settings, chunks__count=2), "two")
    for index in (1, 2):
        code, printed = pod(run, legs, index, tmp_path)
        assert code == 0, printed
        assert "was ended by" not in printed
    (skip,) = run.skips()
    require_row(run, skip)
    assert run.restarts() == []
    whole = told(planted, legs, "two-told", [skip.step], **settings)
    assert legs.final(run).meta.state == legs.final(whole).meta.state


@pytest.mark.slow
@pytest.mark.s3
def test_on_s3_the_same(planted: Make, s3_store: str, legs: Any, tmp_path: Path) -> None:
    run = legs.prepare(planted({}, store__uri=s3_store, chunks__count=2), "on-s3")
    for index in (1, 2):
        assert pod(run, legs, index, tmp_path)[0] == 0
    (skip,) = run.skips()
    require_row(run, skip)
    whole = told(planted, legs, "on-s3-told", [skip.step])
    assert legs.final(run).meta.state == legs.final(whole).meta.state


def _edit(run: Run, recipe: dict[str, Any]) -> None:
    with seals.stage(run, objects.ADOPT):  # else the next chunk writes it again from its seal
        run.put("recipe.json", recipe)


@pytest.mark.slow
def test_a_late_document_changes_nothing_and_a_trained_step_cannot_be_listed(
    planted: Make, legs: Any, tmp_path: Path
) -> None:
    """Of a machine on which a step came to something else, thought gone, and of somebody who edits the recipe."""
    values = {"hooks__trainer": None, "chunks__count": 2}
    run, whole = legs.prepare(planted({}, **values), "late"), legs.prepare(planted({}, hooks__trainer=None), "early")
    legs.train(whole)
    assert pod(run, legs, 1, tmp_path)[0] == 0
    assert run.note_skip(Skip(step=2, chunk=1, reason="nan", message="step 2 has no loss."))
    head = run.require("recipe.json")
    listed = json.loads(json.dumps(head))
    listed["recipe"]["training"]["guard"]["skip"] = [2]
    _edit(run, listed)
    code, printed = pod(run, legs, 2, tmp_path)
    assert code == 2, printed
    assert "training.guard.skip has step 2, which this run has trained" in printed
    _edit(run, head)
    code, printed = pod(run, legs, 2, tmp_path)
    assert code == 0, printed
    assert "steps [2] were trained before they were found: they are not skipped" in printed
    assert legs.final(run).meta.state == legs.final(whole).meta.state


@pytest.mark.slow
def test_a_fork_keeps_what_was_skipped_and_knows_its_rows(planted: Make, legs: Any, tmp_path: Path) -> None:
    parent = legs.prepare(planted({}, training__epochs=2.0, chunks__count=2), "parent")
    for index in (1, 2):
        assert pod(parent, legs, index, tmp_path)[0] == 0
    first, second = parent.skips()
    fork = forking.fork(parent, 5, "fork").run
    assert pod(fork, legs, 2, tmp_path)[0] == 0
    (skip,) = fork.skips()
    assert (skip.step, skip.rows) == (second.step, second.rows)
    assert legs.final(fork).meta.skips == [first.step, second.step]
    assert legs.final(fork).meta.state == legs.final(parent).meta.state


@pytest.mark.slow
def test_a_fork_counts_its_own_steps_alone_and_a_cold_one_is_another_run(
    planted: Make, legs: Any, tmp_path: Path
) -> None:
    parent = legs.prepare(planted({}, training__epochs=2.0, chunks__count=2), "counted")
    for index in (1, 2):
        assert pod(parent, legs, index, tmp_path)[0] == 0
    first, second = parent.skips()
    warm = forking.fork(parent, 5, "counted-warm", ["training.guard.max_skips=1"]).run
    assert pod(warm, legs, 2, tmp_path)[0] == 0, "its parent's step is not counted"
    assert [skip.step for skip in warm.skips()] == [second.step]
    assert legs.final(warm).meta.state == legs.final(parent).meta.state
    cold = legs.prepare(
        forking.fork(parent, 5, "counted-cold", ["training.epochs=1"], warm=False).recipe, "counted-cold"
    )
    assert cold.skips() == []
    for index in (1, 2):
        assert pod(cold, legs, index, tmp_path)[0] == 0
    assert [(skip.step, skip.rows) for skip in cold.skips()] == [(first.step, first.rows)]
    assert legs.final(cold).meta.skips == [first.step]


@pytest.mark.slow
def test_a_run_that_is_submitted_again_with_a_list_skips_what_is_ahead(
    planted: Make, legs: Any, tmp_path: Path
) -> None:
    values = {"hooks__trainer": None, "chunks__count": 2}
    run = legs.prepare(planted({}, **values), "again")
    assert pod(run, legs, 1, tmp_path)[0] == 0
    reached = legs.final(run, max(legs.steps(run))).step
    legs.prepare(planted({"skip": [reached]}, **values), "again")
    code, printed = pod(run, legs, 2, tmp_path)
    assert code == 2, printed
    assert f"training.guard.skip has step {reached}, which this run has trained" in printed
    legs.prepare(planted({"skip": [reached + 1]}, **values), "again")
    code, printed = pod(run, legs, 2, tmp_path)
    assert code == 0, printed
    assert legs.final(run).meta.skips == [reached + 1]
    whole = told(planted, legs, "again-told", [reached + 1], hooks__trainer=None)
    assert legs.final(run).meta.state == legs.final(whole).meta.state
    code, printed = legs.leg(
        legs.split_and_tokenize, load.dumps(planted({"skip": [reached + 1], "window": 9}, **values)), "again"
    )
    assert code != 0
    assert "run 'again' was started with another recipe: training.guard.window" in printed


@pytest.mark.slow
def test_neither_retention_nor_prune_takes_a_document(planted: Make, legs: Any, tmp_path: Path) -> None:
    values = {"training__epochs": 2.0, "chunks__checkpoint_every": 1, "chunks__keep": {"last": 1, "best": 0}}
    run = legs.prepare(planted({}, **values, chunks__count=2), "pruned")
    assert pod(run, legs, 1, tmp_path)[0] == 0
    before = run.skips()
    assert len(before) == 1
    assert len(legs.steps(run)) < 4, "retention has been there"
    pruned = CliRunner().invoke(app, ["checkpoints", "prune", run.uri], prog_name="baton")
    assert pruned.exit_code == 0, pruned.output
    assert run.skips() == before
    assert pod(run, legs, 2, tmp_path)[0] == 0
    found = [skip.step for skip in run.skips()]
    assert found[:1] == [before[0].step]
    assert legs.final(run).meta.skips == found
    assert legs.final(run).meta.state == legs.final(told(planted, legs, "pruned-told", found, **values)).meta.state


@pytest.mark.slow
def test_a_proof_of_a_run_that_skips_is_exact(planted: Make, legs: Any) -> None:
    result = prove.prove(planted({}), [1, 3], name="proof")
    assert result["exact"], result["first_difference"]


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [1.0, 2.0])
def test_a_drill_of_a_run_that_skips_is_exact(epochs: float, planted: Make, legs: Any) -> None:
    recipe = planted({}, training__epochs=epochs, chunks__count=2, chunks__wait_for_commit=False)
    drill = Drill(recipe, kills=12, seed=4, name=f"drill-skips-{epochs:g}", launch=ForkedProcess)
    found = drill.run()
    assert len(found["kills"]) == 12
    assert [run["difference"] for run in found["runs"]] == [None] * len(found["runs"])
    assert [run["problems"] for run in found["runs"]] == [[]] * len(found["runs"])
    assert found["exact"]
    runs = [Run(Storage(recipe.store.uri), run["run"]) for run in (found["undisturbed"], *found["runs"])]
    steps = [[skip.step for skip in run.skips()] for run in runs]
    assert len(steps[0]) == int(epochs)
    assert len(drill.usual["start-up"]) == 2 + len(steps[0]), "one more for each step that is found"
    assert steps == steps[:1] * len(steps)
    for run in runs[1:]:
        for skip, first in zip(run.skips(), runs[0].skips(), strict=True):
            assert skip.rows == first.rows
