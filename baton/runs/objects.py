"""Objects of a run: their names, writers and readers, and the source from which each can be made again.

Names are relative to the run's folder, of shared bundles to the store; `*` is a part of a name, `**` any depth. A
bundle is one object: its manifest covers its files. Forks, sweeps, audits, removal, seals, verification and repairs use
this list.
"""

import re
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from baton.documents import NamedDocument
from baton.runs import documents, outcomes
from baton.runs.plan import Plan


class Mend(StrEnum):
    """Source of a damaged or lost object."""

    SEAL = "seal"  # its writer's seal holds the content
    STAGE = "stage"  # its stage writes it again at each start; readers take a differing one for an absent one
    BUNDLE = "bundle"  # its stage commits it again, above the damaged generation
    STEPS = "steps"  # training continues from the previous checkpoint
    CHAIN = "chain"  # its number is written again where it is the newest; of an older one `baton verify run` tells
    NOTE = "note"  # nothing: a loss costs figures, and no bit depends on it


SPLIT, TOKENIZE, SHARD, LR_FIND, CHUNK = "data-split", "tokenize", "tokenize-shard", "lr-find", "train-chunk"
CHECKPOINT, EVALUATE, GATE, EXPORT, REPORT = "checkpoint", "evaluate", "gate", "export", "report"
FORK, ENTER, ADOPT = "fork", "enter", "adopt"  # a fork, a sweep's trial, and settings given to a run that exists
JUDGE = "judge"  # of a sweep's rung: it reads trials' scores, and whether their chunks have ended
PROMOTE = "promote"  # of a retraining: it accepts an exported model
ALL = (SPLIT, TOKENIZE, SHARD, LR_FIND, CHUNK, CHECKPOINT, EVALUATE, GATE, EXPORT, REPORT, FORK, ENTER, ADOPT, PROMOTE)
LATER = (CHUNK, EVALUATE, GATE, EXPORT, REPORT)  # stages that use trained models


@dataclass(frozen=True)
class RunObject:
    """A kind of object; `readers` are the stages that obey it, and compare it with the seals."""

    pattern: str
    mend: Mend
    writers: tuple[str, ...]
    readers: tuple[str, ...] = ()
    kind: type[NamedDocument] | None = None  # None for a bundle, a page, or a document read as plain JSON
    is_carried: bool = False  # by a warm fork, a sweep's trials and an audit
    is_identity: bool = False  # part of `run.state_identity`
    is_left: bool = False  # by a finished stage: without it the stage runs again, whatever Kubeflow's cache holds
    is_urgent: bool = False  # a second attempt at the same stage obeys it: sealed at once, not at the stage's end
    is_shared: bool = field(default=False)  # by runs of the store

    @cached_property
    def is_bundle(self) -> bool:
        return self.mend in (Mend.BUNDLE, Mend.STEPS)

    @cached_property
    def is_keyed(self) -> bool:
        """Whether there may be many: one a chunk, step or attempt."""
        return "*" in self.pattern and not self.is_bundle

    @cached_property
    def expression(self) -> re.Pattern[str]:
        deep = (map(re.escape, part.split("*")) for part in self.pattern.split("**"))
        return re.compile(".+".join("[^/]*".join(part) for part in deep))


def _document(kind: type[NamedDocument], mend: Mend, writers: tuple[str, ...], **more: object) -> RunObject:
    return RunObject(re.sub(r"\{.*?\}", "*", kind.NAME), mend, writers, kind=kind, **more)  # type: ignore[arg-type]


