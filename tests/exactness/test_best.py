"""Early stopping and the best checkpoint, across chunks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton.checkpoint.store import CheckpointStore
from baton.models import trained
from baton.recipe.recipe import Recipe
from baton.train.live import Sample, matches

RISING = {
    "training__learning_rate": 3.0,
    "training__lr_scheduler": "constant_with_warmup",
    "training__warmup_steps": 15,
    "evaluation__every": 2,
}
"""A learning rate that grows until the loss, which fell, leaps about."""


@pytest.mark.slow
def test_the_best_state_is_the_result_wherever_chunks_end(recipes: dict[str, Recipe], legs: Any) -> None:
    recipe = legs.changed(recipes["scratch"], export__checkpoint="best", chunks__keep={"last": 1, "best": 1}, **RISING)
    found = {}
    for count in (1, 4):
        run = legs.prepare(legs.changed(recipe, chunks__count=count), f"best-{count}")
        legs.train(run)
        best = trained.chosen_checkpoint(run)
        losses = CheckpointStore(run).evaluation_losses(legs.final(run))
        assert losses[best.step] == min(losses.values())
        assert best.step < 14, "the test wants a best step that is not the last evaluation"
        found[count] = best.step, best.meta.state
    assert found[1] == found[4]


@pytest.mark.parametrize("count", [2, 5, 15])
@pytest.mark.slow
def test_early_stopping_counts_across_chunks(count: int, recipes: dict[str, Recipe], legs: Any) -> None:
    stopping = {"patience": 2, "threshold": 0.0}
    recipe = legs.changed(recipes["scratch"], training__early_stopping=stopping, **RISING)
    whole, run = legs.prepare(recipe, "stopped-whole"), legs.prepare(recipe, f"stopped-{count}")
    legs.cut(run, sorted({-(-15 * k // count) for k in range(1, count + 1)}))
    for each in (whole, run):
        legs.train(each)
    last = trained.final_checkpoint(run)
    losses = [loss for _, loss in sorted(CheckpointStore(run).evaluation_losses(last).items())]
    assert last.meta.finished
    assert last.step < 15
    assert min(losses[-2:]) >= min(losses[:-2])  # two in a row without improvement, and not before
    assert (last.step, last.meta.state) == (step_of(whole), trained.final_checkpoint(whole).meta.state)
    outcomes = [attempt.outcome for attempt in run.attempts()]
    assert outcomes.count("finished") == 1
    assert (
        outcomes[outcomes.index("finished") + 1 :].count("already_done")
        == len(outcomes) - outcomes.index("finished") - 1
    )
    code, printed = legs.leg(legs.evaluate, run.uri)
    assert code == 0, printed


@pytest.mark.slow
def test_evaluations_by_epoch_are_those_of_one_run(recipes: dict[str, Recipe], legs: Any) -> None:
    """Chunks end within epochs and at steps that are evaluated; five steps an epoch, twice: 3, 5, 8, 10, 13, 15."""
    plateau = {"training__lr_scheduler": "reduce_lr_on_plateau", "training__warmup_steps": 0}
    options = {"training__lr_scheduler_options": {"patience": 0, "threshold": 9.0}}
    recipe = legs.changed(
        recipes["scratch"],
        evaluation__every=None,
        evaluation__per_epoch=2,
        chunks__checkpoints_per_epoch=1,
        chunks__keep={"last": 9},
        chunks__wait_for_commit=True,
        **plateau,
        **options,
    )
    ends = {}
    for name, targets in {"whole": [15], "parts": [2, 5, 8, 11, 15]}.items():
        run = legs.prepare(recipe, f"by-epoch-{name}")
        legs.cut(run, targets)
        legs.train(run)
        last = legs.final(run)
        assert sorted(CheckpointStore(run).evaluation_losses(last)) == [3, 5, 8, 10, 13, 15]
        assert set(legs.steps(run)) == {5, 10, 15, *targets}
        ends[name] = legs.losses(run), last.meta.state
    assert ends["parts"] == ends["whole"]

    # The schedule looks at evaluations, so the bits tell when there were any.
    other = legs.prepare(legs.changed(recipe, evaluation__per_epoch=1), "by-epoch-other")
    legs.train(other)
    assert legs.final(other).meta.state["weights"] != ends["whole"][1]["weights"]


@pytest.mark.slow
def test_a_chunk_for_each_epoch_ends_on_the_bits_of_one_run(
    recipes: dict[str, Recipe], undisturbed: dict[str, Any], legs: Any
) -> None:
    run = legs.prepare(legs.changed(recipes["scratch"], chunks__count="per-epoch"), "scratch-per-epoch")
    legs.train(run)
    assert run.plan().targets == (5, 10, 15)
    assert legs.losses(run) == legs.losses(undisturbed["scratch"])
    assert legs.final(run).meta.state == legs.final(undisturbed["scratch"]).meta.state


def step_of(run: Any) -> int:
    return trained.final_checkpoint(run).step


def test_a_run_that_comes_to_its_end_is_not_stopped_early(recipes: dict[str, Recipe], legs: Any) -> None:
    stopping = {"patience": 9}
    run = legs.prepare(
        legs.changed(recipes["scratch"], evaluation__every=5, training__early_stopping=stopping), "patient"
    )
    legs.train(run)
    assert [attempt.outcome for attempt in run.attempts()] == ["done"]
    assert not legs.final(run).meta.finished


def test_writing_in_between_leaves_no_trace(recipes: dict[str, Recipe], undisturbed: dict[str, Any], legs: Any) -> None:
    run = legs.prepare(legs.changed(recipes["scratch"], chunks__count=2, evaluation__write_every=3), "scratch-writing")
    legs.train(run)
    assert legs.final(run).meta.state == legs.final(undisturbed["scratch"]).meta.state
    written = run.require("samples/step-00000012.json")["samples"]
    assert len(written) == 2
    assert all(row["prompt"] and row["reference"] and row["written"] for row in written)


@pytest.mark.slow
def test_writing_in_between_samples_as_the_last_evaluation_does(
    recipes: dict[str, Recipe], undisturbed: dict[str, Any], legs: Any
) -> None:
    sampling = {"evaluation__write_every": 12, "evaluation__temperature": 1.5, "evaluation__top_p": 0.9}
    run = legs.prepare(legs.changed(recipes["scratch"], chunks__count=1, **sampling), "scratch-sampling")
    legs.train(run)
    assert legs.final(run).meta.state == legs.final(undisturbed["scratch"]).meta.state
    greedy = legs.prepare(
        legs.changed(recipes["scratch"], chunks__count=1, evaluation__write_every=12), "scratch-greedy"
    )
    legs.train(greedy)
    drawn, likeliest = (
        [row["written"] for row in one.require("samples/step-00000012.json")["samples"]] for one in (run, greedy)
    )
    assert drawn != likeliest


MEASURED = {
    "evaluation__write_every": 3,
    "evaluation__temperature": 1.5,
    "evaluation__top_p": 0.9,
    "evaluation__metrics": ["exact_match", "chrf", "rouge"],
    "evaluation__functions": ["tests.resume.own:drawing"],
    "tracking__jsonl": True,
}
"""Tokens are drawn, and a function draws from the generators that training has: attention dropout."""


def test_what_is_written_and_measured_in_between_leaves_no_trace(
    recipes: dict[str, Recipe], undisturbed: dict[str, Any], legs: Any
) -> None:
    run = legs.prepare(legs.changed(recipes["scratch"], chunks__count=2, **MEASURED), "scratch-measured")
    legs.train(run)
    assert legs.losses(run) == legs.losses(undisturbed["scratch"])
    assert legs.final(run).meta.state == legs.final(undisturbed["scratch"]).meta.state
    files = run.storage.list(run.path("metrics"))
    lines = [json.loads(x) for file in files for x in run.storage.read(run.path(f"metrics/{file}")).splitlines()]
    written = [line for line in lines if "written_drawing" in line]
    assert {line["step"] for line in written} == {3, 6, 9, 12, 15}
    assert all(
        {"written_exact_match", "written_chrf", "written_rouge1", "written_rougeL"} < line.keys() for line in written
    )


@pytest.mark.slow
def test_drawn_from_trainings_own_generators_it_would_leave_one(
    recipes: dict[str, Recipe], undisturbed: dict[str, Any], legs: Any
) -> None:
    """The negative control."""
    run = legs.prepare(legs.changed(recipes["scratch"], chunks__count=1, **MEASURED), "scratch-disturbed")
    code, printed = legs.leg(legs.disturbed_chunk, run.uri, 1)
    assert code == 0, printed
    ours, theirs = legs.final(run).meta.state, legs.final(undisturbed["scratch"]).meta.state
    assert ours["weights"] != theirs["weights"]
    assert ours["rng"] != theirs["rng"]


MATCHES: dict[str, tuple[list[tuple[str, str]], dict[str, float]]] = {
    "some": (
        [(" so #### 12 ", "so #### 12"), ("it is 7", "2 and 5 is #### 7"), ("it is 8", "#### 7"), ("8", "none")],
        {"written_exact_match": 0.25, "written_numeric_match": 2 / 3},
    ),
    "a row without an answer": ([("a", "a"), ("b", ""), ("", "")], {"written_exact_match": 1.0}),
    "no row with an answer": ([("8", ""), ("", "")], {}),
    "no row": ([], {}),
}


@pytest.mark.parametrize(("rows", "expected"), MATCHES.values(), ids=MATCHES)
def test_matches_by_hand(rows: list[tuple[str, str]], expected: dict[str, float]) -> None:
    samples = [Sample(prompt="", written=written, reference=reference) for written, reference in rows]
    assert matches(samples) == pytest.approx(expected)
