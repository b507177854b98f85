"""The report's content: a run's own documents, and what follows from several of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from baton.components.shared.checkpoints.logs import LogEntry
from baton.components.shared.checkpoints.meta import CheckpointMeta
from baton.components.shared.core.document import Json
from baton.components.shared.pages.rendered import Rendered
from baton.components.shared.runs import lineage
from baton.components.shared.runs.documents.data import SplitCounts, Tokens
from baton.components.shared.runs.documents.outcome import Evaluation, ExportedModel, Failure, Figures
from baton.components.shared.runs.documents.skips import Skip
from baton.components.shared.runs.documents.training import ChunkRecord, ForkNote, ProofPart, Restart, Tracking, Warning
from baton.components.shared.runs.plan import Plan


@dataclass(frozen=True)
class Chunk:
    """A chunk and the attempts at it; spare ones come after the last of the plan."""

    index: int
    spare: bool
    attempts: Sequence[ChunkRecord]


@dataclass(frozen=True)
class ProofEntry:
    """A checkpoint's part of the resume proof, and why the checkpoint is no longer there."""

    part: ProofPart
    gone: Literal["removed", "damaged"] | None = None


@dataclass(frozen=True)
class Examples:
    """The evaluation's examples, the first of them to be shown."""

    count: int = 0
    uri: str | None = None
    shown: Sequence[Json] = ()


@dataclass(frozen=True, kw_only=True)
class Report:
    """What the page shows of a run; a document that the run does not have yet is None.

    Attributes:
        uri: The run's address.
        method: The training method.
        rendered: How texts became turns of a conversation; None where rows are rendered as they came.
        attempts: At all chunks, those at spare ones that found nothing to do among them.
        restarts: Processes that were lost and followed by another one in their pod.
        skips: Steps that the run's guard has found, and that are skipped.
        warnings: What a person was told of the run as it ran.
        newest: Meta of the newest committed checkpoint.
        log: What training logged up to that checkpoint.
        stages: Seconds by stage, in the pipeline's order.
        failure: Why the run ended before its end, None where it did not.
    """

    run: str
    uri: str
    created: str
    recipe_name: str
    recipe_yaml: str
    method: str
    plan: Plan | None = None
    split: SplitCounts | None = None
    tokens: Tokens | None = None
    rendered: Rendered | None = None
    tracking: Tracking | None = None
    fork: ForkNote | None = None
    evaluation: Evaluation | None = None
    examples: Examples = Examples()
    export: ExportedModel | None = None
    newest: CheckpointMeta | None = None
    log: Sequence[LogEntry] = ()
    attempts: Sequence[ChunkRecord] = ()
    restarts: Sequence[Restart] = ()
    skips: Sequence[Skip] = ()
    warnings: Sequence[Warning] = ()
    stages: Mapping[str, float] = field(default_factory=dict)
    proof: Sequence[ProofEntry] = ()
    family: lineage.Family = field(default_factory=dict)
    failure: Failure | None = None

    @property
    def is_bare(self) -> bool:
        """Whether nothing is known but why the run failed."""
        return self.failure is not None and not self.recipe_yaml

    @property
    def state(self) -> Literal["succeeded", "rejected", "failed", "cancelled"]:
        """How the run ended."""
        if self.failure:
            return "cancelled" if self.failure.is_cancelled else "failed"
        if not (self.plan and self.newest and (self.newest.finished or self.steps >= self.plan.num_steps)):
            return "failed"
        gate = self.evaluation.gate if self.evaluation else None
        return "rejected" if gate and not gate.passed else "succeeded"

    @property
    def steps(self) -> int:
        """Steps up to the newest checkpoint."""
        return self.newest.step if self.newest else 0

    @property
    def skipped(self) -> Sequence[int]:
        """Steps that were skipped: those found, those the recipe names, and those of the run that this one forked."""
        before = self.newest.skips if self.newest else []
        return sorted({*before, *(skip.step for skip in self.skips)})

    @property
    def stopped_before(self) -> int | None:
        """The planned last step, where early stopping ended the run."""
        return self.plan.num_steps if self.plan and self.newest and self.newest.finished else None

    @property
    def trained_tokens(self) -> int:
        """Tokens that the model has been trained on, repetitions counted."""
        return round(self.tokens.tokens * self.plan.passes(self.steps)) if self.tokens and self.plan else 0

    @property
    def targets(self) -> Sequence[int]:
        """Steps at which the planned chunks end."""
        return self.plan.targets if self.plan else ()

    @property
    def chunks(self) -> list[Chunk]:
        """The planned chunks, and each spare one that an attempt was made at."""
        if self.plan is None:
            return []
        planned = range(1, len(self.plan.targets) + 1)
        worked = {attempt.chunk for attempt in self.attempts if attempt.outcome != "already_done"}
        return [
            Chunk(index, index not in planned, [attempt for attempt in self.attempts if attempt.chunk == index])
            for index in (*planned, *sorted(chunk for chunk in worked if chunk > len(planned)))
        ]

    @property
    def chunk_attempts(self) -> list[ChunkRecord]:
        """The attempts at these chunks, in their order."""
        return [attempt for chunk in self.chunks for attempt in chunk.attempts]

    @property
    def losses(self) -> list[LogEntry]:
        """Log entries that have a training loss."""
        return [entry for entry in self.log if "loss" in entry]

    def figures(self, when: str) -> Figures:
        """Returns the evaluation's figures of a model; see `Evaluation.figures`."""
        return (self.evaluation.figures(when) if self.evaluation else None) or {}
