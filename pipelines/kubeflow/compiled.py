"""A compiled pipeline as Kubeflow is given it: its file, name, parameters and the digest of its content."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import yaml
from google.protobuf import json_format
from kfp.pipeline_spec import pipeline_spec_pb2 as ir

from baton.components.shared.core.errors import UserError
from baton.pipelines.compiling import conformance
from baton.pipelines.kubeflow.api import PipelineSpec
from baton.pipelines.kubeflow.transport import one_line


@dataclass(frozen=True)
class Package:
    """A compiled pipeline.

    Attributes:
        path: Its file.
        name: Name that it was compiled with.
        defaults: Parameter → its default, without empty dictionaries, which a run's page shows as `[object Object]`.
        digest: SHA-256 of the file.
    """

    path: str
    name: str
    defaults: dict[str, object]
    digest: str

    @property
    def version(self) -> str:
        """Name of the version of this content: one that no other pipeline of the namespace has, either."""
        return f"{self.name}-{self.digest[:12]}"

    @staticmethod
    def read(path: str) -> Package:
        """Reads a compiled pipeline.

        Raises:
            UserError: there is none at that path.
        """
        if not path.endswith((".yaml", ".yml")) or not Path(path).is_file():
            raise UserError(
                f"Package '{path}' is not a file ending in .yaml; expected a compiled pipeline.",
                remedy="Compile the recipe first.",
            )
        content = Path(path).read_bytes()
        try:
            documents = list(yaml.load_all(content, conformance.LOADER))
            for document, message in zip(documents, (ir.PipelineSpec(), ir.PlatformSpec()), strict=False):
                json_format.ParseDict(document, message)
            spec: PipelineSpec = documents[0]
            name = spec["pipelineInfo"]["name"]
            parameters = spec["root"].get("inputDefinitions", {}).get("parameters", {})
        except (yaml.YAMLError, json_format.ParseError, LookupError, AttributeError, TypeError) as error:
            raise UserError(
                f"'{path}' cannot be submitted: {one_line(error)}; expected a compiled pipeline.",
                remedy="Compile the recipe again.",
            ) from error
        defaults: dict[str, object] = {}
        for parameter, declared in parameters.items():
            if declared.get("defaultValue", {}) != {}:
                value = declared["defaultValue"]
                is_integer = declared.get("parameterType") == "NUMBER_INTEGER" and isinstance(value, float)
                defaults[parameter] = int(value) if is_integer and isinstance(value, float) else value
        return Package(path, name, defaults, hashlib.sha256(content).hexdigest())
