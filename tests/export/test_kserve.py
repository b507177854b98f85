"""The manifest for KServe, written out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from baton.errors import BatonError
from baton.export import formats
from baton.recipe import load
from baton.recipe.recipe import Recipe

DIGEST = "0123456789abcdef" * 4


def _recipe(scratch_recipe: dict[str, Any], **export: Any) -> Recipe:
    document = {**scratch_recipe, "export": export, "resources": {"gpus": 2}}
    return load.validate(document, origin="test")


def test_every_setting_is_there(scratch_recipe: dict[str, Any]) -> None:
    serving = {"name": "docs", "namespace": "team", "service_account": "reader", "gpus": 1}
    recipe = _recipe(scratch_recipe, kserve=serving)
    found = formats.inference_service(recipe, model_uri="s3://b/m", size=20 * 2**30, run="a" * 70, digest=DIGEST)
    assert found == {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {
            "name": "docs",
            "namespace": "team",
            "labels": {
                "app.kubernetes.io/managed-by": "baton",
                "baton/run": "a" * 63,
                "baton/digest": DIGEST[:63],
            },
            "annotations": {"baton/run": "a" * 70, "baton/digest": DIGEST},
        },
        "spec": {
            "predictor": {
                "serviceAccountName": "reader",
                "model": {
                    "modelFormat": {"name": "huggingface"},
                    "args": ["--model_name=docs"],
                    "storageUri": "s3://b/m",
                    "resources": {
                        "requests": {"cpu": "1", "memory": "34Gi", "nvidia.com/gpu": "1"},  # 1.5 × 20 + 4
                        "limits": {"memory": "34Gi", "nvidia.com/gpu": "1"},
                    },
                },
            }
        },
    }
    assert formats.check_inference_service(found).words == "read back, serves s3://b/m"


def test_what_is_left_out_comes_from_the_recipe(scratch_recipe: dict[str, Any]) -> None:
    recipe = _recipe({**scratch_recipe, "name": "7b"})
    found = formats.inference_service(recipe, model_uri="oci://r/m:1", size=1, run="r", digest=DIGEST)
    assert found["metadata"]["name"] == "m-7b"
    assert "namespace" not in found["metadata"]
    assert found["spec"]["predictor"].keys() == {"model"}
    assert found["spec"]["predictor"]["model"]["resources"]["limits"]["nvidia.com/gpu"] == "2"


def test_labels_that_kubernetes_refuses_do_not_count(scratch_recipe: dict[str, Any]) -> None:
    found = formats.inference_service(_recipe(scratch_recipe), model_uri="s3://b/m", size=1, run="-r", digest=DIGEST)
    with pytest.raises(BatonError, match="not an InferenceService with valid labels"):
        formats.check_inference_service(found)
