"""MLflow's own client, which gives up soon."""

from __future__ import annotations

import logging
import os
import re
from typing import Any

TIMEOUT = "5"
"""Seconds a call to a tracking server may take, and it is tried twice: training matters more."""
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
    import mlflow

    mlflow.set_tracking_uri(uri)
    return mlflow.MlflowClient(uri)


def without_credentials(text: str) -> str:
    """Returns a text without names and passwords in its addresses."""
    return CREDENTIALS.sub("//", text)
