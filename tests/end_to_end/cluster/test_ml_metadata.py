"""The model of ML Metadata refuses what Kubeflow's launcher refuses, and hands artifacts on as they are read back."""

from __future__ import annotations

from typing import Any

import pytest
from kfp import dsl
from kfp.pipeline_spec import pipeline_spec_pb2 as ir


def _task(name: str, *outputs: str, **arguments: Any) -> Any:
    from tests.end_to_end.cluster.graph import Task

    component = ir.ComponentSpec()
    for output in outputs:
        component.output_definitions.artifacts[output].artifact_type.schema_title = "system.Dataset"
    return Task(name, component, None, None, None, arguments)  # type: ignore[arg-type]


def _made(uri: str = "s3://bucket/root/id/rows", **metadata: Any) -> dsl.Dataset:
    return dsl.Dataset(name="rows", uri=uri, metadata=metadata)


def test_an_artifact_is_given_on_as_it_is_read_back() -> None:
    from tests.end_to_end.cluster.ml_metadata import MetadataStore

    store = MetadataStore("s3://bucket/root/id")
    task = _task("split", "rows", baton="b")
    outputs = store.publish(store.begin(task), task, {"rows": _made(train=3, whole=True, address="a"), "Output": "b"})
    rows = outputs["rows"]
    assert rows.metadata == {"train": 3.0, "whole": 1, "address": "a", "display_name": "rows"}
    taker = store.begin(_task("count", rows=rows, side="train"))
    (artifact,) = store.artifacts
    assert (artifact.type, artifact.uri) == ("system.Dataset", "s3://bucket/root/id/rows")
    assert store.maker(artifact).custom_properties == {
        "display_name": "split", "inputs": {"baton": "b"}, "outputs": {"Output": "b"},
    }  # fmt: skip
    assert store.takers(artifact) == [taker]


@pytest.mark.parametrize("value", [None, float("nan"), float("inf")])
def test_what_the_launcher_cannot_store_is_refused(value: object) -> None:
    from tests.end_to_end.cluster.ml_metadata import MetadataStore

    store, task = MetadataStore("s3://bucket/root/id"), _task("split", "rows")
    with pytest.raises(ValueError, match="unsupported value"):
        store.publish(store.begin(task), task, {"rows": _made(loss=value)})


def test_an_artifact_elsewhere_than_below_the_runs_root_is_refused() -> None:
    from tests.end_to_end.cluster.ml_metadata import MetadataStore

    store, task = MetadataStore("s3://bucket/root/id"), _task("split", "rows")
    with pytest.raises(AssertionError, match="is not below"):
        store.publish(store.begin(task), task, {"rows": _made("s3://bucket/root/id2/rows")})
