"""A sweep's best trial, judged and exported; and whether the data of a trial is there."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable

from baton.components.shared.core.events import Event
from baton.components.shared.models import loading
from baton.components.shared.runs.documents.data import Tokens
from baton.components.shared.runs.plan import Plan
from baton.components.shared.runs.run import Run
from baton.components.shared.store import bundles
from baton.pipelines.compiling.package import compile_checked
from baton.pipelines.local import engine
from baton.pipelines.sweep import winners


def hand_out(run: Run, sweep: str, on_event: Callable[[Event], None]) -> None:
    """Runs what comes after the last chunk of the best trial, as the compiled pipeline does.

    Args:
        run: The trial's run.
        sweep: Name of the sweep.
        on_event: Called with each event of a stage.
    """
    log_path = os.path.join(loading.cache_dir(), "logs", f"{sweep}.log")
    os.makedirs(os.path.dirname(log_path), exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="baton-compile-") as folder:
        package = os.path.join(folder, "winner.yaml")
        compile_checked(winners(run.recipe()), package)
        engine.run(package, {"run_uri": run.uri}, on_event=on_event, log_path=log_path)


def is_prepared(run: Run) -> bool:
    """Tells whether the data that was made in a run is still there."""
    tokens = run.read(Tokens)
    if run.read(Plan) is None or tokens is None:
        return False
    return bundles.usable_manifest(run.storage, tokens.prefix) is not None
