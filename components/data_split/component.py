"""Data split stage."""

from kfp import dsl

from baton.kfp.component import component


@component
def data_split(
    recipe: str,
    run_name: str,
    new_name: str,
    job_id: str,
    store: str,
    rows: dsl.Output[dsl.Dataset],
    quality: dsl.Output[dsl.HTML],
    source: str = "",
    base_model: str = "",
    seed: int = -1,
    batch_size: int = 0,
    learning_rate: float = 0.0,
    epochs: float = 0.0,
    max_steps: int = 0,
    overrides: dict = {},  # noqa: B006 - kfp reads it
    phase: str = "",
    start_from: str = "",
) -> str:
    """Starts a run and splits its rows into train, eval and test by their content.

    Args:
        recipe: The whole recipe as JSON, packed; this and every other text as `baton.runs.ref` has it.
        run_name: Name of the run; one that exists resumes. Empty: a new one.
        new_name: What the name of a new run begins with.
        job_id: What it ends in: the id of the pipeline's run.
        store: Folder or bucket for runs and data.
        rows: The first rows of each side, counts, and where all of them are.
        quality: Findings in the rows.
        source: Rows to learn from; several joined by a comma. The recipe's where this and those below are left out.
        base_model: What training starts from.
        seed: Decides every random draw.
        batch_size: Rows per optimizer step.
        learning_rate: Peak learning rate.
        epochs: Passes over the rows; 0 where max_steps counts.
        max_steps: Optimizer steps; 0 where epochs counts.
        overrides: Other settings of the recipe, by dotted path.
        phase: Name of one training of several, added to the run's; empty where there is one.
        start_from: Address of the model of the phase before; empty for the recipe's own start.

    Returns:
        The baton.
    """
    import json

    from baton import events
    from baton.data import split as stage
    from baton.recipe import load, parameters
    from baton.runs import ref
    from baton.runs.run import Run, chosen_name
    from baton.store import sources

    with events.stage("data split"):
        recipe, run_name, store, source = ref.decode_texts([recipe, run_name, store, source])
        base_model, overrides, start_from = ref.decode_texts([base_model, overrides, start_from])
        given = parameters.given_parameters(
            store=store,
            source=sources.parse(source) if source else None,
            base_model=base_model,
            seed=seed,
            batch_size=batch_size,
            learning_rate=learning_rate,
            epochs=epochs,
            max_steps=max_steps,
        )
        chosen = parameters.of_phase(parameters.apply_parameters(load.loads(recipe), given, overrides), phase)
        if start_from:
            chosen = load.with_overrides(chosen, [f"model.base={json.dumps(start_from)}"])
        split = stage.split_data(chosen, chosen_name(run_name, new_name, job_id, phase))
        run = Run.open(split["run_uri"])
        stage.rows_card(run, split, chosen_name(run_name, new_name, job_id)).write(rows)
        with open(quality.path, "w", encoding="utf-8") as file:
            file.write(stage.quality_html(run, split["page"]))
        return str(stage.run_ref(run))
