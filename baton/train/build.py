"""From recipe, rows and base model to a method's trainer, its arguments, and its micro-batch size.

Settings that bits depend on are set before anything is computed. `training.micro_batch_size: auto` tries a throwaway
model on a GPU, on ever fewer of the longest rows. On a CPU, where running out of memory ends the process, it is
estimated. Neither leaves a trace: random state and the libraries' own are put back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import logging
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import torch
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils.memory import should_reduce_batch_size
from transformers import EarlyStoppingCallback, TrainerCallback, TrainerState, TrainingArguments

from baton import events, machine
from baton.errors import UserError
from baton.models import chat, hooks, loading, memory, pinned, rng, trainable, user_code
from baton.recipe.base import amount
from baton.recipe.recipe import Recipe
from baton.runs.documents import MicroBatchSize, RunInfo, TokenizedRows
from baton.runs.plan import Plan
from baton.store.cache import NodeCache
from baton.train import imports, methods, sharding
from baton.train.context import TrainContext
from baton.train.data import samplers
from baton.train.data.tokens import ChunkTokens
from baton.train.distributed import launch
from baton.train.distributed.ranks import Ranks
from baton.train.features import features_of
from baton.train.protocol import ChunkTrainer, Options
from baton.train.trainer import exact_class

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def training_arguments(recipe: Recipe, plan: Plan, output_dir: str) -> Options:
    """Returns keyword arguments for the method's configuration class."""
    training, processes = recipe.training, Ranks.here().size
    clips_groups = any(group.max_grad_norm for group in training.groups)
    mode = sharding.compile_mode(training)
    arguments: Options = {
        "output_dir": output_dir,
        "seed": recipe.seed,
        "data_seed": recipe.seed,
        # The run's, never a chunk's: schedules and order of rows are those of one uninterrupted run.
        "max_steps": plan.num_steps,
        "per_device_train_batch_size": recipe.micro_batch_size_per_process,
        "per_device_eval_batch_size": recipe.evaluation_batch_size,
        # One process that trains alone for several, as the learning-rate finder does, makes the others' passes too; one
        # that has several virtual workers makes theirs.
        "gradient_accumulation_steps": recipe.gradient_accumulation_steps * recipe.workers // processes,
        "logging_strategy": "steps",
        "logging_steps": training.log_every,
        # A loss that is no number is logged as that, and not as an average.
        "logging_nan_inf_filter": False,
        # The checkpoint callback alone decides, by `control.should_save`.
        "save_strategy": "no",
        "eval_strategy": "steps" if recipe.evaluation.in_training else "no",
        # With `per_epoch` those at epochs' ends; `EvaluationsPerEpoch` adds the others.
        "eval_steps": plan.steps_per_epoch if recipe.evaluation.per_epoch else recipe.evaluation.every,
        "dataloader_num_workers": training.workers,
        "dataloader_pin_memory": recipe.resources.gpus > 0,
        "use_cpu": recipe.resources.gpus == 0 and recipe.resources.profile != "mps",
        "report_to": "none",
        "disable_tqdm": True,
        "learning_rate": training.learning_rate,
        "lr_scheduler_type": training.lr_scheduler,
        "lr_scheduler_kwargs": dict(training.lr_scheduler_options) or None,
        "warmup_steps": training.warmup_steps,
        "weight_decay": training.weight_decay,
        # Trainer clips nothing at 0, groups included
        "max_grad_norm": training.max_grad_norm or (math.inf if clips_groups else 0.0),
        "optim": training.optimizer,
        "optim_args": ",".join(f"{name}={value}" for name, value in training.optimizer_options.items()) or None,
        "adam_beta1": training.adam_betas[0],
        "adam_beta2": training.adam_betas[1],
        "adam_epsilon": training.adam_epsilon,
        "neftune_noise_alpha": training.neftune_alpha,
        "bf16": training.precision == "bf16",
        "fp16": training.precision == "fp16",
        "gradient_checkpointing": training.gradient_checkpointing,
        "torch_compile": mode is not None,
        "use_liger_kernel": training.liger,
    }
    if mode:
        arguments["torch_compile_mode"] = mode
    if training.tf32 is not None or training.precision == "tf32":
        arguments["tf32"] = training.tf32 is not False
    if stopping := training.early_stopping:
        arguments["metric_for_best_model"] = stopping.metric.removeprefix("eval_")
        arguments["greater_is_better"] = stopping.greater_is_better
    if processes > 1 and not recipe.parallel.virtual_workers:
        arguments |= sharding.sharding_arguments(recipe)
    return arguments


def uses_tf32(recipe: Recipe) -> bool:
    """Returns whether matrix products round 32-bit numbers: the recipe's choice, else Transformers'."""
    training = recipe.training
    if training.tf32 is not None or training.precision == "tf32":
        return training.tf32 is not False
    compiles = sharding.compile_mode(training) is not None and recipe.world_size == 1
    return compiles and training.precision != "fp16" and recipe.resources.gpus > 0


