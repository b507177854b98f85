"""A cluster's API, and a stage that does not wait for long."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from baton.train import trainjob
from tests.train.trainjob.job_api import JobApi


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks often, and gives up soon."""
    for name, seconds in {"POLL": 0.05, "IMAGE_PATIENCE": 0.5, "PATIENCE": 0.3, "LAST_LINES_WAIT": 2.0}.items():
        monkeypatch.setattr(trainjob, name, seconds)


@pytest.fixture
def api() -> Iterator[JobApi]:
    """A cluster's API."""
    with JobApi() as found:
        yield found
