"""Content of a run's report, gathered from the store: its documents, figures, gate and examples."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from baton.checkpoint.proof import proof_part
from baton.checkpoint.store import Checkpoint, CheckpointMeta, CheckpointStore, LogEntry
from baton.documents import Json, load_object
from baton.errors import StoreError
from baton.pages import quality_page
from baton.pages.html import number
from baton.recipe import load
from baton.runs import documents, lineage
from baton.runs.bill import Bill, bill
from baton.runs.outcomes import EvaluationResult, ExportedModel, Figures, JudgedLine, RunFailure, TrialInfo
from baton.runs.plan import Plan
from baton.runs.run import Run
from baton.runs.spending import spending
from baton.tracking.servers import mlflow_url
from baton.tracking.tracking_run import GpuUse

logger = logging.getLogger("baton")

MAX_EXAMPLES = 400  # shown on the page; the run's `examples.jsonl` has all
EXAMPLES_PER_PAGE = 20
# For evaluations of older releases, which note no direction; of a task's figure the last part counts.
LOWER_IS_BETTER = ("loss", "perplexity", "divergence", "word_perplexity", "byte_perplexity", "bits_per_byte")
SIGNS = {"higher": 1, "lower": -1, None: 0}
STAGES = ("data-split", "tokenize-shard", "tokenize", "lr-find", "train-chunk", "evaluate", "gate", "export")


@dataclass(frozen=True)
class ChunkAttempts:
    """A chunk and its attempts; spare chunks come after the last of the plan."""

    index: int
    spare: bool
    attempts: Sequence[documents.ChunkRecord]


@dataclass(frozen=True)
class ProofEntry:
    """A checkpoint's part of the resume proof, and why the checkpoint is gone."""

    part: documents.ProofPart
    gone: Literal["removed", "damaged"] | None = None


@dataclass(frozen=True)
class Examples:
    count: int = 0
    uri: str | None = None
    shown: Sequence[Json] = ()


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """The page's content; None for a document that the run does not have yet."""

    run: str
    uri: str
    created: str
    command: str = ""  # that began the run
    commit: str = ""  # of the code in that command's folder
    until: str = ""  # as `RunInfo.until`
    verdict: lineage.State | None = None  # of a trial that a rung has ended
    recipe_name: str
    recipe_yaml: str
    method: str
    plan: Plan | None = None
    split: documents.SplitCounts | None = None
    tokens: documents.TokenizedRows | None = None
    rendered: quality_page.Rendering | None = None  # None where rows were not made into conversations
    tracking: documents.TrackingRun | None = None
    fork: documents.ForkNote | None = None
    evaluation: EvaluationResult | None = None
    examples: Examples = Examples()
    export: ExportedModel | None = None
    newest: CheckpointMeta | None = None  # of the newest committed checkpoint
    log: Sequence[LogEntry] = ()  # up to that checkpoint
    attempts: Sequence[documents.ChunkRecord] = ()  # at all chunks, spare ones without work included
    restarts: Sequence[documents.Restart] = ()  # lost processes with a successor in the same pod
    lost_pods: Sequence[documents.PodLoss] = ()  # after which the run was started again on Kubeflow
    skips: Sequence[documents.Skip] = ()  # by the run's guard
    warnings: Sequence[documents.WarningRecord] = ()
    stages: Mapping[str, float] = field(default_factory=dict)  # seconds, in the pipeline's order
    proof: Sequence[ProofEntry] = ()
    family: lineage.Family = field(default_factory=dict)
    failure: RunFailure | None = None
    as_of: str = ""  # time of a page that was written before the run's end; empty afterwards
    is_stopped: bool = False  # by Ctrl-C, for instance: nothing trains now
    is_local: bool = False  # whether the page is written again at each checkpoint, as on this machine
    has_quality_page: bool = False
    mlflow_url: str | None = None  # of the tracking run's page
    gpu_use: GpuUse | None = None
    progress: documents.Progress | None = None  # of the chunk that trains just now
    spending: Json | None = None  # of a run with a budget
    bill: Bill | None = None  # of such a run, once an attempt has ended

    @property
    def is_live(self) -> bool:
        """Whether the run still goes on, as far as this page knows."""
        return bool(self.as_of) and not (self.failure or self.is_stopped)

    @property
    def is_bare(self) -> bool:
        """Whether nothing is known but the failure."""
        return self.failure is not None and not self.recipe_yaml

    @property
    def state(self) -> lineage.State:
        return lineage.decide_state(
            is_running=self.is_live,
            failure=self.failure,
            evaluation=self.evaluation,
            is_exported=self.export is not None,
            is_trained=self.is_trained,
            until=self.until,
            has_begun=bool(self.plan or self.newest),
            verdict=self.verdict,
        )

    @property
    def is_trained(self) -> bool:
        """Whether the last step is saved."""
        return bool(self.plan and self.newest and (self.newest.finished or self.steps >= self.plan.num_steps))

    @property
    def steps(self) -> int:
        return self.newest.step if self.newest else 0

    @property
    def reached(self) -> int:
        """Newest step trained, committed or not, as far as it is known."""
        return max(self.steps, self.progress.step if self.progress else 0)

    @property
    def pace(self) -> float:
        """Seconds of a step in the chunk that trains just now, 0 where none does."""
        return self.progress.seconds_per_step if self.progress else 0.0

    @property
    def skipped(self) -> Sequence[int]:
        """Steps skipped by the guard, by the recipe, and by the forked run."""
        return sorted({*(self.newest.skips if self.newest else ()), *(skip.step for skip in self.skips)})

    @property
    def stopped_before(self) -> int | None:
        return self.plan.num_steps if self.plan and self.newest and self.newest.finished else None

    @property
    def trained_tokens(self) -> int:
        """Tokens trained on, repetitions counted."""
        return round(self.tokens.tokens * self.plan.passes(self.steps)) if self.tokens and self.plan else 0

    @property
    def targets(self) -> Sequence[int]:
        return self.plan.targets if self.plan else ()

    @property
    def chunks(self) -> list[ChunkAttempts]:
        """The planned chunks, and each spare one with an attempt that found work."""
        if self.plan is None:
            return []
        planned = range(1, len(self.targets) + 1)
        worked = {attempt.chunk for attempt in self.attempts if attempt.outcome != "already_done"}
        # A run that is started again passes over the chunks that are done.
        attempts = [each for each in self.attempts if each.outcome != "already_done" or each.chunk not in worked]
        return [
            ChunkAttempts(index, index not in planned, [attempt for attempt in attempts if attempt.chunk == index])
            for index in (*planned, *sorted(chunk for chunk in worked if chunk > len(planned)))
        ]

    @property
    def chunk_attempts(self) -> list[documents.ChunkRecord]:
        return [attempt for chunk in self.chunks for attempt in chunk.attempts]

    @property
    def losses(self) -> list[LogEntry]:
        return [entry for entry in self.log if "loss" in entry]

    def figures(self, when: str) -> Figures:
        return (self.evaluation.figures(when) if self.evaluation else None) or {}


