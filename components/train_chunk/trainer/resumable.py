"""Mixin for exact resume: staged checkpoints, the moment of a restore that can be compared, signs of life."""

from __future__ import annotations

import contextlib
import copy
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

from transformers import set_seed
from transformers.trainer import OPTIMIZER_NAME
from transformers.trainer_pt_utils import find_batch_size

from baton.components.shared.checkpoints import held
from baton.components.shared.core import rng
from baton.components.shared.core.digest import tree_digest
from baton.components.shared.core.errors import BatonError
from baton.components.train_chunk.data import distributed_sampler
from baton.components.train_chunk.trainer import settling
from baton.components.train_chunk.trainer.base import ChunkTrainer

if TYPE_CHECKING:
    import torch
    from datasets import Dataset

NO_ROOM = ("No space left", "PytorchStreamWriter failed", "unexpected pos", "StorageFull")
"""How messages of writers that are not Python's say that a folder is full."""


class Resumable(ChunkTrainer):
    """Mixin for a `Trainer`: stages its checkpoints, and notes when the random state has been restored.

    Upstream restores the random state at one of two places, before or after the first batch is fetched,
    and draws from it in between; the only moment at which it can be compared is right after.
    """

    _send: Callable[[str], None] | None = None
    _weights: Future[None] | None = None
    _batches: distributed_sampler.DistributedBatches | None = None
    _shares: Iterator[float] = iter(())
    _fetches = False

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if "rng" in self.resumption.leave_out:
            return
        if self.resumption.is_reshaped and checkpoint:
            # There is no state of this rank to restore: it draws anew from seed, rank and step (docs/exactness.md).
            set_seed(seed_of(self.args.seed, self.ranks.rank, self.state.global_step))
            return
        super()._load_rng_state(checkpoint)
        # Now, as upstream draws from it before the first step begins.
        self.restored_rng = tree_digest(rng.capture())

    def _init_training_state(self, *arguments: object, **options: object) -> tuple[int, int]:
        epochs_and_batches: tuple[int, int] = super()._init_training_state(*arguments, **options)
        if "log" in self.resumption.leave_out:
            self.state.log_history, self.state.num_input_tokens_seen = [], 0
        if "position" in self.resumption.leave_out:
            self.state.global_step, self.state.epoch = epochs_and_batches = 0, 0
        return epochs_and_batches

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        if "weights" in self.resumption.leave_out:
            return
        types = {name: weight.dtype for name, weight in self.model.named_parameters()}
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        # PEFT widens what it loads to 32 bits; on a base in few bits TRL trains it in bfloat16, as it was saved.
        for name, weight in self.model.named_parameters():
            if weight.requires_grad and weight.dtype != types[name]:
                weight.data = weight.data.to(types[name])

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self.resumption.takeover:
            self.resumption.takeover.note(self)
        left_out, optimizer = self.resumption.leave_out, self.bare_optimizer()
        # Upstream loads both or neither. DeepSpeed's optimizer is in one file with the weights: `Zero` leaves it out.
        puts_back = "optimizer" in left_out and not self.is_deepspeed_enabled
        made = copy.deepcopy(optimizer.state_dict()) if puts_back else {}
        if "scheduler" in left_out:  # and not put back: one that follows evaluations sets the optimizer's rates, too
            self.lr_scheduler.load_state_dict = lambda *_: None
        with contextlib.ExitStack() as loading:
            if checkpoint:
                loading.enter_context(settling.settled(self.optimizer))
                loading.enter_context(held.mapped(os.path.join(checkpoint, OPTIMIZER_NAME)))
            super()._load_optimizer_and_scheduler(checkpoint)
        if "scheduler" in left_out:
            del self.lr_scheduler.load_state_dict
        if made:
            optimizer.load_state_dict(made)

    def _load_scaler(self, checkpoint: str | None) -> None:
        if "scaler" not in self.resumption.leave_out:
            super()._load_scaler(checkpoint)

    def _save_checkpoint(self, model: torch.nn.Module, trial: object) -> None:
        """Writes a checkpoint where there is room, weights and optimizer at the same time."""
        for place in self.places():
            # `Trainer` derives the checkpoint's folder from its output folder, so that one moves with the place.
            self.args.output_dir, self._send = place.folder, place.send
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
            if not self._all_ran_out_of_room(failure, last=place.send is not None):
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
            self._batches = distributed_sampler.distribute(
                loader, batch_size=batch_size, micro=micro, world_size=world_size
            )
        distributed_sampler.follow_epochs(loader)
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
                distributed_sampler.blank(batch_samples)
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
        with contextlib.nullcontext() if is_even else distributed_sampler.uneven(self.accelerator):
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
