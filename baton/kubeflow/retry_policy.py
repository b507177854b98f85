"""Which losses of a pod an installation's workflow controller makes good, as the workflow of any of its runs tells."""

from __future__ import annotations

from baton.kubeflow.connection import Client, KubeflowRun, Workflow
from baton.kubeflow.submit import FINAL_STATES

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


def newest_ended(client: Client, namespace: str | None) -> KubeflowRun | None:
    """Returns the newest run that has ended, whose workflow tells, None where there is none; by one listing."""
    listed = client.list_runs(page_size=20, sort_by="created_at desc", namespace=namespace).runs or []
    return next((run for run in listed if run.state in FINAL_STATES), None)
