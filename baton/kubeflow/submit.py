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
from baton.kubeflow.connection import (
    CREATE_REMEDY,
    ENDPOINT_REMEDY,
    ForbiddenError,
    KubeflowClient,
    KubeflowRun,
    NameClashError,
    RefusedError,
    Spec,
    Token,
    TransientError,
    connect,
    one_line,
    quiet,
    specification,
    ui_address,
)
from baton.runtime import RetryAttempt, backoff, retry


@dataclass(frozen=True)
class PipelineFile:
    """A compiled pipeline.

    Attributes:
        path: Its file.
        name: Name that it was compiled with.
        defaults: Parameter → its default, without empty dictionaries, which a run's page shows as `[object Object]`.
        digest: SHA-256 of the file.
    """

    path: str
    name: str
    defaults: dict[str, object]
    digest: str

    @property
    def version(self) -> str:
        """Name of the version of this content: one that no other pipeline of the namespace has, either."""
        return f"{self.name}-{self.digest[:12]}"

    @staticmethod
    def read(path: str) -> PipelineFile:
        """Reads a compiled pipeline."""
        content = Path(path).read_bytes()
        spec: Spec = next(yaml.load_all(content, LOADER))
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
    """A version of a registered pipeline.

    Attributes:
        pipeline_id: The endpoint's id of the pipeline.
        version_id: The endpoint's id of the version.
        pipeline: Name of the pipeline.
        version: Name of the version.
        is_new: Whether it was not there before.
    """

    pipeline_id: str
    version_id: str
    pipeline: str
    version: str
    is_new: bool


def register(client: KubeflowClient, package: PipelineFile, namespace: str | None) -> RegisteredPipeline:
    """Uploads a pipeline where this content of it is not there yet, and returns its version.

    Raises:
        UserError: the user may not, the name is another pipeline's, or the endpoint refuses the pipeline.
        BatonError: the endpoint fails.
    """
    try:
        with quiet(io.StringIO()):
            return _registered(client, package, namespace_of(client, namespace))
    except ForbiddenError as error:
        raise UserError(
            f"pipeline '{package.name}' cannot be registered: {error.message}", remedy=f"{CREATE_REMEDY} {LEAVE_OUT}"
        ) from error


def namespace_of(client: KubeflowClient, namespace: str | None) -> str | None:
    """Returns where a user's pipelines lie: where the runs do, see `kfp.Client.create_experiment`."""
    return namespace or client.get_user_namespace() or None


def version_url(endpoint: str, registered: RegisteredPipeline) -> str:
    """Returns where a version is shown in the Kubeflow Pipelines UI."""
    return f"{ui_address(endpoint)}/#/pipelines/details/{registered.pipeline_id}/version/{registered.version_id}"


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
    """Returns what is there, else what is made, and whether it was made."""
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
    """Makes sure that a pipeline of this name is not somebody's other one, before a version is added to it."""
    listed = client.list_pipeline_versions(pipeline_id, page_size=1, sort_by="created_at desc").pipeline_versions
    if not listed:
        return
    name = specification(listed[0].pipeline_spec).get("pipelineInfo", {}).get("name")
    if name != package.name:
        raise UserError(
            f"pipeline '{package.name}' is another one there, compiled as '{name or 'unknown'}'; expected versions of "
            "this one.",
            remedy=f"Give the recipe another name. {LEAVE_OUT}",
        )


def _named(name: str) -> str:
    return json.dumps({"predicates": [{"operation": "EQUALS", "key": "name", "stringValue": name}]})


FINAL_STATES = frozenset({"SUCCEEDED", "FAILED", "CANCELED", "SKIPPED"})
MAX_TRANSIENT_FAILURES = 5
"""Polls in a row that may fail before `wait` gives up; the pauses between them double."""

POLL_S = 5.0
"""Seconds between two polls of a run that somebody waits for."""

_MAX_PAUSE_S = 60.0
RESUMES_IN_S = 30.0
"""Seconds for which a run that was started again may be shown as the one that has ended."""


@dataclass(frozen=True)
class Submission:
    """A run that the endpoint has accepted."""

    run_id: str
    run_name: str
    url: str
    """Where the run is shown in the Kubeflow Pipelines UI."""
    registered: RegisteredPipeline | None = None
    """The version of the pipeline that it was started from; None where it carries its specification itself."""


