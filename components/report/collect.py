"""Gathers what the report shows from a run's objects in the store."""

from __future__ import annotations

import logging

from baton.components.report import judged
from baton.components.report.view import ProofEntry, Report
from baton.components.shared.checkpoints.proof import proof_part
from baton.components.shared.checkpoints.store import Checkpoint, CheckpointStore
from baton.components.shared.core.errors import StoreError
from baton.components.shared.pages import rendered
from baton.components.shared.recipe import recipe_file
from baton.components.shared.runs import lineage
from baton.components.shared.runs.documents.data import RunHead, SplitCounts, Tokens
from baton.components.shared.runs.documents.outcome import Evaluation, ExportedModel, Failure
from baton.components.shared.runs.documents.training import ForkNote, ProofPart, StageRecord, Tracking
from baton.components.shared.runs.plan import Plan
from baton.components.shared.runs.run import Run

logger = logging.getLogger("baton")


def collect(run: Run, failure: Failure | None = None) -> Report:
    """Returns the report's content.

    Args:
        run: The run.
        failure: Why it ended before its end.
    """
    recipe = run.recipe()
    store = CheckpointStore(run)
    damaged: list[int] = []
    committed = list(store.committed(lambda step, _: damaged.append(step)))
    newest = committed[0] if committed else None
    evaluation = run.read(Evaluation)
    return Report(
        run=run.name,
        uri=run.uri,
        created=run.need(RunHead).created,
        recipe_name=recipe.name,
        recipe_yaml=recipe_file.to_yaml(recipe),
        method=recipe.training.method,
        plan=run.read(Plan),
        split=run.read(SplitCounts),
        tokens=run.read(Tokens),
        rendered=rendered.of(run),
        tracking=run.read(Tracking),
        fork=run.read(ForkNote),
        evaluation=evaluation,
        examples=judged.examples(run, evaluation),
        export=run.read(ExportedModel),
        newest=newest.meta if newest else None,
        log=store.history(newest) if newest else [],
        attempts=run.attempts(),
        restarts=run.restarts(),
        skips=run.skips(),
        warnings=run.warnings(),
        stages=_stages(run.records()),
        proof=_proof(store, committed, damaged),
        family=_family(run),
        failure=failure,
    )


def _family(run: Run) -> lineage.Family:
    """Returns the run's relatives, none where the store lets a run see nothing but itself."""
    try:
        return lineage.around(run)
    except StoreError as error:
        logger.warning("the report has no family tree: %s", error.message)
        return {}


def _stages(records: list[StageRecord]) -> dict[str, float]:
    """Returns seconds per stage in the order of the pipeline, attempts added up."""
    seconds: dict[str, float] = {}
    for record in sorted(records, key=_place):
        name = record.kind.replace("-", " ") + ("" if record.chunk is None else f" {record.chunk}")
        seconds[name] = seconds.get(name, 0.0) + record.total
    return seconds


def _place(record: StageRecord) -> tuple[int, int, bool]:
    """Orders stages as the pipeline has them: each chunk's checkpoint after it."""
    order = ("data-split", "tokenize-shard", "tokenize", "lr-find", "train-chunk", "evaluate", "gate", "export")
    at = order.index(record.kind if record.chunk is None else "train-chunk")
    return (at, record.chunk or 0, record.kind != "train-chunk")


def _proof(store: CheckpointStore, committed: list[Checkpoint], damaged: list[int]) -> list[ProofEntry]:
    """Returns an entry for each checkpoint that is there, and for each that was read back before it went."""
    parts = [store.run.need(ProofPart, chunk) for chunk in sorted(store.proven_chunks())]
    read_back = {(part.step, part.digest) for part in parts}
    entries = {part.step: ProofEntry(part, "damaged" if part.step in damaged else "removed") for part in parts}
    for checkpoint in committed:
        verified = (checkpoint.step, checkpoint.digest) in read_back
        part = proof_part(store, checkpoint).model_copy(update={"verified": verified})
        entries[checkpoint.step] = ProofEntry(part)
    return [entries[step] for step in sorted(entries)]
