"""What the rest of Baton knows of a training method: one value of `MethodSpec` for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from baton.components.shared.recipe.base import Section

Rows = Literal["sequences", "pairs", "scored", "rated", "prompts"]
"""What tokenized rows are: a sequence with labels, a prompt with two answers, two whole texts, a prompt with one answer
and its label, or a prompt as it is."""
Strategy = Literal["ddp", "fsdp", "zero2", "zero3"]

PREFERENCES = ("preference", "ranked")
"""Formats that hold a better and a worse answer."""
AGAINST_BASELINE = ("reward_accuracy", "reward_margin")
"""Figures that say how a model's likelihoods of pairs differ from those of the model before training."""


@dataclass(frozen=True, kw_only=True)
class SecondModel:
    """A model that is held beside the trained one and is not trained itself.

    Attributes:
        name: Its role: `reference` or `teacher`.
        is_named: Whether the method's settings name it, in a field called after its role. It is then fetched, pinned by
            its files' digest and compared at each chunk, as `model.base` is. Else it is a copy of the start model, held
            where the settings' `beta` is above 0 and no adapter can be taken off instead.
    """

    name: str
    is_named: bool = False


@dataclass(frozen=True, kw_only=True)
class MethodSpec:
    """One training method.

    Attributes:
        name: As in `training.method`; the module in `train_chunk.methods` that builds its trainer has the same name.
        settings: Class of its section in `training`, None where it has none.
        requires: What its section cannot leave out, in words; None where every setting has a default.
        example: The least settings it takes.
        formats: Shapes of source rows it learns from, the usual one first.
        rows: What tokenized rows are.
        sequences_per_row: Sequences that a row is in a forward pass.
        scores: Whether the model scores texts, with one label, instead of writing them.
        takes_loss: Whether `hooks.loss` can replace its loss.
        counts_tokens: Whether the loss is a sum over the tokens of a step; else it is a mean over a micro-batch's rows.
        micro_batch_decides_loss: Whether the loss depends on the rows that share a forward pass.
        own_order: How it orders rows itself, in words; None where the recipe decides.
        needs_all_rows: Whether its trainer goes over all training rows in every chunk.
        strategies: Strategies of `training.parallel` it was compared with.
        offloads_activations: Whether its trainer honours `training.activation_offloading`.
        tiles_logits: Whether its trainer multiplies by the head's weights itself, in tiles.
        second_model: The model held beside the trained one, if there is one.
        buffers: Values its trainer keeps between steps and `Trainer` does not save: name in a checkpoint → attribute.
        figures: What is measured on held-out rows.
        logged: What its trainer logs beside the loss that the report plots, the most telling first: key → label.
        forkable: Its settings that a warm fork may change; each changes the loss from there on.
    """

    name: str
    settings: type[Section] | None = None
    requires: str | None = None
    example: Mapping[str, str | list[str]] = field(default_factory=dict)
    formats: tuple[str, ...]
    rows: Rows
    sequences_per_row: int = 1
    scores: bool = False
    takes_loss: bool = False
    counts_tokens: bool = False
    micro_batch_decides_loss: bool = False
    own_order: str | None = None
    needs_all_rows: bool = False
    strategies: tuple[Strategy, ...] = ("ddp", "fsdp")
    offloads_activations: bool = False
    tiles_logits: bool = True
    second_model: SecondModel | None = None
    buffers: Mapping[str, str] = field(default_factory=dict)
    figures: tuple[str, ...] = ("loss", "perplexity")
    logged: Mapping[str, str] = field(default_factory=dict)
    forkable: tuple[str, ...] = ()

    @property
    def generates(self) -> bool:
        """Whether the model writes what it learns from: of several ranks each holds its own share of a round."""
        return self.rows == "prompts"

    @property
    def is_judged_by_rewards(self) -> bool:
        """Whether the figures are rewards, one of each function among them."""
        return "reward" in self.figures


START_COPY = SecondModel(name="reference")
"""A reference that is the model the run began with."""
