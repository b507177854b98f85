"""Gathers what the report shows from a run's objects in the store."""

from __future__ import annotations

import logging
import statistics
import time

from baton.components.report import judged
from baton.components.shared.checkpoints.proof import proof_part
from baton.components.shared.checkpoints.store import Checkpoint, CheckpointStore
from baton.components.shared.core.errors import StoreError
from baton.components.shared.recipe import recipe_file
from baton.components.shared.runs import lineage
from baton.components.shared.runs.documents.data import RunHead, SplitCounts, Tokens
from baton.components.shared.runs.documents.outcome import Evaluation, ExportedModel, ReportPage
from baton.components.shared.runs.documents.training import ChunkRecord, ForkNote, ProofPart, StageRecord, Tracking
from baton.components.shared.runs.plan import Plan
from baton.components.shared.runs.run import Run

logger = logging.getLogger("baton")


def collect(run: Run) -> dict[str, object]:
    """Returns the report's content; parts that a run does not have yet are None or empty."""
    recipe, attempts = run.recipe(), run.attempts()
    evaluation = run.read(Evaluation)
    store = CheckpointStore(run)
    damaged: list[int] = []
    committed = list(store.committed(lambda step, _: damaged.append(step)))
    newest = committed[0] if committed else None
    reached = newest.step if newest else 0
    history = store.history(newest) if newest else []
    tracking = run.read(Tracking)
    export = run.read(ExportedModel)
    plan = run.read(Plan)
    fork = run.read(ForkNote)
    split = run.read(SplitCounts)
    finished = newest is not None and newest.meta.finished
    return {
        "run": run.name,
        "recipe_name": recipe.name,
        "method": recipe.training.method,
        "state": _state(bool(plan and (finished or reached >= plan.num_steps)), evaluation),
        "created": run.need(RunHead).created,
        "run_uri": run.uri,
        "fork": fork and fork.to_json(),
        "family": _family(run),
        "model_uri": export and export.model_uri,
        "headline": _headline(run, evaluation, newest),
        "history": [entry for entry in history if "loss" in entry],
        "evals": [entry for entry in history if "eval_loss" in entry],
        "chunks": _chunks(plan, attempts),
        "cost": _cost(attempts, newest),
        "stages": _stages(run.records()),
        "proof": _proof(store, committed, damaged),
        "samples": evaluation.samples if evaluation else [],
        "exports": [entry.to_json() for entry in export.exports] if export else [],
        "registry": export.registry.to_json() if export and export.registry else None,
        "evaluation": judged.collected(run, evaluation),
        "data": {**(split.to_json() if split else {}), **_tokens(run)},
        "recipe_yaml": recipe_file.to_yaml(recipe),
        "versions": newest.meta.fingerprint.versions if newest else {},
        "tracking": {"mlflow": tracking and tracking.mlflow, "run_id": tracking and tracking.run_id},
    }


def _family(run: Run) -> lineage.Family:
    """Returns the run's relatives, none where the store lets a run see nothing but itself."""
    try:
        return lineage.around(run)
    except StoreError as error:
        logger.warning("the report has no family tree: %s", error.message)
        return {}


def _state(done: bool, evaluation: Evaluation | None) -> str:
    if not done:
        return "failed"
    gate = evaluation.gate if evaluation else None
    return "rejected" if gate and not gate.passed else "succeeded"


def _headline(run: Run, evaluation: Evaluation | None, newest: Checkpoint | None) -> dict[str, object]:
    tokens, split, plan = run.read(Tokens), run.read(SplitCounts), run.read(Plan)
    steps = newest.step if newest else 0
    epochs = steps / plan.steps_per_epoch if plan else 0
    values: dict[str, object] = {
        "steps": steps,
        "stopped_before": plan.num_steps if plan and newest and newest.meta.finished else None,
        "chunks": len(plan.targets) if plan else None,
        "train_rows": split and split.train,
        "eval_rows": split and split.eval,
        "trained_tokens": round((tokens.tokens if tokens else 0) * epochs),
        "parameters": evaluation and evaluation.parameters,
        "trainable_parameters": newest and newest.meta.trainable_parameters,
    }
    for when in ("before", "after"):
        judged_figures = (evaluation.figures(when) if evaluation else None) or {}
        values |= {f"eval_loss_{when}": judged_figures.get("loss")}
        values |= {f"{name}_{when}": judged_figures.get(name) for name in ("perplexity", "reward", "accuracy")}
    judged = evaluation.after if evaluation else {}
    return values | {name: judged.get(name) for name in ("reward_accuracy", "reward_margin")}


