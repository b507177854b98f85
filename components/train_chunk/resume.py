"""Stopping a trainer at a target, saving all of its state, and proving after a restore that it is all back."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

import torch
from transformers import Trainer, TrainerCallback

from components.shared import events
from components.shared.errors import ExactnessError
from components.train_chunk import staging, state

logger = logging.getLogger("baton")


class Resumable:
    """Mixin for a `Trainer`: stages its checkpoints, and sees when the random state has been put back.

    Upstream restores the random state at one of two places, before or after the first batch is fetched,
    and draws from it in between; the only moment at which it can be compared is right after.
    """

    handover: Handover | None = None
    _send: Callable[[str], None] | None = None
    _weights: Future[None] | None = None

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self.handover and "rng" in self.handover.leave_out:
            return
        super()._load_rng_state(checkpoint)  # type: ignore[misc]
        if self.handover:
            self.handover.check_rng()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self.handover and "optimizer" in self.handover.leave_out:
            return
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
            try:
                super()._save_checkpoint(model, trial)  # type: ignore[misc]
                self._join_weights()
                return
            except Exception as error:
                self._join_weights(failed=True)
                shutil.rmtree(self.handover.folder(), ignore_errors=True)
                if send or not staging.is_full(error):
                    raise

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the weights: in a checkpoint, in a thread beside the optimizer's state."""
        save = super().save_model  # type: ignore[misc]
        if not _internal_call:
            save(output_dir, _internal_call)
        elif self._send:
            save(output_dir, _internal_call)
            self._send(str(output_dir))
        else:
            pool = ThreadPoolExecutor(1)
            self._weights = pool.submit(save, output_dir, _internal_call)
            pool.shutdown(wait=False)

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


class Keeper(Protocol):
    """What a handover asks of the chunk it serves."""

    def places(self, num_bytes: int) -> Iterator[tuple[str, Callable[[str], None] | None]]:
        """Yields folders to write a checkpoint to, with what sends a file off where not all fit."""

    def on_first_step(self) -> None:
        """Is told that training begins."""

    def is_free(self) -> bool:
        """Tells whether a checkpoint taken now would be sent at once."""

    def must_stop(self) -> bool:
        """Tells, after each step, whether to save and leave; raises what went wrong in the background."""

    def save(self, step: int, folder: str, digests: dict[str, str], *, wanted: bool) -> None:
        """Takes a complete checkpoint folder; a wanted one is not given up for a newer one."""


