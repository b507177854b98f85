"""Recipe sections `sweep`, `phases` and `retrain`: several trainings from one recipe.

A sweep compares configurations while they train. Each phase starts from the model of the phase before it.
"""

import difflib
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from baton.recipe.base import Positive, Section, WrittenAs, duration, seconds

# Sections that may differ between a sweep's trials; all are cut, judged and placed the same.
SWEPT = ("seed", "model", "data", "adapter", "training", "hooks")

MAX_TRIALS = 1000  # most trials of a sweep: a workflow's loop fans out over them

Number = int | float


class Range(Section):
    """Range to draw a number from; whole numbers where `min` and `max` have no decimal point."""

    min: Number
    """Lowest number."""
    max: Number
    """Highest number."""
    log: bool = False
    """Draw evenly on a logarithmic scale."""
    step: Annotated[Number, Field(gt=0)] | None = None
    """Distance between numbers, starting at `min`; default: any number."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.max <= self.min:
            raise ValueError(f"max {self.max:g} is not above min {self.min:g}")
        if self.log and self.min <= 0:
            raise ValueError(f"min {self.min:g} has no logarithm; give one above 0, or leave out log")
        if self.log and self.step is not None:
            raise ValueError("log and step exclude each other; leave one out")
        if self.whole and isinstance(self.step, float):
            raise ValueError(f"step {self.step:g} between whole numbers; write min and max with a point")
        return self

    @property
    def whole(self) -> bool:
        return isinstance(self.min, int) and isinstance(self.max, int)

    def stepped(self) -> list[Number] | None:
        """Returns all its numbers, None where there is no step between them."""
        step = self.step or (1 if self.whole else None)
        if step is None or self.log:
            return None
        count = int((self.max - self.min) / step + 1e-9) + 1
        return [self.min + number * step for number in range(count)]


class Halving(Section):
    """Prunes trials at each rung."""

    eta: Annotated[int, Field(ge=2)] = 3
    """One in this many trials advances; rungs follow chunks 1, eta, eta² and so on."""
    sure: Annotated[float, Field(gt=0.5, lt=1)] | None = None
    """Confidence, such as 0.9, at which a pruned trial is worse than the last one that advances; others advance, too.
    Held-out rows are compared pair by pair (bootstrap). Default: any difference counts."""


OPTUNA_BRACKETS = 3


class Search(Section):
    """Configurations to compare, and pruning."""

    method: Literal["grid", "random", "optuna"] = "random"
    """`grid`: every combination; `random`: independent draws; `optuna` (TPE; needs the package): draws informed by
    earlier brackets."""
    parameters: Annotated[dict[str, list[Any] | Range], Field(min_length=1)]
    """Dotted path → values or a range: `{training.learning_rate: {min: 1e-5, max: 1e-3, log: true},
    training.batch_size: [8, 16]}`. Paths of `seed`, `model`, `data`, `adapter`, `training` and `hooks`; the recipe's
    seed decides all draws."""
    trials: Annotated[int, Field(ge=2, le=MAX_TRIALS)] | None = None
    """Number of configurations, except for a grid; default: as many as `hyperband` needs, else 8."""
    metric: str = "eval_loss"
    """Metric to compare: `eval_loss` or another from the trainer's evaluation, such as `eval_mean_token_accuracy`,
    `eval_rewards/accuracies` or one of `hooks.metrics`."""
    mode: Literal["min", "max"] = "min"
    """Direction of the metric."""
    halving: Halving | None = None
    """Prune weaker configurations early: `{eta: 3}`. Default: all train to the end, without `hyperband`."""
    hyperband: Halving | None = None
    """Halving in several brackets (arXiv:1603.06560), from many trials with a short first rung to few full ones. For
    metrics that are noisy early on."""
    brackets: Positive | None = None
    """Batches of trials in sequence, without `hyperband`; `optuna` learns from earlier ones. Default: 3 for `optuna`,
    else 1."""
    parallel: Annotated[Positive | None, WrittenAs("max_parallel_trials")] = None
    """Trials or shared devices at once on a cluster; default: 4. On one machine trials run in turn."""
    device: Literal["own", "shared"] = "own"
    """`shared`: trials take turns inside one process, which loads the base once. On a cluster a rung is
    `max_parallel_trials` pods. `own`: each chunk of a trial is a process, or a pod. Bits are the same."""

    @field_validator("parameters")
    @classmethod
    def _paths(cls, value: dict[str, list[Any] | Range]) -> dict[str, list[Any] | Range]:
        for path, choices in value.items():
            root = path.partition(".")[0]
            if root not in SWEPT:
                close = difflib.get_close_matches(root, SWEPT, n=1, cutoff=0.6)
                hint = f"did you mean {close[0]!r}?" if close else f"can differ: {', '.join(SWEPT)}"
                raise ValueError(f"{path}: is the same for all trials; {hint}")
            if isinstance(choices, list) and not choices:
                raise ValueError(f"{path}: has no values to choose from")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.halving and self.hyperband:
            raise ValueError("halving and hyperband both prune trials; remove one")
        if self.hyperband and self.brackets:
            raise ValueError("brackets: hyperband makes its own; leave it out")
        if self.method == "grid":
            if self.hyperband or (self.brackets or 1) > 1:
                raise ValueError("method: a grid is one bracket; use random or optuna")
            if self.trials:
                raise ValueError("trials: a grid has as many as there are combinations; leave it out")
            for path, choices in self.parameters.items():
                if isinstance(choices, Range) and choices.stepped() is None:
                    raise ValueError(f"parameters.{path}: a grid needs values or a step; give one of the two")
        return self

    @property
    def num_brackets(self) -> int | None:
        """Batches of trials, fewer where there are fewer trials; None for `hyperband`, which makes its own."""
        return None if self.hyperband else self.brackets or (OPTUNA_BRACKETS if self.method == "optuna" else 1)

    @property
    def eta(self) -> int | None:
        """One of how many advances, None where all do."""
        rule = self.halving or self.hyperband
        return rule.eta if rule else None

    @property
    def sure(self) -> float | None:
        """Confidence at which a pruned trial is worse, None where any difference counts."""
        rule = self.halving or self.hyperband
        return rule.sure if rule else None


PREVIOUS = "previous-phase"  # placeholder for the previous phase's model, until that is known

# Sections in which a phase may differ.
MERGED_SECTIONS = ("data", "adapter", "training", "chunks", "evaluation", "hooks")


class RecipePhase(Section):
    """One training of several; its keys override those of the top level."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,18}[a-z0-9])?$")]
    """Lower-case letters, digits and dashes; its run is called `<run>-<name>`."""
    data: dict[str, Any] = {}
    """Changes to `data`."""
    adapter: dict[str, Any] | None = {}
    """Changes to `adapter`; null trains full weights."""
    training: dict[str, Any] = {}
    """Changes to `training`."""
    chunks: dict[str, Any] = {}
    """Changes to `chunks`."""
    evaluation: dict[str, Any] = {}
    """Changes to `evaluation`."""
    hooks: dict[str, Any] = {}
    """Changes to `hooks`."""


