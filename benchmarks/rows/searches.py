"""Samples that a sweep saves against all trials to the end, and whether both find the same winner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.checkpoint.store import CheckpointStore
from baton.runs.run import Run
from baton.sweep.search import rungs
from baton.sweep.trials import decide
from benchmarks.bench import Bench
from benchmarks.ours import Ours
from benchmarks.rows.sweep import TimedSweep, run_sweep
from benchmarks.sizes import SIZES
from benchmarks.table import Figure, Row, keep
from benchmarks.theirs import Theirs

NAME = "searches"
TITLE = "samples saved by pruning, and its winner, against all trials to the end"
SEARCHES, TRIALS, CHUNKS, STEPS = 30, 8, 16, 10
"""Searches, their trials, chunks of a trial, and steps of a chunk."""
ETAS = (2, 4)
SIZE = SIZES["200k"]
SEARCH: Mapping[str, Any] = {
    "method": "random",
    "trials": TRIALS,
    "parameters": {
        "training.learning_rate": {"min": 1e-5, "max": 3e-2, "log": True},
        "training.weight_decay": {"min": 0.0, "max": 0.3},
        "training.warmup_steps": [0, 10, 40],
        "training.lr_scheduler": ["constant_with_warmup", "linear", "cosine"],
    },
}
Curves = dict[str, list[float | None]]
"""Trial → its score after each chunk."""


def measure(bench: Bench, ours: Ours, theirs: Theirs) -> Row:
    searches, steps = (2, 2) if bench.options.quick else (SEARCHES, STEPS)
    columns: dict[str, list[float]] = {}
    for seed in range(1, searches + 1):
        bench.say(f"search {seed} of {searches}")
        overrides = (f"seed={seed}", f"training.max_steps={steps * CHUNKS}", f"evaluation.every={steps}")
        whole = run_sweep(bench, ours, f"whole-{seed}", SIZE, SEARCH, *overrides, "chunks.count=1")
        curves = {trial: _curve(run, steps) for trial, run in whole.runs.items()}
        if seed == 1:
            _check(bench, ours, curves, steps, overrides)
        best = curves[whole.winner][-1]
        for eta in ETAS:
            winner, chunks = halved(curves, eta)
            score = curves[winner][-1]
            assert best is not None
            assert score is not None
            keep(columns, {f"{eta} saved": 100 * (1 - chunks / (TRIALS * CHUNKS))})
            keep(columns, {f"{eta} same": float(winner == whole.winner), f"{eta} above": 100 * (score / best - 1)})
    return Row(
        title=TITLE,
        conditions=f"{searches} random searches of {TRIALS} configurations, each with its own seed; {SIZE}; "
        f"{CHUNKS} chunks of {steps} steps; held-out loss of 128 rows",
        preparation="neither side",
        figures=[figure for eta in ETAS for figure in _figures(columns, eta, searches)],
        notes=[
            "all trials train to the end, with a score where each chunk would end; the rungs then decide by those "
            "scores, as a trial's chunks do not depend on other trials",
            f"the first search is also run with rungs, eta {ETAS[0]}; another winner or number of steps fails the row",
            "configurations differ in learning rate, weight decay, warm-up and schedule",
        ],
    )


def halved(curves: Curves, eta: int) -> tuple[str, int]:
    """Returns the winner of a search by rungs, and the chunks that it trains."""
    alive, chunks, before = list(curves), 0, 0
    for chunk, num_kept in rungs(len(curves), CHUNKS, eta):
        chunks += len(alive) * (chunk - before)
        alive, _ = decide(alive, {trial: curves[trial][chunk - 1] for trial in alive}, num_kept, "min", ())
        before = chunk
    return alive[0], chunks


def _curve(run: Run, steps: int) -> list[float | None]:
    """Returns a trial's score after each chunk's steps."""
    store = CheckpointStore(run)
    last = next(iter(store.committed()))
    logged = {entry["step"]: entry["eval_loss"] for entry in store.history(last) if "eval_loss" in entry}
    return [logged.get(steps * chunk) for chunk in range(1, CHUNKS + 1)]


def _check(bench: Bench, ours: Ours, curves: Curves, steps: int, overrides: tuple[str, ...]) -> None:
    """Runs a search with rungs, and compares it with what the scores of all trials give.

    Raises:
        RuntimeError: they differ.
    """
    search = {**SEARCH, "halving": {"eta": ETAS[0]}}
    pruned: TimedSweep = run_sweep(bench, ours, "pruned", SIZE, search, *overrides, f"chunks.count={CHUNKS}")
    winner, chunks = halved(curves, ETAS[0])
    if (pruned.winner, pruned.steps) != (winner, chunks * steps):
        raise RuntimeError(f"the sweep has {pruned.winner} after {pruned.steps} steps, its scores {winner}, {chunks}")


def _figures(columns: dict[str, list[float]], eta: int, searches: int) -> list[Figure]:
    same = sum(columns[f"{eta} same"])
    return [
        Figure(what=f"samples saved, eta {eta}", unit="%", ours=columns[f"{eta} saved"]),
        Figure(what=f"searches of {searches} with the winner of a full search, eta {eta}", unit="", ours=[same]),
        Figure(what=f"loss above that winner's, eta {eta}", unit="%", ours=columns[f"{eta} above"]),
    ]