def make_deterministic(threads: int | None, deterministic: bool, *, tf32: bool = False) -> None:
    """Sets what bits depend on, before anything is computed; `tf32` rounds what matrix products read in 32 bits."""
    # Read by cuBLAS when it is first used; without it torch refuses deterministic products on CUDA.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import transformers

    transformers.utils.logging.disable_progress_bar()
    if threads:
        torch.set_num_threads(threads)
    imports.use_deterministic(deterministic)
    # On, it fills each new tensor with NaN, to catch kernels that read uninitialized memory; on the CPU that took a
    # third of a small model's step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    if tf32:
        # Before Transformers does it, so that the fingerprint has it when a checkpoint is compared; and by this call,
        # as after Transformers' alone torch refuses to tell the precision, which `max-autotune` asks for.
        torch.set_float32_matmul_precision("high")


class EpochOf(TrainerCallback):
    """Tells a collator the epoch; workers begin anew with each epoch, so it reaches them too."""

    stateless = True

    def __init__(self, collator: hooks.SeededCollator) -> None:
        self._collator = collator

    def on_epoch_begin(self, args: object, state: TrainerState, *_: object, **__: object) -> None:
        self._collator.epoch = int(state.epoch or 0)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Model, data and settings that a method's trainer is built from."""

    recipe: Recipe
    arguments: Options
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    train: Dataset
    held_out: Dataset | None  # None where nothing is evaluated in between
    reference: Callable[[], PreTrainedModel] = field(repr=False)  # a fresh copy of the model that the run began with
    second_model: Callable[[], PreTrainedModel] = field(repr=False)
    weighs: bool = True  # whether rows and tokens count alike, not batches; see `ChunkTrainer`

    def trainer(self, kind: type, config: TrainingArguments, *mixins: type, **extra: object) -> ChunkTrainer:
        """Builds the method's trainer: TRL's class behind the mixins of the method and of the recipe's features."""
        recipe = self.recipe
        rows = trainable.rows_of_tokens(recipe, self.model, self.tokenizer)
        stopping = recipe.training.early_stopping
        early = [EarlyStoppingCallback(stopping.patience, stopping.threshold)] if stopping else []
        own = {
            "data_collator": hooks.collator(recipe.hooks, self.tokenizer, recipe.seed),
            "compute_metrics": hooks.metrics(recipe.hooks),
            "callbacks": [*early, *hooks.callbacks(recipe.hooks)] or None,
            "peft_config": trainable.lora(recipe, rows),
        }
        # The user's class first: its `super()` reaches Baton's mixins, and theirs TRL's trainer.
        users = [hooks.find(recipe.hooks.trainer)] if recipe.hooks.trainer else []
        features = features_of(recipe, config, weighs=self.weighs)
        trainer: ChunkTrainer = exact_class(kind, [*users, *mixins, *features])(
            model=self.model,
            args=config,
            train_dataset=self.train,
            eval_dataset=self.held_out,
            processing_class=self.tokenizer,
            **{name: value for name, value in own.items() if value is not None},
            **extra,
        )
        trainer.recipe, trainer.weighs = recipe, self.weighs
        if getattr(config, "disable_dropout", False):
            # TRL finds `nn.Dropout` alone; layers such as Llama's attention hold it as a number.
            for layer in trainer.model.modules():
                vars(layer).update(
                    {name: 0.0 for name, value in vars(layer).items() if "dropout" in name and isinstance(value, float)}
                )
        if rows:
            trainable.complete(trainer.model)
            # PEFT would write the whole embedding where it is larger than the base's, beside the rows that are trained.
            save = functools.partial(trainer.model.save_pretrained, save_embedding_layers=False)
            trainer.model.save_pretrained = save
        if recipe.adapter is None:
            # Under the names in memory: those of a mixture's original format differ, and `Trainer` loads a checkpoint
            # without converting them back.
            self.model.save_pretrained = functools.partial(self.model.save_pretrained, save_original_format=False)
            if recipe.training.trainable:
                frozen = trainable.save_frozen_separately(self.model, self.model.save_pretrained)
                self.model.save_pretrained = frozen
        if isinstance(own["data_collator"], hooks.SeededCollator):
            trainer.add_callback(EpochOf(own["data_collator"]))
        if trainer.args.world_size > 1:
            sharding.compile_first(trainer.model, recipe)
        if recipe.training.router:
            trainer.watch_router()
        if recipe.training.fp16_initial_scale:
            scaler = trainer.accelerator.scaler
            scaler.load_state_dict({**scaler.state_dict(), "scale": recipe.training.fp16_initial_scale})
        return trainer

    def with_reference(self) -> Options:
        """Returns the argument of a trainer that holds the model to a reference; an adapter's is its base."""
        has_reference = self.recipe.training.has_reference(adapter=self.recipe.adapter is not None)
        return {"ref_model": self.reference()} if has_reference else {}


