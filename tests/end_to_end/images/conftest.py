"""The engine of `DOCKER_HOST` or the default socket, and the image of `make images`; tests skip without them."""

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
    try:
        client = docker.from_env()
        client.ping()
    except docker.errors.DockerException:
        pytest.skip("no container engine answers at DOCKER_HOST or the default socket")
    yield client
    client.close()


@pytest.fixture(scope="session")
def image(engine: Any) -> str:
    """The CPU image, by its tag: `BATON_IMAGE`, or the one built last."""
    return _built(engine, "cpu", "BATON_IMAGE")


@pytest.fixture(scope="session")
def gpu_image(engine: Any) -> str:
    """The GPU image, by its tag: `BATON_GPU_IMAGE`, or the one built last."""
    return _built(engine, "gpu", "BATON_GPU_IMAGE")


def _built(engine: Any, device: str, variable: str) -> str:
    built = ROOT / "build" / "images" / f"{device}.json"
    name = os.environ.get(variable)
    if not name and built.exists():
        name = json.loads(built.read_text())["image"]
    if not name:
        pytest.skip(f"there is no image: neither {variable} nor build/images/{device}.json (make images)")
    try:
        engine.images.get(name)
    except docker.errors.ImageNotFound:
        pytest.skip(f"this engine has no image {name}")
    return name
