"""Where metrics go."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from baton.components.shared.recipe.base import Section

NONE = ("none", "null", "off", "no", "false", "disabled", "")
"""Words for no tracking."""


def _address_or_none(value: Any) -> Any:
    """Returns an address, None for a word that means none."""
    return None if value is False or (isinstance(value, str) and value.strip().lower() in NONE) else value


class Tracking(Section):
    """Where metrics go."""

    mlflow: Annotated[str | None, BeforeValidator(_address_or_none)] = "sqlite:///mlflow.db"
    """MLflow tracking URI; null, none or off turns tracking off, but where Kubeflow gives its pods the address of its
    own MLflow."""
    mlflow_page: str | None = None
    """Address at which people reach MLflow, for links, where it is another than `mlflow`."""
    experiment: str | None = None
    """MLflow experiment; the recipe's name when left out, in Kubeflow's own MLflow the Kubeflow run's."""
    tensorboard: bool = False
    """Also write event files, to `tensorboard/` below the run; needs the package `tensorboard`."""
    wandb: str | None = None
    """Also report to this project of Weights & Biases; needs the package `wandb`, and its key in the pod's environment
    (`resources.secret_env`). With `WANDB_MODE=offline` there, its folders are put below the run's `wandb/`, for
    `wandb sync`."""
    jsonl: bool = False
    """Also write JSON Lines, an object for each logged step, to `metrics/` below the run."""
    prometheus_port: Annotated[int, Field(ge=1024, le=65535)] | None = None
    """Port at which each train-chunk serves its figures to Prometheus, as `/metrics`; not at all when left out."""
    cards: Literal["rows", "counts"] = "rows"
    """What Kubeflow's artifacts show of the data: the first `rows` and sequences, examples and samples as well, or
    `counts` alone, so that no text of yours leaves the store for Kubeflow's bucket."""
