"""The manifest for KServe, written out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.errors import BatonError
from baton.export import kserve
from baton.recipe import load
from baton.recipe.recipe import Recipe

DIGEST = "0123456789abcdef" * 4


def _recipe(scratch_recipe: dict[str, Any], **export: Any) -> Recipe:
    document = {**scratch_recipe, "export": export, "resources": {"gpus": 2}}
    return load.validate(document, origin="test")


def test_every_setting_is_there(scratch_recipe: dict[str, Any], tmp_path: Path) -> None:
    serving = {"name": "docs", "namespace": "team", "service_account": "reader", "gpus": 1}
    recipe = _recipe(scratch_recipe, kserve=serving)
    kserve.write(recipe, str(tmp_path), model_uri="s3://b/m", size=20 * 2**30, run="a" * 70, digest=DIGEST)
    assert yaml.safe_load((tmp_path / "inferenceservice.yaml").read_text()) == {
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
    assert kserve.check(str(tmp_path)).words == "read back, serves s3://b/m"


def test_what_is_left_out_comes_from_the_recipe(scratch_recipe: dict[str, Any]) -> None:
    recipe = _recipe({**scratch_recipe, "name": "7b"})
    found = kserve.manifest(recipe, model_uri="oci://r/m:1", size=1, run="r", digest=DIGEST)
    assert found["metadata"]["name"] == "m-7b"
    assert "namespace" not in found["metadata"]
    assert found["spec"]["predictor"].keys() == {"model"}
    assert found["spec"]["predictor"]["model"]["resources"]["limits"]["nvidia.com/gpu"] == "2"


def test_labels_that_kubernetes_refuses_do_not_count(scratch_recipe: dict[str, Any], tmp_path: Path) -> None:
    kserve.write(_recipe(scratch_recipe), str(tmp_path), model_uri="s3://b/m", size=1, run="-r", digest=DIGEST)
    with pytest.raises(BatonError, match="no InferenceService with valid labels"):
        kserve.check(str(tmp_path))
