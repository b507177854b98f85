"""What the files of every trainer go through on the way to a recipe, in one order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from baton.pipelines.importing import pacing, weights
from baton.pipelines.importing.draft import Document, Draft
from baton.pipelines.importing.table import Table, apply, fill


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """A trainer whose files can be imported: what its keys are called, and what it takes where they are left out.

    Attributes:
        tool: Its name.
        model: Key of the base model.
        nested: Keys whose sections are taken apart.
        micro: Key of the rows per forward pass, and their number by default.
        product: Key of the rows per optimizer step, where it can be given in place of the passes.
        epochs: Key of the passes over the rows, and their number by default.
        warmup: Share of the steps that are warm-up by default; None for Baton's own.
        held_out: Key of the share of rows that are held out.
        per_epoch: Keys of the evaluations and of the checkpoints in an epoch.
        evaluates: Whether `eval_steps` alone turns evaluation on.
        patience: Key of early stopping.
        scheduler: Key of the learning-rate schedule.
        assumed: Other defaults that are not Baton's, by the recipe's path.
        choose: Returns the training method, and settings that follow from its name there.
        methods: What becomes of the methods' own settings.
        weights: Sets adapter, types and trained parameters.
        data: Sets where rows are, and what part of them counts.
        arithmetic: Sets attention, recomputation and what else of the schedule is the trainer's own.
        results: Sets what is measured, and where the model goes.
        keys: What becomes of all other keys.
    """

    tool: str
    model: str
    nested: tuple[str, ...] = ()
    micro: tuple[str, int]
    product: str | None = None
    epochs: tuple[str, float]
    warmup: float | None = None
    held_out: str
    per_epoch: tuple[str, str] | None = None
    evaluates: bool
    patience: str
    scheduler: str
    assumed: Mapping[str, object] = field(default_factory=dict)
    choose: Callable[[Draft], tuple[str, Document]]
    methods: Table
    weights: Callable[[Draft, str], None]
    data: Callable[[Draft, str], None]
    arithmetic: Callable[[Draft, str], None]
    results: Callable[[Draft, str], None]
    keys: Table

    def convert(self, draft: Draft) -> None:
        """Fills a recipe and handles each key of the file. Later steps look at what earlier ones have set.

        Raises:
            UserError: the file is another kind of file, or asks for what Baton cannot do at all.
        """
        method, settings = self.choose(draft)
        draft.put("training.method", method)
        for name, value in settings.items():
            draft.put(f"training.{method}.{name}", value)
        fill(draft, self.methods)
        micro = self.micro[0]
        pacing.batch(draft, micro, self.micro[1], self.product)
        pacing.fit_memory(draft, method)
        pacing.length(draft, *self.epochs)
        pacing.warmup(draft)
        if self.warmup is not None:
            draft.assume("training.warmup_steps", self.warmup)
        if method == "kto":
            pacing.fit_kto(draft, micro)
        self.weights(draft, method)
        self.data(draft, method)
        pacing.held_out(draft, self.held_out)
        if self.per_epoch:
            pacing.by_epoch(draft, *self.per_epoch)
        pacing.evaluations(draft, by_default=self.evaluates)
        pacing.checkpoints(draft)
        pacing.early_stopping(draft, self.patience)
        pacing.best(draft)
        pacing.order(draft, method)
        self.arithmetic(draft, method)
        weights.betas(draft)
        weights.compilation(draft)
        self.results(draft, method)
        apply(draft, self.keys)
        pacing.plateau(draft, self.scheduler)
        for path, value in self.assumed.items():
            draft.assume(path, value)
        draft.put("resources.gpus", 1)
