"""Report stage."""

from kfp import dsl

from baton.components.declaring import stage


@stage
def report(baton: str, report: dsl.Output[dsl.HTML]):
    """Shows the run on one page: loss, time, the resume proof, samples, the recipe.

    Args:
        baton: The run.
        report: The page.
    """
    from baton.components.report.publish import write_report
    from baton.components.shared.core import events
    from baton.components.shared.pages import quality_page
    from baton.components.shared.runs.baton import Baton
    from baton.components.shared.runs.run import Run

    with events.stage("report"), open(report.path, "w", encoding="utf-8") as file:
        run_uri = Baton.read(baton).run_uri
        file.write(write_report(run_uri)["html"])
        quality_page.refresh(Run.open(run_uri))
