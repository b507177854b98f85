"""Report stage."""

from kfp import dsl

from baton.kfp.component import component


@component
def report(baton: str, report: dsl.Output[dsl.HTML]):
    """Shows the run on one page: loss, time, the resume proof, samples, the recipe.

    Args:
        baton: The run.
        report: The page.
    """
    from baton import events
    from baton.pages.publish import write_report
    from baton.runs.ref import RunRef

    with events.stage("report"), open(report.path, "w", encoding="utf-8") as file:
        file.write(write_report(RunRef.read(baton).run_uri)["html"])
