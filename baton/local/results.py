"""Outcome of a run, read from the store: for `--json` and for the last lines on the screen."""

from typing import NotRequired, Required, TypedDict

from baton.checkpoint.proof import differing
from baton.checkpoint.store import CheckpointStore, chained
from baton.documents import Json
from baton.errors import DamagedError
from baton.local import begun
from baton.runs import lineage
from baton.runs.bill import bill
from baton.runs.documents import RunCost
from baton.runs.outcomes import EvaluationResult, ExportedModel, GateVerdict, RunFailure
from baton.runs.run import Run
from baton.runs.spending import spending
from baton.store import bundle
from baton.store.manifest import read_manifest


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


class Status(TypedDict):
    """Progress of a run on this machine, from its store."""

    run: str
    state: lineage.State
    run_uri: str
    step: int  # newest step trained, committed or not; once a run is resumed, the checkpoint's until it trains
    num_steps: int | None  # None before it has a plan
    saved_step: int  # newest checkpoint's, 0 before there is one
    loss: float | None
    resumed: int
    error: str | None
    report_uri: str | None
    model_uri: str | None
    budget: NotRequired[Json]


class VerifiedExport(TypedDict):
    """An export that was read back."""

    format: str
    uri: str
    ok: bool
    problems: list[str]


class Result(TypedDict):
    """A run's outcome; `skips` are the steps that its guard has found, where there are any."""

    run: str
    state: lineage.State
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
    budget: NotRequired[Json]  # with the `bill`, once an attempt has ended


def result(run: Run, live_since: lineage.LiveSince = lambda run: None) -> Result:
    """Returns a run's outcome; `live_since` tells of a process that works on it."""
    evaluation = run.read(EvaluationResult) or EvaluationResult()
    checkpoints = [row for row in list_checkpoints(run) if "digest" in row]
    metrics = {
        f"eval_{name}_{when}": value
        for when in ("before", "after")
        for name, value in (evaluation.figures(when) or {}).items()
    }
    gate = evaluation.gate or GateVerdict(passed=True)
    exported = run.read(ExportedModel) if gate.passed else None
    store = CheckpointStore(run)
    newest = next(store.whole(), None)
    losses = [entry["loss"] for entry in store.history(newest) if "loss" in entry] if newest else []
    told: Result = {
        "run": run.name,
        "state": lineage.read_run(run, live_since).state,
        "run_uri": run.uri,
        "model_uri": exported.model_uri if exported else None,
        "exports": [entry.to_json() for entry in exported.exports] if exported else [],
        "report_uri": report_uri(run),
        "steps": max((row["step"] for row in checkpoints), default=0),
        "evaluation": evaluation.summary or None,
        "gate": [line.to_json() for line in gate.lines],
        "checkpoints": [{"step": row["step"], "uri": row["uri"], "digest": row["digest"]} for row in checkpoints],
        "metrics": {**metrics, **({"train_loss_first": losses[0], "train_loss_last": losses[-1]} if losses else {})},
    }
    if skips := run.skips():
        told["skips"] = [skip.to_json() for skip in skips]
    if budget := spending(run, newest.meta.work if newest else RunCost(), told["steps"]):
        paid = bill(run)
        told["budget"] = {**budget, "bill": paid.to_json()} if paid else budget
    return told


def status(run: Run) -> Status:
    """Returns how far a run is."""
    member, store = lineage.read_run(run, begun.live_since), CheckpointStore(run)
    newest, exported, failure = store.newest(), run.read(ExportedModel), run.read(RunFailure)
    losses = [entry["loss"] for entry in store.history(newest) if "loss" in entry] if newest else []
    told: Status = {
        "run": run.name,
        "state": member.state,
        "run_uri": run.uri,
        "step": member.reached,
        "num_steps": member.num_steps,
        "saved_step": member.step,
        "loss": losses[-1] if losses else None,
        "resumed": num_resumes(run),
        "error": f"{failure.stage}: {failure.message}" if failure and member.state != "running" else None,
        "report_uri": report_uri(run),
        "model_uri": uri_here(run, exported.model_uri) if exported else None,
    }
    if budget := spending(run, newest.meta.work if newest else RunCost(), member.reached):
        told["budget"] = budget
    return told


def report_uri(run: Run) -> str | None:
    """Returns the address of a run's report, written from the first checkpoint on; None before."""
    path = run.path("report.html")
    return run.storage.uri(path) if run.storage.exists(path) else None


def num_resumes(run: Run) -> int:
    """Returns how often a run was resumed after an interruption: of its process here, or of a chunk's."""
    known = begun.find(run.name, run.uri)
    return run.num_restarts() + (known.resumed if known else 0)


def times(number: int) -> str:
    """Returns `1 time`, `3 times`."""
    return f"{number:,} time{'' if number == 1 else 's'}"


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
    by_step = {checkpoint.step: checkpoint for checkpoint in checkpoints}
    for checkpoint in checkpoints:
        problems = store.verify(checkpoint) or store.code(checkpoint)
        meta, parent = checkpoint.meta, checkpoint.meta.parent
        before = by_step.get(parent.step) if parent else None
        if parent and before and before.digest != parent.digest:
            problems.append(f"continues another state of step {parent.step} than this store's")
        elif meta.chain and (before or not (parent or meta.forked_from)) and meta.chain != chained(before, meta.digest):
            problems.append("its chain does not continue its parent's")
        problems += differing(store, checkpoint)
        rows.append({"step": checkpoint.step, "ok": not problems, "problems": problems, "digest": checkpoint.digest})
    return sorted(rows, key=lambda row: row["step"])


def uri_here(run: Run, uri: str) -> str:
    """Returns the address of something of a run, wherever its store was when it was written."""
    _, separator, below = uri.rpartition(f"/{run.path()}/")
    return f"{run.uri}/{below}" if separator else uri


def verify_exports(run: Run, exported: ExportedModel) -> list[VerifiedExport]:
    """Reads every export of a run back and returns a row for each."""
    rows: list[VerifiedExport] = []
    for entry in exported.exports:
        uri = uri_here(run, entry.uri)
        prefix = uri.removeprefix(f"{run.storage.uri()}/").rpartition("/")[0]
        try:
            manifest = read_manifest(run.storage, prefix)
            problems = bundle.verify(run.storage, prefix, manifest) if manifest else ["its manifest is missing"]
        except DamagedError as error:
            problems = [str(error)]
        rows.append({"format": entry.format, "uri": uri, "ok": not problems, "problems": problems})
    return rows
