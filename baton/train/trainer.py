"""Mixins of every method's trainer, and its `Setup`: exact resume, parameter groups, memory after a restore.

After a restore the GPU holds before the first step the same memory as between two steps of one run.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Sampler
from transformers import EarlyStoppingCallback, TrainerCallback, TrainerState, TrainingArguments, set_seed
from transformers.trainer import OPTIMIZER_NAME
from transformers.trainer_pt_utils import find_batch_size

from baton.checkpoint import staging
from baton.checkpoint.digest import tree_digest
from baton.errors import BatonError, UserError
from baton.models import hooks, rng, trainable
from baton.recipe.recipe import Recipe
from baton.recipe.training import Group
from baton.train import sharding
from baton.train.data import samplers
from baton.train.guard import Guarded
from baton.train.protocol import ChunkTrainer, Options, StateDict
from baton.train.reshard import LoadFromShards
from baton.train.router import Routed
from baton.train.sharding import Sharded, Zero
from baton.train.virtual import Virtual

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


# --- Memory after a restore: the GPU holds before the first step what it holds between two steps of one run.


PAGED = 100_000
"""Numbers of a weight from which on bitsandbytes pages its state."""


@contextlib.contextmanager
def free_load_memory(optimizer: Any) -> Iterator[None]:
    """Has what is loaded lie where a fresh optimizer has it, and gives back what loading takes.

    Args:
        optimizer: It, or Accelerate's wrapper around it.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)
    pages = torch.cuda.is_available() and getattr(optimizer, "is_paged", False)
    if pages:  # on the GPU it might have no room
        optimizer.load_state_dict = functools.partial(optimizer.load_state_dict, move_to_device=False)
    try:
        yield
    finally:
        vars(optimizer).pop("load_state_dict", None)
    if pages:
        page_state(optimizer)
    gc.collect()
    if torch.cuda.is_available():
        # Files are read to the GPU where several processes train; what is left in its cache has other sizes than what a
        # step asks for.
        torch.cuda.empty_cache()


def page_state(optimizer: Any) -> None:
    """Pages what was loaded: bitsandbytes pages state that it makes, and not state that it loads."""
    functional = sys.modules["bitsandbytes"].functional
    for weight, values in optimizer.state.items():
        for name in {"state1", "state2"} & values.keys():
            value = values[name]
            if weight.numel() >= PAGED and not getattr(value, "is_paged", False):
                values[name] = functional.get_paged(*value.shape, dtype=value.dtype, device=weight.device).copy_(value)
                optimizer.page_mng.paged_tensors.append(values[name])


# --- Mixin for exact resume: staged checkpoints, the moment of a restore that can be compared, signs of life.


NO_ROOM = ("No space left", "PytorchStreamWriter failed", "unexpected pos", "StorageFull")
"""How messages of writers that are not Python's say that a folder is full."""