def _phase_shorthand(value: Any) -> Any:
    return {"name": value, "training": {"method": value}} if isinstance(value, str) else value


# A phase, or just the name of its method.
ShortPhase = Annotated[RecipePhase, BeforeValidator(_phase_shorthand, json_schema_input_type=RecipePhase | str)]


def phase_document(document: dict[str, Any], phase: RecipePhase, position: int, *, last: bool) -> dict[str, Any]:
    """Returns a phase's recipe as plain values; `last` marks the final phase, which need not export a whole model."""
    # A name has at most 63 characters, a phase's at most 20.
    recipe = {**document, "phases": [], "name": f"{document['name'][:42]}-{phase.name}"}
    for section in MERGED_SECTIONS:
        own = getattr(phase, section)
        recipe[section] = None if own is None else {**(document[section] or {}), **own} or None
    if position:
        recipe["model"] = {**document["model"], "base": PREVIOUS, "from_scratch": None, "tokenizer": None}
    if not last:
        recipe["export"] = {**document["export"], "formats": ["safetensors"], "hub": None, "registered_model": None}
        recipe["evaluation"] = {**recipe["evaluation"], "gate": {}}
    return recipe


# Placeholder in `evaluation.production` for the last accepted model, in the store below the recipe's name.
ACCEPTED = "accepted"


class Retrain(Section):
    """Retraining (`baton run --if-changed`, `baton kfp schedule`) after changes of data or recipe."""

    start: Literal["base", "accepted"] = "base"
    """`base`: the recipe's model, on all rows. `accepted`: the last accepted model, on new rows and `replay`. A changed
    recipe always starts from its own model."""
    replay: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """With `start: accepted`: share of earlier rows in training, drawn by content, against forgetting."""
    concurrency: Literal["queue", "drop"] = "queue"
    """Action while another retraining of the same name runs: wait and check again, or exit."""
    expires: Annotated[str, BeforeValidator(duration)] = "12h"
    """Time without a heartbeat after which another retraining may start. Every object written below the run is a
    heartbeat; a pending pod writes none."""
    learnt: list[str] = []
    """Digests of data already learnt by the start model; written by retraining."""

    @property
    def expires_seconds(self) -> float:
        return seconds(self.expires)
