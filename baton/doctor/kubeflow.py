"""`baton doctor --endpoint`: what of a Kubeflow Pipelines installation would be in a run's way."""

from __future__ import annotations

from baton import machine
from baton.doctor.local import Check
from baton.errors import BatonError
from baton.kubeflow import retry_policy, submit
from baton.kubeflow.connection import Client, connect, token
from baton.kubeflow.submit import run_url


def examine(endpoint: str, namespace: str | None) -> list[Check]:
    """Looks at an installation, and at what its newest run that has ended tells of it.

    Args:
        endpoint: Address of the Kubeflow Pipelines API.
        namespace: The user's namespace on a multi-user Kubeflow.
    """
    try:
        client = connect(endpoint, token=token(), namespace=namespace)
        says = client.installation()
        is_multi_user, version = bool(says.get("multi_user")), says.get("tag_name", "unknown")
        kind = "multi-user" if is_multi_user else "single-user"
        answers = f"{endpoint} speaks v2beta1, version {version}, {kind}; pages at {run_url(endpoint, 'ID')}"
        pipelines = _pipelines(client, submit.namespace_of(client, namespace), is_multi_user=is_multi_user)
        return [Check("kubeflow", "ok", answers), *_proxy(endpoint), pipelines, *_of_runs(client, namespace)]
    except BatonError as error:
        return [Check("kubeflow", "problem", error.message, error.remedy or ""), *_proxy(endpoint)]


def _proxy(endpoint: str) -> list[Check]:
    found = machine.describe_proxy(endpoint)
    return [Check("kubeflow: proxy", "ok", found)] if found else []


def _pipelines(client: Client, namespace: str | None, *, is_multi_user: bool) -> Check:
    """Says whether `baton submit` can register its pipeline there, as far as that shows without posting one."""
    try:
        listed = client.list_pipelines(page_size=1, namespace=namespace)
    except BatonError as error:
        return Check("pipelines", "note", f"cannot be registered: {error.message}", submit.LEAVE_OUT)
    if is_multi_user:
        words = (
            f"can be listed, {listed.total_size or 0} are; the right to register one shows with the first submission"
        )
        return Check("pipelines", "ok", words)
    return Check("pipelines", "ok", f"can be registered; {listed.total_size or 0} are")


def _of_runs(client: Client, namespace: str | None) -> list[Check]:
    run = retry_policy.newest_ended(client, namespace)
    if run is None:
        return [Check("lost pods", "note", "no run has ended there yet, which would tell")]
    checks = [Check("service account", "ok", f"{run.service_account or 'unknown'}, of run {run.display_name}")]
    if mlflow := client.own_mlflow(run.run_id):
        checks.append(Check("kubeflow's mlflow", "ok", f"logs every run: {mlflow}"))
    try:
        loss = retry_policy.ends_run(client.workflow(run.run_id))
    except (BatonError, ValueError):
        return [*checks, Check("lost pods", "note", "the workflow of that run cannot be read, which would tell")]
    lost = (
        Check("lost pods", "note", loss, f"{retry_policy.APPLY}.") if loss else Check("lost pods", "ok", "start again")
    )
    return [*checks, lost]
