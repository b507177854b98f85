"""MLflow's own client, imported without what tracking has no use for, and giving up soon."""

from __future__ import annotations

import logging
import os
import re
from typing import Any

from baton.components.shared.core import deferring
from baton.components.shared.core.deferring import Contents

TIMEOUT = "5"
"""Seconds a call to a tracking server may take, and it is tried twice: training matters more."""
UNUSED: deferring.Packages = {name: Contents() for name in ("fastapi", "mlflow.genai", "pandas", "scipy", "starlette")}
"""What importing MLflow imports too, and a client of a tracking server may never use: half of the time it takes."""
CREDENTIALS = re.compile(r"//[^/\s@]+@")
"""Name and password in an address."""


def give_up_soon(timeout: str = TIMEOUT, retries: str = "1") -> None:
    """Bounds the requests to a server from here on, unless the environment does."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", timeout)
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", retries)


def connect(uri: str, timeout: str = TIMEOUT, retries: str = "1") -> Any:
    """Returns a client of a tracking server or database that gives up soon."""
    give_up_soon(timeout, retries)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    deferring.defer(UNUSED)
    import mlflow

    mlflow.set_tracking_uri(uri)
    return mlflow.MlflowClient(uri)


def without_credentials(text: str) -> str:
    """Returns a text without names and passwords in its addresses."""
    return CREDENTIALS.sub("//", text)
