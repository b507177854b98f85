"""Forks: runs that begin at a checkpoint of another run, warm with all of its state or cold with its weights alone.

    runs/<fork>/fork.json                     whose child it is, and what it changes; written first
    runs/<fork>/{data,model,plan,…}.json      warm: what its parent's stages had found
    runs/<fork>/checkpoints/step-N/           warm: the parent's files, committed under the fork's own name
    runs/<fork>/start/{<attempt>/…, manifest.json}   cold: the model it starts from

Nothing is left in the parent's folder that a fork needs, so the parent may be deleted.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from baton.components.shared.checkpoints import sharded
from baton.components.shared.checkpoints.pickles import code_in
from baton.components.shared.checkpoints.store import Checkpoint, CheckpointStore
from baton.components.shared.core.errors import BatonError, DamagedError, UserError
from baton.components.shared.core.scratch import scratch_folder
from baton.components.shared.forks import fork_rules
from baton.components.shared.forks.fork_rules import Changes
from baton.components.shared.recipe import Recipe, recipe_file
from baton.components.shared.runs.documents.data import (
    ORIGINS,
    OwnCode,
    PinnedModels,
    RunHead,
    SplitCounts,
    SplitData,
    Tokens,
)
from baton.components.shared.runs.documents.training import ForkNote, LearningRate, MicroBatch, Origin, Work
from baton.components.shared.runs.plan import Plan, make_plan
from baton.components.shared.runs.run import Run, check_name, now, state_identity
from baton.components.shared.store import bundles

CARRIED = tuple(kind.NAME for kind in (SplitData, PinnedModels, OwnCode, SplitCounts, Tokens, LearningRate, MicroBatch))
"""What stages had found for the parent, and holds for a warm fork."""
MODEL_FILES = (".safetensors", ".json", ".model", ".txt", ".jinja", ".py")
"""Files of a checkpoint that make a model and its tokenizer."""
STATE_FILES = ("trainer_state.json",)
"""Files of a checkpoint that end like those and are none."""


@dataclass(frozen=True)
class Fork:
    """A fork that was made.

    Attributes:
        run: The new run.
        step: The parent's step that it begins at.
        digest: Digest of the state there.
        recipe: The fork's recipe.
        lines: What it changes, and what that means, for people.
        warm: Whether it keeps the state; else it begins at step 0 with the weights.
    """

    run: Run
    step: int
    digest: str
    recipe: Recipe
    lines: list[str]
    warm: bool


def fork(parent: Run, step: int | None, name: str, overrides: Sequence[str] = (), *, warm: bool = True) -> Fork:
    """Makes a new run of a checkpoint.

    Done again with the same arguments it completes what a call that died had begun.

    Args:
        parent: The run to fork.
        step: One of its checkpoints; the newest that is whole when None.
        name: Name of the new run, in the same store.
        overrides: Changes to the recipe, `PATH=VALUE`.
        warm: Keep optimizer, schedule, random state and place in the data.

    Raises:
        UserError: there is no such run or step, a setting cannot be changed, the name is another run's, or this Baton
            does not continue what a fork takes over.
        DamagedError: the checkpoint is not what was committed.
    """
    before = parent.recipe()
    run = Run(parent.storage, check_name(name))
    # A fork's note is written before its recipe: a run with a note and no recipe is a fork that broke off, and is
    # completed.
    if name == parent.name or (run.read(ForkNote) is None and run.read(RunHead) is not None):
        raise UserError(f"run {run.uri!r} exists and is no fork of this one.", remedy="Choose another name with --run.")
    after = recipe_file.with_overrides(before, _with_rate(before, overrides) if warm else overrides)
    changed = fork_rules.require_warm(before, after) if warm else fork_rules.require_cold(before, after)
    store = CheckpointStore.of(parent, before)
    checkpoint = _chosen(store, step)
    fork_rules.require_continued(parent, checkpoint, warm=warm)
    step, digest = checkpoint.step, checkpoint.digest
    plan = _plan(parent, after, step) if warm else None
    with scratch_folder("fork") as scratch:
        folder = _fetched(store, checkpoint, scratch)
        # Before anything else of the run: it lets the same command complete what a crash broke off (`_new`), and keeps
        # a chunk of a warm fork from beginning with weights of its own meanwhile (`require_start`).
        run.write_once(ForkNote(parent=parent.uri, step=step, digest=digest, warm=warm, changed=changed))
        if plan:
            _carry(parent, run, after, plan, _Start(checkpoint, folder), fork_rules.of_state(before, after))
        else:
            after = _begin_cold(run, before, after, folder, scratch)
    lines = fork_rules.in_words(changed, step=step, end=plan.num_steps if plan else 0, warm=warm)
    return Fork(run, step, digest, after, lines, warm)


def require_start(run: Run) -> None:
    """Makes sure that a run may begin with its own weights: a warm fork begins with its parent's state.

    Raises:
        BatonError: it is one, and the checkpoint that it began with is not there, or not whole.
    """
    note = run.read(ForkNote)
    if note and note.warm:
        raise BatonError(
            f"run {run.name!r} is a fork of {note.parent} at step {note.step}, and has no whole checkpoint "
            "to resume from.",
            remedy="Fork again: the same command completes a fork that was interrupted, another --run makes a new one.",
        )


def began(run: Run) -> int:
    """Returns the step that a run began at: its parent's, for a warm fork."""
    note = run.read(ForkNote)
    return note.step if note and note.warm else 0


