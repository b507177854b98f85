"""From recipe, rows and base model to a method's trainer: its features, arguments, and micro-batch size.

Settings that bits depend on are set before anything is computed. `training.micro_batch_size: auto` tries a throwaway
model on a GPU, on ever fewer of the longest rows. On a CPU, where running out of memory ends the process, it is
estimated. Neither has side effects: random state and the libraries' own are put back.
"""

import contextlib
import dataclasses
import functools
import gc
import glob
import logging
import math
import os
import pathlib
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import transformers
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils.memory import should_reduce_batch_size
from datasets import Dataset
from filelock import FileLock, Timeout
from torch import nn
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments

from baton import events, machine
from baton.errors import UserError
from baton.models import chat, hooks, loading, memory, pinned, rng, trainable, user_code
from baton.recipe.base import amount
from baton.recipe.recipe import Recipe
from baton.recipe.training import Group
from baton.runs.documents import MicroBatchSize, RunInfo, TokenizedRows
from baton.runs.plan import Plan
from baton.store.cache import NodeCache
from baton.train import (
    distributed,
    generation,
    guard,
    imports,
    methods,
    references,
    samplers,
    sharding,
    virtual,
    weighing,
)
from baton.train.context import TrainContext
from baton.train.distributed import Ranks
from baton.train.kept import Kept
from baton.train.protocol import ChunkTrainer, Options
from baton.train.tokens import ChunkTokens
from baton.train.trainer import exact_class


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


def discard_unfinished_kernels() -> None:
    """Deletes the libraries that a killed process left unfinished in the cache of torch's compiler.

    torch 2.13 links a library in place, with a folder `NAME_CxxBuild` next to it until the end, and loads one that
    exists: after a kill each later start would fail at it, "file too short".
    """
    from torch._inductor.codecache import get_lock_dir
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    for folder in glob.glob(os.path.join(glob.escape(cache_dir()), "*", "*_CxxBuild")):
        name = folder.removesuffix("_CxxBuild")
        lock = FileLock(os.path.join(get_lock_dir(), f"{os.path.basename(name).partition('.')[0]}.lock"), timeout=0)
        # A process that holds the lock is building it.
        with contextlib.suppress(Timeout, FileNotFoundError), lock:
            for ending in (".so", ".o", ".h.gch"):
                pathlib.Path(name + ending).unlink(missing_ok=True)
            shutil.rmtree(folder)


def make_deterministic(threads: int | None, deterministic: bool, *, tf32: bool = False) -> None:
    """Sets what bits depend on, before anything is computed; `tf32` rounds what matrix products read in 32 bits."""
    # Read by cuBLAS when it is first used; without it torch refuses deterministic products on CUDA.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    transformers.utils.logging.disable_progress_bar()
    if threads:
        torch.set_num_threads(threads)
    imports.use_deterministic(deterministic)
    # On, it fills each new tensor with NaN, to catch kernels that read uninitialized memory; on the CPU that took a
    # third of a small model's step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    # Else torch's compiler times kernels and takes the fastest: on an H200, chunks ended on other bits than one run.
    os.environ["TORCHINDUCTOR_DETERMINISTIC"] = str(int(deterministic))
    if inductor := sys.modules.get("torch._inductor.config"):  # which has read it
        inductor.deterministic = deterministic  # type: ignore[attr-defined]
    if tf32:
        # Before Transformers does it, so that the fingerprint has it when a checkpoint is compared; and by this call,
        # as after Transformers' alone torch refuses to tell the precision, which `max-autotune` asks for.
        torch.set_float32_matmul_precision("high")


ParamGroup = dict[str, Any]
Call = tuple[tuple[object, ...], Options]  # a forward pass's arguments


def features_of(recipe: Recipe, config: TrainingArguments, *, weighs: bool) -> list[type[ChunkTrainer]]:
    """Returns the mixins that a recipe uses, in their order; a method's own go before them."""
    training, spec, parallel = recipe.training, recipe.training.spec, recipe.parallel
    # With virtual workers, the method's configuration knows of one process.
    is_virtual, is_dealt = bool(parallel.virtual_workers), config.world_size > 1
    used: dict[type[ChunkTrainer], object] = {
        references.MovingReference: getattr(config, "sync_ref_model", False),
        generation.VirtualGeneration: spec.generates and is_virtual,
        generation.ResumableGeneration: spec.generates and not is_virtual,
        generation.ConversationalPrompts: spec.generates,
        # A skipped step is passed over whole, whoever makes its passes.
        guard.Guarded: training.guard,
        virtual.VirtualWorkers: is_virtual,
        weighing.DealtRows: is_dealt,
        weighing.WeighedRows: weighs and not (is_virtual or is_dealt),
        sharding.Zero: is_dealt and parallel.is_zero,
        sharding.Fsdp: is_dealt and parallel.strategy == "fsdp",
        ParamGroups: training.groups or training.compile_optimizer,
        # After the weighing of the loss: a micro-batch's router loss counts as its rows do.
        RouterLosses: training.router,
    }
    return [feature for feature, is_used in used.items() if is_used]


