"""`baton.attach`: trains a script's own trainer in chunks, each an exact part of one run in the store.

The run has no recipe: `attached.json` identifies its checkpoints by facts that decide the bits, compared by value, and
`plan.json` has its length.
"""

import dataclasses
import hashlib
import json
import logging
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import datasets
import pyarrow as pa
import torch
import xxhash
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import has_length

from baton.checkpoint import retention
from baton.checkpoint.digest import tree_digest
from baton.checkpoint.proof import prove
from baton.checkpoint.sharded import code_in
from baton.checkpoint.staging import Staging
from baton.checkpoint.store import Checkpoint, CheckpointStore
from baton.documents import Json
from baton.errors import OtherRunError, UserError
from baton.models import rng
from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.runs.documents import AttachedRun, ProofPart, RunInfo, Script, StagePhase
from baton.runs.plan import Plan
from baton.runs.run import Run, check_name, now
from baton.runs.versions import RUN_FORMATS, FormatVersions
from baton.store.cache import NodeCache
from baton.train import attempt, borrow, inputs
from baton.train.chunk import Outcome, conclude, without_training
from baton.train.context import Clock, TrainContext
from baton.train.distributed import Ranks
from baton.train.preemption import PreemptionWatch

logger = logging.getLogger("baton")

# A step, a share of the run, or chunk k of n as `(k, n)` or `"k/n"`; None is the whole run.
Target = int | float | str | tuple[int, int] | None


def begin_or_join(run: Run, found: Json, section: Json) -> None:
    """Begins a run, or joins one.

    Raises:
        OtherRunError: it was begun with other facts, which are named, or by a Baton that this one does not continue.
    """
    ours = AttachedRun(
        name=run.name,
        created=now(),
        facts=found,
        chunks=section,
        script=running_script(),
        made=FormatVersions.here(RUN_FORMATS),
    )
    if run.write_new(ours):  # of several processes that begin it at once, one writes; the others join
        return
    before = run.need(AttachedRun)
    before.made.require_continued(f"run {run.name!r}", RUN_FORMATS)
    if changed := load.changed_paths(before.facts, ours.facts):
        is_seed = all(line.startswith("model.begins_with") for line in changed)
        hint = " Seed the generators before the model is built." if is_seed else ""
        raise OtherRunError(
            f"run {run.name!r} was begun with something else: {'; '.join(changed)}.",
            remedy=f"Set these back, or attach to a run of another name.{hint}",
        )
    if before.script.sha256 and before.script.sha256 != ours.script.sha256:
        logger.warning("the script has changed since run %s began; compared settings are the same", run.name)


# Trainers that this process has trained: their weights and random state are no longer those of the start.
_used: WeakSet[Trainer] = WeakSet()


# Prefixes of a checkpoint's files that hold no weights.
NOT_WEIGHTS = ("optimizer", "scheduler", "scaler", "rng_state", "baton_state")