def _with_rate(before: Recipe, overrides: Sequence[str]) -> list[str]:
    """Turns the search for a learning rate off where one is given, which would hold in its place."""
    sets_rate = any(override.partition("=")[0].strip() == "training.learning_rate" for override in overrides)
    return [*overrides, *(["training.lr_find=null"] if sets_rate and before.training.lr_find else [])]


def _chosen(store: CheckpointStore, step: int | None) -> Checkpoint:
    """Returns the checkpoint to fork.

    Raises:
        UserError: there is none, or none of this step.
        DamagedError: its manifest was found damaged.
    """
    if step is not None and (checkpoint := store.read(step)):
        return checkpoint
    if step is None and (newest := next(store.whole(), None)):
        return newest
    there = ", ".join(str(checkpoint.step) for checkpoint in reversed(list(store.committed()))) or "none"
    raise UserError(
        f"run {store.run.uri!r} has no checkpoint{'' if step is None else f' of step {step}'}; it has {there}.",
        remedy="Name one that is there as RUN@STEP; chunks.keep decides which stay.",
    )


def _plan(parent: Run, recipe: Recipe, step: int) -> Plan:
    """Returns the plan of a warm fork.

    Raises:
        UserError: it ends before the step at which it begins.
    """
    plan = make_plan(recipe, parent.plan().rows)
    if plan.num_steps < step:
        raise UserError(
            f"the fork would end at step {plan.num_steps}, before step {step}, at which it begins.",
            remedy="Fork an earlier step, or train longer.",
        )
    return plan


def _fetched(store: CheckpointStore, checkpoint: Checkpoint, scratch: str) -> str:
    """Brings a checkpoint here, every byte checked, and no code in it.

    Raises:
        DamagedError: it is not what was committed, or a pickle of it holds code.
    """
    try:
        folder = store.fetch(checkpoint, f"{scratch}/checkpoint")
    except DamagedError as error:
        raise DamagedError(error.message, remedy="Fork another step, or the newest: RUN without @STEP.") from None
    if problems := code_in(folder):
        raise DamagedError(f"{store.storage.uri(store.prefix(checkpoint.step))} is not used: {'; '.join(problems)}.")
    return folder


@dataclass(frozen=True)
class _Start:
    """A parent's checkpoint, brought to this machine."""

    checkpoint: Checkpoint
    folder: str