class Resumable(ChunkTrainer):
    """Mixin for a `Trainer`: stages its checkpoints, and notes when the random state has been restored.

    Upstream restores the random state at one of two places, before or after the first batch is fetched,
    and draws from it in between; the only moment at which it can be compared is right after.
    """

    _send: Callable[[str], None] | None = None
    _weights: Future[None] | None = None
    _batches: samplers.DistributedBatches | None = None
    _shares: Iterator[float] = iter(())
    _fetches = False

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self.resumption.is_reshaped and checkpoint:
            # There is no state of this rank to restore: it draws anew from seed, rank and step (docs/exactness.md).
            set_seed(seed_of(self.args.seed, self.ranks.rank, self.state.global_step))
            return
        super()._load_rng_state(checkpoint)
        # Now, as upstream draws from it before the first step begins.
        self.restored_rng = tree_digest(rng.capture())

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        types = {name: weight.dtype for name, weight in self.model.named_parameters()}
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        # PEFT widens what it loads to 32 bits; on a base in few bits TRL trains it in bfloat16, as it was saved.
        for name, weight in self.model.named_parameters():
            if weight.requires_grad and weight.dtype != types[name]:
                weight.data = weight.data.to(types[name])

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self.resumption.takeover:
            self.resumption.takeover.remember(self)
        with contextlib.ExitStack() as loading:
            if checkpoint:
                loading.enter_context(free_load_memory(self.optimizer))
                loading.enter_context(staging.mmap_load(os.path.join(checkpoint, OPTIMIZER_NAME)))
            super()._load_optimizer_and_scheduler(checkpoint)

    def _save_checkpoint(self, model: torch.nn.Module, trial: object) -> None:
        """Writes a checkpoint where there is room, weights and optimizer at the same time."""
        for pending in self.places():
            # `Trainer` derives the checkpoint's folder from its output folder, so that one moves with the place.
            self.args.output_dir = os.path.dirname(pending.folder)
            self._send = pending.send if pending.writer else None
            failure: Exception | None = None
            try:
                self._write_checkpoint(model, trial)
                self._join_weights()
            except BaseException as error:
                if not _is_failure(error):
                    raise
                # The thread must be out of the folder before it is removed.
                self._join_weights(failed=True)
                failure = error if isinstance(error, Exception) else OSError(str(error))
            if not self._all_ran_out_of_room(failure, last=self._send is not None):
                return
            shutil.rmtree(self.checkpoint_folder(), ignore_errors=True)

    def _write_checkpoint(self, model: torch.nn.Module, trial: object) -> None:
        """Writes this rank's part of a checkpoint."""
        super()._save_checkpoint(model, trial)

    def _all_ran_out_of_room(self, failure: Exception | None, *, last: bool) -> bool:
        """Tells whether another place is to be tried; False where all ranks have written their part.

        Every rank must call it after each place, whether its own write failed or not: it gathers.

        Raises:
            Exception: the write failed for another reason, or there is no other place.
        """
        ours = (str(failure), _is_full(failure)) if failure else None
        failures = [(rank, theirs) for rank, theirs in enumerate(self.ranks.gather(ours)) if theirs]
        if not failures:
            return False
        if failure and (last or not _is_full(failure)):
            shutil.rmtree(self.checkpoint_folder(), ignore_errors=True)
            raise failure
        for rank, (text, full) in failures:
            if not full:
                raise BatonError(f"rank {rank} could not write its part of the checkpoint: {text}")
        return True

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the weights: in a checkpoint, in a thread beside the optimizer's state."""
        save = self._save_model
        if not _internal_call or self.is_deepspeed_enabled:  # all its ranks gather, and in one order
            save(output_dir, _internal_call)
        elif self._send:
            save(output_dir, _internal_call)
            # Now, before the optimizer's state is written: the folder has no room for both.
            self._send(str(output_dir))
        else:
            pool = ThreadPoolExecutor(1)
            self._weights = pool.submit(save, output_dir, _internal_call)
            # Its thread ends with its work, for which `_join_weights` waits.
            pool.shutdown(wait=False)

    def _save_model(self, output_dir: str | None, _internal_call: bool) -> None:
        super().save_model(output_dir, _internal_call)
        if _internal_call:
            with contextlib.suppress(FileNotFoundError):
                # A pickle that no resume needs, and that one refuses: before the folder's files are sent.
                os.remove(os.path.join(str(output_dir), "training_args.bin"))

    def get_train_dataloader(self) -> torch.utils.data.DataLoader[Any]:
        """Returns the batches of this rank: of each step the rows that it has with one process."""
        loader = super().get_train_dataloader()
        world_size, micro = self.args.world_size, self.args.per_device_train_batch_size
        if world_size == 1:
            return loader
        if not self.recipe.training.spec.generates:  # else TRL's own sampler distributes prompts
            batch_size = micro * self.args.gradient_accumulation_steps * world_size
            self._batches = samplers.distribute_rows(loader, batch_size=batch_size, micro=micro, world_size=world_size)
        samplers.follow_epochs(loader)
        return loader

    def get_batch_samples(self, *arguments: object, **options: object) -> object:
        """Returns the batches of a step."""
        self._fetches = True
        samples = super().get_batch_samples(*arguments, **options)
        self._fetches = False
        return samples

    def _get_num_items_in_batch(
        self, batch_samples: list[dict[str, torch.Tensor]], device: torch.device
    ) -> torch.Tensor | None:
        spec = self.recipe.training.spec
        if self._fetches and self._batches:
            step = self.state.global_step % -(-len(self.train_dataset) // self._batches.full)
            is_filler = self._batches.is_filler(step, self.args.process_index)
            if not spec.counts_tokens:
                self._shares = iter(self._batches.shares(step, self.args.process_index))
                self.note_whole([] if is_filler else batch_samples)
            elif is_filler:
                samplers.blank(batch_samples)
        elif self._fetches and not (spec.counts_tokens or spec.generates or self.recipe.parallel.virtual_workers):
            rows = [find_batch_size(batch) for batch in batch_samples] if self.weighs else []
            self._shares = iter([size * len(rows) / sum(rows) for size in rows])
            self.note_whole(batch_samples)
        self.watchdog.beat("forward pass")
        return super()._get_num_items_in_batch(batch_samples, device)

    def note_whole(self, counted: list[Any]) -> None:
        """Notes the rows and tokens of a step in all processes, given this one's micro-batches whose rows count."""
        if self.weighs and self.has_likelihood:
            ours = [(float(find_batch_size(batch)), float(self.likelihood_tokens(batch))) for batch in counted]
            found = self.ranks.gather_numbers([sum(values) for values in zip((0.0, 0.0), *ours, strict=True)])
            self.counted_whole = (sum(rows for rows, _ in found), sum(tokens for _, tokens in found))

    def pass_over(self, model: torch.nn.Module, inputs: Any) -> None:
        """Lets go of what this rank's rows would have counted: an evaluation may come next."""
        super().pass_over(model, inputs)
        self._shares = iter(())

    def compute_loss(self, model: torch.nn.Module, inputs: Any, *arguments: object, **options: object) -> Any:
        """Computes the loss, as much of it as the rows of a pass count in the step, and gives a sign of life."""
        self.watchdog.beat("forward pass")
        share = next(self._shares, 1.0)  # none are left in an evaluation
        if self.weighs and not self.model.training:
            self.weighed = self.figure_weights(inputs)
        is_even = share == 1.0 or self.args.world_size == 1
        with contextlib.nullcontext() if is_even else samplers.uneven(self.accelerator):
            loss = super().compute_loss(model, inputs, *arguments, **options)
        self.watchdog.beat("backward pass")
        return loss if share == 1.0 else loss * share

    def prediction_step(self, model: Any, inputs: Any, *arguments: object, **options: object) -> Any:
        """Evaluates a batch, and gives a sign of life."""
        self.watchdog.beat("evaluation")
        return super().prediction_step(model, inputs, *arguments, **options)

    def _prepare_dataset(self, dataset: Dataset, *_: object, **__: object) -> Dataset:
        """Returns the rows as they are: the tokenize stage has prepared them."""
        return dataset

    def create_model_card(self, *_: object, **__: object) -> None:
        """Writes none: TRL makes one in each checkpoint, for 0.1 s of the training thread's time."""

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        os.makedirs(output_dir, exist_ok=True)
        super()._save_optimizer_and_scheduler(output_dir)
        if self._send:
            self._send(output_dir)

    def _join_weights(self, *, failed: bool = False) -> None:
        weights, self._weights = self._weights, None
        if weights:
            wait([weights])
            if not failed:
                weights.result()


def seed_of(seed: int, rank: int, step: int = 0) -> int:
    """Returns the seed of a rank that does not resume a random state; of the first, the run's.

    Args:
        seed: The run's.
        rank: Number of the rank.
        step: Step at which it begins.
    """
    return (seed + rank * 0x9E3779B1 + step * 0x85EBCA77) % 2**32


def _is_failure(error: BaseException) -> bool:
    """Tells an error from a signal to end; torch's of a checkpoint in parts is a `BaseException`."""
    if isinstance(error, Exception):
        return True
    from torch.distributed.checkpoint.api import CheckpointException

    return isinstance(error, CheckpointException)


def _is_full(error: BaseException) -> bool:
    """Tells whether a write failed for want of room, in Python or in a library."""
    text = str(error)
    return getattr(error, "errno", None) in (28, 122) or any(sign in text for sign in NO_ROOM)


# --- Groups of parameters with their own settings.


ParamGroup = dict[str, Any]
"""A parameter group of a torch optimizer: `params` and settings."""


class Grouped(ChunkTrainer):
    """Mixin for a `Trainer`: groups of parameters with their own learning rate, weight decay and clipping."""

    groups: tuple[Group, ...] = ()
    compile_optimizer = False
    _rates: dict[str, float] | None = None

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """Returns `Trainer`'s optimizer with its parameter groups split."""
        if self.optimizer is not None:
            return self.optimizer
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        if self.groups:
            names = {id(parameter): name for name, parameter in self.model.named_parameters()}
            optimizer.param_groups[:] = [
                part for group in optimizer.param_groups for part in _split(group, self.groups, names)
            ]
            present = {part.get("name") for part in optimizer.param_groups}
            for group in self.groups:
                if _name(group) not in present:
                    raise UserError(
                        f"training.groups: pattern {group.pattern!r} fits no trained parameter that an earlier group "
                        "left.",
                        remedy="Check it against the model's parameter names, and the order of groups.",
                    )
        if self.compile_optimizer:
            optimizer.step = torch.compile(optimizer.step)  # type: ignore[assignment, method-assign]
        return optimizer

    def _clip_grad_norm(self, model: torch.nn.Module) -> torch.Tensor:
        """Clips all gradients together, as `Trainer` does, then those of each group that has its own norm."""
        norm = super()._clip_grad_norm(model)
        for group in self.groups:
            if group.max_grad_norm:
                parts = [x for x in self.optimizer.param_groups if x.get("name") == _name(group)]
                torch.nn.utils.clip_grad_norm_([p for x in parts for p in x["params"]], group.max_grad_norm)
        return norm

    def _get_learning_rate(self) -> float:
        """Returns the first group's learning rate, and keeps the others' of the same moment for the log."""
        groups = self.optimizer.param_groups
        self._rates = {f"learning_rate/{x['name']}": float(x["lr"]) for x in groups if "name" in x}
        return super()._get_learning_rate()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs each group's learning rate beside the first one's."""
        if "learning_rate" in logs:
            logs |= self._rates or {}
        super().log(logs, start_time)


def _name(group: Group) -> str:
    return group.name or group.pattern


def _split(whole: ParamGroup, groups: tuple[Group, ...], names: dict[int, str]) -> list[ParamGroup]:
    """Returns a parameter group of the optimizer as the recipe's groups cut it, without empty ones."""
    settings = {key: value for key, value in whole.items() if key != "params"}
    parts: list[list[torch.nn.Parameter]] = [[] for _ in (*groups, None)]
    for parameter in whole["params"]:
        at = next((i for i, x in enumerate(groups) if re.search(x.pattern, names[id(parameter)])), len(groups))
        parts[at].append(parameter)
    result = []
    for group, parameters in zip(groups, parts, strict=False):
        own: ParamGroup = {"name": _name(group)}
        if group.learning_rate is not None:
            own["lr"] = group.learning_rate
        if group.weight_decay is not None:
            own["weight_decay"] = group.weight_decay
        result.append({**settings, **own, "params": parameters})
    return [part for part in [{**settings, "params": parts[-1]}, *result] if part["params"]]


# --- The mixin that every method's trainer has before TRL's, and what such a trainer is built from.


class ExactResume(Guarded, Virtual, Resumable, Zero, LoadFromShards, Sharded, Grouped, Routed):
    """Mixin for a method's trainer."""

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler[int]:
        """Returns the recipe's order of rows, else the method's own."""
        rows = self.train_dataset  # with all columns; `train_dataset` has lost those that the model does not read
        return samplers.sampler(self.recipe, rows, self.args.max_steps) or super()._get_train_sampler(train_dataset)

    def method_state(self) -> StateDict:
        """Returns the buffers that the method's spec names."""
        buffers = self.recipe.training.spec.buffers
        return {**super().method_state(), **{name: getattr(self, attribute) for name, attribute in buffers.items()}}

    def load_method_state(self, saved: StateDict) -> None:
        """Restores them."""
        super().load_method_state(saved)
        for name, attribute in self.recipe.training.spec.buffers.items():
            setattr(self, attribute, saved[name])


class EpochOf(TrainerCallback):
    """Tells a collator the epoch; workers begin anew with each epoch, so it reaches them too."""

    stateless = True

    def __init__(self, collator: hooks.SeededCollator) -> None:
        self._collator = collator

    def on_epoch_begin(self, args: object, state: TrainerState, *_: object, **__: object) -> None:
        """Passes the number on."""
        self._collator.epoch = int(state.epoch or 0)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Model, data and settings that a method's trainer is built from.

    Attributes:
        recipe: The resolved recipe.
        arguments: Keyword arguments for the method's configuration class.
        model: What is trained.
        tokenizer: Its tokenizer.
        train: Tokenized training rows.
        held_out: Tokenized held-out rows, None where nothing is evaluated in between.
        reference: Returns a fresh copy of the model that the run began with.
        second_model: Loads the second model that the method's settings name.
        weighs: Whether rows and tokens count alike, not batches; see `ChunkTrainer`.
    """

    recipe: Recipe
    arguments: Options
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    train: Dataset
    held_out: Dataset | None
    reference: Callable[[], PreTrainedModel] = field(repr=False)
    second_model: Callable[[], PreTrainedModel] = field(repr=False)
    weighs: bool = True

    def trainer(self, kind: type[ChunkTrainer], config: TrainingArguments, **extra: object) -> ChunkTrainer:
        """Builds the method's trainer.

        Args:
            kind: Its class, `ExactResume` among its bases.
            config: Its configuration.
            extra: Further arguments of that class.
        """
        recipe = self.recipe
        rows = trainable.rows_of_tokens(recipe, self.model, self.tokenizer)
        own = {
            "data_collator": hooks.collator(recipe.hooks, self.tokenizer, recipe.seed),
            "compute_metrics": hooks.metrics(recipe.hooks),
            "callbacks": [*_early_stopping(recipe), *hooks.callbacks(recipe.hooks)] or None,
            "peft_config": trainable.lora(recipe, rows),
        }
        if recipe.hooks.trainer:
            # The user's class first: its `super()` reaches Baton's mixins, and theirs TRL's trainer.
            kind = type(kind.__name__, (hooks.find(recipe.hooks.trainer), kind), {})
        trainer: ExactResume = kind(
            model=self.model,
            args=config,
            train_dataset=self.train,
            eval_dataset=self.held_out,
            processing_class=self.tokenizer,
            **{name: value for name, value in own.items() if value is not None},
            **extra,
        )
        if getattr(config, "disable_dropout", False):
            _without_dropout(trainer.model)
        if rows:
            trainable.complete(trainer.model)
        _save_as_meant(trainer, self.model, recipe, rows)
        if isinstance(own["data_collator"], hooks.SeededCollator):
            trainer.add_callback(EpochOf(own["data_collator"]))
        trainer.recipe, trainer.weighs = recipe, self.weighs
        trainer.groups = tuple(recipe.training.groups)
        trainer.compile_optimizer = recipe.training.compile_optimizer
        if trainer.args.world_size > 1:
            sharding.compile_first(trainer.model, recipe)
        if recipe.training.router:
            trainer.watch_router(recipe.training.router)
        if recipe.training.fp16_initial_scale:
            scaler = trainer.accelerator.scaler
            scaler.load_state_dict({**scaler.state_dict(), "scale": recipe.training.fp16_initial_scale})
        return trainer

    def with_reference(self) -> Options:
        """Returns the argument of a trainer that holds the model to a reference; an adapter's is its base."""
        has_reference = self.recipe.training.has_reference(adapter=self.recipe.adapter is not None)
        return {"ref_model": self.reference()} if has_reference else {}


def _save_as_meant(
    trainer: ExactResume, model: PreTrainedModel, recipe: Recipe, rows: trainable.TokenRows | None
) -> None:
    """Sets how the model is written to a checkpoint."""
    if rows:
        # PEFT would write the whole embedding where it is larger than the base's, beside the rows that are trained.
        trainer.model.save_pretrained = functools.partial(trainer.model.save_pretrained, save_embedding_layers=False)
    if recipe.adapter is None:
        # Under the names in memory: those of a mixture's original format differ, and `Trainer` loads a checkpoint
        # without converting them back.
        model.save_pretrained = functools.partial(model.save_pretrained, save_original_format=False)
        if recipe.training.trainable:
            model.save_pretrained = trainable.save_frozen_separately(model, model.save_pretrained)


def _without_dropout(model: nn.Module) -> None:
    """Switches off dropout that layers hold as a number, as Llama's attention does; TRL finds `nn.Dropout` alone."""
    for layer in model.modules():
        for name, value in vars(layer).items():
            if "dropout" in name and isinstance(value, float):
                setattr(layer, name, 0.0)


def _early_stopping(recipe: Recipe) -> list[EarlyStoppingCallback]:
    stopping = recipe.training.early_stopping
    return [EarlyStoppingCallback(stopping.patience, stopping.threshold)] if stopping else []
