"""Learning-rate finder stage."""

from kfp import dsl

from baton.kfp.component import component


@component
def lr_find(
    baton: str,
    curve: dsl.Output[dsl.HTML],
    learning_rate: dsl.OutputPath(float),  # type: ignore[valid-type]
) -> str:
    """Tries learning rates on a model that is thrown away, and notes the one found with the run.

    Args:
        baton: The run.
        curve: Loss by learning rate.
        learning_rate: The learning rate found.

    Returns:
        The baton.
    """
    from baton import events

    with events.stage("learning-rate finder"):
        from baton.runs.ref import RunRef
        from baton.train.lr_find import find

        finding = find(RunRef.read(baton).run_uri)
        for path, text in ((curve.path, finding.html), (learning_rate, str(finding.learning_rate))):
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
    return baton
