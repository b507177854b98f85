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
    from baton.components.report.collect import write_report
    from baton.components.shared.core import events
    from baton.components.shared.runs.baton import Baton

    with events.stage("report"), open(report.path, "w", encoding="utf-8") as file:
        file.write(write_report(Baton.read(baton).run_uri)["html"])
