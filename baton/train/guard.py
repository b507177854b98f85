"""The guard: each step is judged before its checkpoint, and bad steps are skipped, by their rows.

A step's rows are a function of seed, pass and step, traced back through packing to file and line. The first rank
notes a bad step before its process ends. The next process restores the newest checkpoint and skips the step.
A kill in between does no harm: the step is found again, or is known.
"""

import contextlib
import functools
import logging
import math
import os
import statistics
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, islice
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import nn

from baton import events
from baton.checkpoint.restore import FetchedCheckpoint
from baton.errors import SkipError, UserError
from baton.models import train_rows, trained
from baton.recipe.recipe import Recipe
from baton.runs import origins
from baton.runs.documents import Skip, SourceLocation, SplitCounts, TokensMeta
from baton.runs.run import Run, now
from baton.scratch import scratch_folder
from baton.store.manifest import Manifest
from baton.train import distributed
from baton.train.checkpointer import Checkpointer
from baton.train.context import TrainContext
from baton.train.protocol import ChunkTrainer

logger = logging.getLogger("baton")

LAYERS = ("batch_sampler", "batches", "sampler")  # attributes that lead from batches to the order of rows


def rows_of_step(loader: Any, recipe: Recipe, steps_per_epoch: int, step: int) -> list[int]:
    """Returns the numbers of a step's rows; where the model generates, of all prompts of its round."""
    training = recipe.training
    # TRL's order has a round's prompts, each as often as it is answered, once for every pass.
    size = training.round_size * recipe.gradient_accumulation_steps if training.spec.generates else training.batch_size
    epoch, index = divmod(step - 1, steps_per_epoch)  # steps count from 1
    order = loader.batch_sampler
    while (layer := next((name for name in LAYERS if hasattr(order, name)), None)) is not None:
        order = getattr(order, layer)
    if hasattr(order, "set_epoch"):
        order.set_epoch(epoch)
    rows: Iterator[int] = islice(iter(order), index * size, (index + 1) * size)
    return list(dict.fromkeys(int(row) for row in rows))


def locate_rows(run: Run, recipe: Recipe, rows: Sequence[int]) -> list[SourceLocation]:
    """Returns files and lines of the source of rows among the tokens; packed rows by their sequences."""
    prefix, manifest = trained.tokens_manifest(run)
    meta = TokensMeta.read(manifest.meta, run.storage.uri(prefix))
    files = meta.files["train"]
    starts = [0, *accumulate(count for _, count in files)]
    by_file: dict[int, list[int]] = {}
    for row in rows:
        number = bisect_right(starts, row) - 1
        by_file.setdefault(number, []).append(row - starts[number])
    # Tokens of an older Baton: their own files and rows.
    if not meta.first_lines and (
        train_rows.packs_rows(recipe.data, "train") or meta.train != run.need(SplitCounts).train
    ):
        names = ((run.storage.uri(manifest.path(prefix, files[number][0])), by_file[number]) for number in by_file)
        return [SourceLocation(file=name, line=row + 1) for name, within in names for row in within]
    first_lines = meta.first_lines or [start + 1 for start in starts]
    lines: set[int] = set()
    for number, within in by_file.items():
        noted = _noted(run, prefix, manifest, files[number][0])
        lines.update(_lines(noted, recipe, within) if noted else (first_lines[number] + row for row in within))
    return origins.places(run, lines)


def _noted(run: Run, prefix: str, manifest: Manifest, name: str) -> list[tuple[int, int]] | None:
    """Returns line and length of each row of a file before packing; None where each row is the next line's."""
    side, _, file = name.partition("/")
    noted = f"lines/{side}-{file.rpartition('.')[0]}.npy"
    if noted not in manifest.files:
        return None
    with scratch_folder("lines") as scratch:
        local = os.path.join(scratch, "lines.npy")
        run.storage.download(manifest.path(prefix, noted), local)
        return [(int(line), int(length)) for line, length in np.load(local)]


