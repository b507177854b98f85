"""Recipe section `budget`: the most that a run may cost, and the time by which it is to end."""

import datetime
import re
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, ValidatorFunctionWrapHandler, field_validator, model_validator

from baton.recipe.base import DURATION, Section, duration, near_duration, seconds

GPU_HOURS = "gpu-hours"
LEAST = 1e-6  # smallest limit
AMOUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(gpu-hours|[A-Z]{3})")


def _limit(value: Any) -> Any:
    if isinstance(value, str) and (DURATION.fullmatch(value) or AMOUNT.fullmatch(value)) and re.search("[1-9]", value):
        return value
    expected = "an amount of money such as 40 USD, a number such as 12 gpu-hours, or a time such as 90m, 6h"
    raise ValueError(f"is {value!r}; expected {expected}{near_duration(value)}")


def _moment(value: Any) -> Any:
    """Returns a time with its zone as text; YAML reads one with seconds by itself."""
    try:
        moment = datetime.datetime.fromisoformat(value) if isinstance(value, str) else value
    except ValueError:
        moment = None
    if isinstance(moment, datetime.datetime) and moment.tzinfo:
        return value if isinstance(value, str) else moment.isoformat()
    raise ValueError(f"is {str(value)!r}; expected a time with its zone, such as 2026-12-01T18:00Z")


class Prices(Section):
    """Prices by the capacity of a node, as `resources.capacity` tells it; on demand where that is not known."""

    spot: Annotated[float, Field(gt=0)]
    """Price of a device for an hour on a spot node."""
    on_demand: Annotated[float, Field(gt=0)]
    """Price of a device for an hour on an on-demand node."""


class Budget(Section):
    """Ends training within a limit, with the model of a run of that length: see docs/guides/budget.md."""

    limit: Annotated[str, BeforeValidator(_limit)] | None = None
    """Most to spend: money such as `40 USD`, with `price`; `12 gpu-hours`; or a time such as `90m` or `6h` from the
    start of the first chunk. Training counts from each start of its process to the end, lost work included."""
    by: Annotated[str, BeforeValidator(_moment)] | None = None
    """Time by which the run is to end, with its zone, such as `2026-12-01T18:00Z`."""
    price: Annotated[float, Field(gt=0)] | Prices | None = None
    """Price of a device for an hour, in the currency of `limit`, or `{spot: 1.10, on_demand: 3.20}`. A pod without GPUs
    counts as one device."""
    reserve: Annotated[str, BeforeValidator(duration)] | None = None
    """Time kept for evaluation, export and another start. Default: three times this run's own start, and a pass over
    the held-out rows."""

    @field_validator("price", mode="wrap")
    @classmethod
    def _one_of_two(cls, value: Any, read: ValidatorFunctionWrapHandler) -> Any:
        """Reads prices by capacity as such, so that problems are of that kind alone."""
        return Prices.model_validate(value) if isinstance(value, dict) else read(value)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.limit is None and self.by is None:
            raise ValueError("nothing limits the run; give limit or by, or remove budget")
        if self.currency and self.price is None:
            raise ValueError(f"limit {self.limit}: the price of a device is not known; give price, per hour")
        if self.price is not None and not self.currency:
            raise ValueError("price: nothing is counted in money; give limit as an amount such as 40 USD")
        return self

    @property
    def _amount(self) -> re.Match[str] | None:
        return AMOUNT.fullmatch(self.limit or "")

    @property
    def currency(self) -> str | None:
        """The limit's currency, None for a limit of hours."""
        return self._amount[2] if self._amount and self._amount[2] != GPU_HOURS else None

    @property
    def _on_demand(self) -> float:
        return self.price.on_demand if isinstance(self.price, Prices) else self.price or 1.0

    @property
    def device_seconds(self) -> float | None:
        """Device time that the limit pays for, on demand where prices differ; None without such a limit."""
        return float(self._amount[1]) / self._on_demand * 3600 if self._amount else None

    def weight(self, capacity: str | None) -> float:
        """Returns the price of a device by the capacity of its node, as a share of the price on demand."""
        if isinstance(self.price, Prices) and capacity == "spot":
            return self.price.spot / self.price.on_demand
        return 1.0

    @property
    def run_seconds(self) -> float | None:
        """Time from the start of the first chunk to the run's end; None without such a limit."""
        return seconds(self.limit) if self.limit and not self._amount else None

    @property
    def ends_at(self) -> float | None:
        """Time by which the run is to end, in seconds since the epoch."""
        return datetime.datetime.fromisoformat(self.by).timestamp() if self.by else None

    @property
    def reserve_seconds(self) -> float | None:
        return seconds(self.reserve) if self.reserve else None

    def allows_more(self, than: Self) -> bool:
        """Tells whether a run may cost more, or end later, than under another budget."""
        limits = (
            (self.device_seconds, than.device_seconds),
            (self.run_seconds, than.run_seconds),
            (self.ends_at, than.ends_at),
        )
        return any(theirs is not None and (ours is None or ours > theirs) for ours, theirs in limits)

    def passed(self, *, moment: float, started: float, device_seconds: float) -> str | None:
        """Returns the limit that a run has passed at a moment, in words; None for none.

        Args:
            moment: Seconds since the epoch, as `started`, when the first chunk began.
            started: See `moment`.
            device_seconds: Device time by then, each device's times its `weight`.
        """
        is_spent = self.device_seconds is not None and device_seconds > self.device_seconds
        if is_spent or (self.run_seconds is not None and moment > started + self.run_seconds):
            return f"budget.limit: {self.limit}"
        return f"budget.by: {self.by}" if self.ends_at is not None and moment > self.ends_at else None

    def cost(self, device_seconds: float) -> str:
        """Returns device time, weighted, in the limit's unit: money, or hours to a few digits."""
        amount = self.amount(device_seconds)
        return f"{amount:.2f} {self.currency}" if self.currency else f"{amount:.3g} device-hours"

    def of(self, device_seconds: float) -> str:
        """Returns a limit that pays for so much device time."""
        return f"{max(self.amount(device_seconds), LEAST):.6f} {self.currency or GPU_HOURS}"

    def amount(self, device_seconds: float) -> float:
        """Returns device time, weighted, as money, or as hours where the limit has no currency."""
        return device_seconds / 3600 * (self._on_demand if self.currency else 1.0)
