"""What the Kubeflow Pipelines backend refuses: a pipeline that does not conform, parameters that do not fit it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.support.conformance import check_documents

# What a JSON value must be for a parameter type. The backend takes 3.0 for an integer.
TYPE_CHECKS: dict[str, Callable[[Any], bool]] = {
    "NUMBER_INTEGER": lambda v: isinstance(v, int | float) and not isinstance(v, bool) and v == int(v),
    "NUMBER_DOUBLE": lambda v: isinstance(v, int | float) and not isinstance(v, bool),
    "STRING": lambda v: isinstance(v, str),
    "BOOLEAN": lambda v: isinstance(v, bool),
    "LIST": lambda v: isinstance(v, list),
    "STRUCT": lambda v: isinstance(v, dict),
}


# google.rpc.Code, which the gateway puts beside the HTTP status
RPC_CODES = {400: 3, 401: 16, 403: 7, 404: 5, 409: 6, 500: 13, 503: 14}


class ApiError(Exception):
    """An answer with an error status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

    def document(self) -> dict[str, Any]:
        """Return the answer's body."""
        return {"code": RPC_CODES[self.status], "message": str(self), "details": []}


class UploadError(ApiError):
    """An answer of the upload server, which writes another form."""

    def document(self) -> dict[str, Any]:
        """Return the answer's body."""
        return {"error_message": str(self), "error_details": str(self)}


def check_pipeline(documents: list[Any]) -> None:
    """Refuse a pipeline that does not conform."""
    problems = check_documents(documents)
    if problems:
        raise ApiError(400, f"Invalid input error: {problems[0]}")


def check_parameters(spec: dict[str, Any], given: dict[str, Any]) -> None:
    """Refuse parameters that the pipeline does not declare, or of another type, and one that is missing."""
    declared = spec["root"].get("inputDefinitions", {}).get("parameters", {})
    for name, value in given.items():
        if name not in declared:
            raise ApiError(400, f"Invalid input error: unknown parameter {name}; known: {sorted(declared)}.")
        kind = declared[name]["parameterType"]
        if not TYPE_CHECKS[kind](value):
            raise ApiError(400, f"Invalid input error: parameter {name} is {value!r}, expected {kind}.")
    for name, definition in declared.items():
        if name not in given and "defaultValue" not in definition and not definition.get("isOptional"):
            raise ApiError(400, f"Invalid input error: parameter {name} is required.")
