"""Forks: runs that begin at a checkpoint of another run, warm with its state or cold with its weights.

A warm fork keeps optimizer, schedule, random state and place in the data. It can change settings that are read
again at each step. It cannot change the order of rows or the parts of the saved state. `fork.json` is written first.
A fork needs nothing in its parent's folder, so the parent may be deleted.
"""

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.checkpoint import seals, sharded
from baton.checkpoint.store import Checkpoint, CheckpointStore
from baton.errors import BatonError, DamagedError, UserError
from baton.recipe import load
from baton.recipe.methods import SPECS
from baton.recipe.recipe import Recipe
from baton.runs import documents, objects
from baton.runs.documents import LearningRate
from baton.runs.plan import Plan, make_plan
from baton.runs.run import Run, check_name, identity, now, state_identity
from baton.runs.versions import CHECKPOINT_FORMATS, DATA_FORMATS
from baton.scratch import scratch_folder
from baton.store import bundle

Changes = dict[str, list[Any]]  # dotted path → value before and after

SCHEDULE = "the new schedule counts from step 0: at step {step} the learning rate jumps to where it would then be"
LENGTH = "the run ends at step {end}; the schedule is stretched to that, so the learning rate jumps at step {step}"
NEXT = "applies from step {next}; the optimizer's state stays"
LOSS = "the loss changes from step {next}, so losses before and after cannot be compared"
WATCHED = "applies from step {next}, with the window of the parent's steps"
SAME = "changes how the same steps are computed; expect other rounding, so other bits"

GUARD = ("nan", "loss", "grad_norm", "window")  # settings of the guard that decide which steps it refuses

# Settings that a warm fork may change → the effect.
CHANGEABLE: dict[str, str] = {
    "training.learning_rate": "the schedule continues at step {step} with the new peak; nothing warms up again",
    "training.lr_find": "the given learning rate replaces the search",
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
    "training.early_stopping.threshold": "applies from the next evaluation",
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
    "evaluation.per_epoch": "evaluations after step {step} follow the new number per epoch",
    "chunks.count": "chunks that end at or before step {step} return at once",
}

# Settings that a warm fork cannot change, by path or its beginning → reason.
FIXED: dict[str, str] = {
    "training.batch_size": "the place in the data is counted in batches of this size",
    "training.optimizer": "the optimizer's state belongs to another one",
    "training.early_stopping": "its counter is part of the state",
    "training.threads": "the bits so far were computed with the parent's number",
    "training.method": "another method keeps another state",
    "seed": "it decides the order of rows and every draw",
    "data": "it decides the rows and tokens that the place in the data points into",
    "model": "the weights and their names are the old model's",
    "adapter": "the adapter's weights have the old shape",
    "hooks": "your code may keep a state, and the checkpoint has the old code's",
    "retrain": "it decides the rows",
}

OF_STATE = ("training.", "adapter.", "evaluation.")  # settings that the trainer reads begin so
PLATEAU = ("reduce_lr_on_plateau", "greedy")  # schedules that keep a state of their own, apart from the step


LENGTHS = {path for path, effect in CHANGEABLE.items() if effect in (SCHEDULE, LENGTH)}


def changes(before: Recipe, after: Recipe) -> tuple[Changes, set[str]]:
    """Returns all settings that a fork changes, and the paths among them that decide bits."""
    all_of_them = load.differences(before.model_dump(mode="json"), after.model_dump(mode="json"))
    deciding = set(load.differences(identity(before), identity(after)))
    # These count by content elsewhere; a fork has its parent's content, so another address is another content.
    return all_of_them, deciding | {path for path in all_of_them if path in ("data.source", "hooks.source")}


def require_warm(before: Recipe, after: Recipe) -> Changes:
    """Returns a warm fork's changes; settings that it cannot change are refused, each with the reason."""
    changed, deciding = changes(before, after)
    refused = [f"{path}: {_reason(path)}" for path in sorted(deciding) if not _is_taken_over(path, before, after)]
    if _form(before) != _form(after):
        refused.append(f"training.parallel: the state at that step is {_form(before)}, and the fork's {_form(after)}")
    if before.store.uri != after.store.uri:
        refused.append("store.uri: a fork stays in its parent's store")
    if refused:
        raise UserError(
            "\n  ".join(["a warm fork cannot change", *refused]),
            remedy="\nUse --weights-only to start at step 0 from the parent's weights, or leave these as they are.",
        )
    return changed


def of_state(before: Recipe, after: Recipe) -> Changes:
    """Returns the changes that a warm fork's trainer makes in the restored state."""
    changed, deciding = changes(before, after)
    return {path: changed[path] for path in changed if path in deciding and path.startswith(OF_STATE)}


def require_cold(before: Recipe, after: Recipe) -> Changes:
    """Returns a cold fork's changes; another start model or store is refused."""
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
    """Returns a line for each changed setting: value before and after, and the effect."""
    lines = []
    for path, (before, after) in changed.items():
        means = (CHANGEABLE.get(path, "") if warm else "").format(step=step, next=step + 1, end=end)
        lines.append(f"{path}: {before!r} → {after!r}{f': {means}' if means else ''}")
    return lines