def _lines(noted: Sequence[tuple[int, int]], recipe: Recipe, rows: Iterable[int]) -> list[int]:
    if not train_rows.packs_rows(recipe.data, "train"):
        return [noted[row][0] for row in rows]
    # Packed again, with each token replaced by its line.
    kind = pa.list_(pa.int64())
    table = pa.table({"input_ids": pa.array(([line] * length for line, length in noted), type=kind)})
    joined = train_rows.pack_rows(table, recipe.data, is_all=True)["input_ids"]
    return [line for row in rows for line in joined[row].as_py()]


FEWEST = 10  # steps that a median needs, unless the window is smaller
MOST_ROWS = 1000  # rows that a document names


class Guarded(ChunkTrainer):
    """Mixin: judges each step by its loss and gradient norm, and skips the run's bad ones.

    A skipped step is counted, and schedule, rows and callbacks advance; nothing is computed, and the optimizer and its
    scaler do not know of it. The verdict depends on the steps kept alone, so `guard_window` is state.
    """

    _loss: torch.Tensor | float = 0.0

    @property
    def skips_step(self) -> bool:
        step = self.state.global_step + 1
        return step in self.resumption.skips or bool(self.guard and step in self.guard.skip)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        if not self.skips_step:
            loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
            if self.guard:
                self._loss = self._loss + loss.float()
            return loss
        self.enter_training(model)
        self.skip_step(model, inputs)
        return torch.zeros((), device=self.args.device)

    def floating_point_ops(self, inputs: Any) -> float:
        return 0.0 if self.skips_step else float(super().floating_point_ops(inputs))

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        # transformers 5.23 clips gradients here; a skipped step has none.
        return None if self.skips_step else super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: nn.Module, grad_norm: torch.Tensor | float | None = None) -> Any:
        # transformers 5.23 asks for it after a step's last pass, right before its update: None where it is skipped.
        if self.skips_step:
            # Accelerate's optimizer makes a step, by its scaler where it has one, only where gradients are synced.
            self.accelerator.gradient_state._set_sync_gradients(False)
            # If the scaler refused this process's previous update, the schedule would not advance.
            self.optimizer._is_overflow = False
            self._globalstep_last_logged += 1  # no part of the average that is logged
            self.skipped = (*self.skipped, self.state.global_step + 1)
            return None
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if self.guard:
            whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # of FSDP's shards, that of all
            loss, size, self._loss = float(self._loss), 0.0 if whole is None else float(whole), 0.0
            if self.args.world_size > 1:
                self.figures = (loss, size)
            else:  # with virtual workers each process has the loss of all
                self._judge(self.state.global_step + 1, loss, size)
        return norm

    def judge(self, figures: Sequence[Sequence[float]]) -> None:
        # With several processes, after the step's update: before it each would wait for the others once more. A bad
        # update goes with the process.
        if self.figures:
            self.figures = ()
            self._judge(self.state.global_step, sum(row[0] for row in figures) / len(figures), figures[0][1])

    def _judge(self, step: int, loss: float, norm: float) -> None:
        """Takes a step into the window; raises SkipError, in all ranks, where it is out of bounds."""
        assert self.guard
        if math.isfinite(loss) and math.isfinite(norm):
            # A policy's loss is about 0, and no multiple of it means anything.
            times = None if self.recipe.training.generation else self.guard.loss
            for at, (name, bound) in enumerate((("loss", times), ("grad_norm", self.guard.grad_norm))):
                before = [row[at] for row in self.guard_window]
                if bound and is_beyond((loss, norm)[at], before, bound, self.guard.window):
                    median = statistics.median(before)
                    what = name.replace("grad_norm", "gradient norm")
                    text = (
                        f"step {step} has the {what} {(loss, norm)[at]:.4g}; expected at most {bound:g} times "
                        f"{median:.4g}, the median of the {len(before)} steps before it (training.guard.{name})."
                    )
                    raise SkipError(text, step=step, reason=name, loss=loss, grad_norm=norm, median=median)
            self.guard_window = (*self.guard_window, (loss, norm))[-self.guard.window :]
        # An infinite norm by the gradients' scale is for the scaler: it refuses the update, and lowers the scale.
        elif self.guard.nan and not (math.isfinite(loss) and self.accelerator.scaler is not None):
            text = f"step {step} has the loss {loss:g} and the gradient norm {norm:g}; expected finite ones."
            raise SkipError(text, step=step, reason="nan", loss=loss, grad_norm=norm)

    def load_skipped(self, saved: tuple[int, ...]) -> None:
        trained = [x for x in (self.guard.skip if self.guard else ()) if x <= self.state.global_step and x not in saved]
        if trained:
            raise UserError(
                f"training.guard.skip has step {trained[0]}, which this run has trained: its newest checkpoint is that "
                f"of step {self.state.global_step}.",
                remedy="Leave it out, or start another run with the list.",
            )
        super().load_skipped(saved)


