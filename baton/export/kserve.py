"""A manifest that serves the model: KServe's `InferenceService` with its Hugging Face runtime."""

from __future__ import annotations

import math
import re

import yaml

from baton.errors import BatonError
from baton.recipe.recipe import Recipe
from baton.runs.outcomes import ExportCheck

FILE = "inferenceservice.yaml"
LABEL = 63
"""Characters that a label's value may have."""
LABELS = re.compile(rf"[A-Za-z0-9]([\w.-]{{0,{LABEL - 2}}}[A-Za-z0-9])?")
ROOM = 4
"""GiB that a server takes beside the weights, which are counted one and a half times."""


def write(recipe: Recipe, target: str, *, model_uri: str, size: int, run: str, digest: str) -> None:
    """Writes the manifest.

    Args:
        recipe: Names service, namespace, account and GPUs.
        target: Folder to write to.
        model_uri: Address that the model is served from.
        size: Bytes of the model.
        run: Name of the run.
        digest: State digest of the checkpoint.
    """
    with open(f"{target}/{FILE}", "w", encoding="utf-8") as file:
        yaml.safe_dump(manifest(recipe, model_uri=model_uri, size=size, run=run, digest=digest), file, sort_keys=False)


def manifest(recipe: Recipe, *, model_uri: str, size: int, run: str, digest: str) -> dict[str, object]:
    """Returns the `InferenceService`; see `write` for the arguments."""
    spec = recipe.export.kserve
    gpus = recipe.resources.gpus if spec.gpus is None else spec.gpus
    name = spec.name or recipe.name
    arguments = [f"--model_name={name}"]
    if recipe.training.spec.scores:
        arguments.append("--task=sequence_classification")
    if recipe.model.trust_remote_code:
        arguments.append("--trust_remote_code")
    memory = f"{math.ceil(size * 1.5 / 2**30) + ROOM}Gi"
    accelerators = {recipe.resources.accelerator: str(gpus)} if gpus else {}
    wanted = {"cpu": "1", "memory": memory, **accelerators}
    model = {
        "modelFormat": {"name": "huggingface"},
        "args": arguments,
        "storageUri": model_uri,
        "resources": {"requests": wanted, "limits": {"memory": memory, **accelerators}},
    }
    account = {"serviceAccountName": spec.service_account} if spec.service_account else {}
    return {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {
            "name": name if name[0].isalpha() else f"m-{name}",  # a service's name begins with a letter
            **({"namespace": spec.namespace} if spec.namespace else {}),
            "labels": {
                "app.kubernetes.io/managed-by": "baton",
                "baton/run": run[:LABEL].rstrip("-"),
                "baton/digest": digest[:LABEL],
            },
            "annotations": {"baton/run": run, "baton/digest": digest},
        },
        "spec": {"predictor": {**account, "model": model}},
    }


def check(folder: str) -> ExportCheck:
    """Reads the manifest back.

    Raises:
        BatonError: it is not what KServe takes.
    """
    with open(f"{folder}/{FILE}", encoding="utf-8") as file:
        document = yaml.safe_load(file)
    uri = document["spec"]["predictor"]["model"]["storageUri"]
    values = document["metadata"]["labels"].values()
    if document["kind"] != "InferenceService" or not all(LABELS.fullmatch(value) for value in values):
        raise BatonError(f"the kserve export is no InferenceService with valid labels: {document['metadata']}.")
    return ExportCheck(library="yaml", words=f"read back, serves {uri}")
