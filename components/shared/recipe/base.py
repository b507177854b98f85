"""What every section of the recipe is made of."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(gt=0, lt=1)]
Quantity = Annotated[
    str,
    Field(pattern=r"^[0-9]+(\.[0-9]+)?(m|[kMGTPE]|[KMGTPE]i)?$"),
    BeforeValidator(lambda value: str(value) if isinstance(value, int | float) else value),
]
"""A Kubernetes quantity such as `500m`, `4` or `64Gi`."""

_UNITS = {"": 1.0, "m": 1e-3}
for _power, _unit in enumerate("kMGTPE", 1):
    _UNITS |= {_unit: 1e3**_power, f"{_unit.upper()}i": 1024.0**_power}

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
"""Lower-case letters, digits and dashes, at most 63: it becomes a folder, a label and a run's name."""


class Section(BaseModel):
    """A part of the recipe: unknown keys are errors, values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


def require_pattern(value: str) -> str:
    """Returns a regular expression, if it is one."""
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"is {value!r}, which is no regular expression: {error}") from None
    return value


DURATION = re.compile(r"0*([1-9][0-9]*)(s|m|h)")


def duration(value: Any) -> Any:
    """Returns a time as written, if it is one."""
    if isinstance(value, str) and DURATION.fullmatch(value):
        return value
    raise ValueError(f"is {value!r}; expected a time such as 30s, 5m, 1h")


def seconds(text: str) -> float:
    """Returns a time in seconds."""
    match = DURATION.fullmatch(text)
    assert match, text
    return int(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


def amount(quantity: str) -> float:
    """Returns a quantity as a number: of bytes, where it is one of memory."""
    match = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", quantity)
    assert match, quantity
    return float(match[1]) * _UNITS[match[2]]
