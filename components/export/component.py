"""Export stage."""

from kfp import dsl

from baton.components.declaring import stage


@stage
def export(
    baton: str,
    model: dsl.Output[dsl.Model],
    address: dsl.OutputPath(str),  # type: ignore[valid-type]
) -> str:
    """Writes the trained model where others can load it.

    Args:
        baton: The run.
        model: The model card, or the main model's files where the recipe says `export.artifact`.
        address: Where the main model is.

    Returns:
        The baton.
    """
    from baton.components.export import artifact
    from baton.components.export.export import export_run
    from baton.components.shared.core import events
    from baton.components.shared.runs.baton import Baton
    from baton.components.shared.runs.run import Run

    with events.stage("export"):
        run_uri = Baton.read(baton).run_uri
        exported = export_run(run_uri)
        artifact.leave(Run.open(run_uri), exported, model)
        with open(address, "w", encoding="utf-8") as file:
            file.write(exported.model_uri)
    return baton
