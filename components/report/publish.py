"""Renders a run's report into the store and for Kubeflow."""

from __future__ import annotations

import json
import time
from dataclasses import replace

from baton.components.report.collect import collect
from baton.components.report.view import Report
from baton.components.shared.core import events
from baton.components.shared.pages import rendered
from baton.components.shared.recipe import recipe_file
from baton.components.shared.runs import tracking
from baton.components.shared.runs.documents.outcome import ReportPage
from baton.components.shared.runs.run import Run


def write_report(run_uri: str) -> dict[str, str]:
    """Renders the run's report into the store and hands it to the tracking run.

    Returns:
        `report_uri` and the `html` as Kubeflow may have it: without what people and models wrote, where the recipe
        wants that.
    """
    from baton.components.report.page import render

    started = time.time()
    run = Run.open(run_uri)
    report = collect(run)
    uri, html = publish(run, report, "FINISHED")
    run.write(ReportPage(report_uri=uri, seconds=time.time() - started))
    events.emit(events.Report(uri=uri))
    return {"report_uri": uri, "html": html if run.recipe().tracking.cards == "rows" else render(counts(report))}


def publish(run: Run, report: Report, status: tracking.Ended) -> tuple[str, str]:
    """Renders a report into the store and ends the tracking run with it.

    Args:
        run: The run.
        report: Its report.
        status: How it ended.

    Returns:
        Address of the page, and the page.
    """
    from baton.components.report.page import render

    html = render(report)
    run.storage.write(run.path("report.html"), html.encode())
    tracking.close(run, status, {"report.html": html, **_documents(run, report)})
    if (warnings := run.warnings()) != list(report.warnings):  # MLflow did not take it
        html = render(replace(report, warnings=warnings))
        run.storage.write(run.path("report.html"), html.encode())
    return run.storage.uri(run.path("report.html")), html


def _documents(run: Run, report: Report) -> dict[str, str]:
    """Returns what a tracking run keeps beside the report: the whole recipe and the proof, as far as there are any."""
    if report.is_bare:
        return {}
    proof = [{**entry.part.to_json(), "gone": entry.gone} for entry in report.proof]
    return {
        "recipe.resolved.yaml": recipe_file.to_yaml(run.resolved_recipe()),
        "proof.json": json.dumps({"run": run.uri, "checkpoints": proof}, indent=1),
    }


def counts(report: Report) -> Report:
    """Returns a report without samples and examples."""
    evaluation = report.evaluation and report.evaluation.model_copy(update={"samples": []})
    examples = replace(report.examples, shown=())
    return replace(report, evaluation=evaluation, examples=examples, rendered=rendered.told(report.rendered))
