"""Recurring runs on Kubeflow Pipelines: one for each recipe that is retrained by the clock."""

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from baton.errors import UserError
from baton.kubeflow import submit
from baton.kubeflow.connection import KubeflowClient, connect, quiet

PREFIX = "retrain-"  # of the names of Baton's recurring runs; the recipe's name follows
DESCRIPTION = "Retrains {} if data or recipe have changed."  # marks Baton's own: the name may be anybody's
CLOCK = "UTC, unless Kubeflow's CRON_SCHEDULE_TIMEZONE says otherwise"  # of Kubeflow's controller
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


def create(
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
    package = submit.PipelineFile.read(package_path)
    client = connect(endpoint, namespace)
    registered = submit.register(client, package, namespace) if registers else None
    with quiet(io.StringIO()):
        # The new one is made before these go: a call that dies in between leaves one too many, and never none.
        named = _named(client, recipe, namespace)
        before = [_schedule(run) for run in named if _is_ours(run)]
        made = client.create_recurring_run(
            submit.experiment_id_of(client, endpoint, recipe, namespace),
            f"{PREFIX}{recipe}",
            description=DESCRIPTION.format(recipe),
            cron_expression=cron,
            max_concurrency=1,
            no_catchup=True,  # missed times are not made up for
            params=package.defaults,
            service_account=service_account,
            **submit.started_from(package, registered),
        )
        for recurring in before:
            client.delete_recurring_run(recurring.identifier)
    for run in named:
        if not _is_ours(run):
            on_warning(f"recurring run {run.display_name} ({run.recurring_run_id}) is not Baton's, and stays")
    identifier = submit.required(made.recurring_run_id, "the recurring run", endpoint)
    return RecurringRun(identifier, recipe, _five(cron), is_enabled=True)


def find(endpoint: str, namespace: str | None) -> list[RecurringRun]:
    """Returns Baton's recurring runs."""
    client = connect(endpoint, namespace)
    with quiet(io.StringIO()):
        return _find(client, None, namespace)


def delete(endpoint: str, recipe: str, namespace: str | None) -> list[RecurringRun]:
    """Deletes the recurring runs of a recipe, or refuses where there are none; a run that is under way continues."""
    client = connect(endpoint, namespace)
    with quiet(io.StringIO()):
        schedules = _find(client, recipe, namespace)
        if not schedules:
            known = ", ".join(sorted({recurring.recipe for recurring in _find(client, None, namespace)})) or "none"
            raise UserError(f"recipe {recipe!r} has no schedule; expected one of: {known}.")
        for recurring in schedules:
            client.delete_recurring_run(recurring.identifier)
    return schedules


def _find(client: KubeflowClient, recipe: str | None, namespace: str | None) -> list[RecurringRun]:
    return [_schedule(run) for run in _named(client, recipe, namespace) if _is_ours(run)]


def _named(client: KubeflowClient, recipe: str | None, namespace: str | None) -> list[Any]:
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
