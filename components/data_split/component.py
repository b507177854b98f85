"""Data split stage."""

from kfp import dsl

from baton.components.declaring import stage


@stage
def data_split(
    recipe: str,
    run_name: str,
    new_name: str,
    job_id: str,
    store: str,
    source: str,
    learning_rate: float,
    epochs: float,
    max_steps: int,
    phase: str,
    start_from: str,
    quality: dsl.Output[dsl.HTML],
) -> str:
    """Starts a run and splits its rows into train, eval and test by their content.

    Args:
        recipe: The recipe as JSON.
        run_name: Name of the run; one that exists resumes. Empty: a new one.
        new_name: What the name of a new run begins with.
        job_id: What it ends in: the id of the pipeline's run.
        store: Folder or bucket for runs and data.
        source: Rows to learn from; several joined by a comma.
        learning_rate: Peak learning rate.
        epochs: Passes over the rows; 0 where max_steps counts.
        max_steps: Optimizer steps; 0 where epochs counts.
        phase: Name of one training of several, added to the run's; empty where there is one.
        start_from: Address of the model of the phase before; empty for the recipe's own start.
        quality: What was found in the rows.

    Returns:
        The baton.
    """
    from baton.components.data_split import losses
    from baton.components.data_split.split import split_data
    from baton.components.shared.core import events
    from baton.components.shared.runs.run import Run, chosen_name
    from baton.components.shared.store import sources

    with events.stage("data split"):
        changes = {
            "store.uri": store,
            "data.source": sources.parse(source),
            "training.learning_rate": learning_rate,
            "training.epochs": epochs or None,
            "training.max_steps": max_steps or None,
        }
        if start_from:
            changes |= {"model.base": start_from}
        split = split_data(recipe, chosen_name(run_name, new_name, job_id, phase), changes)
        with open(quality.path, "w", encoding="utf-8") as file:
            file.write(split["page"])
        return str(losses.baton(Run.open(split["run_uri"])))
