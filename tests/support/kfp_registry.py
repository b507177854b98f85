"""The part of `/apis/v2beta1` that keeps pipelines and their versions, as Kubeflow Pipelines 2.17 answers there.

As its `pipeline_server.go` and `pipeline_upload_server.go` have it: a pipeline's name is unique in its namespace, a
version's in its pipeline. Uploads answer with an error of their own form, and say nothing of a right that is missing.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from email.message import Message
from email.parser import BytesParser
from email.policy import HTTP
from typing import Any

import yaml

from tests.support.kfp_checks import ApiError, UploadError, check_pipeline

Query = dict[str, list[str]]
Shown = dict[str, Any]

PATH = (
    r"/apis/v2beta1/pipelines(?:/(?P<upload>upload|upload_version)"
    r"|/(?P<id>[^/]+)(?P<versions>/versions(?:/(?P<version>[^/]+))?)?)?"
)
CANNOT = {"upload": "Failed to create a pipeline", "upload_version": "Failed to create a pipeline version"}


@dataclass
class Registry:
    """Pipelines and their versions.

    Attributes:
        pipelines: Pipelines by id, as the API shows them.
        versions: Versions by id, as the API shows them.
        multi_user: Whether each user has a namespace.
        forbidden: Verbs that the user may not use on pipelines, where there are several.
    """

    pipelines: dict[str, Shown] = field(default_factory=dict)
    versions: dict[str, Shown] = field(default_factory=dict)
    multi_user: bool = False
    forbidden: set[str] = field(default_factory=set)

    def answer(self, match: re.Match[str], method: str, query: Query, headers: Message, body: bytes) -> Shown:
        """Answer a request to a path that `PATH` matches."""
        if upload := match["upload"]:
            self._require("create", UploadError(400, CANNOT[upload]))
            return self._upload(upload, query, headers, body)
        if method == "POST":
            posted = json.loads(body)
            name, namespace = posted.get("name") or posted.get("display_name"), self._namespace(posted.get("namespace"))
            self._require("create", ApiError(403, f"User is not authorized with reason: create on {name}"))
            return self._create(name, posted.get("display_name") or name, namespace)
        verb = "list" if not match["id"] or (match["versions"] and not match["version"]) else "get"
        self._require(verb, ApiError(403, f"User is not authorized with reason: {verb} on pipelines"))
        if match["id"] is None:
            namespace = self._namespace(_one(query, "namespace"))
            here = [found for found in self.pipelines.values() if found.get("namespace", "") == namespace]
            return _listed("pipelines", here, query)
        if match["id"] not in self.pipelines:
            raise ApiError(404, f"Pipeline {match['id']} not found.")
        if match["versions"] is None:
            return self.pipelines[match["id"]]
        if match["version"] is None:
            return _listed("pipeline_versions", list(self._versions(match["id"])), query)
        return self.version({"pipeline_id": match["id"], "pipeline_version_id": match["version"]})

    def version(self, reference: dict[str, str]) -> Shown:
        """Return what a reference means: a version, or the newest of a pipeline."""
        versions = {found["pipeline_version_id"]: found for found in self._versions(reference["pipeline_id"])}
        wanted = reference.get("pipeline_version_id") or next(reversed(versions), "")
        if wanted not in versions:
            raise ApiError(404, f"PipelineVersion {wanted} of {reference['pipeline_id']} not found.")
        return versions[wanted]

    def _versions(self, pipeline_id: str) -> Iterator[Shown]:
        return (found for found in self.versions.values() if found["pipeline_id"] == pipeline_id)

    def _namespace(self, given: str | None) -> str:
        return (given or "") if self.multi_user else ""

    def _require(self, verb: str, error: ApiError) -> None:
        if self.multi_user and verb in self.forbidden:
            raise error

    def _create(self, name: str, display_name: str, namespace: str) -> Shown:
        taken = {(found["name"], found.get("namespace", "")) for found in self.pipelines.values()}
        if (name, namespace) in taken:
            raise ApiError(409, f"Failed to create a new pipeline. The name {name} already exist.")
        if not name or len(name) > 128:
            raise ApiError(400, "Pipeline.Name length cannot exceed 128")
        shown = {"pipeline_id": str(uuid.uuid4()), "name": name, "display_name": display_name}
        shown |= {"created_at": _at(len(self.pipelines)), **({"namespace": namespace} if namespace else {})}
        self.pipelines[shown["pipeline_id"]] = shown
        return shown

    def _upload(self, kind: str, query: Query, headers: Message, body: bytes) -> Shown:
        head = f"content-type: {headers['content-type']}\r\n\r\n".encode()
        parts = list(BytesParser(policy=HTTP).parsebytes(head + body).iter_parts())
        if not parts:
            raise UploadError(400, "Failed to read pipeline from file")
        pipeline_id = _one(query, "pipelineid")
        if kind == "upload_version" and pipeline_id not in self.pipelines:
            raise UploadError(400, CANNOT[kind])
        documents = list(yaml.safe_load_all(parts[0].get_payload(decode=True)))
        name = _one(query, "name") or _one(query, "display_name") or parts[0].get_filename()
        display_name = _one(query, "display_name") or name
        if not isinstance(documents[0], dict) or "pipelineInfo" not in documents[0]:
            raise UploadError(400, "unknown template format")
        try:
            check_pipeline(documents)
        except ApiError as error:
            raise UploadError(error.status, str(error)) from None
        if kind == "upload":
            try:
                shown = self._create(name, display_name, self._namespace(_one(query, "namespace")))
            except ApiError as error:
                raise UploadError(error.status, "Failed to create a pipeline and a pipeline version") from None
            self._add(shown["pipeline_id"], name, display_name, documents)
            return shown
        if any(found["name"] == name for found in self._versions(pipeline_id)):
            raise UploadError(409, CANNOT[kind])
        if len(name) > 127:
            raise UploadError(400, "PipelineVersion.Name length cannot exceed 127")
        return self._add(pipeline_id, name, display_name, documents)

    def _add(self, pipeline_id: str, name: str, display_name: str, documents: list[Shown]) -> Shown:
        spec = {"pipeline_spec": documents[0], "platform_spec": documents[1]} if len(documents) > 1 else documents[0]
        shown = {
            "pipeline_id": pipeline_id,
            "pipeline_version_id": str(uuid.uuid4()),
            "name": name,
            "display_name": display_name,
            "created_at": _at(len(self.versions)),
            "pipeline_spec": spec,
        }
        self.versions[shown["pipeline_version_id"]] = shown
        return shown


def matches(item: Shown, query: Query) -> bool:
    """Apply the API's filter: the EQUALS predicates that kfp sends, written as text or as number."""
    text = _one(query, "filter")
    for predicate in json.loads(text).get("predicates", []) if text else []:
        if predicate["operation"] not in (1, "EQUALS"):
            raise ApiError(400, f"Invalid input error: no such filter operation: {predicate['operation']}.")
        if item.get(predicate["key"]) != predicate.get("stringValue", predicate.get("string_value")):
            return False
    return True


def _listed(name: str, items: list[Shown], query: Query) -> Shown:
    found = [item for item in items if matches(item, query)]
    field_name, _, order = _one(query, "sort_by").partition(" ")
    if field_name:
        found.sort(key=lambda item: str(item[field_name]), reverse=order == "desc")
    size = int(_one(query, "page_size") or 20)
    return {name: found[:size], "total_size": len(found)} if found else {}


def _one(query: Query, name: str) -> str:
    return query.get(name, [""])[0]


def _at(number: int) -> str:
    return f"2024-05-01T12:{number // 60:02d}:{number % 60:02d}Z"
