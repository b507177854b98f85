"""The page of a run that failed: `python -m baton.components.report.failed RUN_URI [--anew]`.

Why is read from standard input. It is a process of its own, which `shared.runs.failures` starts and ends: what a stage
has failed of, memory, a device, a store that does not answer, must not keep it from saying so.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from pathlib import Path

from baton.components.report.collect import collect
from baton.components.report.publish import publish
from baton.components.report.view import Report
from baton.components.shared.core import events
from baton.components.shared.core.errors import BatonError
from baton.components.shared.runs.documents.data import RunHead
from baton.components.shared.runs.documents.outcome import Failure, ReportPage
from baton.components.shared.runs.run import Run

logger = logging.getLogger("baton")


def leave(run: Run, failure: Failure) -> str:
    """Keeps why a run failed, shows it with what there is on the run's page, and ends the tracking run.

    Returns:
        Address of the page.
    """
    run.write(failure)
    try:
        report = collect(run, failure) if run.read(RunHead) else _bare(run, failure)
    except Exception as error:  # what the stage has failed of may be what lies there
        logger.warning("the report has nothing but why the run failed: %s", error)
        report = _bare(run, failure)
    return publish(run, report, "KILLED" if failure.is_cancelled else "FAILED")[0]


def _bare(run: Run, failure: Failure) -> Report:
    """Returns the report of a run of which nothing is known but why it failed."""
    return Report(
        run=run.name, uri=run.uri, created=failure.at, recipe_name="", recipe_yaml="", method="sft", failure=failure
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Keep why a run failed.")
    parser.add_argument("run_uri")
    parser.add_argument("--anew", action="store_true", help="also where the store has no such run yet")
    given = parser.parse_args()
    events.setup_logging()
    with contextlib.suppress(OSError):  # were there too little memory for both, the stage would be the larger one
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    try:
        run = Run.open(given.run_uri)
        failure = Failure.read(sys.stdin.buffer.read(), "standard input")
        # A run that has come to its end is none that fails where its data cannot be read once more.
        has_ended = failure.stage == "data split" and run.read(ReportPage) is not None
        if given.anew or (run.read(RunHead) and not has_ended):
            sys.stdout.write(leave(run, failure) + "\n")
    except BatonError as error:
        sys.exit(str(error))
