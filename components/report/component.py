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
    from baton.pages import quality_page
    from baton.pages.publish import write_report
    from baton.runs.ref import RunRef
    from baton.runs.run import Run

    with events.stage("report"), open(report.path, "w", encoding="utf-8") as file:
        run_uri = RunRef.read(baton).run_uri
        file.write(write_report(run_uri)["html"])
        quality_page.refresh(Run.open(run_uri))