def submit(
    package_path: str,
    endpoint: str,
    *,
    experiment: str,
    run_name: str,
    arguments: dict[str, object],
    token: Token = None,
    namespace: str | None = None,
    service_account: str | None = None,
    cache: bool = True,
    registers: bool = True,
) -> Submission:
    """Creates a run of a compiled pipeline, and its experiment where there is none yet, and returns it.

    It is given every parameter, as Kubeflow's pages show only those.

    Args:
        package_path: The compiled pipeline, a `.yaml` file.
        endpoint: Address of the Kubeflow Pipelines API.
        experiment: Experiment in which the run is listed.
        run_name: Name shown for the run; it need not be unique.
        arguments: The pipeline's parameters, by name.
        token: Bearer token, or None where the endpoint asks for none.
        namespace: The user's namespace on a multi-user Kubeflow.
        service_account: Account that the pods run under; the endpoint's own choice when left out.
        cache: Whether finished stages may be taken from Kubeflow's cache, as the package says. Where not, the run
            carries its specification itself: that of a version cannot be changed for one run.
        registers: Whether the pipeline is registered, and the run started from its version.

    Raises:
        UserError: An argument, the address, the token or a name is at fault.
        BatonError: The endpoint cannot be reached or fails.
    """
    package = PipelineFile.read(package_path)
    client = connect(endpoint, token=token, namespace=namespace)
    registered = register(client, package, namespace) if registers and cache else None
    with quiet(io.StringIO()):
        run = client.run_pipeline(
            experiment_id_of(client, endpoint, experiment, namespace),
            run_name,
            params={**package.defaults, **arguments},
            enable_caching=None if cache else False,  # True would turn it on for every stage
            service_account=service_account,
            **started_from(package, registered),
        )
    run_id = required(run.run_id, "the run", endpoint)
    return Submission(run_id, run_name, run_url(endpoint, run_id), registered)


def started_from(package: PipelineFile, registered: RegisteredPipeline | None) -> dict[str, str]:
    """Returns what a run is started from, as kfp's client takes it: the registered version, else the file."""
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
    token: Token = None,
    namespace: str | None = None,
    poll_s: float = POLL_S,
) -> str:
    """Polls a run until it ends. A few failed polls in a row are survived.

    Args:
        endpoint: Address of the Kubeflow Pipelines API.
        run_id: The run, as in `Submission.run_id`.
        timeout_s: How long to wait; the run itself continues after that.
        on_state: Called with the run's name and its state, at first and upon each change.
        on_run: Called with kfp's client and the run as the client returns it, after each poll.
        token: Bearer token, or None where the endpoint asks for none.
        namespace: The user's namespace on a multi-user Kubeflow.
        poll_s: Seconds between two polls.

    Returns:
        The final state: SUCCEEDED, FAILED, CANCELED or SKIPPED.

    Raises:
        UserError: The address, the token or the run's id is at fault.
        BatonError: The endpoint fails time after time, or the run outlasts `timeout_s`.
    """
    client = retry(
        lambda: connect(endpoint, token=token, namespace=namespace), TransientError, _tries(poll_s), lambda *_: None
    )
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
    """Starts the failed stages of a run again, and waits until it is no longer shown as ended.

    Raises:
        BatonError: the backend cannot: its workflow is gone, or too large.
    """
    client.retry_run(run_id)
    for _ in backoff(RESUMES_IN_S, pause=min(1.0, POLL_S)):
        with contextlib.suppress(TransientError, RefusedError):  # it has been started
            if client.get_run(run_id).state not in FINAL_STATES:
                return


def _asked(client: KubeflowClient, run_id: str, poll_s: float) -> KubeflowRun:
    """Returns a run, asked for again where the endpoint fails for a while, or a token that is renewed has ended."""

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
            f"Experiment '{name}' exists more than once ({one_line(error)}); expected one of that name.",
            remedy="Name another experiment.",
        ) from error
    return required(experiment.experiment_id, f"experiment '{name}'", endpoint)


def required(identifier: str | None, what: str, endpoint: str) -> str:
    """Returns an id; an error where the endpoint gave none."""
    if not identifier:
        raise BatonError(f"'{endpoint}' gave no id for {what}; expected one.", remedy=ENDPOINT_REMEDY)
    return identifier


def run_url(endpoint: str, run_id: str) -> str:
    """Returns where a run is shown in the Kubeflow Pipelines UI."""
    return f"{ui_address(endpoint)}/#/runs/details/{run_id}"
