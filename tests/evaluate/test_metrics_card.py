"""The one place of a run's scalar metrics: a flat column of numbers, whatever was and was not measured."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton.checkpoint.store import CheckpointMeta, CheckpointStore
from baton.evaluate.evaluate import evaluation_card
from baton.runs.documents import ForkOrigin, RunCost
from baton.runs.plan import Plan
from baton.runs.run import Run
from baton.store.storage import Storage
from tests.support import tiny

EVALUATION = {
    "before": {"loss": 4.0, "perplexity": 54.6, "bleu": None},
    "after": {"loss": 2.0, "perplexity": float("inf"), "bleu": None, "reward_margin": 0.25},
}
BEST = {"export": {"checkpoint": "best"}, "evaluation": {"every": 5}}


def _run(folder: Path, *, origin: ForkOrigin | None = None, **sections: Any) -> Run:
    """A run of 1,000 tokens an epoch of ten steps, trained for 20 steps in 50 of 100 seconds."""
    run = Run(Storage(str(folder / "store")), "r")
    run.create(tiny.recipe("org/base", **sections))
    run.put("tokens.json", {"prefix": "data/x/tokens", "tokens": 1000})
    run.write_once(Plan(rows=80, steps_per_epoch=10, num_steps=20, targets=(10, 20)))
    for chunk, peak in ((1, 3 * 2**30), (2, None)):
        run.record(f"train-chunk-{chunk:03d}", {"chunk": chunk, "peak_bytes": peak})
    log = [{"step": 5, "loss": 3.0}, {"step": 10, "eval_loss": 1.5}, {"step": 20, "eval_loss": 1.75}]
    store = CheckpointStore(run)
    for step in (10, 20):
        local = folder / f"step-{step}"
        local.mkdir()
        reached = [entry for entry in log if entry["step"] <= step]
        (local / "trainer_state.json").write_text(json.dumps({"log_history": reached}), encoding="utf-8")
        writer = store.open_writer(step)
        writer.send(str(local))
        work = RunCost(started=0.0, trained_seconds=step * 2.5, goodput=0.5)
        store.commit(step, writer, CheckpointMeta(digest=f"{step:02x}" * 32, step=step, work=work, forked_from=origin))
    return run


def _metrics(run: Run) -> dict[str, Any]:
    artifact = SimpleNamespace(path="/nowhere", metadata={})
    evaluation_card(run, EVALUATION).write_metadata(artifact)
    json.dumps(artifact.metadata, allow_nan=False)
    return artifact.metadata


def test_each_figure_before_and_after_and_what_it_cost(tmp_path: Path) -> None:
    assert _metrics(_run(tmp_path)) == {
        "loss_before": 4.0,
        "loss_after": 2.0,
        "perplexity_before": 54.6,
        "perplexity_after": "inf",
        "reward_margin_after": 0.25,
        "eval_loss": 1.75,
        "steps": 20,
        "tokens": 2000,
        "tokens_per_second": 40.0,
        "goodput": 0.5,
        "peak_memory_gib": 3.0,
        "digest": "14" * 8,
    }


def test_the_best_checkpoint_has_its_own_figures(tmp_path: Path) -> None:
    metrics = _metrics(_run(tmp_path, **BEST))
    assert (metrics["steps"], metrics["eval_loss"], metrics["tokens"]) == (10, 1.5, 1000)
    assert metrics["tokens_per_second"] == 40.0


def test_a_fork_counts_the_pace_of_its_own_steps(tmp_path: Path) -> None:
    metrics = _metrics(_run(tmp_path, origin=ForkOrigin(run_uri="there", step=10, digest="d")))
    assert metrics["tokens"] == 2000
    assert metrics["tokens_per_second"] == pytest.approx(20.0)
