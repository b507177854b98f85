"""`metadata.yaml` of each component, as Kubeflow's component repositories have it, says what the component takes."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

COMPONENTS = Path(__file__).parents[1] / "components"
ROOMS = sorted(path.parent.name for path in COMPONENTS.glob("*/component.py"))


def metadata(room: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((COMPONENTS / room / "metadata.yaml").read_text(encoding="utf-8"))
    return found


def test_every_component_has_one() -> None:
    assert {path.parent.name for path in COMPONENTS.glob("*/metadata.yaml")} == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_name_inputs_and_outputs_are_the_components(room: str) -> None:
    about = metadata(room)
    spec = getattr(import_module(f"components.{room}.component"), about["name"]).component_spec
    assert spec.name.replace("-", "_") == about["name"]
    assert set(about["inputs"]) == set(spec.inputs or {})
    assert set(about["outputs"]) == set(spec.outputs or {})
    assert all(about["inputs"].values())
    assert all(about["outputs"].values())
