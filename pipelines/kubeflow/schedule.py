"""Recurring runs on Kubeflow Pipelines: one for each recipe that is retrained on a schedule."""

from __future__ import annotations

import datetime
import io
import json
import re
import zoneinfo
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from baton.components.shared.core.errors import UserError
from baton.pipelines.kubeflow import registry
from baton.pipelines.kubeflow.api import RecurringRun
from baton.pipelines.kubeflow.compiled import Package
from baton.pipelines.kubeflow.endpoint import Client, Token, connect, quiet
from baton.pipelines.kubeflow.submit import experiment_id_of, required, source

PREFIX = "retrain-"
"""How the names of Baton's recurring runs begin; the recipe's name follows."""

DESCRIPTION = "Retrains {} if data or recipe have changed."
"""By it a recurring run is Baton's: the name alone may be anybody's."""

FIELDS = {
    "minute": (0, 59, ()),
    "hour": (0, 23, ()),
    "day of the month": (1, 31, ()),
    "month": (1, 12, ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")),
    "day of the week": (0, 7, ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")),
}
"""Fields of a cron line → least and greatest value, and the names of the values; Sunday is 0 and 7."""
NICKNAMES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
CLOCK = "UTC, unless Kubeflow's CRON_SCHEDULE_TIMEZONE says otherwise"
"""Whose time a line is in: that of Kubeflow's controller."""

PART = re.compile(r"(?P<from>\*|\?|\w+)(-(?P<to>\w+))?(/(?P<step>[1-9]\d*))?")
_DAYS = 3 * 366 * 4
"""Days in which a date that exists comes round: 29 February may be eight years off."""
_PAGE = 100


@dataclass(frozen=True)
class Schedule:
    """A recurring run.

    Attributes:
        identifier: The endpoint's id.
        recipe: Name of the recipe.
        cron: When, in five fields; with a sixth in front where another tool has set seconds.
        is_enabled: Whether it runs.
        next_run: When next, by `CLOCK`; None where it does not run, or by an interval.
    """

    identifier: str
    recipe: str
    cron: str
    is_enabled: bool
    next_run: str | None = None


def cron_line(text: str, tell: Callable[[str], None] = lambda line: None) -> str:
    """Returns a cron line as Kubeflow takes it: with a field for seconds in front, in the time of its controller.

    Args:
        text: Five fields, those with `0` for seconds in front, or a nickname; `CRON_TZ=ZONE` may stand before it.
        tell: Called with what somebody should know of it.

    Raises:
        UserError: it is none, or its time never comes.
    """
    zone, line = re.fullmatch(r"(?:(?:CRON_)?TZ=(\S+)\s+)?(.*)", text.strip(), re.DOTALL).groups()  # type: ignore[union-attr]
    parts = NICKNAMES.get(line.lower(), line).split()
    if len(parts) == len(FIELDS) + 1 and parts[0] == "0":
        parts = parts[1:]
    if len(parts) != len(FIELDS):
        raise UserError(
            f"cron {text!r} has {len(parts)} field(s), expected 5: {', '.join(FIELDS)}.",
            remedy=f"Every night at three is '0 3 * * *', every Monday '0 3 * * MON'; names: {', '.join(NICKNAMES)}.",
        )
    for place, (part, (name, (low, high, names))) in enumerate(zip(parts, FIELDS.items(), strict=True)):
        if not all(_is_part(entry, low, high, names) for entry in part.split(",")):
            raise UserError(
                f"cron {text!r}: {part!r} is no {name}; expected *, or numbers from {low} to {high}"
                f"{' or names such as ' + names[1] if names else ''}, as in 1,2 or 1-5 or */2."
            )
        if "7" in re.split(r"\D", part) and high == 7:  # Kubeflow's Sunday is 0
            parts[place] = _joined(_values(part, name))
    if zone:
        parts = _in_utc(parts, zone, text, tell)
    if next_run(" ".join(parts), datetime.datetime.now(datetime.UTC)) is None:
        raise UserError(
            f"cron {text!r} names a day that no month has, so that it never runs; expected one that comes.",
            remedy="The last day of every month cannot be named; the first is '0 3 1 * *'.",
        )
    return " ".join(["0", *parts])


def next_run(cron: str, after: datetime.datetime) -> datetime.datetime | None:
    """Returns when a line comes next, in the zone of `after`; None where it never does, or is not in five fields.

    Where both days are restricted either will do, as cron has it.
    """
    parts = cron.split()
    if len(parts) != len(FIELDS):
        return None
    try:
        minutes, hours, days, months, weekdays = (_values(part, name) for part, name in zip(parts, FIELDS, strict=True))
    except (ValueError, AttributeError):  # another tool's
        return None
    free = {part[0] in "*?" for part in (parts[2], parts[4])}
    either = free == {False}
    start = (after + datetime.timedelta(minutes=1)).replace(second=0, microsecond=0)
    for offset in range(_DAYS):
        day = start.date() + datetime.timedelta(days=offset)
        held = (day.day in days, day.isoweekday() % 7 in weekdays)
        if day.month not in months or not (any(held) if either else all(held)):
            continue
        for hour in sorted(hours):
            for minute in sorted(minutes):
                moment = datetime.datetime.combine(day, datetime.time(hour, minute), start.tzinfo)
                if moment >= start:
                    return moment
    return None


def _values(part: str, name: str) -> set[int]:
    """Returns the values that a field stands for; Sunday is 0."""
    low, high, names = FIELDS[name]
    top = 6 if high == 7 else high
    values: set[int] = set()
    for entry in part.split(","):
        match = PART.fullmatch(entry)
        assert match is not None
        first = low if match["from"] in "*?" else int(_value(match["from"], low, names) or 0)
        is_open = match["from"] in "*?" or (match["step"] and not match["to"])
        last = top if is_open else int(_value(match["to"], low, names) or 0) if match["to"] else first
        values.update(range(first, last + 1, int(match["step"] or 1)))
    return {value % 7 for value in values} if high == 7 else values


def _joined(values: Iterable[int]) -> str:
    return ",".join(str(value) for value in sorted(values))


def _in_utc(parts: list[str], zone: str, text: str, tell: Callable[[str], None]) -> list[str]:
    """Returns the fields of a line in the time of Kubeflow's controller, which knows no zone of a line.

    Raises:
        UserError: there is no such zone, or no line says the same in UTC.
    """
    try:
        clock = zoneinfo.ZoneInfo(zone)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise UserError(
            f"cron {text!r}: {zone!r} is no time zone; expected a name such as Europe/Berlin or UTC."
        ) from error
    now = datetime.datetime.now(clock)
    shift = _minutes(now)
    changes = next(
        (day for day in (now + datetime.timedelta(days=n) for n in range(366)) if _minutes(day) != shift), None
    )
    minutes, hours, *_ = (_values(part, name) for part, name in zip(parts, FIELDS, strict=True))
    times = [divmod(hour * 60 + minute - shift, 24 * 60) for hour in hours for minute in minutes]
    moved, new = {day for day, _ in times}, {divmod(rest, 60) for _, rest in times}
    new_hours, new_minutes = {hour for hour, _ in new}, {minute for _, minute in new}
    has_days = any(part not in ("*", "?") for part in parts[2:])
    (by,) = moved if len(moved) == 1 else (0,)
    dates_move = has_days and (len(moved) > 1 or (by and any(part not in ("*", "?") for part in parts[2:4])))
    if dates_move or len(new) != len(new_hours) * len(new_minutes):
        raise UserError(
            f"cron {text!r} has no line of its own in UTC, the time of Kubeflow's controller; expected one that has.",
            remedy="Leave CRON_TZ out and give the line in UTC, or name other hours.",
        )
    if shift and not (hours == set(range(24)) and new_minutes == minutes):
        minute = parts[0] if new_minutes == minutes else _joined(new_minutes)
        weekday = parts[4]
        if has_days and by:
            weekday = _joined({(day + by) % 7 for day in _values(parts[4], "day of the week")})
        parts = [minute, _joined(new_hours), *parts[2:4], weekday]
    if changes:
        after = _minutes(changes) - shift
        tell(
            f"{zone} changes its clock about {changes:%Y-%m-%d}, Kubeflow does not: '{' '.join(parts)}' is in UTC, and "
            f"from then on {abs(after)} minutes {'later' if after > 0 else 'earlier'} there"
        )
    return parts


def _minutes(moment: datetime.datetime) -> int:
    return int((moment.utcoffset() or datetime.timedelta()).total_seconds() // 60)


def create(
    package_path: str,
    endpoint: str,
    *,
    recipe: str,
    cron: str,
    token: Token,
    namespace: str | None,
    service_account: str | None = None,
    registers: bool = True,
    tell: Callable[[str], None] = lambda line: None,
) -> Schedule:
    """Creates the recurring run of a recipe, in place of those of Baton that there are.

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
        tell: Called with what somebody should know.

    Raises:
        UserError: the address, the token or the namespace is at fault.
        BatonError: the endpoint cannot be reached or fails.
    """
    package = Package.read(package_path)
    client = connect(endpoint, token=token, namespace=namespace)
    registered = registry.register(client, package, namespace) if registers else None
    with quiet(io.StringIO()):
        # The new one is made before these go: a call that dies in between leaves one too many, and never none.
        named = _named(client, recipe, namespace)
        before = [_schedule(run) for run in named if _is_ours(run)]
        made = client.create_recurring_run(
            experiment_id_of(client, endpoint, recipe, namespace),
            f"{PREFIX}{recipe}",
            description=DESCRIPTION.format(recipe),
            cron_expression=cron,
            max_concurrency=1,
            no_catchup=True,
            params=package.defaults,
            service_account=service_account,
            **source(package, registered),
        )
        for recurring in before:
            client.delete_recurring_run(recurring.identifier)
    for run in named:
        if not _is_ours(run):
            tell(f"recurring run {run.display_name} ({run.recurring_run_id}) is not Baton's, and stays")
    identifier = required(made.recurring_run_id, "the recurring run", endpoint)
    line = _five(cron)
    return Schedule(identifier, recipe, line, is_enabled=True, next_run=_next(line))


def find(endpoint: str, *, token: Token, namespace: str | None, recipe: str | None = None) -> list[Schedule]:
    """Returns Baton's recurring runs, or those of one recipe."""
    client = connect(endpoint, token=token, namespace=namespace)
    with quiet(io.StringIO()):
        return _find(client, recipe, namespace)


def delete(endpoint: str, recipe: str, *, token: Token, namespace: str | None) -> list[Schedule]:
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
    return [_schedule(run) for run in _named(client, recipe, namespace) if _is_ours(run)]


def _named(client: Client, recipe: str | None, namespace: str | None) -> list[RecurringRun]:
    """Returns the recurring runs with a name as Baton gives, or that of one recipe, whosever they are."""
    wanted = {"operation": "EQUALS", "key": "display_name", "stringValue": f"{PREFIX}{recipe}"}
    filtered = json.dumps({"predicates": [wanted]}) if recipe else None
    runs: list[RecurringRun] = []
    page = ""
    while True:
        answer = client.list_recurring_runs(page_token=page, page_size=_PAGE, namespace=namespace, filter=filtered)
        runs += answer.recurring_runs or []
        page = answer.next_page_token or ""
        if not page:
            return [run for run in runs if run.display_name.startswith(PREFIX)]


def _is_ours(run: RecurringRun) -> bool:
    return run.description == DESCRIPTION.format(run.display_name.removeprefix(PREFIX))


def _schedule(run: RecurringRun) -> Schedule:
    trigger = run.trigger and run.trigger.cron_schedule
    cron, is_enabled = _five(str(trigger.cron)) if trigger else "by interval", run.status == "ENABLED"
    next_time = _next(cron) if is_enabled else None
    return Schedule(run.recurring_run_id, run.display_name.removeprefix(PREFIX), cron, is_enabled, next_time)


def _five(cron: str) -> str:
    """Returns a line of Kubeflow as people write it: without the seconds, where they are 0."""
    return cron.removeprefix("0 ") if len(cron.split()) == len(FIELDS) + 1 else cron


def _next(cron: str) -> str | None:
    moment = next_run(cron, datetime.datetime.now(datetime.UTC))
    return f"{moment:%Y-%m-%d %H:%M}" if moment else None


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