def is_beyond(value: float, before: list[float], times: float, window: int) -> bool:
    """Tells whether a value exceeds `times` the median of earlier ones in a window."""
    # A value that is not above all is within: where a loss has fallen fast, it may rise to where it was.
    if len(before) < min(FEWEST, window) or value <= max(before):
        return False
    median = statistics.median(before)
    return 0 < median * times < value


def known_skips(context: TrainContext, restored: FetchedCheckpoint | None) -> tuple[int, ...]:
    steps = [skip.step for skip in context.run.skips()]  # without those that the recipe names
    # Earlier steps are as the checkpoint has them: it holds the state that followed.
    if restored and (late := sorted(step for step in {*steps} - {*restored.meta.skips} if step <= restored.step)):
        context.run.warn(f"steps {late} were trained before they were found: they are not skipped")
    return tuple(steps)


@contextlib.contextmanager
def watch_for_skips(trainer: ChunkTrainer, checkpointer: Checkpointer) -> Iterator[None]:
    """Notes with the run a bad step that training finds in the block, before this process ends.

    Raises:
        SkipError: a step is to be skipped, and the run knows it.
        DeviceError: in the place of a device's error, with the step after which it came.
    """
    context = checkpointer.context

    def note(error: SkipError) -> None:
        # The next process resumes from the checkpoint that is on its way. From here the store has its usual patience.
        checkpointer.finish()
        keep_skip(context, trainer, error)

    try:
        with distributed.watch_device(lambda: int(trainer.state.global_step)):
            yield
    except SkipError as error:
        checkpointer.watchdog.stop()
        # All ranks have found it, and wait here: the launcher ends all as soon as one has ended.
        context.ranks.on_first(functools.partial(note, error))
        raise


def keep_skip(context: TrainContext, trainer: ChunkTrainer, error: SkipError) -> None:
    """Notes with the run that a step is to be skipped, unless another process has, or no more skips are allowed."""
    run, guard = context.run, context.recipe.training.guard
    assert guard is not None
    rows: list[SourceLocation] = []
    try:
        loader = trainer.callback_handler.train_dataloader
        numbers = rows_of_step(loader, context.recipe, context.plan.steps_per_epoch, error.step)
        rows = locate_rows(run, context.recipe, numbers)
    except Exception as failure:  # unknown rows are no reason to train on them
        logger.warning("the rows of step %d are not known: %s: %s", error.step, type(failure).__name__, failure)
    skip = Skip(
        step=error.step,
        chunk=context.index,
        reason=error.reason,
        message=error.message,
        loss=_finite(error.loss),
        grad_norm=_finite(error.grad_norm),
        median=_finite(error.median),
        rows=rows[:MOST_ROWS],
        num_rows=len(rows),
        created=now(),
    )
    began = run.began()
    before = [other for other in run.skips() if other.step > began]
    if len(before) >= guard.max_skips and skip.step not in {other.step for other in before}:
        lines = (
            f"{each.message.rstrip('.')} ({each.rows_in_words or 'its rows are not known'})" for each in (*before, skip)
        )
        allowed = {0: "no step", 1: "1 step"}.get(guard.max_skips, f"{guard.max_skips} steps")
        raise UserError(
            f"training.guard.max_skips allows {allowed} to be skipped, and there is one more: {'; '.join(lines)}.",
            remedy="Raise max_skips and run again; or fix these rows, or lower training.learning_rate where training "
            "diverges, which makes another run.",
        )
    run.note_skip(skip)
    events.emit(events.StepSkipped(step=skip.step, chunk=skip.chunk, message=skip.message, rows=skip.rows_in_words))


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
