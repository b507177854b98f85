"""Writes a run's report, or a failed run's page, to the store, Kubeflow and the tracking run.

`python -m baton.pages.publish RUN_URI [--anew]` reads the failure from standard input, in a process of its own: a
broken stage cannot keep it from writing the page.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from baton import events
from baton.checkpoint import seals
from baton.checkpoint.store import Checkpoint, LogEntry
from baton.errors import BatonError
from baton.pages import quality_page
from baton.pages.collect import RunReport, collect
from baton.recipe import load
from baton.runs import objects
from baton.runs.documents import RunInfo
from baton.runs.outcomes import ReportPage, RunFailure
from baton.runs.plan import Plan
from baton.runs.run import Run, now
from baton.tracking import tracking_run

logger = logging.getLogger("baton")


@seals.sealed(objects.REPORT)
def write_report(run_uri: str) -> dict[str, str]:
    """Publishes the run's report, and returns `report_uri` and the `html` for Kubeflow."""
    from baton.pages.run_page import render

    started = time.time()
    run = Run.open(run_uri)
    report = collect(run)
    uri, html = publish(run, report, "FINISHED")
    run.write(ReportPage(report_uri=uri, seconds=time.time() - started))
    quality_page.refresh(run)
    if ledger := seals.ledger_of(run):
        ledger.read_notes()
    events.emit(events.ReportWritten(uri=uri))
    # Kubeflow gets texts of people and models only where the recipe allows it.
    return {"report_uri": uri, "html": html if run.recipe().tracking.cards == "rows" else render(without_texts(report))}


def write_progress(run_uri: str, *, is_stopped: bool = False, is_local: bool = False) -> None:
    """Writes the page of a run that has not ended, from all its documents; no stage fails for its page."""
    from baton.pages.run_page import render

    run = Run.open(run_uri)
    try:
        if not is_local and run.read(RunFailure):
            return  # the failed run's own page stays
        report = collect(run, as_of=now(), is_stopped=is_stopped, is_local=is_local)
        if report.evaluation is None:  # the page of a run that has ended stays
            run.storage.write(run.path("report.html"), render(report).encode())
    except (BatonError, FileNotFoundError) as error:  # retention in parallel may be faster
        logger.warning("the run's page is not up to date: %s", error)


def progress_page(run: Run, plan: Plan, checkpoint: Checkpoint | None, log: Sequence[LogEntry]) -> str:
    """Returns a chunk's page for Kubeflow, by as many reads for the last chunk as for the first: the next one waits.

    No chunk fails for its page: documents that cannot be read are left out.
    """
    from baton.pages.run_page import render

    report = replace(_bare(run), as_of=now())
    try:
        recipe = run.recipe()
        report = replace(
            report,
            created=run.need(RunInfo).created,
            recipe_name=recipe.name,
            recipe_yaml=load.to_yaml(recipe),
            method=recipe.training.method,
            plan=plan,
            newest=checkpoint.meta if checkpoint else None,
            log=log,
            skips=run.skips(),
        )
    except BatonError as error:
        logger.warning("the chunk's page lacks its figures: %s", error)
    return render(report)


class LivePage:
    """Keeps the page of a run on this machine up to date, from one committed checkpoint to another."""

    SHARE = 0.02  # of the time, at most, goes into the page

    def __init__(self, run_uri: str) -> None:
        self._run_uri = run_uri
        self._next = 0.0

    def heard(self, event: events.Event) -> None:
        if isinstance(event, events.CheckpointCommitted):
            self._run_uri = event.uri.rpartition("/checkpoints/")[0]  # a later phase has a run of its own
            if time.monotonic() >= self._next:
                began = time.monotonic()
                self.write()
                self._next = time.monotonic() + (time.monotonic() - began) / self.SHARE

    def write(self, *, is_stopped: bool = False) -> None:
        with contextlib.suppress(BatonError):  # training goes on, and ends with a page
            if Run.open(self._run_uri).read(RunInfo):
                write_progress(self._run_uri, is_stopped=is_stopped, is_local=True)


def publish(run: Run, report: RunReport, status: tracking_run.Ended) -> tuple[str, str]:
    """Renders a report into the store, ends the tracking run with it, and returns address and page."""
    from baton.pages.run_page import render

    if report.newest and report.newest.fingerprint.device not in ("", "cpu"):
        report = replace(report, gpu_use=tracking_run.gpu_use(run))
    html = render(report)
    run.storage.write(run.path("report.html"), html.encode())
    documents = {"report.html": html}
    if not report.is_bare:
        proof = [{**entry.part.to_json(), "gone": entry.gone} for entry in report.proof]
        documents["recipe.resolved.yaml"] = load.to_yaml(run.resolved_recipe())
        documents["proof.json"] = json.dumps({"run": run.uri, "checkpoints": proof}, indent=1)
    tracking_run.close(run, status, documents)
    if (warnings := run.warnings()) != list(report.warnings):  # MLflow did not take it
        html = render(replace(report, warnings=warnings))
        run.storage.write(run.path("report.html"), html.encode())
    return run.storage.uri(run.path("report.html")), html


def without_texts(report: RunReport) -> RunReport:
    evaluation = report.evaluation and report.evaluation.model_copy(update={"samples": []})
    examples = replace(report.examples, shown=())
    return replace(report, evaluation=evaluation, examples=examples, rendered=quality_page.without_row(report.rendered))


def _bare(run: Run) -> RunReport:
    return RunReport(run=run.name, uri=run.uri, created="", recipe_name="", recipe_yaml="", method="sft")


def publish_failure(run: Run, failure: RunFailure) -> str:
    """Keeps a run's failure, publishes the page with it, and returns the page's address."""
    run.write(failure)  # first: the reason is kept, whatever fails below
    # For the case that nothing else can be read: the stage's fault may be in the way here too.
    report = replace(_bare(run), created=failure.at, failure=failure)
    try:
        if run.read(RunInfo):
            report = collect(run, failure)
    except Exception as error:
        logger.warning("the report has nothing but why the run failed: %s", error)
    return publish(run, report, "KILLED" if failure.is_cancelled else "FAILED")[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Keep why a run failed.")
    parser.add_argument("run_uri")
    parser.add_argument("--anew", action="store_true", help="also where the store has no such run yet")
    given = parser.parse_args()
    events.setup_logging()
    with contextlib.suppress(OSError):  # where memory is short, the kernel ends this process and not the stage
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    try:
        run = Run.open(given.run_uri)
        failure = RunFailure.read(sys.stdin.buffer.read(), "standard input")
        # A run that has ended does not fail because its data cannot be read once more.
        has_ended = failure.stage == "data split" and run.read(ReportPage) is not None
        if given.anew or (run.read(RunInfo) and not has_ended):
            sys.stdout.write(publish_failure(run, failure) + "\n")
    except BatonError as error:
        sys.exit(str(error))