def combined(inherited: Mapping[str, list[Any]], own: Mapping[str, list[Any]]) -> Changes:
    """Returns a fork's changes since the recipe that made its state: its own, on those of an untrained parent fork."""
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
    return path in CHANGEABLE


def _reason(path: str) -> str:
    parts = path.split(".")
    names = (".".join(parts[:size]) for size in range(len(parts), 0, -1))
    return next((FIXED[name] for name in names if name in FIXED), "the state at that step fits the old value")


# Files of a checkpoint that make a model and its tokenizer.
MODEL_FILES = (".safetensors", ".json", ".model", ".txt", ".jinja", ".py")
TRAINER_STATE = "trainer_state.json"  # ends like a file of a model and is none


@dataclass(frozen=True)
class Fork:
    run: Run
    step: int  # of the parent
    digest: str  # of the parent's state at that step
    recipe: Recipe
    lines: list[str]  # changes, in words
    warm: bool


def fork(parent: Run, step: int | None, name: str, overrides: Sequence[str] = (), *, warm: bool = True) -> Fork:
    """Forks a checkpoint, by default the newest whole one, into a new run of the same store.

    The same call again completes a fork that broke off. `overrides` are changes to the recipe, `PATH=VALUE`.

    Raises:
        UserError: there is no such run or step, a setting cannot be changed, the name is another run's, or this Baton
            does not continue the parent's formats.
        DamagedError: the checkpoint differs from its commit.
    """
    key = CheckpointStore.of(parent, parent.recipe()).signed_by
    with seals.stage(parent, objects.FORK, appends=False, public=key) as ledger:
        return _fork(parent, ledger, step, name, overrides, warm=warm)


def _fork(
    parent: Run, sealed: seals.Ledger, step: int | None, name: str, overrides: Sequence[str], *, warm: bool
) -> Fork:
    before = parent.recipe()
    run = Run(parent.storage, check_name(name))
    # The note is written before the recipe: a run with a note and no recipe is a fork that broke off.
    if name == parent.name or (run.read(documents.ForkNote) is None and run.read(documents.RunInfo) is not None):
        raise UserError(
            f"run {run.uri!r} exists and is not a fork of this one.", remedy="Choose another name with --run."
        )
    if warm and before.training.lr_find:  # else the finder's rate would replace the given one
        gives_rate = any(override.partition("=")[0].strip() == "training.learning_rate" for override in overrides)
        overrides = [*overrides, *(["training.lr_find=null"] if gives_rate else [])]
    after = load.with_overrides(before, overrides)
    changed = require_warm(before, after) if warm else require_cold(before, after)
    store = CheckpointStore.of(parent, before)
    checkpoint = _chosen(store, step)
    if warm:  # rows and tokens are the parent's; their order and random numbers are this Baton's from here on
        parent.need(documents.RunInfo).made.require_continued(f"run {parent.name!r}", DATA_FORMATS)
    checkpoint.require_continued(*(CHECKPOINT_FORMATS if warm else ("checkpoint",)))
    step, digest = checkpoint.step, checkpoint.digest
    plan = make_plan(after, parent.plan().rows) if warm else None
    if plan and plan.num_steps < step:
        raise UserError(
            f"the fork would end at step {plan.num_steps}, before step {step}, at which it begins.",
            remedy="Fork an earlier step, or train longer.",
        )
    key = CheckpointStore.of(run, after).signed_by
    with seals.stage(run, objects.FORK, public=key) as ledger, scratch_folder("fork") as scratch:
        folder = _fetched(store, checkpoint, scratch)
        # First of all that is written: a crash after it is completed by the same command, and until then no chunk of a
        # warm fork begins with weights of its own (`require_start`).
        run.write_once(documents.ForkNote(parent=parent.uri, step=step, digest=digest, warm=warm, changed=changed))
        if plan:
            ledger.writes |= sealed.shared()
            _carry(parent, run, after, plan, checkpoint, folder, of_state(before, after))
        else:
            after = _begin_cold(run, before, after, folder, scratch)
    lines = in_words(changed, step=step, end=plan.num_steps if plan else 0, warm=warm)
    return Fork(run, step, digest, after, lines, warm)


def require_start(run: Run) -> None:
    """Refuses a warm fork without a checkpoint: it must not begin with weights of its own."""
    note = run.read(documents.ForkNote)
    if note and note.warm:
        raise BatonError(
            f"run {run.name!r} is a fork of {note.parent} at step {note.step}, and has no whole checkpoint "
            "to resume from.",
            remedy="Fork again: the same command completes a fork that was interrupted, another --run makes a new one.",
        )


def _chosen(store: CheckpointStore, step: int | None) -> Checkpoint:
    if step is not None and (checkpoint := store.read(step)):
        return checkpoint
    if step is None and (newest := next(store.whole(), None)):
        return newest
    there = ", ".join(str(checkpoint.step) for checkpoint in reversed(list(store.committed()))) or "none"
    raise UserError(
        f"run {store.run.uri!r} has no checkpoint{'' if step is None else f' of step {step}'}; it has {there}.",
        remedy="Name one that is there as RUN@STEP; chunks.keep decides which stay.",
    )


