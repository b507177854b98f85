"""Which settings a fork may change, and what each change means from the step at which it begins.

A warm fork keeps optimizer, schedule, random state and place in the data, so it can change what is read anew at each
step. What decides which rows come next, or what the saved state is made of, it cannot.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.components.shared.checkpoints.store import Checkpoint
from baton.components.shared.core.errors import UserError
from baton.components.shared.recipe import SPECS, Recipe
from baton.components.shared.runs.documents.data import RunHead
from baton.components.shared.runs.formats import DATA, OF_CHECKPOINT
from baton.components.shared.runs.run import Run, identity

Changes = dict[str, list[Any]]
"""Dotted path → value before and after."""

SCHEDULE = "the new schedule counts from step 0: at step {step} the learning rate jumps to where it would then be"
LENGTH = "the run ends at step {end}; the schedule is stretched to that, so the learning rate jumps at step {step}"
NEXT = "holds from step {next}; what the optimizer has gathered stays"
LOSS = "the loss is another from step {next}, so losses before and after cannot be compared"
WATCHED = "steps are judged so from step {next}, by those of the window that the parent has kept"
SAME = "changes how the same steps are computed; expect other rounding, so other bits"

GUARD = ("nan", "loss", "grad_norm", "window")
"""Settings of the guard that decide what it finds."""

TAKEN_OVER: dict[str, str] = {
    "training.learning_rate": "the schedule continues at step {step} with the new peak; nothing warms up again",
    "training.lr_find": "the learning rate is given, and not looked for",
    "training.lr_scheduler": SCHEDULE,
    "training.lr_scheduler_options": SCHEDULE,
    "training.warmup_steps": SCHEDULE,
    "training.epochs": LENGTH,
    "training.max_steps": LENGTH,
    "training.weight_decay": NEXT,
    "training.max_grad_norm": NEXT,
    "training.adam_betas": NEXT,
    "training.adam_epsilon": NEXT,
    "training.groups": NEXT,
    "training.neftune_alpha": NEXT,
    **dict.fromkeys(("training.guard", *(f"training.guard.{name}" for name in GUARD)), WATCHED),
    "training.log_every": "holds from step {next}",
    "training.early_stopping.patience": "the evaluations without gain so far count against the new patience",
    "training.early_stopping.threshold": "holds from the next evaluation",
    "training.micro_batch_size": SAME,
    "training.gradient_checkpointing": SAME,
    "training.activation_offloading": SAME,
    "training.compile": SAME,
    "training.liger": SAME,
    "training.precision": SAME,
    "training.tf32": SAME,
    "training.deterministic": SAME,
    "training.workers": "batches are the same; other processes prepare them",
    **{f"training.{spec.name}.{setting}": LOSS for spec in SPECS.values() for setting in spec.forkable},
    "adapter.dropout": NEXT,
    "evaluation.every": "evaluations after step {step} come at multiples of the new number",
    "evaluation.per_epoch": "evaluations after step {step} come as often in an epoch as the new number says",
    "chunks.count": "chunks that end at or before step {step} return at once",
}
"""What a warm fork takes over → what that means."""

REASONS: dict[str, str] = {
    "training.batch_size": "the place in the data is counted in batches of this size",
    "training.optimizer": "the optimizer's state is another's",
    "training.early_stopping": "its counter is part of the state, and is there or not",
    "training.threads": "the bits so far were computed with the parent's number",
    "training.method": "another method keeps another state",
    "seed": "it decides the order of rows and every draw",
    "data": "it decides the rows and tokens that the place in the data points into",
    "model": "the weights and their names are the old model's",
    "adapter": "the adapter's weights have the old shape",
    "hooks": "your code may keep a state, and the checkpoint has the old code's",
    "retrain": "it decides the rows",
}
"""What a warm fork cannot change, by path or its beginning → why."""

OF_STATE = ("training.", "adapter.", "evaluation.")
"""Beginnings of paths that the trainer reads."""
PLATEAU = ("reduce_lr_on_plateau", "greedy")
"""Schedules that keep their own state, beside the step."""


def require_continued(parent: Run, checkpoint: Checkpoint, *, warm: bool) -> None:
    """Checks that this Baton works on with what a fork takes over.

    Raises:
        FormatError: it does not.
    """
    if warm:  # whose order of rows and random numbers are this Baton's from here on
        parent.need(RunHead).made.require_continued(f"run {parent.name!r}", DATA)
    checkpoint.require_continued(*(OF_CHECKPOINT if warm else ("checkpoint",)))


def differences(before: Any, after: Any, path: str = "") -> Changes:
    """Returns the dotted paths whose values differ between two plain documents."""
    if isinstance(before, dict) and isinstance(after, dict):
        differing: Changes = {}
        for key in sorted(before.keys() | after.keys()):
            differing |= differences(before.get(key), after.get(key), f"{path}.{key}".lstrip("."))
        return differing
    return {} if before == after else {path: [before, after]}


def changes(before: Recipe, after: Recipe) -> tuple[Changes, set[str]]:
    """Returns all settings in which a fork differs from its parent, and which of them decide bits."""
    all_of_them = differences(before.model_dump(mode="json"), after.model_dump(mode="json"))
    deciding = set(differences(identity(before), identity(after)))
    # These count by content elsewhere; a fork has its parent's content, so another address is another content.
    return all_of_them, deciding | {path for path in all_of_them if path in ("data.source", "hooks.source")}


def require_warm(before: Recipe, after: Recipe) -> Changes:
    """Returns what a warm fork changes.

    Raises:
        UserError: settings that it cannot change, each by name with the reason.
    """
    changed, deciding = changes(before, after)
    refused = [f"{path}: {_reason(path)}" for path in sorted(deciding) if not _is_taken_over(path, before, after)]
    if _form(before) != _form(after):
        refused.append(f"training.parallel: the state at that step is {_form(before)}, and the fork's {_form(after)}")
    if before.store.uri != after.store.uri:
        refused.append("store.uri: a fork lies in its parent's store")
    if refused:
        raise UserError(
            "\n  ".join(["a warm fork cannot change", *refused]),
            remedy="\nUse --cold to start at step 0 from the parent's weights, or leave these as they are.",
        )
    return changed


def of_state(before: Recipe, after: Recipe) -> Changes:
    """Returns the changes that a warm fork's trainer has to make in the state it restores."""
    changed, deciding = changes(before, after)
    return {path: changed[path] for path in changed if path in deciding and path.startswith(OF_STATE)}