class ParamGroups(ChunkTrainer):
    """Mixin: groups of parameters with their own learning rate, weight decay and clipping; a compiled optimizer."""

    _rates: dict[str, float] | None = None

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is not None:
            return self.optimizer
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        if groups := self.recipe.training.groups:
            names = {id(parameter): name for name, parameter in self.model.named_parameters()}
            optimizer.param_groups[:] = [
                part for group in optimizer.param_groups for part in _split(group, groups, names)
            ]
            present = {part.get("name") for part in optimizer.param_groups}
            for group in groups:
                if _name(group) not in present:
                    raise UserError(
                        f"training.groups: pattern {group.pattern!r} fits no trained parameter that an earlier group "
                        "left.",
                        remedy="Check it against the model's parameter names, and the order of groups.",
                    )
        if self.recipe.training.compile_optimizer:
            optimizer.step = torch.compile(optimizer.step)  # type: ignore[assignment, method-assign]
        return optimizer

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        # transformers 5.23 clips all gradients together; a group with its own norm is clipped after that.
        norm = super()._clip_grad_norm(model)
        for group in self.recipe.training.groups:
            if group.max_grad_norm:
                parts = [x for x in self.optimizer.param_groups if x.get("name") == _name(group)]
                torch.nn.utils.clip_grad_norm_([p for x in parts for p in x["params"]], group.max_grad_norm)
        return norm

    def _get_learning_rate(self) -> float:
        # transformers 5.23 reads the first group's rate before the schedule's step and logs it after; so do all here.
        groups = self.optimizer.param_groups
        self._rates = {f"learning_rate/{x['name']}": float(x["lr"]) for x in groups if "name" in x}
        return super()._get_learning_rate()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "learning_rate" in logs:
            logs |= self._rates or {}
        super().log(logs, start_time)


def _name(group: Group) -> str:
    return group.name or group.pattern


def _split(whole: ParamGroup, groups: list[Group], names: dict[int, str]) -> list[ParamGroup]:
    settings = {key: value for key, value in whole.items() if key != "params"}
    parts: list[list[torch.nn.Parameter]] = [[] for _ in (*groups, None)]
    for parameter in whole["params"]:
        at = next((i for i, x in enumerate(groups) if re.search(x.pattern, names[id(parameter)])), len(groups))
        parts[at].append(parameter)
    result = [{**settings, "params": parts[-1]}]
    for group, parameters in zip(groups, parts, strict=False):
        named = {"name": _name(group), "lr": group.learning_rate, "weight_decay": group.weight_decay}
        own = {key: value for key, value in named.items() if value is not None}
        result.append({**settings, **own, "params": parameters})
    return [part for part in result if part["params"]]


class RouterLosses(ChunkTrainer):
    """Mixin: adds losses that keep the router of a mixture of experts balanced and its logits small.

    Losses are means over layers. Each forward pass of training returns its router logits; padding does not count.
    """

    _router_loss: torch.Tensor | None = None

    def watch_router(self) -> None:
        model = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        config = model.config.get_text_config()
        if not hasattr(config, "output_router_logits"):
            raise UserError(
                f"training.router: {type(model).__name__} is not a mixture of experts that returns router logits.",
                remedy="Leave training.router out, or choose such a model.",
            )
        model.router_aux_loss_coef = 0.0  # the architecture's own, which it adds where logits are asked for
        self._top_k = int(getattr(config, "num_experts_per_tok", 1))
        # Heads drop the logits: TRL's fused one returns other outputs, and a score's has no place for them.
        model.base_model.register_forward_pre_hook(self._ask, with_kwargs=True)
        model.base_model.register_forward_hook(self._listen, with_kwargs=True)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Any:
        own = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        # The router's loss is a mean over micro-batches, whatever the method's own is.
        extra, self._router_loss = self._router_loss, None
        if extra is None or not self.model.training:
            return own
        scaled = self.loss_is_scaled_for_ga
        if scaled is None:
            scaled = (self.model_accepts_loss_kwargs and num_items_in_batch is not None) or self.compute_loss_func
        if scaled:
            extra = extra / self.current_gradient_accumulation_steps
        return (own[0] + extra, *own[1:]) if return_outputs else own + extra

    def _ask(self, module: nn.Module, arguments: tuple[object, ...], options: Options) -> Call | None:
        if not module.training or not torch.is_grad_enabled():
            return None
        return arguments, {**options, "output_router_logits": True}

    def _listen(self, module: nn.Module, arguments: tuple[object, ...], options: Options, outputs: object) -> None:
        layers, router = getattr(outputs, "router_logits", None), self.recipe.training.router
        if not module.training or not torch.is_grad_enabled() or layers is None:
            return
        assert router
        mask = options.get("attention_mask")
        counted = mask.flatten().bool() if mask is not None and mask.dim() == 2 else slice(None)
        parts = []
        for logits in layers:
            scores = logits.flatten(0, -2).float()[counted]
            parts.append(
                router.balance * balance(scores, self._top_k)
                + router.unevenness * unevenness(scores, self._top_k)
                + router.z * z_loss(scores)
            )
        self._router_loss = torch.stack(parts).mean()


