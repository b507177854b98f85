"""Virtual workers of methods whose model writes: each has its own rounds, in whichever process."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from baton.recipe.recipe import Recipe
from baton.runs.run import Run
from tests.exactness import matrix, matrix_virtual
from tests.exactness.matrix import WRITES, Changes, training
from tests.exactness.matrix_virtual import ENDING, SPANNING, WRITING
from tests.exactness.matrix_virtual import STEPS_OF_WRITING as STEPS

CHANGING = {1: 2, 4: 5, 2: STEPS}
"""Processes of each chunk, and its end."""


@pytest.fixture
def controls(legs: Any) -> Any:
    """What is changed in the processes."""
    return importlib.import_module("writes_legs")


@pytest.fixture
def prepared(tmp_path: Path, base_model: str) -> Any:
    """Returns a method's recipe, of two passes a step for each of four workers."""
    source = matrix.write_rows(tmp_path)

    def find(method: str, changes: Changes, processes: int, workers: int | None = 4) -> Recipe:
        cell = matrix_virtual.writer(method, changes, workers=workers, processes=processes)
        return matrix.recipe(cell, str(tmp_path / "store"), base_model, source)

    return find


@pytest.fixture
def trained(prepared: Any, legs: Any) -> Any:
    """Returns a run with so many processes in each of its chunks, and the end of each; the last may fail."""

    def train(method: str, changes: Changes, chunks: dict[int, int], last: Any = None, says: str = "") -> Run:
        name = "-".join([method, *map(str, chunks), *([last.__name__.replace("_", "-")] if last else [])])
        run: Run = legs.prepare(prepared(method, changes, 1), name)
        legs.cut(run, list(chunks.values()))
        for index, processes in enumerate(chunks, 1):
            legs.adopt(run, prepared(method, changes, processes))
            is_last = index == len(chunks)
            code, printed = legs.leg((is_last and last) or legs.chunk, run.uri, index)
            assert bool(code) == bool(is_last and says), printed
            assert says in printed or not is_last
        return run

    return train


def test_chunks_of_any_number_of_processes_end_on_the_bits_of_one(trained: Any, legs: Any) -> None:
    """Both chunks' ends are inside a round."""
    changes = training(grpo=SPANNING)
    one, changing = trained("grpo", changes, {1: STEPS}), trained("grpo", changes, CHANGING)
    assert legs.losses(changing) == legs.losses(one)
    assert len({loss for _, loss in legs.losses(one)}) == STEPS
    assert legs.final(changing).meta.state == legs.final(one).meta.state
    restored = legs.final(changing).meta.restored
    assert restored.level == "bitwise"
    assert set(restored.checked.values()) <= {"match", "absent"}


@pytest.mark.slow
@pytest.mark.parametrize("cell", WRITING)
def test_every_method_that_writes_ends_on_the_same_bits(cell: str, trained: Any, legs: Any) -> None:
    method, changes = WRITING[cell]
    runs = [trained(method, changes, chunks) for chunks in ({1: STEPS}, {2: STEPS}, {4: STEPS}, CHANGING)]
    one = legs.final(runs[0]).meta.state
    assert [legs.final(run).meta.state for run in runs] == [one] * 4
    entries = [[{**entry, "step_time": 0} for entry in legs.history(run) if "loss" in entry] for run in runs]
    assert entries == [entries[0]] * 4, "and all that they logged"
    assert [entry["num_tokens"] > 0 for entry in entries[0][:1]] == [True]


@pytest.mark.slow
def test_killed_and_resumed_by_fewer_and_more_the_bits_are_those_of_one(
    prepared: Any, trained: Any, legs: Any, inside: Any
) -> None:
    """Three times, while a checkpoint is on its way; those before it are inside rounds."""
    changes = {**training(grpo=SPANNING), "chunks": {"checkpoint_every": 1}}
    run: Run = legs.prepare(prepared("grpo", changes, 1), "killed")
    steps = [0]
    for processes, nth in ((2, 15), (1, 25), (4, 15)):
        legs.adopt(run, prepared("grpo", changes, processes))
        leg = (inside.killed, run.uri, 1, 0) if processes > 1 else (legs.chunk, run.uri, 1, ())
        code, printed = legs.leg(*leg, f"sending:{nth}")
        assert code, printed
        steps.append(max(legs.steps(run)))
    assert steps[0] < steps[1] < steps[2] < steps[3] < STEPS, "each resumed, and trained on"
    legs.adopt(run, prepared("grpo", changes, 2))
    code, printed = legs.leg(legs.chunk, run.uri, 1)
    assert code == 0, printed
    assert legs.final(run).meta.state == legs.final(trained("grpo", training(grpo=SPANNING), {1: STEPS})).meta.state


@pytest.mark.slow
@pytest.mark.parametrize("control", ["seeded_by_process", "normalized_by_process"])
def test_by_process_the_bits_differ(control: str, trained: Any, controls: Any, legs: Any) -> None:
    """By process the same run differs with their number; by worker, `WRITING` shows, it does not."""
    changes = training(grpo=ENDING)
    one, two = (trained("grpo", changes, {number: STEPS}, getattr(controls, control)) for number in (1, 2))
    ours, theirs = legs.final(two).meta.state, legs.final(one).meta.state
    assert ours["weights"] != theirs["weights"]
    assert ours["position"] == theirs["position"]


@pytest.mark.slow
def test_completions_of_other_workers_are_no_match(trained: Any, controls: Any) -> None:
    """A process that resumes inside a round with another worker's completions does not take a step."""
    ends = {1: 2, 2: STEPS}
    trained("grpo", training(grpo=SPANNING), ends, controls.begun_anew, says="step 2, method in memory differ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        pytest.param("grpo", {}, id="tokens"),
        pytest.param("grpo", {"loss": "grpo"}, id="means"),
        pytest.param("grpo", {"num_iterations": 2}, id="iterations"),
        pytest.param("rloo", {}, id="rloo"),
    ],
)
def test_workers_learn_what_as_many_processes_do(
    method: str, settings: Changes, prepared: Any, legs: Any, inside: Any, tmp_path: Path
) -> None:
    """With the same completions the objective is TRL's with a process in the place of each worker."""
    losses, norms = [], []
    for workers, processes in ((4, 1), (None, 4)):
        recipe = prepared(method, training(**{method: {**WRITES, **settings}}), processes, workers)
        run, folder = legs.prepare(recipe, f"of-{processes}"), tmp_path / str(processes)
        folder.mkdir()
        code, printed = legs.leg(inside.told_what_to_write, run.uri, 1, str(folder))
        assert code == 0, printed
        losses.append([loss for _, loss in legs.losses(run)])
        norms.append([entry["grad_norm"] for entry in legs.history(run) if "loss" in entry])
    assert losses[0] == pytest.approx(losses[1], rel=2e-4, abs=1e-5)
    assert norms[0] == pytest.approx(norms[1], rel=2e-3)
    assert len(set(norms[0])) == STEPS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seconds", "tokens", "says"), [(600.0, 1, "rank 1 hangs in step 1, before or in its writing"), (2.5, 5, "")]
)
def test_a_process_that_stops_writing_hangs_and_one_that_writes_slowly_does_not(
    seconds: float, tokens: int, says: str, prepared: Any, legs: Any, inside: Any
) -> None:
    recipe = legs.changed(prepared("grpo", training(grpo=WRITES), 2), training__parallel__hang_after="6s")
    run = legs.prepare(recipe, "writing")
    code, printed = legs.leg(inside.writing, run.uri, 1, 1, seconds, tokens)
    assert code == bool(says), printed
    assert says in printed
