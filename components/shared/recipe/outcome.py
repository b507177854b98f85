"""How the result is judged, handed out and recorded."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from components.shared.recipe.base import Positive, Section


class Evaluation(Section):
    """How the result is judged against the start."""

    samples: Annotated[int, Field(ge=0)] = 8
    """Held-out rows for which the model writes, before and after training."""
    max_new_tokens: Positive = 64
    """Longest sample in tokens."""
    every: Positive | None = None
    """Steps between evaluations during training; none when left out."""
    write_every: Positive | None = None
    """Steps after which the model writes for the samples in the course of training: the texts go to `samples/` below
    the run, and how many are right to the metrics. None when left out; training is not changed by it."""
    batch_size: Positive | None = None
    """Rows per forward pass; `training.micro_batch_size` when left out."""


class Export(Section):
    """What is handed out at the end."""

    format: Literal["safetensors"] = "safetensors"
    """File format of the weights."""
    checkpoint: Literal["last", "best"] = "last"
    """Which state of the run is evaluated and handed out: that of the last step, or the one with the lowest evaluation
    loss, which is then saved when it is measured."""
    merge_adapter: bool = True
    """Fold the adapter into the base weights; off exports the adapter alone."""


class Tracking(Section):
    """Where metrics go."""

    mlflow: str | None = "sqlite:///mlflow.db"
    """MLflow tracking URI; null turns tracking off."""
    experiment: str | None = None
    """MLflow experiment; the recipe's name when left out."""
    tensorboard: bool = False
    """Also write event files, to `tensorboard/` below the run; needs the package `tensorboard`."""
    wandb: str | None = None
    """Also report to this project of Weights & Biases; needs the package `wandb`, and its key in the pod's environment
    (`resources.secret` hands on the store's credentials alone)."""
