"""What is left with a run that ends before its end: why, and a page that says so."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys

from baton.components.shared.core.errors import BatonError
from baton.components.shared.runs.documents.outcome import Failure
from baton.components.shared.runs.run import Run
from baton.components.shared.store.storage import PATIENCE

logger = logging.getLogger("baton")

MOST_S = 60.0
"""Seconds that it may take in all; it takes about four."""
STORE_S = 10
"""Seconds for which a store that does not answer is asked."""
_PAGE = "baton.components.report.failed"


def leave(run_uri: str, failure: Failure, *, anew: bool = False) -> str | None:
    """Keeps with a run why it failed, writes its page and ends its tracking run, in a process of its own.

    Args:
        run_uri: Address of the run.
        failure: Why.
        anew: Also where the store has no such run yet.

    Returns:
        Address of the page, None where there is no such run.

    Raises:
        BatonError: it could not be written: the store cannot be reached from here, or it took too long.
    """
    command = [sys.executable, "-m", _PAGE, run_uri, *(["--anew"] if anew else [])]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(failure.to_json()),
            capture_output=True,
            text=True,
            timeout=MOST_S,
            env={**os.environ, PATIENCE: str(STORE_S)},
            check=False,
        )
    except (subprocess.TimeoutExpired, OSError) as error:
        raise BatonError(f"why the run failed could not be kept: {error}.") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise BatonError(f"why the run failed could not be kept: {lines[-1]}")
    return done.stdout.strip() or None


def forget(run: Run, stage: str | None) -> None:
    """Removes why a run failed, once its stage has got past it.

    Args:
        run: The run.
        stage: Name of the stage; None where the run begins again, or has come to its end.
    """
    run.storage.patience = STORE_S
    try:
        failure = run.read(Failure)
        if failure and stage in (None, failure.stage):
            run.remove(Failure)
    except BatonError as error:
        logger.warning("why run %s failed before is still told: %s", run.name, error)
