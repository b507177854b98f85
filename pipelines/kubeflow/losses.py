"""Which losses of a pod an installation's workflow controller makes good, as the workflow of any of its runs tells."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

from baton.components.shared.core.errors import BatonError
from baton.components.shared.core.machine import cache_dir
from baton.pipelines.kubeflow.api import Run, Workflow
from baton.pipelines.kubeflow.endpoint import Client, connect, token
from baton.pipelines.kubeflow.submit import FINAL_STATES

APPLY = "Apply k8s/components/retry-lost-pods (docs/cluster.md)"


def ends_run(workflow: Workflow) -> str | None:
    """Returns in one line which losses of a pod end a run there, None where none does.

    Kubeflow merges `workflowDefaults.templateDefaults.retryStrategy` into every template, over what a task asks for
    with `set_retry` but for its limit.
    """
    strategy = workflow.get("spec", {}).get("templateDefaults", {}).get("retryStrategy")
    if strategy is None:
        return None  # a task's own retries hold
    policy, expression = strategy.get("retryPolicy", "OnFailure"), strategy.get("expression", "")
    if policy == "Always" and (not expression or ("143" in expression and "137" in expression)):
        return None
    if policy == "OnFailure":
        return "a pod that was deleted ends the run there, as Argo's retryPolicy is OnFailure for every stage"
    return (
        f"a pod that was killed, evicted or whose node was shut down ends the run there, one that was deleted often: "
        f"Argo's retryPolicy is {policy} for every stage"
    )


def newest_ended(client: Client, namespace: str | None) -> Run | None:
    """Returns the newest run that has ended, whose workflow tells, None where there is none; by one listing."""
    listed = client.list_runs(page_size=20, sort_by="created_at desc", namespace=namespace).runs or []
    return next((run for run in listed if run.state in FINAL_STATES), None)


def not_told_yet(endpoint: str, namespace: str | None) -> str | None:
    """Returns which losses of a pod end a run at an endpoint, once; None from the second time on, or where none does.

    What is not known is not told either: no run has ended there yet, or its workflow cannot be read.

    Args:
        endpoint: Address of the Kubeflow Pipelines API.
        namespace: The user's namespace on a multi-user Kubeflow.
    """
    place = hashlib.sha256(f"{endpoint.rstrip('/')} {namespace or ''}".encode()).hexdigest()[:16]
    known = Path(cache_dir(), "kubeflow", f"losses-{place}")
    if known.exists():
        return None
    try:
        client = connect(endpoint, token=token(), namespace=namespace)
        run = newest_ended(client, namespace)
        loss = ends_run(client.workflow(run.run_id)) if run else None
    except (BatonError, ValueError):
        return None
    if loss:
        with contextlib.suppress(OSError):
            known.parent.mkdir(parents=True, exist_ok=True)
            known.touch()
    return loss
