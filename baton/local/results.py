"""Outcome of a run, read from the store: for `--json` and for the last lines on the screen."""

from typing import NotRequired, Required, TypedDict

from baton.checkpoint.store import CheckpointStore
from baton.documents import Json
from baton.errors import DamagedError
from baton.runs.outcomes import EvaluationResult, ExportedModel, GateVerdict, ReportPage
from baton.runs.plan import Plan
from baton.runs.run import Run


class Listed(TypedDict, total=False):
    """A committed checkpoint, or the `problem` of its manifest."""

    step: Required[int]
    problem: str
    uri: str
    digest: str
    finished: bool
    parent: int | None
    chunk: int
    level: str
    bytes: int
    created: str
    skips: list[int]  # skipped steps up to it, where there are any
    not_carried: dict[str, str]  # state of the user's code that it lacks, where there is any


class VerifiedCheckpoint(TypedDict):
    """A checkpoint that was read back."""

    step: int
    ok: bool
    problems: list[str]
    digest: NotRequired[str]


class Result(TypedDict):
    """A run's outcome; `skips` are the steps that its guard has found, where there are any."""

    run: str
    state: str
    run_uri: str
    model_uri: str | None
    exports: list[Json]
    report_uri: str | None
    steps: int
    evaluation: str | None
    gate: list[Json]
    checkpoints: list[Listed]
    metrics: dict[str, float | None]
    skips: NotRequired[list[Json]]


def result(run: Run) -> Result:
    """Returns a run's outcome."""
    evaluation = run.read(EvaluationResult) or EvaluationResult()
    plan = run.read(Plan)
    report = run.read(ReportPage)
    checkpoints = [row for row in list_checkpoints(run) if "digest" in row]
    metrics = {
        f"eval_{name}_{when}": value
        for when in ("before", "after")
        for name, value in (evaluation.figures(when) or {}).items()
    }
    done = plan is not None and any(row["step"] == plan.num_steps or row["finished"] for row in checkpoints)
    gate = evaluation.gate or GateVerdict(passed=True)
    exported = run.read(ExportedModel) if gate.passed else None
    state = "succeeded" if exported else "failed" if gate.passed else "rejected"
    store = CheckpointStore(run)
    newest = next(store.whole(), None)
    losses = [entry["loss"] for entry in store.history(newest) if "loss" in entry] if newest else []
    told: Result = {
        "run": run.name,
        "state": state if done else "failed",
        "run_uri": run.uri,
        "model_uri": exported.model_uri if exported else None,
        "exports": [entry.to_json() for entry in exported.exports] if exported else [],
        "report_uri": report.report_uri if report else None,
        "steps": max((row["step"] for row in checkpoints), default=0),
        "evaluation": evaluation.summary or None,
        "gate": [line.to_json() for line in gate.lines],
        "checkpoints": [{"step": row["step"], "uri": row["uri"], "digest": row["digest"]} for row in checkpoints],
        "metrics": {**metrics, **({"train_loss_first": losses[0], "train_loss_last": losses[-1]} if losses else {})},
    }
    if skips := run.skips():
        told["skips"] = [skip.to_json() for skip in skips]
    return told


def list_checkpoints(run: Run) -> list[Listed]:
    """Returns a row for each committed checkpoint, ascending; a damaged manifest as its problem."""
    store = CheckpointStore(run)
    rows: list[Listed] = []

    def note_damaged(step: int, error: DamagedError) -> None:
        rows.append({"step": step, "problem": str(error)})

    for checkpoint in store.committed(note_damaged):
        meta = checkpoint.meta
        row: Listed = {
            "step": checkpoint.step,
            "uri": store.uri(checkpoint),
            "digest": meta.digest,
            "finished": meta.finished,
            "parent": meta.parent.step if meta.parent else None,
            "chunk": meta.chunk,
            "level": meta.restored.level,
            "bytes": checkpoint.bytes,
            "created": meta.created,
        }
        if meta.hooks and meta.hooks.lost:
            row["not_carried"] = meta.hooks.lost
        rows.append({**row, "skips": meta.skips} if meta.skips else row)
    return rows[::-1]


def verify_checkpoints(run: Run) -> list[VerifiedCheckpoint]:
    """Reads every checkpoint back and returns a row for each, with its problems and those of the chain."""
    store = CheckpointStore(run)
    rows: list[VerifiedCheckpoint] = []

    def note_damaged(step: int, error: DamagedError) -> None:
        rows.append({"step": step, "ok": False, "problems": [str(error)]})

    checkpoints = list(store.committed(note_damaged))
    digests = {checkpoint.step: checkpoint.digest for checkpoint in checkpoints}
    for checkpoint in checkpoints:
        problems = store.verify(checkpoint) or store.code(checkpoint)
        parent = checkpoint.meta.parent
        if parent and digests.get(parent.step, parent.digest) != parent.digest:
            problems.append(f"continues another state of step {parent.step} than the one that is here")
        rows.append({"step": checkpoint.step, "ok": not problems, "problems": problems, "digest": checkpoint.digest})
    return sorted(rows, key=lambda row: row["step"])
