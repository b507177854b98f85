"""Finding a run on Kubeflow by its id or its name."""

from __future__ import annotations

import json
import re

from baton.components.shared.core.errors import UserError
from baton.pipelines.kubeflow.api import Run
from baton.pipelines.kubeflow.endpoint import Client

ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def find(client: Client, endpoint: str, run: str, namespace: str | None) -> tuple[Run, int]:
    """Returns a run and how many runs have its name; of several, the newest.

    Args:
        client: What `endpoint.connect` returned.
        endpoint: Its address, for messages.
        run: Name or id of the run.
        namespace: The user's namespace on a multi-user Kubeflow.

    Raises:
        UserError: there is no such run.
        BatonError: the endpoint fails.
    """
    if ID.fullmatch(run):
        found: Run = client.get_run(run)
        return found, 1
    equals = {"operation": "EQUALS", "key": "display_name", "stringValue": run}
    listed = client.list_runs(
        page_size=50, sort_by="created_at desc", namespace=namespace, filter=json.dumps({"predicates": [equals]})
    )
    if not listed.runs:
        raise UserError(
            f"'{endpoint}' has no run named '{run}'; expected one{f' in namespace {namespace}' if namespace else ''}.",
            remedy="Give the name that `baton submit` printed or the run's id; with several profiles --namespace too.",
        )
    newest: Run = max(listed.runs, key=lambda found: found.created_at)
    newest = client.get_run(newest.run_id)  # the list lacks the stages
    return newest, int(listed.total_size or len(listed.runs))
