"""Export stage."""

from kfp import dsl


@dsl.component(base_image="python:3.11", install_kfp_package=False)
def export(run_uri: str, evaluation: str, metrics: dsl.Output[dsl.Metrics]) -> str:
    """Writes the trained model where others can load it.

    Args:
        run_uri: Address of the run.
        evaluation: What this stage waits for: the evaluation.
        metrics: Size of the main model, and the number of formats.

    Returns:
        Address of the main model.
    """
    from baton.components.export.export import export_run
    from baton.components.shared.core import events

    with events.stage("export"):
        exported = export_run(run_uri)
        metrics.log_metric("bytes", exported.bytes)
        metrics.log_metric("formats", len(exported.exports))
    return exported.model_uri
