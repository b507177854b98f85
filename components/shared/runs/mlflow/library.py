"""A tracking server or database by MLflow's own client: for databases, and for what it has plugins for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton.components.shared.runs.mlflow.connection import connect
from baton.components.shared.runs.mlflow.told import Model, Tracked, Value


class LibraryClient:
    """A tracking server or database.

    Args:
        uri: Its address.
    """

    def __init__(self, uri: str) -> None:
        self._client = connect(uri)

    def read(self, run_id: str) -> Tracked:
        """Returns a tracking run."""
        run = self._client.get_run(run_id)
        outputs = run.outputs.model_outputs if run.outputs else []
        return Tracked(
            experiment_id=run.info.experiment_id,
            status=run.info.status,
            params=dict(run.data.params),
            steps={metric.key: metric.step for metric in run.data.to_proto().metrics},
            models=[output.model_id for output in outputs],
        )

    def reopen(self, run_id: str) -> None:
        """Sets a tracking run running."""
        self._client.update_run(run_id, "RUNNING")

    def log(self, run_id: str, values: Sequence[Value]) -> None:
        """Logs metrics, at most a thousand."""
        from mlflow.entities import Metric

        self._client.log_batch(run_id, metrics=[Metric(**value) for value in values])

    def log_params(self, run_id: str, params: Mapping[str, str]) -> None:
        """Logs parameters."""
        from mlflow.entities import Param

        self._client.log_batch(run_id, params=[Param(key, value) for key, value in params.items()])

    def tag(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Sets tags of a tracking run."""
        from mlflow.entities import RunTag

        self._client.log_batch(run_id, tags=[RunTag(key, value) for key, value in tags.items()])

    def make_model(self, run_id: str, experiment_id: str, model: Model, params: Mapping[str, str]) -> str:
        """Makes a logged model that comes out of a run, and returns its id."""
        from mlflow.entities import LoggedModelOutput

        made = self._client.create_logged_model(
            experiment_id, model.name, run_id, dict(model.tags), dict(params), model.kind
        )
        self._client.log_outputs(run_id, [LoggedModelOutput(made.model_id, step=0)])
        return str(made.model_id)

    def tag_model(self, model_id: str, tags: Mapping[str, str]) -> None:
        """Sets tags of a logged model."""
        self._client.set_logged_model_tags(model_id, dict(tags))