class Chunk:
    """A stretch of a trainer's run, up to one step.

    Attributes:
        uri: Address of the run.
        target: The step at which the chunk ends.
        num_steps: Steps of the whole run.
        number: The chunk's number.
    """

    def __init__(self, trainer: Trainer, context: TrainContext) -> None:
        self._trainer, self._context = trainer, context
        self.uri = context.run.uri
        self.target, self.num_steps, self.number = context.target, context.plan.num_steps, context.index

    def __repr__(self) -> str:
        return f"<chunk {self.number} of {self.uri}, to step {self.target} of {self.num_steps}>"

    def train(self, *, load: bool = True, leave_out: tuple[str, ...] = ()) -> Outcome:
        """Brings the run to the chunk's target, from the newest checkpoint that is as it was committed.

        It returns at once where the target is committed, and with `partial` where this machine is to be preempted.
        Afterwards the trainer has the class, arguments and callbacks that it had, and the weights of the step reached.

        Args:
            load: Whether to load the weights where there is nothing to train; without, the trainer is left as it is.
            leave_out: Parts of the state not to restore, `rng` or `hooks`: a negative control for tests of exactness.

        Returns:
            How it ended, and the newest checkpoint.

        Raises:
            ExactnessError: the state restored differs from the state saved.
            BatonError: the store takes no checkpoints, or a step cannot be trained.
        """
        self._context = dataclasses.replace(self._context, clock=Clock())
        self._context.clock.restart()  # earlier effects of the script are its own
        outcome = without_training(self._context, None)
        if outcome is None:
            self._context.store.require_signer()
            outcome = self._train(leave_out)
            context = self._context
            retention.tidy(context.store, context.recipe.chunks.keep, targets=context.plan.targets)
        elif load:
            self.load(outcome.step)
        # Also where early stopping has ended the run in a chunk before this one.
        if outcome.is_done and (outcome.step >= self.num_steps or self._checkpoint(outcome.step).meta.finished):
            # `Trainer` would look for what `load_best_model_at_end` asks for in its own folder.
            state = self._trainer.state
            best = state.best_global_step if self._trainer.args.load_best_model_at_end else None
            if best and self._context.store.read(best):
                self.load(best)
                self._trainer.state = state
        return outcome

    def _train(self, leave_out: tuple[str, ...]) -> Outcome:
        """Trains to the target, or as far as it gets, and gives the trainer back."""
        context, trainer = self._context, self._trainer
        context.clock.enter(StagePhase.FETCH, chunk=context.index, target=context.target)
        with PreemptionWatch(context.recipe.chunks.preemption) as watch, Staging() as staging:
            restorer = inputs.open_restorer(context, staging, NodeCache.of(context.recipe.store))
            restored = restorer.require_no_code(restorer.fetch())
            if restored is None and trainer in _used:
                raise UserError(
                    f"run {context.run.name!r} has no checkpoint to restore, and this trainer has been trained before.",
                    remedy="Build the trainer again: a run begins with a fresh one.",
                )
            _used.add(trainer)
            restored = inputs.without(restored, leave_out, staging.folder(0))
            with borrow.borrow_trainer(trainer, context.recipe, resumes=restored is not None) as attached:
                checkpointer = attempt.train_chunk(
                    context, restored, restorer.skipped, staging, watch, lambda: (context, attached), is_script=True
                )
                return conclude(context, checkpointer)

    def load(self, step: int | None = None) -> int:
        """Loads the weights of a checkpoint into the trainer's model, and what it has logged up to there.

        Args:
            step: Its step; that of the newest one when left out.

        Returns:
            Its step.

        Raises:
            UserError: there is no such checkpoint.
            DamagedError: it differs from its commit.
        """
        store, trainer = self._context.store, self._trainer
        checkpoint = self._checkpoint(step)
        checkpoint.require_continued()
        names = [name for name in checkpoint.manifest.files if not os.path.basename(name).startswith(NOT_WEIGHTS)]
        self._context.clock.enter(StagePhase.FETCH)
        with Staging() as staging, borrow.borrow_trainer(trainer, self._context.recipe, resumes=True) as attached:
            place = os.path.join(staging.folder(checkpoint.bytes), "weights")
            folder = store.fetch(checkpoint, place, names=names)
            store.require_whole(checkpoint, code_in(folder))
            attached._load_from_checkpoint(folder)
            trainer.state = TrainerState.load_from_json(os.path.join(folder, TRAINER_STATE_NAME))
        return checkpoint.step

    def prove(self) -> ProofPart:
        """Reads the newest checkpoint back, byte for byte, and writes the chunk's part of the run's resume proof.

        Baton's own pipelines do it during the next chunk, on a small machine.

        Raises:
            UserError: there is no checkpoint.
            RewritableDamageError: it differs from its commit.
        """
        context = self._context
        return prove(
            context.store,
            self._checkpoint(None),
            context.index,
            context.run.attempts(context.index),
            keep=context.recipe.chunks.keep,
            targets=context.plan.targets,
        )

    def _checkpoint(self, step: int | None) -> Checkpoint:
        store = self._context.store
        checkpoint = store.newest() if step is None else store.read(step)
        if checkpoint is None:
            which = "" if step is None else f" of step {step}"
            there = f"; it has {steps}" if (steps := store.committed_steps()) else ""
            raise UserError(f"run {self.uri!r} has no checkpoint{which}{there}.")
        return checkpoint