def trainer_setup(
    recipe: Recipe,
    plan: Plan,
    tokens: ChunkTokens,
    folders: Mapping[str, str],
    output_dir: str,
    *,
    start_weights: bool = True,
    evaluates: bool | None = None,
    weighs: bool = True,
) -> Setup:
    tokenizer = loading.load_tokenizer(f"{tokens.folder}/tokenizer", trust_remote_code=recipe.model.trust_remote_code)
    base = folders.get(pinned.BASE)
    model = loading.start_model(recipe, tokenizer, base, weights=start_weights)
    if recipe.training.trainable:
        trainable.freeze(model, recipe.training.trainable)
    evaluates = recipe.evaluation.in_training if evaluates is None else evaluates

    def second_model() -> PreTrainedModel:
        assert recipe.training.second_model
        return loading.second_model(recipe, folders[recipe.training.second_model[0]])

    return Setup(
        recipe=recipe,
        arguments=training_arguments(recipe, plan, output_dir),
        model=model,
        tokenizer=tokenizer,
        train=tokens.train(),
        held_out=tokens.held_out() if evaluates else None,
        reference=lambda: loading.start_model(recipe, tokenizer, base),
        second_model=second_model,
        weighs=weighs,
    )


def build_trainer(parts: Setup) -> ChunkTrainer:
    return cast(ChunkTrainer, methods.load(parts.recipe.training.method).build(parts))


logger = logging.getLogger("baton")

USABLE = 0.95  # share of a GPU's memory that a trial may fill: rows of other lengths leave holes in it
HOST_SHARE = 0.8  # share of the host's memory that may be filled
STEPS = 2  # optimizer steps of a trial: from the second on, the optimizer's state is there too


def resolve_micro_batch(
    context: TrainContext, tokens: ChunkTokens, folders: Mapping[str, str], output_dir: str
) -> TrainContext:
    """Finds and notes the micro-batch size that the recipe leaves open; the first note of a run holds."""
    recipe = context.recipe
    if recipe.training.micro_batch_size != "auto":
        return context
    # Trials draw random numbers, and the run must begin as if its recipe named the size.
    with rng.undisturbed():
        if gpu := machine.gpu():

            def fits(rows: int) -> bool:
                sized = with_micro_batch(recipe, rows)
                trial = functools.partial(_try, sized, context.plan, tokens, folders, output_dir)
                return _fits_gpu(trial, USABLE * gpu.bytes)

            size, by = largest_micro_batch(recipe, fits), "trial"
        else:
            size, by = largest_micro_batch(recipe, _fits_host(recipe, folders.get(pinned.BASE))), "estimate"
    try:
        context.run.write_once(MicroBatchSize(micro_batch_size=size, found_by=by, device=gpu.name if gpu else "cpu"))
    except UserError:
        if context.run.read(MicroBatchSize) is None:  # not another process that was first
            raise
    context = context.resolved_again()
    rows, passes = context.recipe.micro_batch_size_per_process, context.recipe.gradient_accumulation_steps
    logger.info("%d rows per forward pass, %d passes per step, by %s", rows, passes, by)
    events.emit(events.MicroBatch(size=rows, accumulation=passes, found_by=by))
    return context


def largest_micro_batch(recipe: Recipe, fits: Callable[[int], bool]) -> int:
    batch_size = recipe.training.batch_size
    for size in range(batch_size, 0, -1):
        if batch_size % size == 0 and fits(size):
            return size
    raise UserError(
        f"training.micro_batch_size is auto, and not one row of data.max_length {recipe.data.max_length} fits memory.",
        remedy="Set training.gradient_checkpointing, train an adapter, lower data.max_length, or use a larger machine; "
        "`baton validate` shows what takes how much.",
    )


def with_micro_batch(recipe: Recipe, size: int) -> Recipe:
    training = recipe.training.model_copy(update={"micro_batch_size": size})
    return recipe.model_copy(update={"training": training})


def _fits_host(recipe: Recipe, base: str | None) -> Callable[[int], bool]:
    local = recipe.model_copy(update={"model": recipe.model.model_copy(update={"base": base})})
    model = memory.build_skeleton(local)
    room = min(HOST_SHARE * machine.total_memory(), machine.available_memory())
    if recipe.resources.memory:
        room = min(room, amount(recipe.resources.memory) - amount(recipe.resources.shm or "0"))
    return lambda size: memory.estimate(with_micro_batch(local, size), model).total <= room