def _tokens(run: Run) -> dict[str, object]:
    tokens = run.read(Tokens)
    return {name: tokens and getattr(tokens, name) for name in ("tokens", "truncated", "dropped")}


def _chunks(plan: Plan | None, attempts: list[ChunkRecord]) -> list[dict[str, object]]:
    if plan is None:
        return []
    count = len(plan.targets)
    worked = {attempt.chunk for attempt in attempts if attempt.outcome != "already_done"}
    spare = sorted(chunk for chunk in worked if chunk > count)
    return [
        {
            "index": index,
            "target_step": plan.target(index),
            "spare": index > count,
            "attempts": [_attempt(attempt, plan.steps_per_epoch) for attempt in attempts if attempt.chunk == index],
        }
        for index in (*range(1, count + 1), *spare)
    ]


def _attempt(record: ChunkRecord, steps_per_epoch: int) -> dict[str, object]:
    steps, trained = record.to_step - record.from_step, record.seconds.get("train", 0.0)
    rate = steps / trained if trained > 0 and steps else None
    return {
        "from_step": record.from_step,
        "to_step": record.to_step,
        "outcome": record.outcome,
        "seconds": record.seconds,
        "steps_per_second": rate,
        "tokens_per_second": rate and rate * record.tokens / steps_per_epoch,
    }


def _cost(attempts: list[ChunkRecord], newest: Checkpoint | None) -> dict[str, object]:
    """Returns what training in chunks cost: time, steps trained in vain, bytes, and how long saving held it up."""
    stalls = [seconds for attempt in attempts for seconds in attempt.save_stalls]
    return {
        "goodput": newest.meta.work.goodput if newest else None,
        "lost_steps": newest.meta.work.lost_steps if newest else None,
        "bytes_sent": sum(attempt.bytes_sent for attempt in attempts),
        "bytes_received": sum(attempt.bytes_received for attempt in attempts),
        "save_stall": statistics.median(stalls) if stalls else None,
    }


def _stages(records: list[StageRecord]) -> list[dict[str, object]]:
    """Returns seconds per stage in the order of the pipeline, attempts added up."""
    seconds: dict[str, float] = {}
    for record in sorted(records, key=_place):
        name = record.kind.replace("-", " ") + ("" if record.chunk is None else f" {record.chunk}")
        seconds[name] = seconds.get(name, 0.0) + record.total
    return [{"name": name, "seconds": value} for name, value in seconds.items()]


def _place(record: StageRecord) -> tuple[int, int, bool]:
    """Orders stages as the pipeline has them: each chunk's checkpoint after it."""
    order = ("data-split", "tokenize", "lr-find", "train-chunk", "evaluate", "gate", "export")
    at = order.index(record.kind if record.chunk is None else "train-chunk")
    return (at, record.chunk or 0, record.kind != "train-chunk")


def _proof(store: CheckpointStore, committed: list[Checkpoint], damaged: list[int]) -> list[dict[str, object]]:
    """Returns a row for each checkpoint that is there, and for each that was read back before it went."""
    parts = [store.run.need(ProofPart, chunk) for chunk in sorted(store.proven_chunks())]
    read_back = {(part.step, part.digest) for part in parts}
    rows = {part.step: _row(part, "damaged" if part.step in damaged else "removed") for part in parts}
    for checkpoint in committed:
        verified = (checkpoint.step, checkpoint.digest) in read_back
        rows[checkpoint.step] = {**_row(proof_part(store, checkpoint), None), "verified": verified}
    return [rows[step] for step in sorted(rows)]


def _row(part: ProofPart, gone: str | None) -> dict[str, object]:
    return {**part.model_dump(mode="json"), "fingerprint": part.fingerprint.to_json(), "gone": gone}


def write_report(run_uri: str) -> dict[str, str]:
    """Renders the run's report into the store and hands it to the tracking run.

    Returns:
        `report_uri` and the `html`.
    """
    import tempfile

    from baton.components.report.page import render
    from baton.components.shared.core import events
    from baton.components.shared.runs import tracking

    started = time.time()
    run = Run.open(run_uri)
    html = render(collect(run))
    run.storage.write(run.path("report.html"), html.encode())
    with tempfile.TemporaryDirectory(prefix="baton-report-") as folder:
        path = f"{folder}/report.html"
        with open(path, "w", encoding="utf-8") as file:
            file.write(html)
        tracking.finish(run, path)
    uri = run.storage.uri(run.path("report.html"))
    run.write(ReportPage(report_uri=uri, seconds=time.time() - started))
    events.emit(events.Report(uri=uri))
    return {"report_uri": uri, "html": html}
