"""Stopping a trainer at a target, saving all of its state, and proving after a restore that it is all back."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers import Trainer, TrainerCallback, set_seed

from components.shared import events
from components.shared.errors import ExactnessError
from components.train_chunk import state
from components.train_chunk.ranks import Ranks
from components.train_chunk.resumable import seed_of
from components.train_chunk.takeover import Takeover

if TYPE_CHECKING:
    from components.train_chunk.pulse import Pulse

logger = logging.getLogger("baton")


class Keeper(Protocol):
    """What a handover asks of the chunk it serves."""

    def places(self, num_bytes: int) -> Iterator[tuple[str, Callable[[str], None] | None]]:
        """Yields folders to write a checkpoint to, with what sends a file off where not all fit."""

    def on_first_step(self) -> None:
        """Is told that training begins."""

    def agree(self, late: bool) -> tuple[bool, bool, bool]:
        """Tells, after each step, what the process that speaks for all has to say; raises what went wrong beside.

        Args:
            late: Whether a checkpoint is due by time.

        Returns:
            Whether to save and leave, whether a checkpoint is due by time, and whether one taken now would be sent at
            once.
        """

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
        takeover: What a fork's recipe changes in its parent's state.
        keep_best: Save where an evaluation finds the lowest loss so far.
        ranks: This process among those that train together.
        pulse: Its signs of life, where there are others.
        replicated: Whether each of them has the whole state.
        saved_by: How many processes made the checkpoint.
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
        takeover: Takeover | None = None,
        keep_best: bool = False,
        ranks: Ranks = Ranks(),  # noqa: B008
        pulse: Pulse | None = None,
        replicated: bool = True,
        saved_by: int = 1,
    ) -> None:
        self.trainer = trainer
        self.ranks = ranks
        self.pulse = pulse
        self.replicated = replicated
        self.is_reshaped = resume_from is not None and saved_by != ranks.size
        self.takeover = takeover
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
        self._overdue = self._late = False
        self._is_free = True
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
            if self.ranks.rank:  # dropout is not to leave out the same places in all processes
                set_seed(seed_of(args.seed, self.ranks.rank))
            return
        if self.takeover:
            trainer_state.compute_steps(args, trainer_state.max_steps)  # those of the parent were restored
        extra = torch.load(self._extra_file(self.resume_from), weights_only=True)
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
            if self.takeover:
                self.takeover.apply(self.trainer)
        if self.pulse:
            self.pulse.start(trainer_state.global_step + 1)
            if not self.trainer.recipe.training.compile:  # what is compiled would take the clock in
                self.pulse.time_forward(self.trainer.model, self.trainer.model_wrapped)
        self.keeper.on_first_step()

    def on_step_end(self, args: Any, trainer_state: Any, control: Any, **_: Any) -> None:
        """Decides whether to save and to stop. At an epoch's end both wait for `on_epoch_end`."""
        step = trainer_state.global_step
        if self.pulse:
            self.pulse.beat("end")
        late = bool(self.every_seconds and time.monotonic() - self._saved_at >= self.every_seconds)
        stop, self._late, self._is_free = self.keeper.agree(late)
        if self.pulse:
            self.pulse.beat("rows", step + 1)
        self._leaving = stop or step >= self.target
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
        torch.save(extra, os.path.join(folder, state.extra_file(self.ranks.rank)))
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(folder, "training_args.bin"))  # a pickle that nobody needs to resume
        # All processes have written what is theirs once their digests are here.
        self.keeper.save(trainer_state.global_step, folder, self._digests(), wanted=self._is_best)
        self._is_best, self._saved_step = False, trainer_state.global_step
        self._saved_at, self._overdue, self._late = time.monotonic(), False, False

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
        self._overdue = self._overdue or self._late or bool(self.every_steps and step % self.every_steps == 0)
        return self._overdue and self._is_free

    def _digests(self) -> dict[str, str]:
        """Returns the digests of the state, those of all processes together."""
        return self._joined(state.digests(self.trainer))

    def _joined(self, ours: dict[str, str]) -> dict[str, str]:
        rows = self.ranks.gather(ours)
        return state.joined(rows, replicated=self.replicated, of_each=self.trainer.of_each)

    def _extra_file(self, folder: str) -> str:
        """Returns the file of this process, or the first one's where other processes made the checkpoint."""
        own = os.path.join(folder, state.extra_file(self.ranks.rank))
        return own if os.path.isfile(own) else os.path.join(folder, state.extra_file(0))

    def _prove_restored(self) -> None:
        ours = state.digests(self.trainer)
        ours["rng"] = self._rng_digest or "not restored"
        if self.takeover:
            ours |= self.takeover.restored(self.trainer)
        found = self._joined(ours)
        of_each = self.trainer.of_each if self.replicated else (*self.trainer.of_each, *state.IN_SHARDS)
        for part in state.PARTS:
            if part in self.leave_out:
                self.checked[part] = "left out"
            elif self.is_reshaped and part in of_each:
                self.checked[part] = "of other processes"
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
