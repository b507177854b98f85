"""`ExactResume`, which goes right before TRL's class in every trainer, and the class composed of what a run uses.

`exact_class(DPOTrainer, features)` returns `(features…, ExactResume, DPOTrainer)`: a feature's `super()` reaches the
features after it, then `ExactResume`, then TRL. Features that split the state override the methods `read_…` and
`write_…`. A comment at each override of a private method names the upstream release that it was read in, and why.
"""

import contextlib
import functools
import gc
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from datasets import Dataset
from torch import nn
from torch.utils.data import Sampler
from torch.utils.serialization import config
from transformers import get_scheduler, set_seed
from transformers.trainer import OPTIMIZER_NAME

from baton.checkpoint import staging
from baton.checkpoint.digest import tree_digest
from baton.checkpoint.staging import PendingCheckpoint
from baton.errors import BatonError
from baton.models import rng, trainable
from baton.recipe.training import DECAYS
from baton.train import samplers
from baton.train.distributed import Ranks, Watchdog
from baton.train.protocol import ChunkTrainer, Resumption, StateDict
from baton.train.reshard import LoadFromShards

BLOCK = 256  # numbers that share a scale in bitsandbytes' state of 8 bits
PAGED = 100_000  # numbers of a weight from which on bitsandbytes pages its state
# In messages of writers that are not Python's: the folder is full.
NO_ROOM = ("No space left", "PytorchStreamWriter failed", "unexpected pos", "StorageFull")


class ExactResume(ChunkTrainer):
    """Mixin: stages its checkpoints where there is room, and restores one so that it can be compared before a step."""

    saves_weights_beside = True  # a checkpoint's weights, in another thread than the optimizer's state
    _send: Callable[[str], None] | None = None
    _weights: Future[None] | None = None

    def begin_chunk(
        self,
        ranks: Ranks,
        watchdog: Watchdog,
        resumption: Resumption,
        places: Callable[[], Iterator[PendingCheckpoint]],
    ) -> None:
        self.ranks, self.watchdog, self.resumption, self.places = ranks, watchdog, resumption, places
        self.guard = self.recipe.training.guard
        # One process may read the parts that several have written.
        if self.args.world_size == 1 and resumption.strategy != "ddp" and resumption.is_reshaped:
            self.__class__ = exact_class(type(self), [LoadFromShards])

    def end_at(self, last_step: int, epochs: int) -> None:
        self.args.max_steps = self.state.max_steps = last_step
        self.state.num_train_epochs = epochs
        if self.recipe.training.lr_scheduler == DECAYS:
            # The shape alone, by another optimizer: the schedule itself keeps its place.
            other = torch.optim.SGD([torch.zeros(1)])
            warmup, options = self.args.get_warmup_steps(last_step), self.args.lr_scheduler_kwargs
            made = get_scheduler(self.args.lr_scheduler_type, other, warmup, last_step, options)
            schedule: Any = getattr(self.lr_scheduler, "scheduler", self.lr_scheduler)  # behind DeepSpeed's
            schedule.lr_lambdas = made.lr_lambdas * len(schedule.lr_lambdas)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None and self.recipe.training.uses_bitsandbytes:
            from bitsandbytes.optim import GlobalOptimManager

            # Of the whole process: settings of an earlier trainer's weights would hold for these.
            manager = GlobalOptimManager.get_instance()
            manager.initialize()
            if self.recipe.training.optimizer.endswith("ademamix_8bit"):
                # bitsandbytes 0.50 counts the blocks of two averages in one row: without whole blocks, the last of the
                # first and the first of the second have one scale, which a GPU writes in any order.
                for module in self.model.modules():
                    for name, weight in module.named_parameters(recurse=False):
                        if weight.numel() % BLOCK:
                            manager.register_module_override(module, name, {"optim_bits": 32})
        return super().create_optimizer(model)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        # transformers 5.23 restores it before or after the first batch is fetched, and draws from it in between: the
        # only moment at which it can be compared is right after.
        if self.resumption.is_reshaped:
            # No state of this rank to restore: it draws from seed, rank and step (docs/trust/exactness.md).
            set_seed(seed_of(self.args.seed, self.ranks.rank, self.state.global_step))
            return
        super()._load_rng_state(checkpoint)
        self.restored_rng = tree_digest(rng.capture())

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        # transformers 5.23 has PEFT widen loaded weights to 32 bits; on a base in few bits TRL trains them in bfloat16,
        # as they were saved.
        types = {name: weight.dtype for name, weight in self.model.named_parameters()}
        self.read_weights(resume_from_checkpoint, model)
        for name, weight in self.model.named_parameters():
            if weight.requires_grad and weight.dtype != types[name]:
                weight.data = weight.data.to(types[name])

    def read_weights(self, checkpoint: str, model: nn.Module | None = None) -> None:
        super()._load_from_checkpoint(checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        # transformers 5.23 loads the optimizer where a fresh one has no memory, and overwrites a fork's own settings.
        if self.resumption.takeover:
            self.resumption.takeover.remember(self)
        if checkpoint is not None:
            with free_load_memory(self.optimizer), staging.mmap_load(os.path.join(checkpoint, OPTIMIZER_NAME)):
                self.read_optimizer(checkpoint)

    def read_optimizer(self, checkpoint: str) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)

    def _save_checkpoint(self, model: nn.Module, trial: object) -> None:
        # transformers 5.23 has one output folder; here a checkpoint goes where there is room, best place first.
        for pending in self.places():
            # `Trainer` derives the checkpoint's folder from its output folder.
            self.args.output_dir = os.path.dirname(pending.folder)
            self._send = pending.send if pending.writer else None
            failure: Exception | None = None
            # From a GPU to locked memory, which CUDA copies to directly and torch uses again.
            config.save.use_pinned_memory_for_d2h = torch.cuda.is_available()
            try:
                self.write_checkpoint(model, trial)
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

    def write_checkpoint(self, model: nn.Module, trial: object) -> None:
        super()._save_checkpoint(model, trial)

    def _all_ran_out_of_room(self, failure: Exception | None, *, last: bool) -> bool:
        """Tells whether to try another place. Every rank calls it after each place, failed or not: it gathers."""
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
        if not _internal_call or not self.saves_weights_beside:
            self._save_model(output_dir, _internal_call)
        elif self._send:
            self._save_model(output_dir, _internal_call)
            # Now, before the optimizer's state is written: the folder has no room for both.
            self._send(str(output_dir))
        else:
            pool = ThreadPoolExecutor(1)
            self._weights = pool.submit(self._save_model, output_dir, _internal_call)
            # The thread ends with its work; `_join_weights` waits for it.
            pool.shutdown(wait=False)

    def _save_model(self, output_dir: str | None, internal: bool) -> None:
        self.write_weights(output_dir, internal=internal)
        if self.args.should_save:
            trainable.sort_adapter_configs(str(output_dir))
        if internal:
            with contextlib.suppress(FileNotFoundError):
                # A pickle that no resume needs, and that one refuses: before the folder's files are sent.
                os.remove(os.path.join(str(output_dir), "training_args.bin"))

    def write_weights(self, output_dir: str | None, *, internal: bool) -> None:
        """`internal` where the folder is a checkpoint's."""
        super().save_model(output_dir, internal)

    def _join_weights(self, *, failed: bool = False) -> None:
        weights, self._weights = self._weights, None
        if weights:
            wait([weights])
            if not failed:  # else the error at hand is raised, not the thread's
                weights.result()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        # transformers 5.23 expects the weights to have made the folder; here their thread may be later.
        os.makedirs(output_dir, exist_ok=True)
        self.write_optimizer(output_dir)
        if self._send:
            self._send(output_dir)

    def write_optimizer(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)

    def method_state(self) -> StateDict:
        buffers = self.recipe.training.spec.buffers
        # Left out while empty: a fork may have another guard than its parent, or alone have one.
        window = {"guard": self.guard_window} if self.guard_window else {}
        return {**super().method_state(), **window, **{name: getattr(self, buffers[name]) for name in buffers}}

    def load_method_state(self, saved: StateDict) -> None:
        super().load_method_state(saved)
        self.guard_window = tuple(saved.get("guard", ()))
        for name, attribute in self.recipe.training.spec.buffers.items():
            setattr(self, attribute, saved[name])

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler[int]:
        # transformers 5.23 takes the order from its arguments alone, and drops columns that an order may go by.
        order = samplers.sampler(self.recipe, self.train_dataset, self.args.max_steps)
        return order or super()._get_train_sampler(train_dataset)

    def _prepare_dataset(self, dataset: Dataset, *_: object, **__: object) -> Dataset:
        # TRL 1.16 would tokenize the rows, which the tokenize stage has done.
        return dataset

    def create_model_card(self, *_: object, **__: object) -> None:
        """Writes none: TRL makes one in each checkpoint, for 0.1 s of the training thread's time."""


