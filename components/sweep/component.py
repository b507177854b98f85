"""Sweep stages: what begins a bracket, and what compares its trials at a rung."""

from kfp import dsl

from baton.kfp.component import component


@component
def begin(
    recipe: str,
    sweep_name: str,
    new_name: str,
    job_id: str,
    store: str,
    bracket: int,
    base_model: str,
    seed: int,
    batch_size: int,
    overrides: dict,
    sweep_uri: dsl.OutputPath(str),  # type: ignore[valid-type]
) -> list:
    """Draws the trials of a bracket.

    Args:
        recipe: The recipe with its sweep, as JSON, packed; every text as `baton.runs.ref` has it.
        sweep_name: Name of the sweep; one that exists resumes. Empty: a new one.
        new_name: What the name of a new sweep begins with.
        job_id: What it ends in: the id of the pipeline's run.
        store: Folder or bucket for runs and data.
        bracket: Number of the bracket, from 1.
        base_model: What training starts from; empty for the recipe's.
        seed: Decides every random draw.
        batch_size: Rows per optimizer step.
        overrides: Other settings of the recipe, by dotted path.
        sweep_uri: Address of the sweep.

    Returns:
        For each different data of the trials the arguments of split and tokenize: recipe, run and source.
    """
    from baton import events
    from baton.recipe import load, parameters
    from baton.runs import ref
    from baton.sweep.trials import start_bracket

    with events.stage(f"begin bracket {bracket}"):
        recipe, sweep_name, store, base_model, overrides = ref.decode_texts(
            [recipe, sweep_name, store, base_model, overrides]
        )
        compiled = load.loads(recipe)
        given = parameters.given_parameters(store=store, base_model=base_model, seed=seed, batch_size=batch_size)
        parameters.require_undrawn(compiled, given, overrides)
        chosen = parameters.apply_parameters(compiled, given, overrides)
        sweep, preparations = start_bracket(chosen, sweep_name or f"{new_name}-{job_id}", bracket)
        with open(sweep_uri, "w", encoding="utf-8") as file:
            file.write(sweep.uri)
        return [
            {**each, "recipe": ref.pack_text(each["recipe"]), "source": ref.encode_text(each["source"])}
            for each in preparations
        ]


@component
def enter(sweep_uri: str, bracket: int) -> list:
    """Gives each trial of a bracket a run on the data that was made for it.

    Args:
        sweep_uri: Address of the sweep.
        bracket: Number of the bracket, from 1.

    Returns:
        Batons of the runs.
    """
    from baton import events
    from baton.runs.run import Sweep
    from baton.sweep.trials import create_trials

    with events.stage(f"enter bracket {bracket}"):
        return create_trials(Sweep.open(sweep_uri), bracket)


@component
def judge(
    sweep_uri: str,
    rung: int,
    ranking: dsl.Output[dsl.HTML],
    winner: dsl.OutputPath(str),  # type: ignore[valid-type]
) -> list:
    """Compares the trials of a rung: the best advance.

    Args:
        sweep_uri: Address of the sweep.
        rung: Number of the rung, from 1.
        ranking: The sweep so far: which trials advance, and which are stopped and why.
        winner: Baton of the best run that is trained to its end, empty before there is one.

    Returns:
        Batons of the runs that advance.
    """
    from baton import events
    from baton.pages.card import DISPLAY_NAME
    from baton.runs.run import Sweep
    from baton.sweep.page import publish
    from baton.sweep.trials import rank_trials

    with events.stage(f"judge rung {rung}"):
        sweep = Sweep.open(sweep_uri)
        verdict = rank_trials(sweep, rung)
        ranking.metadata[DISPLAY_NAME] = f"{sweep.name} · rung {rung}"
        for path, text in ((ranking.path, publish(sweep, rung)), (winner, verdict.winner)):
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
    return verdict.kept