class Handover(TrainerCallback):
    """Takes a run over from a checkpoint, brings it to a target step, and hands it on.

    Args:
        trainer: The trainer, its callbacks complete.
        target: Step at which to stop.
        keeper: Where checkpoints go, and who says when to leave.
        every_steps: Steps between checkpoints before the target.
        every_seconds: Seconds between checkpoints before the target.
        resume_from: Local folder of the checkpoint, None at the start of a run.
        expected: Digests in its manifest.
        leave_out: Parts not to restore: a negative control for tests of exactness.
        keep_best: Save where an evaluation finds the lowest loss so far.
    """

    stateless = True

    def __init__(
        self,
        trainer: Trainer,
        target: int,
        keeper: Keeper,
        *,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        resume_from: str | None = None,
        expected: dict[str, str] | None = None,
        leave_out: tuple[str, ...] = (),
        keep_best: bool = False,
    ) -> None:
        self.trainer = trainer
        self.keep_best = keep_best
        self.target = target
        self.keeper = keeper
        self.every_steps = every_steps
        self.every_seconds = every_seconds
        self.resume_from = resume_from
        self.expected = expected or {}
        self.leave_out = leave_out
        self.checked: dict[str, str] = {}
        self.finished = False
        self._is_best = False
        self._saved_step = -1
        self._rng_digest: str | None = None
        self._saved_at = time.monotonic()
        self._first = True
        self._leaving = False
        self._overdue = False
        # The manifest has each file's SHA-256; CRC-32 on top takes a third of the time of writing.
        torch.serialization.set_crc32_options(False)
        trainer.handover = self
        trainer.remove_callback(state.PrinterCallback)
        trainer.add_callback(self)
        for name in state.without_state(trainer):
            logger.warning("callback %s has no state_dict: what it keeps is lost between chunks", name)

    def places(self) -> Iterator[tuple[str, Callable[[str], None] | None]]:
        """Yields where to write a checkpoint, best first."""
        return self.keeper.places(state.num_bytes(self.trainer))

    def folder(self) -> str:
        """Returns where `Trainer` writes the checkpoint of the step it is at."""
        return os.path.join(self.trainer.args.output_dir, f"checkpoint-{self.trainer.state.global_step}")

    def check_rng(self) -> None:
        """Remembers the random state as restored."""
        self._rng_digest = state.tree_digest(state.rng.capture())

    def num_trainable(self) -> int:
        """Returns how many parameters training changes."""
        return sum(value.numel() for value in self.trainer.model.parameters() if value.requires_grad)

    def on_train_begin(self, args: Any, trainer_state: Any, control: Any, **_: Any) -> None:
        """Puts back what `Trainer` does not restore."""
        if self.resume_from is None:
            return
        extra = torch.load(os.path.join(self.resume_from, state.EXTRA_FILE), weights_only=True)
        state.restore_log_window(self.trainer, extra["log_window"])
        if "method" not in self.leave_out:
            self.trainer.load_method_state(extra["method"])
        if "callbacks" in self.leave_out:
            return
        try:
            state.restore_callbacks(self.trainer, extra["callbacks"])
        except KeyError as error:
            raise ExactnessError(f"callbacks cannot be restored: {error.args[0]}.") from None

    def on_step_begin(self, args: Any, trainer_state: Any, control: Any, **_: Any) -> None:
        """Before the first step: compares what is in memory with what was saved."""
        if not self._first:
            return
        self._first = False
        if self.resume_from is not None:
            self._prove_restored()
        self.keeper.on_first_step()

    def on_step_end(self, args: Any, trainer_state: Any, control: Any, **_: Any) -> None:
        """Decides whether to save and to stop. At an epoch's end both wait for `on_epoch_end`."""
        step = trainer_state.global_step
        self._leaving = self.keeper.must_stop() or step >= self.target
        # Where this step is evaluated, that decides first whether the run ends here, whatever the chunk does.
        control.should_training_stop = control.should_training_stop or (self._leaving and not control.should_evaluate)
        if not self._ends_epoch(trainer_state) and self._is_due(step):
            control.should_save = True

    def on_epoch_end(self, args: Any, trainer_state: Any, control: Any, **_: Any) -> None:
        """Saves what waited; silences an epoch's end that only the stop of a chunk brought about."""
        if self._ends_epoch(trainer_state):
            due = self._is_due(trainer_state.global_step) and self._saved_step != trainer_state.global_step
            control.should_save = control.should_save or due
        else:
            control.should_save = control.should_evaluate = control.should_log = False

    def on_evaluate(self, args: Any, trainer_state: Any, control: Any, **_: Any) -> None:
        """Keeps the step at which an evaluation ended the run, and the best one where that is wanted."""
        losses = [entry["eval_loss"] for entry in trainer_state.log_history if "eval_loss" in entry]
        if self.keep_best and losses and losses.index(min(losses)) == len(losses) - 1:
            self._is_best = control.should_save = True
        at_end = trainer_state.global_step >= trainer_state.max_steps
        if control.should_training_stop and not at_end:
            self.finished = self._leaving = control.should_save = True
        control.should_training_stop = self._leaving or at_end

    def on_save(self, args: Any, trainer_state: Any, control: Any, **_: Any) -> None:
        """Completes the folder that `Trainer` wrote and passes it on with the digest of the state."""
        folder = self.folder()
        extra = {
            "log_window": state.log_window(self.trainer),
            "callbacks": state.callback_states(self.trainer),
            "method": self.trainer.method_state(),
        }
        torch.save(extra, os.path.join(folder, state.EXTRA_FILE))
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(folder, "training_args.bin"))  # a pickle that nobody needs to resume
        self.keeper.save(trainer_state.global_step, folder, state.digests(self.trainer), wanted=self._is_best)
        self._is_best, self._saved_step = False, trainer_state.global_step
        self._saved_at, self._overdue = time.monotonic(), False

    def on_log(self, args: Any, trainer_state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Tells whoever watches."""
        if logs and "loss" in logs:
            events.emit("step", step=trainer_state.global_step, of=trainer_state.max_steps, loss=logs["loss"])

    def _ends_epoch(self, trainer_state: Any) -> bool:
        return float(trainer_state.epoch).is_integer()

    def _is_due(self, step: int) -> bool:
        """Tells whether to save now. What falls due while a checkpoint is on its way waits until that has arrived."""
        if self._leaving:
            return True
        by_time = self.every_seconds and time.monotonic() - self._saved_at >= self.every_seconds
        self._overdue = self._overdue or bool(by_time or (self.every_steps and step % self.every_steps == 0))
        return self._overdue and self.keeper.is_free()

    def _prove_restored(self) -> None:
        found = state.digests(self.trainer)
        found["rng"] = self._rng_digest or "not restored"
        for part in state.PARTS:
            if part in self.leave_out:
                self.checked[part] = "left out"
            elif part == "scaler" and getattr(self.trainer.accelerator, "scaler", None) is None:
                self.checked[part] = "absent" if found[part] == self.expected[part] else "mismatch"
            else:
                self.checked[part] = "match" if found[part] == self.expected[part] else "mismatch"
        wrong = [part for part, verdict in self.checked.items() if verdict == "mismatch"]
        events.emit("restored", step=self.trainer.state.global_step, wrong=wrong)
        if wrong:
            raise ExactnessError(
                f"after restoring step {self.trainer.state.global_step}, {', '.join(wrong)} in memory differ from "
                "what was saved; the chunk stops before it trains on.",
                remedy="Check that image and recipe are those that wrote the checkpoint.",
            )