def exact_class(kind: type, features: Sequence[type]) -> type[Any]:
    """Returns the class by which a trainer of class `kind` trains in chunks."""
    # Under that class's own name, by which the state of the user's code is known.
    bases = (*features, kind) if issubclass(kind, ExactResume) else (*features, ExactResume, kind)
    return type(kind.__name__, bases, {"__module__": kind.__module__, "__qualname__": kind.__qualname__})


def seed_of(seed: int, rank: int, step: int = 0) -> int:
    """Returns the seed of a rank that resumes no random state; the run's own for the first rank at step 0."""
    return (seed + rank * 0x9E3779B1 + step * 0x85EBCA77) % 2**32


@contextlib.contextmanager
def free_load_memory(optimizer: Any) -> Iterator[None]:
    """Has the GPU hold before the first step the same memory as between two steps of one run."""
    optimizer = getattr(optimizer, "optimizer", optimizer)
    pages = torch.cuda.is_available() and getattr(optimizer, "is_paged", False)
    if pages:  # loaded to the host: the GPU might have no room
        optimizer.load_state_dict = functools.partial(optimizer.load_state_dict, move_to_device=False)
    try:
        yield
    finally:
        vars(optimizer).pop("load_state_dict", None)
    if pages:
        page_state(optimizer)
    gc.collect()
    if torch.cuda.is_available():
        # Several processes read files to the GPU; blocks left in its cache have other sizes than a step asks for.
        torch.cuda.empty_cache()


def page_state(optimizer: Any) -> None:
    """Pages loaded state: bitsandbytes pages only state that it makes."""
    functional = sys.modules["bitsandbytes"].functional
    paged = set(map(id, optimizer.page_mng.paged_tensors))  # loaded ones are marked, too: they were when saved
    for weight, values in optimizer.state.items():
        for name in {"state1", "state2"} & values.keys():
            value = values[name]
            if weight.numel() >= PAGED and id(value) not in paged:
                values[name] = functional.get_paged(*value.shape, dtype=value.dtype, device=weight.device).copy_(value)
                optimizer.page_mng.paged_tensors.append(values[name])


def _is_failure(error: BaseException) -> bool:
    if isinstance(error, Exception):
        return True
    # Any other `BaseException` but torch's of a checkpoint in parts is a signal to end.
    from torch.distributed.checkpoint.api import CheckpointException

    return isinstance(error, CheckpointException)


def _is_full(error: BaseException) -> bool:
    text = str(error)
    return getattr(error, "errno", None) in (28, 122) or any(sign in text for sign in NO_ROOM)
