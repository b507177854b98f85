"""How a model is trained again when its data or its recipe change."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from baton.components.shared.recipe.base import Section, duration, seconds

ACCEPTED = "accepted"
"""Stands in `evaluation.production` for the model that was accepted last, in the store below the recipe's name."""


class Retrain(Section):
    """What a retraining (`baton retrain`, `baton schedule`) does where data or recipe have changed since a model was
    accepted."""

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
        """Seconds without a sign of life after which a retraining counts as gone."""
        return seconds(self.expires)
