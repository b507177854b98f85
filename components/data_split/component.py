"""Data split stage."""

from kfp import dsl


@dsl.component(base_image="python:3.11", install_kfp_package=False)
def data_split(
    recipe: str,
    run_name: str,
    new_name: str,
    store: str,
    source: str,
    learning_rate: float,
    epochs: float,
    max_steps: int,
    phase: str,
    start_from: str,
    metrics: dsl.Output[dsl.Metrics],
    page: dsl.Output[dsl.HTML],
) -> str:
    """Starts a run and splits its rows into train, eval and test by their content.

    Args:
        recipe: The recipe as JSON.
        run_name: Name of the run; one that exists goes on where it stopped. Empty: a new one.
        new_name: Name of a new run.
        store: Folder or bucket for runs and data.
        source: Rows to learn from; several joined by a comma.
        learning_rate: Peak learning rate.
        epochs: Passes over the rows; 0 where max_steps counts.
        max_steps: Optimizer steps; 0 where epochs counts.
        phase: Name of one training of several, added to the run's; empty where there is one.
        start_from: Address of the model of the phase before; empty for the recipe's own start.
        metrics: Counts of rows.
        page: What was found in the rows.

    Returns:
        Address of the run.
    """
    from components.data_split.split import split_data
    from components.shared import events, sources

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
        found = split_data(recipe, "-".join(filter(None, [run_name or new_name, phase])), changes)
        for name in ("rows", "train", "eval", "test", "rejected"):
            metrics.log_metric(name, found[name])
        with open(page.path, "w", encoding="utf-8") as file:
            file.write(found["page"])
    return found["run_uri"]
