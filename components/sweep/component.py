"""Sweep stages: what begins a bracket, trains a share of its trials, and compares them at a rung."""

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
def enter(sweep_uri: str, bracket: int, devices: int = 0) -> list:
    """Gives each trial of a bracket a run on the data that was made for it.

    Args:
        sweep_uri: Address of the sweep.
        bracket: Number of the bracket, from 1.
        devices: Number of pods that train the trials in turns; 0 for a pod for each chunk.

    Returns:
        Batons of the runs, or `sweep_uri` and `trials` of each device.
    """
    from baton import events
    from baton.runs.run import Sweep
    from baton.sweep.trials import create_trials, deal

    with events.stage(f"enter bracket {bracket}"):
        sweep = Sweep.open(sweep_uri)
        runs = create_trials(sweep, bracket)
        return deal(sweep, runs, devices) if devices else runs


@component
def train_turns(sweep_uri: str, rung: int, trials: str, spare: int, scores: dsl.Output[dsl.Markdown]) -> str:
    """Trains the chunks of a rung for one device's trials, which take turns.

    Args:
        sweep_uri: Address of the sweep.
        rung: Number of the rung, from 1.
        trials: Ids of the device's trials, between spaces.
        spare: Number of pods after this one that may end what a preemption leaves.
        scores: Newest score of each trial.

    Returns:
        Ids of trials that are left at a preemption, else an empty text.
    """
    from baton import events
    from baton.kfp.rung import share_as_markdown, train_share
    from baton.runs.run import Sweep

    with events.stage(f"train rung {rung}"):
        sweep = Sweep.open(sweep_uri)
        remaining = train_share(sweep, rung, trials, spare)
        with open(scores.path, "w", encoding="utf-8") as file:
            file.write(share_as_markdown(sweep, trials))
    return remaining


@component
def judge(
    sweep_uri: str,
    rung: int,
    ranking: dsl.Output[dsl.HTML],
    winner: dsl.OutputPath(str),  # type: ignore[valid-type]
    devices: int = 0,
) -> list:
    """Compares the trials of a rung: the best advance.

    Args:
        sweep_uri: Address of the sweep.
        rung: Number of the rung, from 1.
        ranking: The sweep so far: which trials advance, and which are stopped and why.
        winner: Baton of the best run that is trained to its end, empty before there is one.
        devices: Number of pods that train the trials in turns; 0 for a pod for each chunk.

    Returns:
        Batons of the runs that advance, or `sweep_uri` and `trials` of each device.
    """
    from baton import events
    from baton.pages.card import DISPLAY_NAME
    from baton.runs.run import Sweep
    from baton.sweep.page import publish
    from baton.sweep.trials import deal, rank_trials

    with events.stage(f"judge rung {rung}"):
        sweep = Sweep.open(sweep_uri)
        verdict = rank_trials(sweep, rung)
        ranking.metadata[DISPLAY_NAME] = f"{sweep.name} · rung {rung}"
        for path, text in ((ranking.path, publish(sweep, rung)), (winner, verdict.winner)):
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        return deal(sweep, verdict.kept, devices, rung) if devices else verdict.kept
