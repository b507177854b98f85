"""The schemas of Kubeflow Trainer's kinds, out of its own CustomResourceDefinitions in `crds/`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

CRDS = Path(__file__).parent / "crds"
PLURALS = {"TrainJob": "trainjobs", "TrainingRuntime": "trainingruntimes"}


@functools.cache
def definition(kind: str) -> dict[str, Any]:
    """Returns the CustomResourceDefinition of a kind."""
    document: dict[str, Any] = yaml.load((CRDS / f"{PLURALS[kind]}.yaml").read_text(), yaml.CSafeLoader)
    return document


@functools.cache
def _validator(kind: str) -> Draft202012Validator:
    (version,) = definition(kind)["spec"]["versions"]
    assert (version["name"], version["served"]) == ("v1alpha1", True)
    schema = _closed(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}  # the API server's own, and open in every definition
    return Draft202012Validator(schema)


def _closed(schema: Any) -> Any:
    """Returns a schema that refuses fields it does not name, as `kubectl apply --validate=strict` does."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        found.setdefault("additionalProperties", False)
    return found


def problems(document: dict[str, Any]) -> list[str]:
    """Returns a line for each thing in which an object is not of its kind's schema.

    Rules in CEL (`x-kubernetes-validations`) are the API server's alone.
    """
    errors = _validator(document["kind"]).iter_errors(document)
    return [f"{error.json_path}: {error.message}" for error in errors]