def _fits_gpu(trial: Callable[[], None], room: float) -> bool:
    fits = _survives(trial)
    # After the handler there, as the error holds the trial's model, which `_forget` frees.
    peak = torch.cuda.max_memory_allocated()
    _forget()
    return fits and peak <= room


def _survives(trial: Callable[[], None]) -> bool:
    """Tells whether memory sufficed; another error is raised."""
    try:
        trial()
    except RuntimeError as error:
        if not isinstance(error, torch.cuda.OutOfMemoryError) and not should_reduce_batch_size(error):
            raise
        logger.info("that is too much: %s", str(error).partition(".")[0])
        return False
    return True


def _try(recipe: Recipe, plan: Plan, tokens: ChunkTokens, folders: Mapping[str, str], output_dir: str) -> None:
    """Trains a throwaway model on the longest rows."""
    # Nothing of the user's that could act outside of it.
    training = {"curriculum": None, "group_by_length": False, "early_stopping": None}
    recipe = recipe.model_copy(
        update={
            "training": recipe.training.model_copy(update=training),
            "hooks": recipe.hooks.model_copy(update={"callbacks": []}),
            "evaluation": recipe.evaluation.model_copy(update={"every": None, "per_epoch": None}),
        }
    )
    setup = trainer_setup(recipe, plan, tokens, folders, output_dir, evaluates=False)
    size = recipe.micro_batch_size_per_process
    passes = min(2, recipe.gradient_accumulation_steps)  # gradients are there while the second one's activations are
    lengths = samplers.lengths(setup.train)
    longest = sorted(range(len(lengths)), key=lambda row: -lengths[row])[: size * passes]
    rows = [longest[number % len(longest)] for number in range(size * passes)]
    changed = {
        "max_steps": STEPS,
        "gradient_accumulation_steps": passes,
        "lr_scheduler_type": "constant",
        "lr_scheduler_kwargs": None,
        "warmup_steps": 0,
        "logging_strategy": "no",
        "dataloader_num_workers": 0,
    }
    setup = dataclasses.replace(setup, arguments={**setup.arguments, **changed}, train=setup.train.select(rows))
    build_trainer(setup).train()


def _forget() -> None:
    if "bitsandbytes" in sys.modules:
        sys.modules["bitsandbytes"].optim.GlobalOptimManager.get_instance().initialize()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    # Of the whole process: a trial's settings would hold for the chunk's own trainer.
    AcceleratorState._reset_state()
    GradientState._reset_state()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def prepare(
    context: TrainContext,
    tokens: ChunkTokens,
    folders: Mapping[str, str],  # local ones of the models that the recipe names, by role; see `pinned`
    output_dir: str,
    *,
    code_folder: str | None,  # of the user's Python files, None where there are none
    start_weights: bool = True,  # else left undefined, as a checkpoint is loaded over them
    evaluates: bool | None = None,  # the recipe's choice when None
    changed: Options | None = None,  # arguments of the method's configuration in place of the run's
) -> tuple[TrainContext, ChunkTrainer]:
    """Builds the trainer of the recipe's method; returns the chunk too, with its micro-batch size found."""
    # In each rank: a method that generates renders its prompts, and only one rank of a machine has fetched the tokens.
    told = context.run.read(TokenizedRows)
    chat.set_template_date(told.today if told else None)
    # Before anything is built: the recipe names hooks and functions that are imported from there.
    user_code.install(code_folder)
    context = resolve_micro_batch(context, tokens, folders, output_dir)
    setup = trainer_setup(
        context.recipe,
        context.plan,
        tokens,
        folders,
        output_dir,
        start_weights=start_weights,
        evaluates=evaluates,
        weighs=context.run.need(RunInfo).made.number("loss") > 1,
    )
    setup = dataclasses.replace(setup, arguments={**setup.arguments, **(changed or {})})
    # With virtual workers each process is told that it trains alone.
    with context.ranks.hidden() if context.recipe.parallel.virtual_workers else contextlib.nullcontext():
        return context, build_trainer(setup)


def prepare_trial(context: TrainContext, num_steps: int, folder: str, changed: Options) -> ChunkTrainer:
    """Builds the first chunk's trainer for a throwaway model; `changed` are arguments of its configuration."""
    recipe = context.recipe
    machine.require_gpus(recipe.resources.image)
    launch.pin_device(recipe, context.ranks)
    training = recipe.training
    make_deterministic(training.threads, training.deterministic, tf32=uses_tf32(recipe))
    tokens = ChunkTokens(context.run, recipe, context.plan, lambda _: folder, NodeCache.of(recipe.store))
    tokens.fetch(0, num_steps)
    own_code = user_code.fetch(context.run, folder)
    folders = pinned.compared(context.run, recipe)
    return prepare(context, tokens, folders, folder, code_folder=own_code, evaluates=False, changed=changed)[1]