def balance(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """Returns the load-balancing loss `C · Σ fᵢ Pᵢ` (Fedus et al., arXiv:2101.03961, equations 4 to 6).

    Logits are of shape (tokens, experts C). `fᵢ` is expert i's share of all assignments, `top_k` per token; `Pᵢ` is its
    mean probability. The loss is 1 where both are even.
    """
    probabilities = logits.softmax(-1)
    return logits.shape[-1] * (_shares(probabilities, top_k) * probabilities.mean(0)).sum()


def unevenness(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """Returns the auxiliary loss `Σ (fᵢ − 1/C)²` of logits of shape (tokens, experts C).

    `fᵢ` counts assignments and has no gradient: the gradient is that of the same expression in `Pᵢ` (straight-through,
    Bengio et al., arXiv:1308.3432).
    """
    probabilities = logits.softmax(-1)
    mean = probabilities.mean(0)
    shares = _shares(probabilities, top_k) + mean - mean.detach()
    return ((shares - 1 / logits.shape[-1]) ** 2).sum()


def z_loss(logits: torch.Tensor) -> torch.Tensor:
    """Returns the router z-loss `mean(log² Σ exp)` (Zoph et al., arXiv:2202.08906, equation 5)."""
    return (logits.logsumexp(-1) ** 2).mean()


def _shares(probabilities: torch.Tensor, top_k: int) -> torch.Tensor:
    chosen = probabilities.topk(top_k, -1).indices
    return torch.nn.functional.one_hot(chosen, probabilities.shape[-1]).sum((0, 1)) / chosen.numel()


class EpochOf(TrainerCallback):
    """Tells a collator the epoch; workers restart with each epoch, so it reaches them too."""

    stateless = True

    def __init__(self, collator: hooks.SeededCollator) -> None:
        self._collator = collator

    def on_epoch_begin(self, args: object, state: transformers.TrainerState, *_: object, **__: object) -> None:
        self._collator.epoch = int(state.epoch or 0)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Model, data and settings that a method's trainer is built from."""

    recipe: Recipe
    arguments: Options
    model: PreTrainedModel
    tokenizer: transformers.PreTrainedTokenizerBase
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
        early = [transformers.EarlyStoppingCallback(stopping.patience, stopping.threshold)] if stopping else []
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
            # PEFT would write the whole embedding where it is larger than the base's, in addition to the trained rows.
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
    kept: Kept | None = None,
) -> Setup:
    tokenizer = loading.load_tokenizer(f"{tokens.folder}/tokenizer", trust_remote_code=recipe.model.trust_remote_code)
    base = folders.get(pinned.BASE)

    def start_model(*, weights: bool, shares: bool) -> PreTrainedModel:
        load = functools.partial(loading.start_model, recipe, tokenizer, base, weights=weights)
        if kept is None:
            return load()
        # Trials that share a process have the same model and data; a tokenizer is learned from rows that the seed drew.
        key = weights, recipe.seed if recipe.model.tokenizer else None
        return kept.copy(pinned.BASE, key, load, seed=recipe.seed, shares=shares)

    # PEFT trains biases in the base's own weights.
    model = start_model(weights=start_weights, shares=recipe.adapter is not None and recipe.adapter.bias == "none")
    moves = getattr(getattr(recipe.training, recipe.training.method, None), "sync_reference", None)
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
        train=samplers.train_dataset(tokens),
        held_out=tokens.held_out() if evaluates else None,
        reference=functools.partial(start_model, weights=True, shares=not moves),
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
    """Finds and notes the micro-batch size that the recipe does not set; the first note of a run holds."""
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
        "`baton check` shows what takes how much.",
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
        context.span,
        tokens,
        folders,
        output_dir,
        start_weights=start_weights,
        evaluates=evaluates,
        weighs=context.run.need(RunInfo).made.number("loss") > 1,
        kept=context.kept,
    )
    setup = dataclasses.replace(setup, arguments={**setup.arguments, **(changed or {})})
    # With virtual workers each process is told that it trains alone.
    with context.ranks.hidden() if context.recipe.parallel.virtual_workers else contextlib.nullcontext():
        return context, build_trainer(setup)


def prepare_trial(context: TrainContext, num_steps: int, folder: str, changed: Options) -> ChunkTrainer:
    """Builds the first chunk's trainer for a throwaway model; `changed` are arguments of its configuration."""
    recipe = context.recipe
    machine.require_gpus(recipe.resources.image)
    distributed.pin_device(recipe, context.ranks)
    training = recipe.training
    make_deterministic(training.threads, training.deterministic, tf32=uses_tf32(recipe))
    tokens = ChunkTokens(context.run, recipe, context.plan, lambda _: folder, NodeCache.of(recipe.store))
    tokens.fetch(0, num_steps)
    own_code = user_code.fetch(context.run, folder)
    folders = pinned.compared(context.run, recipe)
    return prepare(context, tokens, folders, folder, code_folder=own_code, evaluates=False, changed=changed)[1]