@dataclass(frozen=True, kw_only=True)
class FigureRow:
    name: str
    before: float | None
    production: float | None
    after: float | None
    why: str  # the reason why `after` was not measured
    low: float | None  # ends of the confidence interval of `after`
    high: float | None
    gain: str  # change by training with its interval, in words
    tone: str  # `good` where the gain's whole interval is on the better side, `bad` on the worse, else empty
    gate: str  # the gate's line on this figure, in words
    held: bool


def examples(run: Run, evaluation: EvaluationResult | None) -> Examples:
    named = evaluation.examples if evaluation else None
    if not named or not named.count:
        return Examples()
    lines = run.storage.read(run.path(named.path)).splitlines()
    uri = run.storage.uri(run.path(named.path))
    return Examples(len(lines), uri if lines else None, [load_object(line, uri) for line in lines[:MAX_EXAMPLES]])


def figure_rows(evaluation: EvaluationResult) -> list[FigureRow]:
    """Returns a row for each figure, those of the gate first."""
    lines = {line.figure: line for line in (evaluation.gate.lines if evaluation.gate else ())}
    names = [name for name in evaluation.after if name != "tokens"]
    names.sort(key=lambda name: name not in lines)  # stable: the evaluation's order otherwise
    return [_figure_row(name, evaluation, lines.get(name)) for name in names]


def _figure_row(name: str, evaluation: EvaluationResult, line: JudgedLine | None) -> FigureRow:
    intervals = evaluation.intervals or {}
    low, high = intervals.get("after", {}).get(name, (None, None))
    before, after = evaluation.before.get(name), evaluation.after[name]
    change = [value for value in intervals.get("gain", {}).get(name, ()) if value is not None]
    better = evaluation.better.get(name)
    if better is None and line and line.line:  # the gate asks for more or for less
        better = "lower" if line.line.startswith("<") else "higher"
    if better is None and name not in evaluation.better:
        better = "lower" if name.rpartition(".")[2] in LOWER_IS_BETTER else "higher"
    gain, tone = "", ""
    if len(change) == 2 and before is not None and after is not None:
        gain = f"{_signed(after - before)} ({_signed(change[0])} to {_signed(change[1])})"
        gains = [value * SIGNS[better] for value in change]
        tone = "good" if min(gains) > 0 else "bad" if max(gains) < 0 else ""
    return FigureRow(
        name=name,
        before=before,
        production=(evaluation.production or {}).get(name),
        after=after,
        why=evaluation.not_measured.get("after", {}).get(name, ""),
        low=low,
        high=high,
        gain=gain,
        tone=tone,
        gate=line.words if line else "",
        held=line is None or line.held,
    )


