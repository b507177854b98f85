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
    """Numbers from which one is drawn; whole ones where `min` and `max` are written without a point."""

    min: Number
    """The lowest."""
    max: Number
    """The highest."""
    log: bool = False
    """Draw evenly on a logarithmic scale."""
    step: Annotated[Number, Field(gt=0)] | None = None
    """Distance between the numbers, from `min` on; any number in between when left out."""

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
    """At each rung the best part advances."""

    eta: Annotated[int, Field(ge=2)] = 3
    """One of so many advances; rungs are after chunks 1, eta, eta² and so on."""


class Search(Section):
    """Which configurations are compared, and which of them train to the end."""

    method: Literal["grid", "random", "optuna"] = "random"
    """`grid` takes every combination, `random` draws each value by itself, `optuna` (TPE; needs the package) draws the
    trials of each bracket by what the brackets before have shown."""
    parameters: Annotated[dict[str, list[Any] | Range], Field(min_length=1)]
    """Dotted path of the recipe → the values to choose from, or a range: `{training.learning_rate: {min: 1e-5, max:
    1e-3, log: true}, training.batch_size: [8, 16]}`. Paths of `seed`, `model`, `data`, `adapter`, `training` and
    `hooks`; all values come from the recipe's seed."""
    trials: Annotated[int, Field(ge=2, le=MAX_TRIALS)] | None = None
    """Configurations in all, except of a grid; when left out as many as `hyperband` asks for, and 8 otherwise."""
    metric: str = "eval_loss"
    """What trials are compared by: `eval_loss`, or another value that the trainer's evaluation of the held-out rows
    gives, such as `eval_mean_token_accuracy`, `eval_rewards/accuracies` or one of `hooks.metrics`."""
    mode: Literal["min", "max"] = "min"
    """Whether less is better, or more."""
    halving: Halving | None = None
    """Stop the worse configurations early: `{eta: 3}`. All train to the end when both this and `hyperband` are left
    out."""
    hyperband: Halving | None = None
    """Halving in several brackets, one after the other, from many trials with a short first rung to few that all train
    to the end (arXiv:1603.06560): for scores that say little at first."""
    brackets: Positive | None = None
    """Batches of trials one after the other, where there is no `hyperband`: `optuna` learns from the ones before. 3
    for `optuna` and 1 otherwise when left out."""
    parallel: Annotated[Positive | None, WrittenAs("max_parallel_trials")] = None
    """Trials at once on a cluster; 4 when left out. On one machine they take turns."""

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
            raise ValueError("halving and hyperband both say which trials advance; leave one out")
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
    def eta(self) -> int | None:
        """One of how many advances, None where all do."""
        rule = self.halving or self.hyperband
        return rule.eta if rule else None


PREVIOUS = "previous-phase"  # stands for the previous phase's model, until that is known

# Sections in which a phase may differ.
MERGED_SECTIONS = ("data", "adapter", "training", "chunks", "evaluation", "hooks")


class RecipePhase(Section):
    """One training of several: what it has in a section stands in place of the top level's, key by key."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,18}[a-z0-9])?$")]
    """Its name, of lower-case letters, digits and dashes; its run is called `<run>-<name>`."""
    data: dict[str, Any] = {}
    """As `data` at the top level."""
    adapter: dict[str, Any] | None = {}
    """As `adapter` at the top level; null trains the full weights."""
    training: dict[str, Any] = {}
    """As `training` at the top level."""
    chunks: dict[str, Any] = {}
    """As `chunks` at the top level."""
    evaluation: dict[str, Any] = {}
    """As `evaluation` at the top level."""
    hooks: dict[str, Any] = {}
    """As `hooks` at the top level."""


def _phase_shorthand(value: Any) -> Any:
    return {"name": value, "training": {"method": value}} if isinstance(value, str) else value


# A phase, or just the name of its method.
ShortPhase = Annotated[RecipePhase, BeforeValidator(_phase_shorthand, json_schema_input_type=RecipePhase | str)]


def phase_document(document: dict[str, Any], phase: RecipePhase, position: int, *, last: bool) -> dict[str, Any]:
    """Returns a phase's recipe as plain values; `last` is the phase that need not hand on a whole model."""
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


# Stands in `evaluation.production` for the last accepted model, in the store below the recipe's name.
ACCEPTED = "accepted"


class Retrain(Section):
    """Retraining (`baton run --if-changed`, `baton kfp schedule`), once data or recipe have changed since the accepted
    model."""

    start: Literal["base", "accepted"] = "base"
    """What it starts from: the recipe's own model on all rows, or the model that was accepted last on the rows that are
    new since, with `replay`. Where the recipe has changed it starts from the recipe's own in any case."""
    replay: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """With `start: accepted`, share of the training rows that the model has learnt before, drawn by their content, so
    that it does not forget them."""
    concurrency: Literal["queue", "drop"] = "queue"
    """What a retraining does while another one of the same name is under way: wait until that has ended and look again,
    or end at once."""
    expires: Annotated[str, BeforeValidator(duration)] = "12h"
    """Time without a sign of life after which a retraining counts as gone, and the next may begin. Every object written
    below its run is a sign; a pod that waits for a machine gives none."""
    learnt: list[str] = []
    """Digests of the data that the model has learnt from which training starts. A retraining fills this in."""

    @property
    def expires_seconds(self) -> float:
        return seconds(self.expires)
