"""Submits a compiled pipeline to Kubeflow, registered with one version per content, and waits for its run.

A run that starts from a version can be cloned and scheduled on Kubeflow's page. Endpoint failures arrive as
`BatonError`.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from baton.compiler.pipeline_file import LOADER
from baton.errors import BatonError, UserError
from baton.kubeflow import connection
from baton.kubeflow.connection import KubeflowClient, KubeflowRun, NameClashError, RefusedError, TransientError, quiet
from baton.runtime import RetryAttempt, backoff, retry


@dataclass(frozen=True)
class PipelineFile:
    path: str
    name: str
    defaults: dict[str, object]  # without empty dictionaries, which a run's page shows as `[object Object]`
    digest: str  # SHA-256 of the file

    @property
    def version(self) -> str:
        """Name of the version of this content, unique among all pipelines of the namespace."""
        return f"{self.name}-{self.digest[:12]}"

    @staticmethod
    def read(path: str) -> PipelineFile:
        content = Path(path).read_bytes()
        spec: connection.Spec = next(yaml.load_all(content, LOADER))
        defaults: dict[str, object] = {}
        for name, declared in spec["root"].get("inputDefinitions", {}).get("parameters", {}).items():
            value = declared.get("defaultValue", {})
            if declared.get("parameterType") == "NUMBER_INTEGER" and isinstance(value, float):
                value = int(value)
            if value != {}:
                defaults[name] = value
        return PipelineFile(path, spec["pipelineInfo"]["name"], defaults, hashlib.sha256(content).hexdigest())


LEAVE_OUT = "--no-register starts the run without it."


@dataclass(frozen=True)
class RegisteredPipeline:
    """A version of a registered pipeline: ids and names of both."""

    pipeline_id: str
    version_id: str
    pipeline: str
    version: str
    is_new: bool  # it was not there before


def register(client: KubeflowClient, package: PipelineFile, namespace: str | None) -> RegisteredPipeline:
    """Uploads a pipeline where this content is not there yet, and returns its version."""
    try:
        with quiet(io.StringIO()):
            return _registered(client, package, namespace_of(client, namespace))
    except connection.ForbiddenError as error:
        raise UserError(
            f"pipeline '{package.name}' cannot be registered: {error.message}",
            remedy=f"{connection.CREATE_REMEDY} {LEAVE_OUT}",
        ) from error


def namespace_of(client: KubeflowClient, namespace: str | None) -> str | None:
    """Returns the namespace of a user's pipelines: that of the runs, see `kfp.Client.create_experiment`."""
    return namespace or client.get_user_namespace() or None


def version_url(endpoint: str, registered: RegisteredPipeline) -> str:
    """Returns the page of a version in the Kubeflow Pipelines UI."""
    page = f"{connection.ui_address(endpoint)}/#/pipelines/details"
    return f"{page}/{registered.pipeline_id}/version/{registered.version_id}"


def _registered(client: KubeflowClient, package: PipelineFile, namespace: str | None) -> RegisteredPipeline:
    named = _named(package.name)

    def pipeline_there() -> str | None:
        listed = client.list_pipelines(page_size=1, namespace=namespace, filter=named).pipelines
        return listed[0].pipeline_id if listed else None

    def version_there() -> str | None:
        versions = client.list_pipeline_versions(pipeline_id, page_size=1, filter=_named(package.version))
        return versions.pipeline_versions[0].pipeline_version_id if versions.pipeline_versions else None

    def uploaded() -> str:
        _require_same_pipeline(client, pipeline_id, package)
        made = client.upload_pipeline_version(package.path, package.version, pipeline_id)
        return str(made.pipeline_version_id)

    pipeline_id, _ = _there_or(pipeline_there, lambda: client.create_pipeline(package.name, namespace))
    version_id, is_new = _there_or(version_there, uploaded)
    return RegisteredPipeline(pipeline_id, version_id, package.name, package.version, is_new)


def _there_or(there: Callable[[], str | None], make: Callable[[], str]) -> tuple[str, bool]:
    """Returns the id that is there, else the made one, and whether it was made."""
    found = there()
    if found is not None:
        return found, False
    try:
        return make(), True
    except BatonError:
        # Another submission may have made it since, or this one, whose answer was lost.
        found = there()
        if found is None:
            raise
        return found, False


def _require_same_pipeline(client: KubeflowClient, pipeline_id: str, package: PipelineFile) -> None:
    """Refuses to add a version to another pipeline of this name."""
    listed = client.list_pipeline_versions(pipeline_id, page_size=1, sort_by="created_at desc").pipeline_versions
    if not listed:
        return
    name = connection.specification(listed[0].pipeline_spec).get("pipelineInfo", {}).get("name")
    if name != package.name:
        raise UserError(
            f"pipeline '{package.name}' is another one there, compiled as '{name or 'unknown'}'; expected versions of "
            "this one.",
            remedy=f"Give the recipe another name. {LEAVE_OUT}",
        )


def _named(name: str) -> str:
    return json.dumps({"predicates": [{"operation": "EQUALS", "key": "name", "stringValue": name}]})


