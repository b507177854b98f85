"""Registering a compiled pipeline on Kubeflow: under its name, with one version for each content.

A run that is started from a version can be cloned and scheduled on Kubeflow's page, which also offers the pipeline with
all its parameters under *Create run*.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from baton.components.shared.core.errors import BatonError, UserError
from baton.pipelines.kubeflow.api import Pipeline, PipelineVersion
from baton.pipelines.kubeflow.compiled import Package
from baton.pipelines.kubeflow.endpoint import Client, page, quiet
from baton.pipelines.kubeflow.transport import CREATE_REMEDY, ForbiddenError

T = TypeVar("T")

LEAVE_OUT = "--no-register starts the run without it."


@dataclass(frozen=True)
class Registered:
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


def register(client: Client, package: Package, namespace: str | None) -> Registered:
    """Uploads a pipeline where this content of it is not there yet, and returns its version.

    Args:
        client: What `endpoint.connect` returned.
        package: The compiled pipeline.
        namespace: The user's namespace on a multi-user Kubeflow.

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


def namespace_of(client: Client, namespace: str | None) -> str | None:
    """Returns where a user's pipelines lie: where the runs do, see `kfp.Client.create_experiment`."""
    return namespace or client.get_user_namespace() or None


def url(endpoint: str, registered: Registered) -> str:
    """Returns where a version is shown in the Kubeflow Pipelines UI."""
    return f"{page(endpoint)}/#/pipelines/details/{registered.pipeline_id}/version/{registered.version_id}"


def _registered(client: Client, package: Package, namespace: str | None) -> Registered:
    named = _named(package.name)

    def pipeline_there() -> Pipeline | None:
        listed = client.list_pipelines(page_size=1, namespace=namespace, filter=named).pipelines
        return listed[0] if listed else None

    def version_there() -> PipelineVersion | None:
        versions = client.list_pipeline_versions(pipeline_id, page_size=1, filter=_named(package.version))
        return versions.pipeline_versions[0] if versions.pipeline_versions else None

    def uploaded() -> PipelineVersion:
        _require_same_pipeline(client, pipeline_id, package)
        version: PipelineVersion = client.upload_pipeline_version(package.path, package.version, pipeline_id)
        return version

    pipeline, _ = _there_or(pipeline_there, lambda: client.create_pipeline(package.name, namespace))
    pipeline_id = pipeline.pipeline_id
    version, is_new = _there_or(version_there, uploaded)
    return Registered(pipeline_id, version.pipeline_version_id, package.name, package.version, is_new)


def _there_or(there: Callable[[], T | None], make: Callable[[], T]) -> tuple[T, bool]:
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


def _require_same_pipeline(client: Client, pipeline_id: str, package: Package) -> None:
    """Makes sure that a pipeline of this name is not somebody's other one, before a version is added to it."""
    listed = client.list_pipeline_versions(pipeline_id, page_size=1, sort_by="created_at desc").pipeline_versions
    if not listed:
        return
    posted = listed[0].pipeline_spec or {}
    name = posted.get("pipeline_spec", posted).get("pipelineInfo", {}).get("name")
    if name != package.name:
        raise UserError(
            f"pipeline '{package.name}' is another one there, compiled as '{name or 'unknown'}'; expected versions of "
            "this one.",
            remedy=f"Give the recipe another name. {LEAVE_OUT}",
        )


def _named(name: str) -> str:
    return json.dumps({"predicates": [{"operation": "EQUALS", "key": "name", "stringValue": name}]})