def attach(
    trainer: Trainer,
    run_uri: str,
    target: Target = None,
    *,
    checkpoint_every: int | str | None = None,
    chunks: Mapping[str, Any] | None = None,
    identity: Mapping[str, Any] | None = None,
    deterministic: bool = True,
) -> Chunk:
    """Makes a trainer of your own train in chunks that end on the bits of one uninterrupted run.

    The trainer's arguments define the whole run: its number of steps and its schedule. A chunk ends at its target,
    which is a step of that run and not a number of steps to come.

    Args:
        trainer: A `transformers.Trainer` or one of TRL's, built and not trained yet.
        run_uri: Address of the run, `STORE/runs/NAME`; the store is a folder or a bucket.
        target: Where the chunk ends: a step (`100`), a share of the run (`0.25`), or chunk k of n (`(1, 4)` or
            `"1/4"`); the whole run when left out.
        checkpoint_every: Checkpoints before the target, as `chunks.checkpoint_every` of a recipe: a number of steps, a
            time such as `5m`, or `continuous`. When left out, those of the trainer's `save_strategy`.
        chunks: Further settings of a recipe's section `chunks`: `keep`, `preemption`, `exactness`, `wait_for_commit`,
            `max_unsaved`, `signing`.
        identity: Names and values of your own that must be the same for the run to be resumed, such as a version of
            data that is no table.
        deterministic: Refuse kernels whose result varies from call to call.

    Returns:
        The chunk; nothing is trained yet.

    Raises:
        UserError: the trainer cannot be trained in exact chunks, the target is none of this run, a setting has no
            effect, or the run was begun with something else, which is named.
        StoreError: the store cannot be used.
    """
    require_exact(trainer)
    run, plan = Run.open(run_uri), attached_plan(trainer)
    check_name(run.name)
    run.storage.check()
    if run.read(RunInfo):
        raise UserError(
            f"run {run.name!r} belongs to a recipe.",
            remedy="Attach to a run of another name, or resume it with `baton run`.",
        )
    step, number = resolve_target(target, plan.num_steps)
    section = chunks_section(trainer, checkpoint_every, plan.num_steps, chunks)
    recipe = attached_recipe(trainer, run, section, deterministic=deterministic)
    found = run_identity(trainer, run.uri, identity)
    begin_or_join(run, found, section)
    run.write_once(plan)
    # A target that names no chunk: its number follows the chunks that ended before this step.
    done = [record.chunk for record in run.attempts() if record.outcome == "done" and record.to_step < step]
    context = TrainContext(
        run=run,
        recipe=recipe,
        plan=plan,
        store=CheckpointStore.of(run, recipe),
        index=number or max(done, default=0) + 1,
        target=step,
        identity=hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest(),
        ranks=Ranks(),
        clock=Clock(),
    )
    return Chunk(trainer, context)


FORMS = "expected a step such as 100, a share such as 0.25, or chunk k of n as (k, n) or 'k/n'"


