"""Report stage."""

from kfp import dsl


@dsl.component(base_image="python:3.11", install_kfp_package=False)
def report(run_uri: str, outcome: str, page: dsl.Output[dsl.HTML]) -> str:
    """Shows the run on one page: loss, time, the resume proof, samples, the recipe.

    Args:
        run_uri: Address of the run.
        outcome: What this stage waits for: the export, or the rejection.
        page: The report.

    Returns:
        Address of the report.
    """
    from baton.components.report.collect import write_report
    from baton.components.shared.core import events

    with events.stage("report"):
        written = write_report(run_uri)
        with open(page.path, "w", encoding="utf-8") as file:
            file.write(written["html"])
    return written["report_uri"]
