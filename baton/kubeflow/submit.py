"""Submits a compiled pipeline to Kubeflow, registered with one version per content: waits for its run, or schedules it.

A run that starts from a version can be cloned and scheduled on Kubeflow's page. A recipe that is retrained by the clock
has one recurring run. Endpoint failures arrive as `BatonError`.
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
from typing import Any

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
            f"pipeline '{package.name}' is a different one there, compiled as '{name or 'unknown'}'; expected versions "
            "of this one.",
            remedy=f"Give the recipe another name. {LEAVE_OUT}",
        )


def _named(name: str) -> str:
    return json.dumps({"predicates": [{"operation": "EQUALS", "key": "name", "stringValue": name}]})


FINAL_STATES = connection.ENDS
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
    client = retry(lambda: connection.connect(endpoint, namespace), TransientError, tries(poll_s), lambda *_: None)
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

    return retry(ask, TransientError, tries(poll_s), lambda *_: None)


def tries(poll_s: float | None = None) -> Iterator[RetryAttempt]:
    """Yields the attempts at a request that the endpoint fails: a few, over minutes."""
    poll_s = POLL_S if poll_s is None else poll_s
    pauses = backoff(math.inf, pause=2 * poll_s, growth=2.0, longest=_MAX_PAUSE_S)
    return itertools.islice(pauses, MAX_TRANSIENT_FAILURES + 1)


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


PREFIX = "retrain-"  # of the names of Baton's recurring runs; the recipe's name follows
DESCRIPTION = "Retrains {} if data or recipe have changed."  # marks Baton's own: the name may be anybody's
CLOCK = "UTC, unless Kubeflow's CRON_SCHEDULE_TIMEZONE is another zone"  # of Kubeflow's controller
_PAGE = 100


@dataclass(frozen=True)
class RecurringRun:
    identifier: str
    recipe: str
    cron: str  # five fields, or six with seconds in front
    is_enabled: bool
    next_run: str | None = None  # Kubeflow does not tell; the key stays for scripts that read `--json`


def cron_line(text: str) -> str:
    """Returns five fields, six with seconds, or a nickname such as `@daily`, as Kubeflow takes them: with seconds."""
    fields = text.split()
    if fields and "=" in fields[0]:
        raise UserError(
            f"cron {text!r} names a time zone; expected a line in the time of Kubeflow's clock.",
            remedy=f"Leave {fields[0]} out, and give the hours of that clock: {CLOCK}.",
        )
    if len(fields) == 1 and text.startswith("@"):
        return fields[0]
    if len(fields) not in (5, 6):
        raise UserError(
            f"cron {text!r} has {len(fields)} field(s), expected 5: minute, hour, day of the month, month, day of the "
            "week; or 6, with seconds in front.",
            remedy="Every night at three is '0 3 * * *', every Monday '0 3 * * MON'.",
        )
    return " ".join(fields if len(fields) == 6 else ["0", *fields])


def schedule(
    package_path: str,
    endpoint: str,
    *,
    recipe: str,
    cron: str,
    namespace: str | None,
    service_account: str | None = None,
    registers: bool = True,
    on_warning: Callable[[str], None] = lambda line: None,
) -> RecurringRun:
    """Creates the recurring run of a recipe, in place of Baton's earlier ones; `cron` is as `cron_line` returns it."""
    package = PipelineFile.read(package_path)
    client = connection.connect(endpoint, namespace)
    registered = register(client, package, namespace) if registers else None
    with quiet(io.StringIO()):
        # The new one is made before these go: after a call that dies in between there is one too many, never none.
        named = _recurring(client, recipe, namespace)
        before = [_schedule(run) for run in named if _is_ours(run)]
        made = client.create_recurring_run(
            experiment_id_of(client, endpoint, recipe, namespace),
            f"{PREFIX}{recipe}",
            description=DESCRIPTION.format(recipe),
            cron_expression=cron,
            max_concurrency=1,
            no_catchup=True,  # missed times are not made up for
            params=package.defaults,
            service_account=service_account,
            **started_from(package, registered),
        )
        for recurring in before:
            client.delete_recurring_run(recurring.identifier)
    for run in named:
        if not _is_ours(run):
            on_warning(f"recurring run {run.display_name} ({run.recurring_run_id}) is not Baton's, and stays")
    identifier = required(made.recurring_run_id, "the recurring run", endpoint)
    return RecurringRun(identifier, recipe, _five(cron), is_enabled=True)


def schedules(endpoint: str, namespace: str | None) -> list[RecurringRun]:
    """Returns Baton's recurring runs."""
    client = connection.connect(endpoint, namespace)
    with quiet(io.StringIO()):
        return _find(client, None, namespace)


def delete_schedules(endpoint: str, recipe: str, namespace: str | None) -> list[RecurringRun]:
    """Deletes the recurring runs of a recipe, or refuses where there are none; a run that is under way continues."""
    client = connection.connect(endpoint, namespace)
    with quiet(io.StringIO()):
        found = _find(client, recipe, namespace)
        if not found:
            known = ", ".join(sorted({recurring.recipe for recurring in _find(client, None, namespace)})) or "none"
            raise UserError(f"recipe {recipe!r} has no schedule; expected one of: {known}.")
        for recurring in found:
            client.delete_recurring_run(recurring.identifier)
    return found


def _find(client: KubeflowClient, recipe: str | None, namespace: str | None) -> list[RecurringRun]:
    return [_schedule(run) for run in _recurring(client, recipe, namespace) if _is_ours(run)]


def _recurring(client: KubeflowClient, recipe: str | None, namespace: str | None) -> list[Any]:
    """Returns the recurring runs named as Baton names them, or as one recipe's, whoever made them."""
    wanted = {"operation": "EQUALS", "key": "display_name", "stringValue": f"{PREFIX}{recipe}"}
    filtered = json.dumps({"predicates": [wanted]}) if recipe else None
    runs: list[Any] = []
    page = ""
    while True:
        answer = client.list_recurring_runs(page_token=page, page_size=_PAGE, namespace=namespace, filter=filtered)
        runs += answer.recurring_runs or []
        page = answer.next_page_token or ""
        if not page:
            return [run for run in runs if run.display_name.startswith(PREFIX)]


def _is_ours(run: Any) -> bool:
    return bool(run.description == DESCRIPTION.format(run.display_name.removeprefix(PREFIX)))


def _schedule(run: Any) -> RecurringRun:
    trigger = run.trigger and run.trigger.cron_schedule
    cron = _five(str(trigger.cron)) if trigger else "by interval"
    return RecurringRun(
        run.recurring_run_id, run.display_name.removeprefix(PREFIX), cron, is_enabled=run.status == "ENABLED"
    )


def _five(cron: str) -> str:
    """Returns a line of Kubeflow without the seconds, where they are 0."""
    return cron.removeprefix("0 ") if len(cron.split()) == 6 else cron
