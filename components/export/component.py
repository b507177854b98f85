"""Export stage."""

from kfp import dsl

from baton.kfp.component import component


@component
def export(
    baton: str,
    model: dsl.Output[dsl.Model],
    address: dsl.OutputPath(str),  # type: ignore[valid-type]
) -> str:
    """Writes the trained model where others can load it.

    Args:
        baton: The run.
        model: The model card, or the main model's files where the recipe sets `export.artifact`.
        address: Where the main model is.

    Returns:
        The baton.
    """
    from baton import events
    from baton.export import export as artifact
    from baton.export.export import export_run
    from baton.runs.ref import RunRef
    from baton.runs.run import Run

    with events.stage("export"):
        run_uri = RunRef.read(baton).run_uri
        exported = export_run(run_uri)
        artifact.write_artifact(Run.open(run_uri), exported, model)
        with open(address, "w", encoding="utf-8") as file:
            file.write(exported.model_uri)
    return baton