def _carry(parent: Run, run: Run, recipe: Recipe, plan: Plan, start: _Start, changed: Changes) -> None:
    """Gives a warm fork its parent's state, with a note of what its recipe changes in it."""
    run.create(recipe, data=parent.need(RunHead).made)
    left_out = {LearningRate.NAME} if recipe.training.lr_find is None else set()
    left_out |= {MicroBatch.NAME} if recipe.training.micro_batch_size != "auto" else set()
    for name in (name for name in CARRIED if name not in left_out):
        if document := parent.get(name):
            run.put(name, document)
    if ORIGINS in parent.storage.list(parent.path()):
        run.storage.write(run.path(ORIGINS), parent.storage.read(parent.path(ORIGINS)))
    run.write_once(plan)
    store = CheckpointStore.of(run, recipe)
    step = start.checkpoint.step
    writer = store.open_writer(step)
    with contextlib.suppress(FileNotFoundError):  # retention may take it away meanwhile
        writer.send(start.folder)
    # Where the store is a folder the files were read in place, and not from a copy.
    if writer.files != start.checkpoint.manifest.files:
        raise DamagedError(f"step {step} of {parent.uri} changed while it was copied.", remedy="Fork again.")
    identity = state_identity(run, run.resolved_recipe(), plan)
    # Last: with it the fork is complete, and a chunk may resume from it.
    meta = start.checkpoint.meta
    # The state of a fork that has not trained yet was made by the recipe of its own parent.
    differs = fork_rules.combined(meta.forked_from.changed if meta.forked_from else {}, changed)
    store.commit(
        step,
        writer,
        meta.model_copy(
            update={
                "forked_from": Origin(
                    run_uri=parent.uri, step=start.checkpoint.step, digest=meta.digest, changed=differs
                ),
                "parent": None,
                "restored": meta.restored.model_copy(
                    update={"step": start.checkpoint.step, "checked": None, "skipped": []}
                ),
                "finished": meta.finished and not differs,
                "created": now(),
                "work": Work(started=time.time(), trained_seconds=0.0, goodput=0.0, lost_steps=0, lost_seconds=0.0),
                "identity": identity,
            }
        ),
    )


def _begin_cold(run: Run, before: Recipe, after: Recipe, folder: str, scratch: str) -> Recipe:
    """Gives a cold fork its start model, and returns its recipe."""
    model = f"{scratch}/model"
    if sharded.is_sharded(folder):
        sharded.merge(folder, f"{scratch}/merged", shard_size=sharded.SHARD_SIZE)
        folder = f"{scratch}/merged"
    os.makedirs(model)
    _merge(before, folder, model) if before.adapter else _copy_model(folder, model)
    names = sorted(os.listdir(model))
    lines = [f"{name} {bundles.file_sha256(os.path.join(model, name))}\n" for name in names]
    digest = hashlib.sha256("".join(lines).encode()).hexdigest()
    # By content: the same command, given again, finds what it had sent.
    prefix = run.path(f"start/{digest[:16]}")
    manifest = bundles.usable_manifest(run.storage, prefix)
    if manifest is None:
        manifest, _ = bundles.publish(run.storage, prefix, model, kind="model", meta={"digest": digest})
    document = after.model_dump(mode="json")
    document["model"] |= {
        "base": run.storage.uri(manifest.path(prefix)),
        "revision": None,
        "from_scratch": None,
        "tokenizer": None,
    }
    recipe = recipe_file.validate(document, origin=run.uri)
    run.create(recipe)
    return recipe


def _copy_model(folder: str, target: str) -> None:
    """Copies weights, configuration and tokenizer of a checkpoint."""
    for name in os.listdir(folder):
        if name.endswith(MODEL_FILES) and name not in STATE_FILES:
            shutil.copyfile(os.path.join(folder, name), os.path.join(target, name))


def _merge(recipe: Recipe, folder: str, target: str) -> None:
    """Writes the base with the checkpoint's adapter folded in, and the tokenizer."""
    from baton.components.shared.models import loading, trained

    tokenizer = loading.load_tokenizer(folder, trust_remote_code=recipe.model.trust_remote_code)
    model: Any = trained.trained_model(recipe, tokenizer, folder, whole=True)
    model.merge_and_unload().save_pretrained(target)
    tokenizer.save_pretrained(target)
