"""What every trainer has in front of it: staged checkpoints, the moment of a restore that can be compared, beats."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.api import CheckpointException
from transformers import set_seed

from components.shared.errors import BatonError
from components.train_chunk import dealing, staging, state

if TYPE_CHECKING:
    from components.train_chunk.resume import Handover


class Resumable:
    """Mixin for a `Trainer`: stages its checkpoints, and sees when the random state has been put back.

    Upstream restores the random state at one of two places, before or after the first batch is fetched,
    and draws from it in between; the only moment at which it can be compared is right after.

    Attributes:
        of_each: Parts of the state that each of several processes has its own of.
        deals: Whether rows are dealt to processes by us; else the method's own sampler does that.
        counts_tokens: Whether the loss is a sum over the tokens of a step; else it is a mean over rows.
    """

    of_each: tuple[str, ...] = state.OF_EACH
    deals = True
    counts_tokens = False

    handover: Handover | None = None
    _send: Callable[[str], None] | None = None
    _weights: Future[None] | None = None
    _dealt: dealing.Dealt | None = None
    _shares: Iterator[float] = iter(())
    _fetches = False

    def _load_rng_state(self, checkpoint: str | None) -> None:
        handover = self.handover
        if handover and "rng" in handover.leave_out:
            return
        if handover and handover.is_reshaped and checkpoint:
            trainer: Any = self
            set_seed(seed_of(trainer.args.seed, handover.ranks.rank, trainer.state.global_step))
            return
        super()._load_rng_state(checkpoint)  # type: ignore[misc]
        if handover:
            handover.check_rng()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self.handover and "optimizer" in self.handover.leave_out:
            return
        if self.handover and self.handover.takeover:
            self.handover.takeover.note(self)
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]

    def _load_scaler(self, checkpoint: str | None) -> None:
        if self.handover and "scaler" in self.handover.leave_out:
            return
        super()._load_scaler(checkpoint)  # type: ignore[misc]

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Writes a checkpoint where there is room, weights and optimizer at the same time."""
        assert self.handover
        trainer: Any = self
        for folder, send in self.handover.places():
            trainer.args.output_dir, self._send = folder, send
            failure: Exception | None = None
            try:
                super()._save_checkpoint(model, trial)  # type: ignore[misc]
                self._join_weights()
            except (Exception, CheckpointException) as error:
                self._join_weights(failed=True)
                failure = error if isinstance(error, Exception) else OSError(str(error))
            if not self._all_failed_for_want_of_room(failure, last=send is not None):
                return
            shutil.rmtree(self.handover.folder(), ignore_errors=True)

    def _all_failed_for_want_of_room(self, failure: Exception | None, *, last: bool) -> bool:
        """Tells whether another place is to be tried; False where all processes have written what is theirs.

        Raises:
            Exception: the write failed for another reason, or there is no other place.
        """
        assert self.handover
        seen = (str(failure), staging.is_full(failure)) if failure else None
        failures = [(rank, found) for rank, found in enumerate(self.handover.ranks.gather(seen)) if found]
        if not failures:
            return False
        if failure and (last or not staging.is_full(failure)):
            shutil.rmtree(self.handover.folder(), ignore_errors=True)
            raise failure
        for rank, (text, full) in failures:
            if not full:
                raise BatonError(f"rank {rank} could not write its part of the checkpoint: {text}")
        return True

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the weights: in a checkpoint, in a thread beside the optimizer's state."""
        save = super().save_model  # type: ignore[misc]
        trainer: Any = self
        if not _internal_call or trainer.is_deepspeed_enabled:  # all its processes gather, and in one order
            save(output_dir, _internal_call)
        elif self._send:
            save(output_dir, _internal_call)
            self._send(str(output_dir))
        else:
            pool = ThreadPoolExecutor(1)
            self._weights = pool.submit(save, output_dir, _internal_call)
            pool.shutdown(wait=False)

    def get_train_dataloader(self) -> Any:
        """Returns the batches of this process: of each step the rows that it has with one process."""
        loader = super().get_train_dataloader()  # type: ignore[misc]
        trainer: Any = self
        world_size, micro = trainer.args.world_size, trainer.args.per_device_train_batch_size
        if world_size > 1 and self.deals:
            batch_size = micro * trainer.args.gradient_accumulation_steps * world_size
            self._dealt = dealing.deal(loader, batch_size=batch_size, micro=micro, world_size=world_size)
        if world_size > 1:
            dealing.follow_epochs(loader)
        return loader

    def get_batch_samples(self, *given: Any, **named: Any) -> Any:
        """Returns the batches of a step."""
        self._fetches = True
        found = super().get_batch_samples(*given, **named)  # type: ignore[misc]
        self._fetches = False
        return found

    def _get_num_items_in_batch(self, batch_samples: Any, device: Any) -> Any:
        trainer: Any = self
        if self._fetches and self._dealt:
            step = trainer.state.global_step % -(-len(trainer.train_dataset) // self._dealt.full)
            if not self.counts_tokens:
                self._shares = iter(self._dealt.shares(step, trainer.args.process_index))
            elif self._dealt.is_filler(step, trainer.args.process_index):
                dealing.blank(batch_samples)
        if pulse := self.handover and self.handover.pulse:
            pulse.fetched()
        return super()._get_num_items_in_batch(batch_samples, device)  # type: ignore[misc]

    def compute_loss(self, *given: Any, **named: Any) -> Any:
        """Computes the loss, as much of it as this process's rows count in the step, and gives a sign of life."""
        if not (pulse := self.handover and self.handover.pulse):
            return super().compute_loss(*given, **named)  # type: ignore[misc]
        pulse.beat("forward pass")
        share = next(self._shares, 1.0)  # in an evaluation there are none left
        trainer: Any = self
        with contextlib.nullcontext() if share == 1.0 else dealing.uneven(trainer.accelerator):
            found = super().compute_loss(*given, **named)  # type: ignore[misc]
        pulse.beat("backward pass")
        return found if share == 1.0 else found * share

    def prediction_step(self, *given: Any, **named: Any) -> Any:
        """Evaluates a batch, and gives a sign of life."""
        if pulse := self.handover and self.handover.pulse:
            pulse.beat("evaluation")
        return super().prediction_step(*given, **named)  # type: ignore[misc]

    def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
        """Returns the rows as they are: the tokenize stage has prepared them."""
        return dataset

    def method_state(self) -> dict[str, Any]:
        """Returns what the method keeps between steps that `Trainer` does not save."""
        return {}

    def load_method_state(self, saved: dict[str, Any]) -> None:
        """Puts it back."""

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """Writes none: TRL makes one in each checkpoint, for 0.1 s of the training thread's time."""

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        os.makedirs(output_dir, exist_ok=True)
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        if self._send:
            self._send(output_dir)

    def _join_weights(self, *, failed: bool = False) -> None:
        weights, self._weights = self._weights, None
        if weights:
            wait([weights])
            if not failed:
                weights.result()


def seed_of(seed: int, rank: int, step: int = 0) -> int:
    """Returns the seed of one process, where it does not go on with a random state of its own; of the first, the run's.

    Args:
        seed: The run's.
        rank: Number of the process.
        step: Step at which it begins.
    """
    return (seed + rank * 0x9E3779B1 + step * 0x85EBCA77) % 2**32
