"""What a process beside training is told, and what it finds out of a run in MLflow; see `sender`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

Value = dict[str, str | int | float]
"""A metric as MLflow's API has it: key, value, timestamp, step; model and data set where it is one of these."""


@dataclass(frozen=True)
class Model:
    """A logged model to be made, where the run has none.

    Attributes:
        name: Its name.
        kind: What kind of model it is, by which MLflow's search tells them apart.
        tags: Its tags.
    """

    name: str
    kind: str
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Order:
    """Where metrics go.

    Attributes:
        uri: Address of the server or database.
        run_id: The tracking run.
        trains: Whether a chunk trains: then the run is set running, steps that it has already are left out, and the
            machine's use is logged.
        datasets: Side of the data → name and digest.
        model: The logged model, None where none is to be made.
        params: The run's parameters that were found out.
        unsent: Folder of what was held back before, which is sent first; see `unsent`.
    """

    uri: str
    run_id: str
    trains: bool = False
    datasets: Mapping[str, Sequence[str]] = field(default_factory=dict)
    model: Model | None = None
    params: Mapping[str, str] = field(default_factory=dict)
    unsent: str | None = None


@dataclass(frozen=True)
class Tracked:
    """A tracking run as it is.

    Attributes:
        experiment_id: Its experiment.
        status: Its status.
        params: Its parameters.
        steps: Metric → the last step it has a value of.
        models: Ids of the models that came out of it.
    """

    experiment_id: str
    status: str
    params: Mapping[str, str]
    steps: Mapping[str, int]
    models: Sequence[str]


class Client(Protocol):
    """What the process beside training, and who has little to say, ask of MLflow."""

    def read(self, run_id: str) -> Tracked:
        """Returns a tracking run."""

    def reopen(self, run_id: str) -> None:
        """Sets a tracking run running."""

    def log(self, run_id: str, values: Sequence[Value]) -> None:
        """Logs metrics, at most a thousand."""

    def log_params(self, run_id: str, params: Mapping[str, str]) -> None:
        """Logs parameters."""

    def tag(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Sets tags of a tracking run."""

    def make_model(self, run_id: str, experiment_id: str, model: Model, params: Mapping[str, str]) -> str:
        """Makes a logged model that comes out of a run, and returns its id."""

    def tag_model(self, model_id: str, tags: Mapping[str, str]) -> None:
        """Sets tags of a logged model."""
