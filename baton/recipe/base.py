"""Base of every section of the recipe."""

import ast
import inspect
import itertools
import re
import textwrap
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetJsonSchemaHandler
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema

Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(gt=0, lt=1)]
# A Kubernetes quantity such as `500m`, `4` or `64Gi`.
Quantity = Annotated[
    str,
    Field(pattern=r"^[0-9]+(\.[0-9]+)?(m|[kMGTPE]|[KMGTPE]i)?$"),
    BeforeValidator(lambda value: str(value) if isinstance(value, int | float) else value),
]

_UNITS = {"": 1.0, "m": 1e-3}
for _power, _unit in enumerate("kMGTPE", 1):
    _UNITS |= {_unit: 1e3**_power, f"{_unit.upper()}i": 1024.0**_power}

# At most 63 lower-case letters, digits and dashes: it becomes a folder, a label and a run's name.
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]


@dataclass(frozen=True)
class WrittenAs:
    """A setting's name in recipes, where its field keeps a former one.

    The field's name is part of digests, of compiled pipelines and of documents in the store, and stays there.
    """

    name: str


def written_name(name: str, field: FieldInfo) -> str:
    """Returns people's name of a field."""
    return next((mark.name for mark in field.metadata if isinstance(mark, WrittenAs)), name)


class Section(BaseModel):
    """A part of the recipe: unknown keys are errors, values do not change after loading.

    The text below a field is its description in the JSON Schema, read on demand. Pydantic's own way would read each
    class's source at import, which delays every chunk.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Returns the class's JSON Schema with its fields' descriptions."""
        written = handler(schema)
        shown, described = handler.resolve_ref_schema(written), _descriptions(cls)
        fields, shown["properties"] = shown.get("properties", {}), {}
        for name, field in fields.items():
            if name in described:
                field.setdefault("description", described[name])
            theirs, default = written_name(name, cls.model_fields[name]), cls.model_fields[name].default
            if isinstance(default, Section) and "default" in field:
                names = type(default).model_fields
                field["default"] = {written_name(key, names[key]): value for key, value in field["default"].items()}
            title = {} if theirs == name else {"title": theirs.replace("_", " ").title()}
            shown["properties"][theirs] = {**field, **title}
        return written


def _descriptions(section: type[Section]) -> dict[str, str]:
    """Returns field → the docstring below it, in the class or one it inherits."""
    described: dict[str, str] = {}
    for base in reversed(section.__mro__):
        if issubclass(base, Section) and base is not Section:
            (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            assert isinstance(definition, ast.ClassDef)
            for field, below in itertools.pairwise(definition.body):
                match field, below:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                        described[name] = inspect.cleandoc(text)
                    case ast.AnnAssign(target=ast.Name(id=name)), _:
                        described.pop(name, None)  # declared again without a text
    return described


def require_pattern(value: str) -> str:
    """Returns a regular expression, if it is one."""
    try:
        re.compile(value)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"is {value!r}, which is not a regular expression: {error}") from None
    return value


DURATION = re.compile(r"0*([1-9][0-9]*)(s|m|h)")
_LIKE_DURATION = re.compile(r"(?i)\s*0*([1-9][0-9]*)\s*(s|m|h|d)(ec(ond)?s?|in(ute)?s?|(ou)?rs?|ays?)?\s*", re.ASCII)


def duration(value: Any) -> Any:
    """Returns a time as written, if it is one."""
    if isinstance(value, str) and DURATION.fullmatch(value):
        return value
    raise ValueError(f"is {value!r}; expected a time such as 30s, 5m, 1h{near_duration(value)}")


def near_duration(value: Any) -> str:
    """Returns the end of a message with the likely time; empty where a value is like none."""
    match = _LIKE_DURATION.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return ""
    unit = match[2].lower()
    return f"; did you mean '{int(match[1]) * 24}h'?" if unit == "d" else f"; did you mean '{match[1]}{unit}'?"


def seconds(text: str) -> float:
    """Returns a time in seconds."""
    match = DURATION.fullmatch(text)
    assert match, text
    return int(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


def amount(quantity: str) -> float:
    """Returns a quantity as a number: of bytes, for memory."""
    match = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", quantity)
    assert match, quantity
    return float(match[1]) * _UNITS[match[2]]
