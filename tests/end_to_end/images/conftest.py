"""The engine of `DOCKER_HOST` and the image that `make images` built; tests that need them skip without."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def engine() -> Iterator[Any]:
    """Docker's client."""
    if not os.environ.get("DOCKER_HOST"):
        pytest.skip("DOCKER_HOST is not set")
    client = docker.from_env()
    yield client
    client.close()


@pytest.fixture(scope="session")
def image(engine: Any) -> str:
    """The CPU image, by its tag: `BATON_IMAGE`, or the one built last."""
    built = ROOT / "build" / "images" / "cpu.json"
    name = os.environ.get("BATON_IMAGE")
    if not name and built.exists():
        name = json.loads(built.read_text())["image"]
    if not name:
        pytest.skip("there is no image: neither BATON_IMAGE nor build/images/cpu.json (make images)")
    try:
        engine.images.get(name)
    except docker.errors.ImageNotFound:
        pytest.skip(f"this engine has no image {name}")
    return name
