"""Recurring runs on Kubeflow Pipelines: one for each recipe that is retrained on a schedule."""

from __future__ import annotations

import io
import json
import re
from dataclasses import dataclass

from baton.components.shared.core.errors import UserError
from baton.pipelines.kubeflow import registry
from baton.pipelines.kubeflow.api import RecurringRun
from baton.pipelines.kubeflow.compiled import Package
from baton.pipelines.kubeflow.endpoint import Client, connect, quiet
from baton.pipelines.kubeflow.submit import experiment_id_of, required, source

PREFIX = "retrain-"
"""How the names of Baton's recurring runs begin; the recipe's name follows."""

FIELDS = {
    "minute": (0, 59, ()),
    "hour": (0, 23, ()),
    "day of the month": (1, 31, ()),
    "month": (1, 12, ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")),
    "day of the week": (0, 6, ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")),
}
"""Fields of a cron line → least and greatest value, and the names of the values."""

PART = re.compile(r"(?P<from>\*|\?|\w+)(-(?P<to>\w+))?(/(?P<step>[1-9]\d*))?")
_PAGE = 100


@dataclass(frozen=True)
class Schedule:
    """A recurring run.

    Attributes:
        identifier: The endpoint's id.
        recipe: Name of the recipe.
        cron: When, with a field for seconds in front.
        is_enabled: Whether it runs.
    """

    identifier: str
    recipe: str
    cron: str
    is_enabled: bool


def cron_line(text: str) -> str:
    """Returns a cron line as Kubeflow takes it: with a field for seconds in front.

    Raises:
        UserError: it is none.
    """
    parts = text.split()
    if len(parts) != len(FIELDS):
        raise UserError(
            f"cron {text!r} has {len(parts)} field(s), expected 5: {', '.join(FIELDS)}.",
            remedy="Every night at three is '0 3 * * *', every Monday '0 3 * * MON'.",
        )
    for part, (name, (low, high, names)) in zip(parts, FIELDS.items(), strict=True):
        if not all(_is_part(entry, low, high, names) for entry in part.split(",")):
            raise UserError(
                f"cron {text!r}: {part!r} is no {name}; expected *, or numbers from {low} to {high}"
                f"{' or names such as ' + names[1] if names else ''}, as in 1,2 or 1-5 or */2."
            )
    return " ".join(["0", *parts])


def create(
    package_path: str,
    endpoint: str,
    *,
    recipe: str,
    cron: str,
    token: str | None,
    namespace: str | None,
    service_account: str | None = None,
    registers: bool = True,
) -> Schedule:
    """Creates the recurring run of a recipe, in place of those that there are.

    One run of it is under way at a time, and times that were missed are not made up for.

    Args:
        package_path: The compiled retraining pipeline.
        endpoint: Address of the Kubeflow Pipelines API.
        recipe: Name of the recipe.
        cron: As `cron_line` returns it.
        token: Bearer token, or None.
        namespace: The user's namespace on a multi-user Kubeflow.
        service_account: Account that the pods run under; the endpoint's own choice when left out.
        registers: Whether the pipeline is registered, and its runs started from its version.

    Raises:
        UserError: the address, the token or the namespace is at fault.
        BatonError: the endpoint cannot be reached or fails.
    """
    package = Package.read(package_path)
    client = connect(endpoint, token=token, namespace=namespace)
    registered = registry.register(client, package, namespace) if registers else None
    with quiet(io.StringIO()):
        # The new one is made before these go: a call that dies in between leaves one too many, and never none.
        before = _find(client, recipe, namespace)
        made = client.create_recurring_run(
            experiment_id_of(client, endpoint, recipe, namespace),
            f"{PREFIX}{recipe}",
            description=f"Retrains {recipe} if data or recipe have changed.",
            cron_expression=cron,
            max_concurrency=1,
            no_catchup=True,
            params=package.defaults,
            service_account=service_account,
            **source(package, registered),
        )
        for recurring in before:
            client.delete_recurring_run(recurring.identifier)
    identifier = required(made.recurring_run_id, "the recurring run", endpoint)
    return Schedule(identifier, recipe, cron, is_enabled=True)


def find(endpoint: str, *, token: str | None, namespace: str | None, recipe: str | None = None) -> list[Schedule]:
    """Returns Baton's recurring runs, or those of one recipe."""
    client = connect(endpoint, token=token, namespace=namespace)
    with quiet(io.StringIO()):
        return _find(client, recipe, namespace)


def delete(endpoint: str, recipe: str, *, token: str | None, namespace: str | None) -> list[Schedule]:
    """Deletes the recurring runs of a recipe; a run that is under way continues.

    Raises:
        UserError: there are none.
    """
    client = connect(endpoint, token=token, namespace=namespace)
    with quiet(io.StringIO()):
        schedules = _find(client, recipe, namespace)
        if not schedules:
            known = ", ".join(sorted({recurring.recipe for recurring in _find(client, None, namespace)})) or "none"
            raise UserError(f"recipe {recipe!r} has no schedule; expected one of: {known}.")
        for recurring in schedules:
            client.delete_recurring_run(recurring.identifier)
    return schedules


def _find(client: Client, recipe: str | None, namespace: str | None) -> list[Schedule]:
    wanted = {"operation": "EQUALS", "key": "display_name", "stringValue": f"{PREFIX}{recipe}"}
    filtered = json.dumps({"predicates": [wanted]}) if recipe else None
    schedules: list[RecurringRun] = []
    page = ""
    while True:
        answer = client.list_recurring_runs(page_token=page, page_size=_PAGE, namespace=namespace, filter=filtered)
        schedules += answer.recurring_runs or []
        page = answer.next_page_token or ""
        if not page:
            break
    return [
        Schedule(run.recurring_run_id, run.display_name.removeprefix(PREFIX), _cron(run), run.status == "ENABLED")
        for run in schedules
        if run.display_name.startswith(PREFIX)
    ]


def _cron(run: RecurringRun) -> str:
    schedule = run.trigger and run.trigger.cron_schedule
    return str(schedule.cron) if schedule else "by interval"


def _is_part(text: str, low: int, high: int, names: tuple[str, ...]) -> bool:
    match = PART.fullmatch(text)
    if match is None:
        return False
    if match["from"] in "*?":
        return match["to"] is None
    ends = [_value(end, low, names) for end in (match["from"], match["to"]) if end]
    return all(end is not None and low <= end <= high for end in ends) and ends == sorted(
        ends, key=lambda end: end or 0
    )


def _value(text: str, low: int, names: tuple[str, ...]) -> int | None:
    if text.upper() in names:
        return names.index(text.upper()) + low
    return int(text) if text.isdecimal() else None
