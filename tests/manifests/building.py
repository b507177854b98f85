"""What `kubectl apply -k` would send."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, NoReturn

import pytest
import yaml

K8S = Path(__file__).parents[2] / "k8s"
OVERLAYS = ("local", "spot", "multi-tenant")
CUSTOM_KINDS = {"ExternalSecret", "PodMonitor", "PrometheusRule", "SecretStore"}
"""Kinds that Kubernetes does not know by itself."""


def _cannot(reason: str) -> NoReturn:
    """Skips the test; on CI, where everything is to be there, fails it."""
    pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)


def require(name: str, package: str) -> str:
    """Returns a program's path; there is no test without it."""
    found = shutil.which(name)
    if found is None:
        _cannot(f"{name} is not installed ({package})")
    return found


@functools.cache
def built(folder: str) -> str:
    """Returns the manifests of a folder of `k8s/`, as kustomize prints them."""
    command = ["kustomize", "build"]
    if shutil.which("kustomize") is None:
        kubectl = require("kubectl", "https://kubernetes.io/docs/tasks/tools, or kustomize")
        version = subprocess.run([kubectl, "version", "--client", "-o", "json"], capture_output=True, text=True).stdout
        minor = int(re.sub(r"\D.*", "", json.loads(version)["clientVersion"]["minor"]))
        if minor < 21:
            _cannot(f"kubectl 1.{minor} brings a kustomize that knows no components; 1.21 does, and kustomize 4")
        command = [kubectl, "kustomize"]
    return subprocess.run([*command, str(K8S / folder)], capture_output=True, text=True, check=True).stdout


@functools.cache
def objects(overlay: str) -> list[dict[str, Any]]:
    """Returns the objects of an overlay."""
    return [document for document in yaml.load_all(built(f"overlays/{overlay}"), yaml.CSafeLoader) if document]


def named(overlay: str, kind: str, name: str) -> dict[str, Any]:
    """Returns one object of an overlay."""
    (found,) = (x for x in objects(overlay) if x["kind"] == kind and x["metadata"]["name"] == name)
    return found


def pods(overlay: str) -> dict[str, dict[str, Any]]:
    """Returns the pod templates of an overlay, by the name of what makes them."""
    return {x["metadata"]["name"]: x["spec"]["template"] for x in objects(overlay) if "template" in x.get("spec", {})}