def resolve_target(target: Target, num_steps: int) -> tuple[int, int | None]:
    """Returns the step of a target, and the chunk's number if the target has one."""
    if target is None:
        return num_steps, None
    if isinstance(target, str | tuple | list):
        try:
            index, count = (int(part) for part in (target.split("/") if isinstance(target, str) else target))
        except (ValueError, TypeError):
            raise UserError(f"target is {target!r}; {FORMS}.") from None
        if not 1 <= index <= count <= num_steps:
            raise UserError(
                f"target {target!r} is chunk {index} of {count} in a run of {num_steps} steps; expected 1 ≤ k ≤ n ≤ "
                f"{num_steps}."
            )
        return -(-num_steps * index // count), index  # as `runs.plan` cuts a run
    if isinstance(target, bool) or not isinstance(target, int | float):
        raise UserError(f"target is {target!r}; {FORMS}.")
    if isinstance(target, float):
        if not 0 < target <= 1:
            raise UserError(f"target {target!r} is not a share of a run; expected more than 0 and at most 1.0.")
        return math.ceil(num_steps * target), None
    if not 1 <= target <= num_steps:
        raise UserError(
            f"target is step {target}, and the run has {num_steps} steps; expected 1 to {num_steps}.",
            remedy="The trainer's max_steps or num_train_epochs set the length of the run, whatever its chunks.",
        )
    return target, None


CADENCES = ("checkpoint_every", "checkpoints_per_epoch")
# Settings of `chunks` without use for a script's chunk → reason and remedy.
WITHOUT_EFFECT = {
    "count": ("the target ends a chunk", "Give attach a target, such as `(1, 4)`."),
    **dict.fromkeys(
        ("extra", "spare"), ("the script sets the number of chunks", "Attach once more where a chunk ended early.")
    ),
    "retries": ("nothing starts a script again in its process", "Start the script again: it resumes."),
    "keep.audit": ("`baton verify replay` trains a recipe's chunks again, and there is none", "Leave it out."),
    "signing.secret": (
        "Baton mounts no Secret for a script",
        "Mount it, name the file in BATON_SIGNING_KEY_FILE, and leave chunks.signing.secret out.",
    ),
}


def require_exact(trainer: Trainer) -> None:
    """Raises `UserError` for a trainer whose chunks cannot be exact."""
    if not isinstance(trainer, Trainer):
        raise UserError(
            f"attach was given a {type(trainer).__name__}; expected a transformers.Trainer, or one of TRL's trainers."
        )
    args, rows = trainer.args, trainer.train_dataset
    for is_so, problem, remedy in (
        (rows is None, "it has no train_dataset", "Give it one."),
        (
            args.world_size > 1,
            f"{args.world_size} processes train together",
            "Train in one process, or write a recipe: Baton's own chunks train in several.",
        ),
        (
            args.world_size == 1 and args.n_gpu > 1,
            f"torch's DataParallel would split each batch over {args.n_gpu} GPUs",
            "Choose one by CUDA_VISIBLE_DEVICES.",
        ),
        (trainer.is_deepspeed_enabled, "DeepSpeed's checkpoints are unpickled to be read", "Leave args.deepspeed out."),
        (trainer.is_fsdp_enabled, "FSDP splits the state over processes", "Leave args.fsdp out."),
        (
            args.ignore_data_skip,
            "args.ignore_data_skip begins each chunk with the first rows again",
            "Set it to False.",
        ),
        (
            args.auto_find_batch_size,
            "args.auto_find_batch_size lets each process find another batch size",
            "Give per_device_train_batch_size the size that fits.",
        ),
        (
            getattr(args, "enable_jit_checkpoint", False),
            "args.enable_jit_checkpoint saves in the middle of a step",
            "Set it to False: a chunk that is told to end saves at the step's end.",
        ),
        (getattr(args, "use_vllm", False), "vLLM draws its completions from a state of its own", "Set use_vllm=False."),
        (trainer.model_init is not None, "model_init makes a new model when training begins", "Give a model."),
        (
            isinstance(rows, torch.utils.data.IterableDataset) and not hasattr(rows, "state_dict"),
            f"{type(rows).__name__} is a stream without state_dict",
            "Take a datasets.IterableDataset, or rows with a length.",
        ),
        (
            args.load_best_model_at_end and args.metric_for_best_model not in (None, "loss", "eval_loss"),
            f"load_best_model_at_end by {args.metric_for_best_model!r}: the store keeps the best by eval_loss",
            "Set load_best_model_at_end=False, and keep what you choose from by save_total_limit.",
        ),
    ):
        if is_so:
            raise UserError(f"this trainer cannot be trained in exact chunks: {problem}.", remedy=remedy)


def attached_plan(trainer: Trainer) -> Plan:
    with rng.undisturbed():
        loader = trainer.get_train_dataloader()
        values = trainer.set_initial_training_values(trainer.args, loader)
    # Accelerate keeps each loader it prepares; training is to find its own alone.
    loaders = trainer.accelerator._dataloaders
    loaders[:] = [each for each in loaders if each is not loader]
    per_epoch, num_steps = int(values[1]), int(values[-1])
    rows = len(trainer.train_dataset) if has_length(trainer.train_dataset) else 0
    return Plan(rows=rows, steps_per_epoch=per_epoch, num_steps=num_steps, targets=(num_steps,))


def chunks_section(
    trainer: Trainer, every: int | str | None, num_steps: int, own: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Returns the section `chunks` of a run: its trainer's save settings, overridden by those given to `attach`."""
    args, own = trainer.args, dict(own or {})
    for path, (reason, remedy) in WITHOUT_EFFECT.items():
        outer, _, inner = path.rpartition(".")
        values = own.get(outer) if outer else own
        if isinstance(values, Mapping) and inner in values:
            raise UserError(f"chunks.{path} has no effect here: {reason}.", remedy=remedy)
    twice = [name for name in CADENCES if name in own] if every is not None else []
    if twice:
        raise UserError(
            f"checkpoint_every is {every!r}, and chunks.{twice[0]} is {own[twice[0]]!r}: both set the steps.",
            remedy="Leave one out.",
        )
    section: dict[str, Any] = {}
    if every is not None:
        section["checkpoint_every"] = every
    elif any(name in own for name in CADENCES):
        pass  # in place of the trainer's
    elif args.save_strategy == "steps":
        steps = args.save_steps if args.save_steps >= 1 else num_steps * args.save_steps
        section["checkpoint_every"] = math.ceil(steps)
    elif args.save_strategy == "epoch":
        section["checkpoints_per_epoch"] = 1
    if args.save_total_limit:
        section["keep"] = {"last": args.save_total_limit}
        if isinstance(own.get("keep"), Mapping):
            own["keep"] = {**section["keep"], **own["keep"]}
    return {**section, **own}


def attached_recipe(trainer: Trainer, run: Run, chunks: Mapping[str, Any], *, deterministic: bool) -> Recipe:
    """Returns the recipe that checkpoints, fingerprint, callbacks and store read; its model and data are unset."""
    args = trainer.args
    chooses_best = args.load_best_model_at_end or args.save_strategy == "best"
    return load.validate(
        {
            "name": run.name[:63].strip("-"),
            "seed": args.seed,
            "store": {"uri": run.storage.uri()},
            "model": {"base": "attached"},
            "data": {"source": ["attached"]},
            "training": {
                "batch_size": args.per_device_train_batch_size * args.gradient_accumulation_steps,
                "micro_batch_size": args.per_device_train_batch_size,
                "deterministic": deterministic,
                "tf32": args.tf32,
                "compile": bool(args.torch_compile),
            },
            "chunks": dict(chunks),
            "evaluation": {"every": 1} if chooses_best else {},
            "export": {"checkpoint": "best"} if chooses_best else {},
            "tracking": {"mlflow": None},
        },
        origin=f"chunks of {run.name}",
    )


AT_ONCE = 1000  # rows that are hashed at a time: a whole number of bytes also where a value takes one bit


def dataset_identity(rows: Any) -> Json:
    """Returns the number of rows and the digest of their content; for rows that are no table, facts known unread."""
    if isinstance(rows, Mapping):
        return {str(name): dataset_identity(part) for name, part in rows.items()}
    if isinstance(rows, datasets.Dataset):
        return {"rows": len(rows), "columns": sorted(rows.column_names), "digest": dataset_digest(rows)}
    kind = f"{type(rows).__module__}.{type(rows).__qualname__}"
    if isinstance(rows, datasets.IterableDataset):
        return {"kind": kind, "columns": sorted(rows.column_names or [])}
    return {"kind": kind, "rows": len(rows) if hasattr(rows, "__len__") else None}


def dataset_digest(rows: datasets.Dataset) -> str:
    """Returns a digest of the rows in order, which depends on their content and not on files or earlier steps."""
    plain = rows.with_format("arrow")
    names = sorted(rows.column_names)
    whole = xxhash.xxh3_128()
    for start in range(0, len(rows), AT_ONCE):
        table = plain[start : start + AT_ONCE].select(names).replace_schema_metadata(None).combine_chunks()
        sink = pa.BufferOutputStream()
        # Arrow's stream format drops the buffers' bytes before and after a slice, so the rows' files do not count.
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        whole.update(sink.getvalue())
    return whole.hexdigest()


# Arguments that change no bit: destinations, how often checkpoints are written, who fetches rows.
NOT_COUNTED = frozenset(
    {
        "output_dir", "overwrite_output_dir", "logging_dir", "run_name", "project", "report_to", "trackio_space_id",
        "trackio_bucket_id", "trackio_static_space_id", "disable_tqdm", "log_level", "log_level_replica",
        "log_on_each_node", "do_train", "do_eval", "do_predict", "resume_from_checkpoint",
        "restore_callback_states_from_checkpoint", "enable_jit_checkpoint", "save_strategy", "save_steps",
        "save_total_limit", "save_only_model", "save_safetensors", "save_on_each_node", "load_best_model_at_end",
        "push_to_hub", "hub_model_id", "hub_strategy", "hub_token", "hub_private_repo", "hub_always_push",
        "hub_revision", "skip_memory_metrics", "debug", "dataset_num_proc", "dataloader_num_workers",
        "dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor",
        "dataloader_multiprocessing_context", "torch_empty_cache_steps", "log_completions", "num_completions_to_print",
        "teacher_model_name_or_path",  # its weights count, wherever they are
    }
)  # fmt: skip
# Attributes of trainers that hold a second model, which no checkpoint has.
MODELS = ("ref_model", "teacher_model", "reward_model")

# Trainer → run → model and optimizer at its start: a chunk in this process changes the trainer's weights.
_begun: WeakKeyDictionary[Trainer, dict[str, dict[str, Any]]] = WeakKeyDictionary()


def run_identity(trainer: Trainer, run_uri: str, identity: Mapping[str, Any] | None) -> Json:
    """Returns the facts that must be the same for a run to be resumed by a trainer as its script has built it."""
    args = trainer.args
    found: dict[str, Any] = {
        "trainer": _name(type(trainer)),
        "arguments": {name: value for name, value in args.to_dict().items() if name not in NOT_COUNTED},
        **_begun.setdefault(trainer, {}).setdefault(
            run_uri, {"model": _model(trainer), "optimizer": _optimizer(trainer)}
        ),
        "rows": dataset_identity(trainer.train_dataset),
        "tokenizer": _tokenizer(trainer.processing_class),
        "collator": _name(trainer.data_collator),
        "rewards": [
            _weights(reward, trained=None) if isinstance(reward, nn.Module) else _name(reward)
            for reward in getattr(trainer, "reward_funcs", [])
        ],
        "callbacks": [_name(each) for each in trainer.callback_handler.callbacks if _counts(each)],
    }
    if args.eval_strategy != "no" and trainer.eval_dataset is not None:
        found["held_out"] = dataset_identity(trainer.eval_dataset)
    if identity:
        try:
            found["identity"] = json.loads(json.dumps(dict(identity), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise UserError(f"identity is {identity!r}; expected names and JSON values ({error}).") from None
    document: Json = json.loads(json.dumps(found, default=_as_text, sort_keys=True))
    return document


def running_script() -> Script:
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    if not path or not Path(path).is_file():
        return Script()
    return Script(path=str(path), sha256=hashlib.sha256(Path(path).read_bytes()).hexdigest())


def _model(trainer: Trainer) -> dict[str, Any]:
    model = trainer.model
    config = getattr(model, "config", None)
    facts: dict[str, Any] = {
        "class": _name(type(model)),
        "config": _hash({**config.to_dict(), "_name_or_path": None, "transformers_version": None}) if config else None,
        "trained": sum(weight.numel() for weight in model.parameters() if weight.requires_grad),
        "begins_with": _weights(model, trained=True),
        "frozen": _weights(model, trained=False),
        "adapter": {
            name: {**value.to_dict(), "base_model_name_or_path": None}
            for name, value in getattr(model, "peft_config", {}).items()
        },
    }
    for name in MODELS:
        other = getattr(trainer, name, None)
        # A reference that moves is in the checkpoint.
        if isinstance(other, nn.Module) and not (
            name == "ref_model" and getattr(trainer.args, "sync_ref_model", False)
        ):
            facts[name] = _weights(other, trained=None)
    return facts


def _weights(model: nn.Module, *, trained: bool | None) -> str:
    chosen: dict[str, torch.Tensor] = {
        name: weight.detach()
        for name, weight in model.named_parameters()
        if trained is None or weight.requires_grad is trained
    }
    return tree_digest(chosen)


def _tokenizer(processing: Any) -> str | None:
    """Returns the digest of a tokenizer, whatever it was last asked to cut or fill up."""
    tokenizer = getattr(processing, "tokenizer", processing)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return _name(type(tokenizer)) if tokenizer is not None else None
    document = json.loads(backend.to_str())
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return _hash(
        [{**document, "truncation": None, "padding": None}, special, getattr(processing, "chat_template", None)]
    )


def _optimizer(trainer: Trainer) -> dict[str, Any] | None:
    """Returns the optimizer that the script has built itself; None where the arguments name it."""
    own, chosen = trainer.optimizer, getattr(trainer, "optimizer_cls_and_kwargs", None)
    if chosen:
        return {"class": _name(chosen[0]), "settings": chosen[1]}
    if own is None:
        return None
    bare = getattr(own, "optimizer", own)
    return {"class": _name(type(bare)), "scheduler": _name(type(trainer.lr_scheduler))}


def _counts(callback: TrainerCallback) -> bool:
    """Tells a callback of the script's or TRL's from those by which Transformers shows and reports."""
    module = type(callback).__module__
    return not module.startswith(("transformers.integrations", "transformers.utils.notebook", "baton.")) and type(
        callback
    ).__name__ not in ("PrinterCallback", "ProgressCallback", "RichProgressCallback", "NotebookProgressCallback")


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, default=_as_text, sort_keys=True).encode()).hexdigest()


def _name(value: Any) -> str:
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def _as_text(value: Any) -> Any:
    """Returns values that JSON does not know in a form that is the same in every process."""
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if hasattr(value, "__qualname__") or type(value).__repr__ is object.__repr__:
        return _name(value)
    return str(value)