def require_cold(before: Recipe, after: Recipe) -> Changes:
    """Returns what a cold fork changes.

    Raises:
        UserError: another start model is asked for, or another store.
    """
    changed, _ = changes(before, after)
    starts = ("model.base", "model.revision", "model.from_scratch", "model.tokenizer", "phases", "store.uri")
    refused = [path for path in changed if any(path == start or path.startswith(f"{start}.") for start in starts)]
    if refused:
        raise UserError(
            f"a cold fork begins with its parent's weights and tokenizer, in its store; {', '.join(refused)} cannot "
            "be changed.",
            remedy="Start a separate run for another model.",
        )
    if before.training.spec.scores and not after.training.spec.scores:
        raise UserError("a reward model scores texts and writes none; only training.method reward can start from it.")
    return changed


def in_words(changed: Mapping[str, list[Any]], *, step: int, end: int, warm: bool) -> list[str]:
    """Returns a line for each changed setting: what it was, what it is, and what that means for the rest."""
    lines = []
    for path, (before, after) in changed.items():
        words = TAKEN_OVER.get(path, "") if warm else ""
        means = words.format(step=step, next=step + 1, end=end)
        lines.append(f"{path}: {before!r} → {after!r}{f': {means}' if means else ''}")
    return lines


def combined(inherited: Mapping[str, list[Any]], own: Mapping[str, list[Any]]) -> Changes:
    """Returns in what a fork's recipe differs from the one that made the state it takes over.

    Args:
        inherited: What its parent had changed, where the parent is a fork that has not trained since.
        own: What it changes itself.
    """
    merged = {path: list(values) for path, values in inherited.items()}
    for path, (before, after) in own.items():
        merged[path] = [merged[path][0] if path in merged else before, after]
    return {path: values for path, values in merged.items() if values[0] != values[1]}


def _form(recipe: Recipe) -> str:
    if recipe.world_size == 1 or not recipe.parallel.is_sharded:
        return "whole"
    return f"in {recipe.parallel.strategy}'s shards"


def _is_taken_over(path: str, before: Recipe, after: Recipe) -> bool:
    path = "training.lr_scheduler_options" if path.startswith("training.lr_scheduler_options.") else path
    path = "training.lr_find" if path.startswith("training.lr_find.") else path
    old, new = before.training, after.training
    if path == "training.lr_find":
        return new.lr_find is None  # looked for at the start of a run, or not at all
    if path in ("training.lr_scheduler", "training.lr_scheduler_options", "training.warmup_steps"):
        return old.lr_scheduler not in PLATEAU and new.lr_scheduler not in PLATEAU
    if path == "training.precision":
        return "fp16" not in (old.precision, new.precision)  # its loss scale is part of the state
    if path == "training.groups":
        return [(x.name, x.pattern) for x in old.groups] == [(x.name, x.pattern) for x in new.groups]
    if path == "training.micro_batch_size":
        return not old.spec.micro_batch_decides_loss
    return path in TAKEN_OVER


def _reason(path: str) -> str:
    parts = path.split(".")
    names = (".".join(parts[:size]) for size in range(len(parts), 0, -1))
    return next(
        (REASONS[name] for name in names if name in REASONS), "the state at that step is made for the old value"
    )