FINAL_STATES = frozenset({"SUCCEEDED", "FAILED", "CANCELED", "SKIPPED"})
MAX_TRANSIENT_FAILURES = 5  # polls in a row; the pauses between them double
POLL_S = 5.0  # between two polls of a run that somebody waits for
_MAX_PAUSE_S = 60.0
RESUMES_IN_S = 30.0  # for which a run that was started again may be shown as ended


@dataclass(frozen=True)
class Submission:
    """A run that the endpoint has accepted."""

    run_id: str
    run_name: str
    url: str
    """Page of the run in the Kubeflow Pipelines UI."""
    registered: RegisteredPipeline | None = None
    """Version of the pipeline that it was started from; None where it carries its specification itself."""


def submit(
    package_path: str,
    endpoint: str,
    *,
    experiment: str,
    run_name: str,
    arguments: dict[str, object],
    namespace: str | None = None,
    service_account: str | None = None,
    cache: bool = True,
    registers: bool = True,
) -> Submission:
    """Creates a run of a compiled pipeline, and its experiment where there is none yet, and returns it."""
    package = PipelineFile.read(package_path)
    client = connection.connect(endpoint, namespace)
    # Without the cache the run carries its specification itself: a version's cannot be changed for one run.
    registered = register(client, package, namespace) if registers and cache else None
    with quiet(io.StringIO()):
        run = client.run_pipeline(
            experiment_id_of(client, endpoint, experiment, namespace),
            run_name,
            params={**package.defaults, **arguments},  # all: Kubeflow's pages show only given ones
            enable_caching=None if cache else False,  # True would turn it on for every stage
            service_account=service_account,
            **started_from(package, registered),
        )
    run_id = required(run.run_id, "the run", endpoint)
    return Submission(run_id, run_name, run_url(endpoint, run_id), registered)


def started_from(package: PipelineFile, registered: RegisteredPipeline | None) -> dict[str, str]:
    """Returns the start of a run as kfp's client takes it: the registered version, else the file."""
    if registered is None:
        return {"pipeline_package_path": package.path}
    return {"pipeline_id": registered.pipeline_id, "version_id": registered.version_id}


def wait(
    endpoint: str,
    run_id: str,
    *,
    timeout_s: float,
    on_state: Callable[[str, str], None],
    on_run: Callable[[KubeflowClient, KubeflowRun], None] = lambda client, run: None,
    namespace: str | None = None,
    poll_s: float = POLL_S,
) -> str:
    """Polls a run until it ends and returns its final state; survives a few failed polls in a row."""
    client = retry(lambda: connection.connect(endpoint, namespace), TransientError, _tries(poll_s), lambda *_: None)
    state = ""
    for _ in backoff(timeout_s, pause=poll_s):
        run = _asked(client, run_id, poll_s)
        previous, state = state, run.state or "PENDING"
        if state != previous:
            on_state(run.display_name or run_id, state)
        on_run(client, run)
        if state in FINAL_STATES:
            return state
    raise BatonError(
        f"Run {run_id} is {state} after {timeout_s:g} s; expected it to have ended.",
        remedy=f"It continues without us: {run_url(endpoint, run_id)}",
    )


def resume(client: KubeflowClient, run_id: str) -> None:
    """Starts the failed stages of a run again, and waits until it is no longer shown as ended."""
    client.retry_run(run_id)
    for _ in backoff(RESUMES_IN_S, pause=min(1.0, POLL_S)):
        with contextlib.suppress(TransientError, RefusedError):  # it has been started
            if client.get_run(run_id).state not in FINAL_STATES:
                return


def _asked(client: KubeflowClient, run_id: str, poll_s: float) -> KubeflowRun:
    """Returns a run, asked for again while the endpoint fails or a renewed token is refused."""

    def ask() -> KubeflowRun:
        try:
            return client.get_run(run_id)
        except RefusedError as error:
            if client.renews:
                raise TransientError(error.message, remedy=error.remedy) from error
            raise

    return retry(ask, TransientError, _tries(poll_s), lambda *_: None)


def _tries(poll_s: float) -> Iterator[RetryAttempt]:
    tries = backoff(math.inf, pause=2 * poll_s, growth=2.0, longest=_MAX_PAUSE_S)
    return itertools.islice(tries, MAX_TRANSIENT_FAILURES + 1)


def experiment_id_of(client: KubeflowClient, endpoint: str, name: str, namespace: str | None) -> str:
    """Returns the id of an experiment, which is created where there is none of that name."""
    try:
        experiment = client.create_experiment(name, namespace=namespace)
    except NameClashError:
        # Somebody created it between kfp's look-up and its creation: look again, once.
        experiment = client.create_experiment(name, namespace=namespace)
    except ValueError as error:
        raise NameClashError(
            f"Experiment '{name}' exists more than once ({connection.one_line(error)}); expected one of that name.",
            remedy="Name another experiment.",
        ) from error
    return required(experiment.experiment_id, f"experiment '{name}'", endpoint)


def required(identifier: str | None, what: str, endpoint: str) -> str:
    """Returns an id; an error where the endpoint gave none."""
    if not identifier:
        raise BatonError(f"'{endpoint}' gave no id for {what}; expected one.", remedy=connection.ENDPOINT_REMEDY)
    return identifier


def run_url(endpoint: str, run_id: str) -> str:
    """Returns the page of a run in the Kubeflow Pipelines UI."""
    return f"{connection.ui_address(endpoint)}/#/runs/details/{run_id}"
