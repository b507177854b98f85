"""Plan of a run's steps and chunks: a pure function of a few numbers."""

import math
from typing import Self

from pydantic import Field

from baton.documents import NamedDocument
from baton.errors import UserError
from baton.recipe.recipe import Recipe
from baton.recipe.training import Training


class Plan(NamedDocument, name="plan.json"):
    rows: int  # training sequences
    steps_per_epoch: int = Field(gt=0)  # the last may have fewer rows
    num_steps: int
    targets: tuple[int, ...] = Field(min_length=1)  # step at which each chunk ends, ascending; the last is `num_steps`

    def target(self, index: int) -> int:
        # Spare chunks, after the last, have the last one's target.
        return self.targets[min(index, len(self.targets)) - 1]

    def passes(self, step: int) -> float:
        return step / self.steps_per_epoch

    def is_due(self, step: int, per_epoch: int) -> bool:
        """Tells whether something that is due `per_epoch` times an epoch is due after a step.

        The k-th of n in an epoch of S steps comes after step k × S / n, rounded up. So an epoch's end is always one,
        nothing drifts from one epoch to the next, and with n above S every step is one.
        """
        return step * per_epoch // self.steps_per_epoch > (step - 1) * per_epoch // self.steps_per_epoch

    def until(self, last_step: int) -> Self:
        """Returns the plan of a run of the same rows that ends at another step, without its chunks."""
        return self.model_copy(update={"num_steps": last_step})

    def slots(self, spare: int) -> int:
        return len(self.targets) + spare


def make_plan(recipe: Recipe, rows: int) -> Plan:
    """Plans a run; UserError for too few rows, or more chunks than steps."""
    training, count = recipe.training, recipe.num_chunks
    if rows == 0:
        raise UserError("no training rows are left after the split.", remedy="Check data.source and data.split.eval.")
    steps_per_epoch = _steps_per_epoch(training, rows)
    num_steps = training.max_steps or math.ceil(steps_per_epoch * (training.epochs or 1.0))
    if count > num_steps:
        raise UserError(
            f"chunks.count is {count}, but {rows} rows at batch_size {training.batch_size} give {num_steps} steps.",
            remedy=f"Use at most {num_steps} chunks, or train longer.",
        )
    if recipe.chunks.count == "per-epoch":
        targets = (*(steps_per_epoch * (index + 1) for index in range(count - 1)), num_steps)
    else:
        # Rounded up: the last is `num_steps`, and with at most as many chunks as steps no two are the same.
        targets = tuple(-(-num_steps * (index + 1) // count) for index in range(count))
    return Plan(rows=rows, steps_per_epoch=steps_per_epoch, num_steps=num_steps, targets=targets)


def _steps_per_epoch(training: Training, rows: int) -> int:
    if training.completions is None:
        return math.ceil(rows / training.batch_size)
    # As in TRL: a round takes as many prompts as its completions need and is trained on `num_iterations` times; prompts
    # that do not fill a round are left out of the pass.
    generation = training.generation
    completions_each, passes = (generation.num_generations, generation.num_iterations) if generation else (1, 1)
    prompts = training.round_size // completions_each
    if rows < prompts:
        raise UserError(
            f"one round of {training.method} takes {prompts} prompts, and there are {rows}.",
            remedy="Give more rows, or lower batch_size or steps_per_generation, or raise num_generations.",
        )
    return math.ceil(rows // prompts * training.round_size * passes / training.batch_size)
