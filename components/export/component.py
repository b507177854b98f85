"""Export stage."""

from kfp import dsl

from baton.components.declaring import stage


@stage
def export(baton: str, address: dsl.OutputPath(str)) -> str:  # type: ignore[valid-type]
    """Writes the trained model where others can load it.

    Args:
        baton: The run.
        address: Where the main model is.

    Returns:
        The baton.
    """
    from baton.components.export.export import export_run
    from baton.components.shared.core import events
    from baton.components.shared.runs.baton import Baton

    with events.stage("export"):
        exported = export_run(Baton.read(baton).run_uri)
        with open(address, "w", encoding="utf-8") as file:
            file.write(exported.model_uri)
    return baton