def _fetched(store: CheckpointStore, checkpoint: Checkpoint, scratch: str) -> str:
    """Downloads a checkpoint with every byte checked, and refuses code in it."""
    try:
        folder = store.fetch(checkpoint, f"{scratch}/checkpoint")
    except DamagedError as error:
        raise DamagedError(error.message, remedy="Fork another step, or the newest: RUN without @STEP.") from None
    if problems := sharded.code_in(folder):
        raise DamagedError(f"{store.storage.uri(store.prefix(checkpoint.step))} is not used: {'; '.join(problems)}.")
    return folder


def _carry(
    parent: Run, run: Run, recipe: Recipe, plan: Plan, checkpoint: Checkpoint, folder: str, changed: Changes
) -> None:
    """Commits the parent's state as a warm fork's checkpoint, with the changes that its recipe makes in it."""
    run.create(recipe, data=parent.need(documents.RunInfo).made)
    left_out = {LearningRate.NAME} if recipe.training.lr_find is None else set()
    left_out |= {documents.MicroBatchSize.NAME} if recipe.training.micro_batch_size != "auto" else set()
    for name in (name for name in objects.CARRIED if name not in left_out):
        if document := parent.raw(name):
            run.put(name, document)
    if documents.ORIGINS in parent.storage.list(parent.path()):
        run.storage.write(run.path(documents.ORIGINS), parent.storage.read(parent.path(documents.ORIGINS)))
    run.write_once(plan)
    store = CheckpointStore.of(run, recipe)
    step, meta = checkpoint.step, checkpoint.meta
    writer = store.open_writer(step)
    with contextlib.suppress(FileNotFoundError):  # retention may take it away meanwhile
        writer.send(folder)
    # In a folder store the files were read in place, not from a copy, and may have changed. `origin` does not count.
    sent, meant = (
        {name: (entry["size"], entry["sha256"]) for name, entry in files.items()}
        for files in (writer.files, checkpoint.manifest.files)
    )
    if sent != meant:
        raise DamagedError(f"step {step} of {parent.uri} changed while it was copied.", remedy="Fork again.")
    # A step of the parent's decay belongs to its end; with another length or a larger budget it is one like any other.
    end, span = parent.end(parent.need(documents.RunInfo)) if meta.end else None, meta.end
    if meta.end and step > meta.end[0]:
        if end and not end.is_voided(recipe.budget) and LENGTHS.isdisjoint(changed):
            run.write(end, 1)
        else:
            end, span = None, (step, meta.end[1])
    identity = state_identity(run, run.resolved_recipe(), plan)
    # A parent that is a fork and has not trained yet has a state that its own parent's recipe made.
    differs = combined(meta.forked_from.changed if meta.forked_from else {}, changed)
    begun = meta.model_copy(
        update={
            "forked_from": documents.ForkOrigin(run_uri=parent.uri, step=step, digest=meta.digest, changed=differs),
            "parent": None,
            "restored": meta.restored.model_copy(update={"step": step, "checked": None, "skipped": []}),
            "finished": meta.finished and not differs and span == meta.end,
            **({"end": span} if span else {}),
            "created": now(),
            "work": documents.RunCost(
                started=time.time(), trained_seconds=0.0, goodput=0.0, lost_steps=0, lost_seconds=0.0
            ),
            "identity": identity,
        }
    )
    store.commit(step, writer, begun)  # last: with it the fork is complete, and a chunk may resume from it


def _begin_cold(run: Run, before: Recipe, after: Recipe, folder: str, scratch: str) -> Recipe:
    """Writes a cold fork's start model, and returns its recipe."""
    model = f"{scratch}/model"
    folder = sharded.as_whole(folder, scratch)
    os.makedirs(model)
    if before.adapter:  # the base with the adapter folded in
        from baton.models import loading, trained

        tokenizer = loading.load_tokenizer(folder, trust_remote_code=before.model.trust_remote_code)
        whole: Any = trained.trained_model(before, tokenizer, folder, whole=True)
        whole.merge_and_unload().save_pretrained(model)
        tokenizer.save_pretrained(model)
    else:
        for name in os.listdir(folder):
            if name.endswith(MODEL_FILES) and name != TRAINER_STATE:
                shutil.copyfile(os.path.join(folder, name), os.path.join(model, name))
    names = sorted(os.listdir(model))
    lines = [f"{name} {bundle.file_sha256(os.path.join(model, name))}\n" for name in names]
    digest = hashlib.sha256("".join(lines).encode()).hexdigest()
    # Named by content: the same command, given again, finds the model that it had sent.
    prefix = run.path(f"start/{digest[:16]}")
    manifest = bundle.undamaged(run.storage, prefix)
    if manifest is None:
        manifest, _ = bundle.publish(run.storage, prefix, model, kind="model", meta={"digest": digest})
    document = after.model_dump(mode="json")
    document["model"] |= {
        "base": run.storage.uri(manifest.path(prefix)),
        "revision": None,
        "from_scratch": None,
        "tokenizer": None,
    }
    recipe = load.validate(document, origin=run.uri)
    run.create(recipe)
    return recipe