def _signed(value: float) -> str:
    return f"{'+' if value > 0 else '−' if value < 0 else ''}{number(abs(value))}"


def example_pages(shown: Sequence[Json]) -> list[tuple[str, Sequence[Json]]]:
    pages = [(at, shown[at : at + EXAMPLES_PER_PAGE]) for at in range(0, len(shown), EXAMPLES_PER_PAGE)]
    return [(f"{start + 1}–{start + len(page)}", page) for start, page in pages]


def collect(run: Run, failure: RunFailure | None = None, **state: Any) -> RunReport:
    """Returns the content of a run's page; `state` is of one that has not ended, such as `as_of`."""
    info, recipe = run.need(documents.RunInfo), run.recipe()
    store = CheckpointStore(run)
    damaged: list[int] = []
    committed = list(store.committed(lambda step, _: damaged.append(step)))
    newest = committed[0] if committed else None
    evaluation, trial = run.read(EvaluationResult), run.read(TrialInfo)
    attempts, records = run.attempts(), run.records()
    return RunReport(
        run=run.name,
        uri=run.uri,
        created=info.created,
        command=info.command,
        commit=info.commit,
        until="train" if trial else info.until,
        verdict=lineage.rung_verdicts(run.storage, trial.sweep).get(trial.id) if trial else None,
        recipe_name=recipe.name,
        recipe_yaml=load.to_yaml(recipe),
        method=recipe.training.method,
        plan=run.read(Plan),
        split=run.read(documents.SplitCounts),
        tokens=run.read(documents.TokenizedRows),
        rendered=quality_page.read_rendering(run),
        tracking=run.read(documents.TrackingRun),
        fork=run.read(documents.ForkNote),
        evaluation=evaluation,
        examples=examples(run, evaluation),
        export=run.read(ExportedModel),
        newest=newest.meta if newest else None,
        log=store.history(newest) if newest else [],
        attempts=attempts,
        restarts=run.restarts(),
        lost_pods=run.lost_pods(),
        skips=run.skips(),
        warnings=run.warnings(),
        stages=_stages(records),
        proof=_proof(store, committed, damaged),
        family={} if state else _family(run),  # which reads the other runs of the store
        failure=failure,
        spending=spending(run, newest.meta.work if newest else documents.RunCost(), newest.step if newest else 0),
        bill=bill(run, attempts, records) if recipe.budget else None,
        has_quality_page=run.storage.exists(run.path(quality_page.PAGE)),
        mlflow_url=mlflow_url(run, recipe),
        **state,
    )


def _family(run: Run) -> lineage.Family:
    """Returns the run's relatives, none where the store's policy shows a run only itself."""
    try:
        return lineage.related_runs(run)
    except StoreError as error:
        logger.warning("the report has no family tree: %s", error.message)
        return {}


def _stages(records: list[documents.StageRecord]) -> dict[str, float]:
    """Returns seconds by stage in pipeline order, attempts added up."""

    def place(record: documents.StageRecord) -> tuple[int, int, bool]:
        at = STAGES.index(record.kind if record.chunk is None else "train-chunk")
        return (at, record.chunk or 0, record.kind != "train-chunk")

    seconds: dict[str, float] = {}
    for record in sorted(records, key=place):
        name = record.kind.replace("-", " ") + ("" if record.chunk is None else f" {record.chunk}")
        seconds[name] = seconds.get(name, 0.0) + record.total
    return seconds


def _proof(store: CheckpointStore, committed: list[Checkpoint], damaged: list[int]) -> list[ProofEntry]:
    """Returns an entry for each checkpoint, and for each that was read back before it went."""
    parts = store.run.restored_parts()
    parts += [store.run.need(documents.ProofPart, chunk) for chunk in sorted(store.run.proven_chunks())]
    read_back = {(part.step, part.digest) for part in parts}
    entries = {part.step: ProofEntry(part, "damaged" if part.step in damaged else "removed") for part in parts}
    for checkpoint in committed:
        verified = (checkpoint.step, checkpoint.digest) in read_back
        part = proof_part(store, checkpoint).model_copy(update={"verified": verified})
        entries[checkpoint.step] = ProofEntry(part)
    return [entries[step] for step in sorted(entries)]
