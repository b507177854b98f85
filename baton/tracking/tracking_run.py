"""The MLflow tracking run of a training run: started, tagged, given its rows as inputs, and ended.

All processes of a run report to one tracking run: stages by MLflow's own client, metrics by another process, see
`tracker`. A server out of reach is a warning, not a failure.
"""

import json
import logging
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, Literal

from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.runs.documents import ForkNote, SplitCounts, TrackingRun
from baton.runs.outcomes import TrialInfo
from baton.runs.run import Run
from baton.tracking import servers, tracker
from baton.tracking.client import PARAMS_AT_ONCE, connect, open_client, without_credentials

logger = logging.getLogger("baton")

SIDES = ("train", "eval", "test")  # sides of a split, and MLflow's contexts of an input
DIGEST_LENGTH = 12  # characters of the data's digest: MLflow takes 36 and shows all
COLUMN_TYPES = {bool: "boolean", int: "long", float: "double", str: "string"}
# Scheme of an address → MLflow's type of a source; others are `local`.
SOURCE_TYPES = {"s3": "s3", "http": "http", "https": "http", "hf": "hugging_face"}


def dataset_columns(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the columns of rows as MLflow's schema has them, each by the first row that has a value there."""
    found: dict[str, dict[str, Any]] = {}
    required: dict[str, bool] = {}
    rows = list(rows)
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        kind = next((kind for value in values if (kind := _column_type(value))), None)
        found[name], required[name] = kind or {"type": "string"}, None not in values
    return [{"name": name, **kind, "required": required[name]} for name, kind in found.items()]


def _column_type(value: Any) -> dict[str, Any] | None:
    if isinstance(value, list):
        items = next((kind for entry in value if (kind := _column_type(entry))), None)
        return {"type": "array", "items": items} if items else None
    if isinstance(value, dict):
        properties = {
            str(name): {**kind, "required": True} for name, entry in value.items() if (kind := _column_type(entry))
        }
        return {"type": "object", "properties": properties} if properties else None
    return {"type": COLUMN_TYPES[type(value)]} if type(value) in COLUMN_TYPES else None


def dataset_keys(recipe: Recipe, counts: SplitCounts) -> dict[str, tuple[str, str]]:
    """Returns MLflow's name and digest of each side that has rows."""
    digest = str(counts.to_json().get("digest", ""))[:DIGEST_LENGTH]
    sides = [side for side in SIDES if digest and getattr(counts, side)]
    return {side: (f"{_dataset_name(recipe)}-{side}", digest) for side in sides}


def dataset_inputs(recipe: Recipe, counts: SplitCounts) -> list[Any]:
    """Returns each side as an input of a tracking run."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    kind, source = _dataset_source(recipe)
    schema = json.dumps({"mlflow_colspec": counts.columns}) if counts.columns else None
    found = []
    for side, (name, digest) in dataset_keys(recipe, counts).items():
        profile = json.dumps({"num_rows": getattr(counts, side), "digest": counts.to_json().get("digest")})
        dataset = Dataset(name, digest, kind, source, schema=schema, profile=profile)
        found.append(DatasetInput(dataset, [InputTag("mlflow.data.context", side)]))
    return found


def _dataset_name(recipe: Recipe) -> str:
    """Returns the data's name: the end of its one source's address, or the recipe's for several."""
    addresses = [source.uri for source in recipe.data.sources]
    if len(addresses) > 1:
        return recipe.name
    address = addresses[0].partition("?")[0].rstrip("/")
    if address.startswith("hf://datasets/"):
        return "/".join(address.removeprefix("hf://datasets/").split("/")[:2])
    return address.rpartition("/")[2].rpartition(":")[2] or recipe.name


def _dataset_source(recipe: Recipe) -> tuple[str, str]:
    """Returns type and description of the rows' source, as MLflow's own sources write them."""
    addresses = [without_credentials(source.uri) for source in recipe.data.sources]
    first = addresses[0]
    kind = SOURCE_TYPES.get(first.partition("://")[0], "local") if len(addresses) == 1 else "local"
    if kind == "hugging_face" and not first.startswith("hf://datasets/"):
        kind = "local"
    if kind == "hugging_face":
        path, _, query = first.removeprefix("hf://datasets/").partition("?")
        return kind, json.dumps({"path": "/".join(path.split("/")[:2]), "split": query.partition("split=")[2] or None})
    key = "url" if kind == "http" else "uri"
    return kind, json.dumps({key: ", ".join(addresses)})


Ended = Literal["FINISHED", "FAILED", "KILLED"]

RECIPE = "recipe.yaml"


def start(run: Run, recipe: Recipe) -> None:
    """Creates a new run's tracking run, and sets a resumed run's running again; a server out of reach is a warning."""
    server, tracking = servers.server_of(recipe), run.read(TrackingRun)
    if tracking:
        _resume(run, tracking, server)
        return
    if server is None:
        return
    try:
        client = connect(server.uri)
        number = server.experiment(client, recipe, run.storage)
        tags = {"baton.run": run.name, "baton.run_uri": run.uri, **servers.kubeflow_tags()}
        # Baton's own parent, a fork's run or a trial's sweep, replaces Kubeflow's run: a run has one parent.
        tags |= server.parent(client, number) | _of_fork(run, server.uri, number) | _of_trial(run)
        tracked = client.create_run(number, run_name=run.name, tags=tags)
        log_params(client, tracked.info.run_id, tracker.recipe_params(recipe))
    except Exception as error:
        run.warn(f"tracking at {without_credentials(server.uri)} is off for this run: {error}")
        return
    # The tracking run of a crash before this stays empty; the next attempt makes another.
    run.write(TrackingRun(mlflow=server.uri, run_id=tracked.info.run_id, experiment_id=number))
    log_texts(run.warn, client, server.uri, tracked.info.run_id, {RECIPE: load.to_yaml(recipe, only_set=True)})


def log_params(client: Any, run_id: str, params: Mapping[str, str]) -> None:
    """Logs parameters to a tracking run."""
    from mlflow.entities import Param

    entities = [Param(name, value) for name, value in params.items()]
    for first in range(0, len(entities), PARAMS_AT_ONCE):
        client.log_batch(run_id, params=entities[first : first + PARAMS_AT_ONCE])


def log_texts(warn: Callable[[str], None], client: Any, uri: str, run_id: str, texts: Mapping[str, str]) -> None:
    """Keeps texts as files among a tracking run's artifacts; a store of artifacts out of reach is a warning."""
    # That store may be another than the server, with credentials that this process has not: the rest goes on without.
    try:
        with tempfile.TemporaryDirectory(prefix="baton-mlflow-") as folder:
            for name, text in texts.items():
                Path(folder, name).write_text(without_credentials(text), encoding="utf-8")
            client.log_artifacts(run_id, folder)
    except Exception as error:
        warn(f"tracking at {without_credentials(uri)} does not keep {', '.join(texts)}: {error}")


def _resume(run: Run, tracking: TrackingRun, server: servers.Server | None) -> None:
    """Sets the tracking run of a resumed run running again, with links to the Kubeflow run that resumes it."""

    def tell(client: Any) -> None:
        if client.get_run(tracking.run_id).info.status != "RUNNING":
            client.update_run(tracking.run_id, "RUNNING")
        tracker.resume_model(client, tracking.run_id)
        tags = servers.kubeflow_tags()
        if server and server.uri == tracking.mlflow:
            number = tracking.experiment_id
            tags |= server.parent(client, number) | _of_fork(run, server.uri, number) | _of_trial(run)
        for name, value in tags.items():
            client.set_tag(tracking.run_id, name, value)

    _told(run, tracking, "does not know that this run resumes", tell)


def _told(run: Run, tracking: TrackingRun, otherwise: str, tell: Callable[[Any], None]) -> bool:
    """Tells a server something, and whether it succeeded; one out of reach is a warning."""
    try:
        tell(connect(tracking.mlflow))
    except Exception as error:
        run.warn(f"tracking at {without_credentials(tracking.mlflow)} {otherwise}: {error}")
        return False
    return True


def _of_fork(run: Run, uri: str, number: str | None) -> dict[str, str]:
    """Returns tags with a fork's parent, which shows the fork below it in the same experiment."""
    fork = run.read(ForkNote)
    if fork is None:
        return {}
    tags = {"baton.parent": fork.parent, "baton.parent_step": str(fork.step)}
    theirs = Run.open(fork.parent).read(TrackingRun)
    if theirs and (theirs.mlflow, theirs.experiment_id) == (uri, number):
        tags[servers.PARENT] = theirs.run_id
    return tags


def _of_trial(run: Run) -> dict[str, str]:
    trial = run.read(TrialInfo)
    return {servers.PARENT: trial.tracking, "baton.sweep": trial.sweep} if trial and trial.tracking else {}


def log_data(run: Run, recipe: Recipe) -> None:
    """Logs the run's rows as inputs of its tracking run, once; a server out of reach is a warning."""
    tracking, counts = run.read(TrackingRun), run.read(SplitCounts)
    if tracking is None or counts is None or tracking.datasets:
        return

    def tell(client: Any) -> None:
        client.log_inputs(tracking.run_id, dataset_inputs(recipe, counts))

    if _told(run, tracking, "has no data set of this run", tell):
        # Written last: figures are logged with data sets that the server has.
        sides = {side: list(key) for side, key in dataset_keys(recipe, counts).items()}
        run.write(tracking.model_copy(update={"datasets": sides}))


def log_metrics(run: Run, metrics: dict[str, float], step: int) -> None:
    """Logs metrics to the tracking run, if there is one; a server out of reach is a warning."""
    with tracker.Tracker(run) as sending:
        sending.log(metrics, step)


def tag(run: Run, tags: dict[str, str]) -> None:
    """Sets tags on the tracking run, if there is one; a server out of reach is a warning."""
    tracking = run.read(TrackingRun)
    if tracking is None or not tags:
        return

    try:
        open_client(tracking.mlflow).tag(tracking.run_id, tags)
    except Exception as error:
        run.warn(f"tracking at {without_credentials(tracking.mlflow)} has no tags of this run: {error}")


def close(run: Run, status: Ended, texts: Mapping[str, str] | None = None) -> None:
    """Ends the tracking run, if there is one, and keeps texts as files with it; a server out of reach is a warning."""
    tracking = run.read(TrackingRun)
    if tracking is None:
        return

    def end(client: Any) -> None:
        tracker.send_held(run)
        if texts:
            log_texts(run.warn, client, tracking.mlflow, tracking.run_id, texts)
        client.set_terminated(tracking.run_id, status)

    if _told(run, tracking, f"was not told that this run is {status.lower()}", end):
        # A server before MLflow 3 has no models.
        end_model = partial(tracker.end_model, run=run, run_id=tracking.run_id, status=status)
        _told(run, tracking, "does not know how this run's model is", end_model)


GPU = re.compile(r"^system/.*gpu_\d+_(utilization_percentage|memory_usage_megabytes)$")


@dataclass(frozen=True)
class GpuUse:
    """Use of a run's GPUs, as its tracking run has it."""

    utilization: float | None  # mean of all samples, in percent
    megabytes: float | None  # most memory in use on one GPU


def gpu_use(run: Run) -> GpuUse | None:
    """Returns the use of the GPUs, None where nothing of it was recorded or the server is out of reach."""
    tracking = run.read(TrackingRun)
    if tracking is None:
        return None
    values: dict[str, list[float]] = defaultdict(list)
    try:
        client = connect(tracking.mlflow)
        for name in client.get_run(tracking.run_id).data.metrics:
            if kind := GPU.search(name):
                values[kind[1]] += [metric.value for metric in client.get_metric_history(tracking.run_id, name)]
    except Exception as error:
        logger.info("the report lacks the use of GPUs: %s", error)
        return None
    used, memory = values["utilization_percentage"], values["memory_usage_megabytes"]
    return GpuUse(mean(used) if used else None, max(memory, default=None)) if used or memory else None


def close_left(uri: str, experiments: Iterable[str], kubeflow_run: str, status: Ended) -> list[str]:
    """Ends runs, sweeps and trials that an ended Kubeflow run left running; returns their names.

    Raises:
        Exception: MLflow's own, where the server cannot be reached.
    """
    client = connect(uri, retries="0")
    existing = map(client.get_experiment_by_name, sorted(set(experiments)))
    numbers = [experiment.experiment_id for experiment in existing if experiment]
    if not numbers:
        return []
    # A run that another Kubeflow run has resumed since has that one's tag, and stays as it is.
    wanted = f"tags.`kubeflow.run_id` = '{kubeflow_run}' and attributes.status = 'RUNNING'"
    left = client.search_runs(numbers, wanted, max_results=1000)
    for tracked in left:
        client.set_terminated(tracked.info.run_id, status)
        tracker.fail_model(client, tracked.info.run_id)
    return [str(tracked.info.run_name) for tracked in left]