BEGINS = (SPLIT, FORK, ENTER, ADOPT)  # stages that begin a run, or give it new settings
OBJECTS = (
    _document(documents.RunInfo, Mend.SEAL, BEGINS, readers=ALL),
    _document(documents.SplitData, Mend.SEAL, BEGINS, readers=ALL, is_carried=True, is_identity=True),
    _document(
        documents.PinnedModels,
        Mend.SEAL,
        (TOKENIZE, *BEGINS),
        readers=ALL,
        is_carried=True,
        is_identity=True,
        is_left=True,
    ),
    _document(documents.OwnCode, Mend.SEAL, BEGINS, readers=ALL, is_carried=True, is_identity=True),
    _document(documents.SplitCounts, Mend.SEAL, BEGINS, readers=ALL, is_carried=True),
    _document(documents.TokenizedRows, Mend.SEAL, (TOKENIZE, *BEGINS), readers=ALL, is_carried=True, is_left=True),
    _document(documents.LearningRate, Mend.SEAL, (LR_FIND, *BEGINS), readers=ALL, is_carried=True, is_left=True),
    _document(documents.MicroBatchSize, Mend.SEAL, (CHUNK, *BEGINS), readers=ALL, is_carried=True, is_urgent=True),
    _document(Plan, Mend.SEAL, (TOKENIZE, *BEGINS), readers=ALL, is_left=True),
    _document(documents.ForkNote, Mend.SEAL, (FORK, ADOPT), readers=ALL),
    _document(outcomes.TrialInfo, Mend.SEAL, (ENTER, ADOPT), readers=(CHUNK, REPORT)),
    _document(outcomes.RetrainNote, Mend.NOTE, ()),
    _document(documents.MissingArtifacts, Mend.NOTE, ()),
    _document(documents.Skip, Mend.SEAL, (CHUNK, *BEGINS), readers=(CHUNK, REPORT), is_urgent=True),
    _document(documents.RunEnd, Mend.SEAL, (CHUNK, *BEGINS), readers=ALL, is_urgent=True),
    RunObject(documents.ORIGINS, Mend.STAGE, BEGINS),
    RunObject("quality.json", Mend.STAGE, BEGINS),
    RunObject("quality.jsonl", Mend.STAGE, (SPLIT,)),
    RunObject("rejected.jsonl", Mend.STAGE, (SPLIT,)),
    RunObject("data-quality.html", Mend.STAGE, (SPLIT, TOKENIZE, REPORT)),
    _document(documents.Promoted, Mend.STAGE, (CHECKPOINT,), readers=(REPORT, JUDGE)),
    _document(documents.ProofPart, Mend.STAGE, (CHECKPOINT,), readers=(REPORT, JUDGE)),
    RunObject("proof/restored-*.json", Mend.STAGE, (CHUNK,), readers=(REPORT,)),
    _document(outcomes.TrialScore, Mend.SEAL, (CHUNK,), readers=(CHUNK, JUDGE)),
    _document(outcomes.TrialRows, Mend.SEAL, (CHUNK,), readers=(CHUNK, JUDGE)),
    _document(outcomes.TrialFailure, Mend.NOTE, ()),
    _document(outcomes.EvaluationResult, Mend.STAGE, (EVALUATE, GATE), readers=(GATE, EXPORT, REPORT, PROMOTE)),
    RunObject("examples.jsonl", Mend.STAGE, (EVALUATE,), readers=(REPORT,)),
    _document(outcomes.ExportedModel, Mend.STAGE, (EXPORT,), readers=(REPORT, PROMOTE)),
    _document(outcomes.RegistryEntry, Mend.STAGE, (EXPORT,)),
    _document(outcomes.Pushed, Mend.STAGE, (EXPORT,)),
    _document(outcomes.ReportPage, Mend.STAGE, (REPORT,)),
    RunObject("report.html", Mend.STAGE, (REPORT,)),
    _document(documents.AttachedRun, Mend.NOTE, ()),
    _document(documents.Progress, Mend.NOTE, ()),
    _document(documents.NodeChoice, Mend.NOTE, ()),
    _document(documents.TrackingRun, Mend.NOTE, ()),
    _document(outcomes.RunFailure, Mend.NOTE, ()),
    RunObject("records/*.json", Mend.NOTE, ()),
    RunObject("restarts/*.json", Mend.NOTE, ()),
    RunObject("warnings/*.json", Mend.NOTE, ()),
    RunObject("samples/*.json", Mend.NOTE, ()),
    RunObject("metrics/*.jsonl", Mend.NOTE, ()),
    RunObject("tensorboard/**", Mend.NOTE, ()),
    RunObject("wandb/**", Mend.NOTE, ()),
    RunObject("unsent/**", Mend.NOTE, ()),
    RunObject("demo.html", Mend.NOTE, ()),
    RunObject("recipe.yaml", Mend.NOTE, ()),
    RunObject("seals/*.json", Mend.CHAIN, ALL),
    RunObject("checkpoints/step-*", Mend.STEPS, (CHUNK, FORK), readers=LATER),
    RunObject("start/*", Mend.BUNDLE, (FORK,)),
    RunObject("export", Mend.BUNDLE, (EXPORT,), readers=(EXPORT, PROMOTE)),
    RunObject("export-*", Mend.BUNDLE, (EXPORT,), readers=(EXPORT, PROMOTE)),
    RunObject("exports/*", Mend.BUNDLE, (EXPORT,), readers=(EXPORT, PROMOTE)),
    RunObject("data/*/split", Mend.BUNDLE, (SPLIT,), readers=(TOKENIZE, SHARD, *LATER), is_shared=True),
    RunObject("data/*/tokens*", Mend.BUNDLE, (TOKENIZE,), readers=(TOKENIZE, LR_FIND, *LATER), is_shared=True),
    RunObject("data/*/code", Mend.BUNDLE, (SPLIT,), is_shared=True),
)
CARRIED = tuple(each.pattern for each in OBJECTS if each.is_carried)
"""Results of a run's stages that hold for its warm fork."""
IDENTITY = tuple(each.pattern for each in OBJECTS if each.is_identity)
HEADS = (documents.RunInfo.NAME, documents.AttachedRun.NAME)
"""Documents that make a folder a run."""


def find(name: str) -> RunObject | None:
    """Returns the kind of an object by its name, None where it is none of a run's."""
    return next((each for each in OBJECTS if each.expression.fullmatch(name)), None)
